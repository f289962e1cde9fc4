"""From what a user says to a Plan: the one place where model, machine, tiers, use and prices come
together.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvire.core.errors import ConfigError
from kvire.core.memory import parse_size
from kvire.plan.calibration import remembered
from kvire.plan.hardware import ASSUMED_RANGE, Machine, machine
from kvire.plan.hits import HitCurve, assumed_reuse, read_curve
from kvire.plan.plan import Money, Plan, PlannedModel
from kvire.plan.prices import hosted_prices
from kvire.plan.serve import PromptShape
from kvire.plan.shape import WEIGHT_BYTES, Storage
from kvire.plan.sizing import ServingUse
from kvire.plan.tiers import PlannedTier, default_tiers, parse_tier

MEASURED = "measured"  # --hardware: this machine, as --calibrate found it


@dataclass(frozen=True, slots=True)
class Kept:
    """How weights and KV are kept.

    weights_dtype: None for the checkpoint's.
    kv_dtype, index_dtype: of the KV, and of a sparse indexer's keys; None for the same.
    block_size: tokens per block.
    tp: ranks of tensor parallelism; None for as many as devices.
    """

    weights_dtype: str | None = None
    kv_dtype: str = "float16"
    index_dtype: str | None = None
    block_size: int = 16
    tp: int | None = None

    def __post_init__(self) -> None:
        if self.weights_dtype not in (None, *WEIGHT_BYTES):
            raise ConfigError(f"--weights-dtype is one of {', '.join(WEIGHT_BYTES)}, not {self.weights_dtype!r}")


@dataclass(frozen=True, slots=True)
class Hardware:
    """What computes.

    hardware: a device of the table, "measured", or None.
    mfu: share of the peak that prefill reaches; None for the table's assumption.
    memory: such as "80GB"; None for the devices'.
    reserve: share of the memory that neither weights nor KV get.
    """

    hardware: str | None = None
    devices: int = 1
    mfu: float | None = None
    memory: str | None = None
    reserve: float = 0.1

    def __post_init__(self) -> None:
        if self.hardware == MEASURED and (self.devices > 1 or self.mfu is not None):
            raise ConfigError("--devices and --mfu are for devices of the table: this machine was measured as it is")
        if self.mfu is not None and self.hardware is None:
            raise ConfigError("--mfu is the share of a device's peak: say which device, with --hardware")

    def choose(self) -> tuple[Machine | None, tuple[PlannedTier, ...]]:
        """The machine, and the tiers measured with it; (None, ()) where none was named."""
        if self.hardware == MEASURED:
            return remembered()
        if self.hardware is None:
            return None, ()
        return machine(self.hardware, devices=self.devices, mfu=self.mfu), ()


@dataclass(frozen=True, slots=True)
class PlannedReuse:
    """What comes back, and where it may be kept.

    tier: as --tier says them; None for the usual ones.
    hit_curve, policy: a report of kvire replay, and which of its curves.
    reuse: instead, the share of prompt tokens seen before.
    new_tokens: at a prompt's end, computed by nobody before.
    """

    tier: Sequence[str] | None = None
    hit_curve: Path | None = None
    policy: str | None = None
    reuse: float | None = None
    new_tokens: int = 64

    def tiers(self, measured: tuple[PlannedTier, ...]) -> tuple[PlannedTier, ...]:
        """What was named, with measured speeds where a name is a measured one; else those measured,
        else the usual.
        """
        if not self.tier:
            return measured or tuple(default_tiers())
        known = {tier.name: tier for tier in measured}
        return tuple(parse_tier(text, known) for text in self.tier)

    def curve(self, use: ServingUse) -> HitCurve | None:
        """None where nothing is known of reuse."""
        if self.hit_curve is not None and self.reuse is not None:
            raise ConfigError("give either --hit-curve or --reuse: one is measured, the other assumed")
        if self.hit_curve is None and self.policy is not None:
            raise ConfigError("--policy chooses a curve of --hit-curve FILE: say which file")
        if self.hit_curve is not None:
            return read_curve(_read(self.hit_curve), self.policy)
        return None if self.reuse is None else assumed_reuse(self.reuse, use.sessions * use.context)


@dataclass(frozen=True, slots=True)
class Spent:
    """What it costs: as plan.Money, but with sizes and models as users write them.

    tbw: such as "1200TB".
    """

    usd_per_hour: float | None = None
    requests_per_hour: float | None = None
    output_tokens: int = 256
    tbw: str | None = None
    price: Sequence[str] | None = None

    def money(self) -> Money:
        """With the prices of the table."""
        return Money(
            usd_per_hour=self.usd_per_hour,
            requests_per_hour=self.requests_per_hour,
            output_tokens=self.output_tokens,
            endurance_bytes=None if self.tbw is None else parse_size(self.tbw, "--tbw"),
            prices=hosted_prices(self.price or ()),
        )


def make(
    model: PlannedModel,
    kept: Kept | None = None,
    hardware: Hardware | None = None,
    reused: PlannedReuse | None = None,
    use: ServingUse | None = None,
    spent: Spent | None = None,
) -> Plan:
    """The plan of a model.

    Raises ConfigError naming the option that cannot work, as the command line spells it.
    """
    kept, hardware, reused = kept or Kept(), hardware or Hardware(), reused or PlannedReuse()
    use, spent = use or ServingUse(), spent or Spent()
    if use.context < reused.new_tokens:
        raise ConfigError(f"--new-tokens {reused.new_tokens} is more than the whole --context {use.context}")
    storage = Storage(kept.kv_dtype, kept.block_size, kept.tp or hardware.devices, kept.index_dtype)
    who, measured_tiers = hardware.choose()
    on_this = who is not None and bool(who.measured_on)
    return Plan(
        title=model.title,
        source=model.source,
        verified=model.verified,
        shape=model.shape,
        storage=storage,
        use=use,
        prompt=PromptShape(use.context, reused.new_tokens),
        tiers=reused.tiers(measured_tiers),
        money=spent.money(),
        who=_scaled(who, model),
        memory_bytes=None if hardware.memory is None else parse_size(hardware.memory, "--memory"),
        reserve=hardware.reserve,
        weights_dtype=kept.weights_dtype or ("float32" if on_this else None),  # the engine computes in float32
        curve=reused.curve(use),
    )


def _scaled(who: Machine | None, model: PlannedModel) -> Machine | None:
    """A machine that was measured with another model may be as far off as a device of the table."""
    if who is None or who.measured_on in ("", model.name):
        return who
    return replace(who, span=ASSUMED_RANGE, source=f"{who.source}, and scaled to this model by its FLOPs")


def _read(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is no report: it holds no JSON object")
    return value
