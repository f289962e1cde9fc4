"""How fast a machine computes: a device's data sheet and an assumed efficiency, or a measurement of
this machine.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from kvire.core.errors import ConfigError
from kvire.plan.cost import PrefillSpeed
from kvire.plan.shape import Shape, Storage

# How much faster or slower than assumed prefill may be: published efficiencies of prefill lie
# between 0.3 and 0.65 of the peak; a measured machine repeats itself within 15 %.
ASSUMED_RANGE = (0.6, 1.3)
MEASURED_RANGE = (0.85, 1.15)


@dataclass(frozen=True, slots=True)
class Machine:
    """What computes.

    linear_flops_per_s, attention_flops_per_s: reached, not peak.
    overhead_s: of one request beside its FLOPs.
    memory_bytes, memory_bytes_per_s: None where not known.
    span: how far off the speed may be, as factors.
    measured_on: the model that it was measured with; empty for a data sheet.
    """

    name: str
    title: str
    linear_flops_per_s: float
    attention_flops_per_s: float
    overhead_s: float = 0.0
    memory_bytes: int | None = None
    memory_bytes_per_s: float | None = None
    span: tuple[float, float] = ASSUMED_RANGE
    measured_on: str = ""
    source: str = ""

    def prefill_s(self, shape: Shape, start: int, stop: int) -> float:
        """Seconds to compute the tokens from `start` to `stop`, alone, with the KV of those before
        at hand.
        """
        linear = shape.linear_flops(stop - start) / self.linear_flops_per_s
        return self.overhead_s + linear + shape.attention_flops(start, stop) / self.attention_flops_per_s

    def prefill_tokens_per_s(self, shape: Shape, tokens: int) -> float:
        """Of one prompt of so many tokens; it falls with the length."""
        return tokens / self.prefill_s(shape, 0, tokens)

    def prefill_speed(self, shape: Shape, tokens: int) -> PrefillSpeed:
        """The same as the engine writes it, matched at `tokens`; without overhead_s."""
        speed = PrefillSpeed(shape.linear_flops(1) / self.linear_flops_per_s)
        pairs = max(1, tokens * (tokens - 1) // 2)
        speed.context_s = shape.attention_flops(0, tokens) / self.attention_flops_per_s / pairs
        return speed

    def decode_s(self, shape: Shape, storage: Storage, context: int, users: int, weights_dtype: str | None) -> float:
        """Least seconds of one step that adds a token for each of `users`: what it reads over the
        bandwidth.

        Raises ConfigError where the bandwidth is not known.
        """
        if self.memory_bytes_per_s is None:
            raise ConfigError(f"the memory bandwidth of {self.name} is not known")
        kv = users * shape.sequence_bytes(context, storage)
        return (shape.weights.read_bytes(users, weights_dtype) + kv) / self.memory_bytes_per_s

    def scaled(self, factor: float) -> "Machine":
        """The same, so many times as fast."""
        return Machine(
            self.name, self.title, self.linear_flops_per_s * factor, self.attention_flops_per_s * factor,
            self.overhead_s / factor, self.memory_bytes, self.memory_bytes_per_s, self.span, self.measured_on,
            self.source,
        )  # fmt: skip


@cache
def hardware_table() -> Mapping[str, Any]:
    """The shipped table of devices and tiers, with its date."""
    table: Mapping[str, Any] = json.loads((files("kvire.plan") / "hardware.json").read_text(encoding="utf-8"))
    return table


def machine(name: str, *, devices: int = 1, mfu: float | None = None) -> Machine:
    """From the table: so many devices together, shared out evenly.

    mfu: share of the peak that prefill reaches; None for the table's assumption.

    Raises ConfigError for a name that is not in it, or an mfu outside 0 to 1.
    """
    rows = {row["name"]: row for row in hardware_table()["devices"]}
    if (row := rows.get(name.lower())) is None:
        raise ConfigError(f"there is no hardware card {name!r}: choose one of {', '.join(rows)}, or measured")
    share = row["mfu"] if mfu is None else mfu
    if not 0 < share <= 1:
        raise ConfigError(f"--mfu is the share of peak FLOP/s that prefill reaches, above 0 and up to 1, got {share}")
    reached = devices * row["peak_flops"] * share
    return Machine(
        name=row["name"],
        title=row["title"] if devices == 1 else f"{devices} x {row['title']}",
        linear_flops_per_s=reached,
        attention_flops_per_s=reached,
        memory_bytes=devices * row["memory_bytes"],
        memory_bytes_per_s=devices * row["memory_gb_s"] * 1e9,
        source=f"{row['source']}; {share:g} of the peak assumed ({hardware_table()['date']})",
    )


def break_even_bytes_per_s(shape: Shape, storage: Storage, who: Machine, tokens: int) -> float:
    """B*: a tier that gives more than this loads a prefix of so many tokens faster than it is
    computed.

    KV bytes per token times prefill tokens per second, with what windows and states make of the
    first.
    """
    return shape.sequence_bytes(tokens, storage) / who.prefill_s(shape, 0, tokens)
