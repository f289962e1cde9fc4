"""Places that keep KV outside the device: how much, how fast, at what price."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvire.core.errors import ConfigError
from kvire.core.memory import parse_size
from kvire.plan.hardware import hardware_table

_NUMBER = r"(\d+\.?\d*|\.\d+)"
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
EXAMPLE = "nvme4=2TB, or mine=2TB@7,0.1ms,$0.08: size @ GB/s, latency, USD per GB and month"


@dataclass(frozen=True, slots=True)
class PlannedTier:
    """A place that keeps KV outside the device.

    state: the letter of the tier state that a prompt served from it is in (G device, R memory, D
        disk, N another node).
    capacity_bytes: None for as much as is wanted.
    usd_per_gb_month: None where not known.
    measured: on this machine, not a nominal rate.
    """

    name: str
    title: str
    state: str
    bytes_per_s: float
    latency_s: float
    capacity_bytes: int | None = None
    usd_per_gb_month: float | None = None
    measured: bool = False
    source: str = ""

    def load_s(self, size_bytes: int) -> float:
        """Until so many bytes have arrived."""
        return self.latency_s + size_bytes / self.bytes_per_s

    def usd_per_month(self, size_bytes: float) -> float | None:
        """Of so many bytes; None where the price is not known."""
        return None if self.usd_per_gb_month is None else self.usd_per_gb_month * size_bytes / 1e9


def presets() -> dict[str, PlannedTier]:
    """The shipped tiers, by name, without a size."""
    return {row["name"]: _of_row(row) for row in hardware_table()["tiers"]}


def default_tiers() -> list[PlannedTier]:
    """What a plan looks at when it is told of no tier."""
    table = presets()
    return [table[name] for name in ("ram", "nvme5", "nvme4", "25gbe", "s3")]


def parse_tier(text: str, measured: Mapping[str, PlannedTier] | None = None) -> PlannedTier:
    """A tier as --tier says it: NAME, NAME=SIZE, or NAME=SIZE@GBps[,LATENCY][,$USD].

    measured: by name, go before presets.

    Raises ConfigError.
    """
    match = re.fullmatch(r"([\w.-]+)(?:=([^@,]*))?(?:@([\d.]+))?((?:,[^,]+)*)", text.strip())
    if match is None:
        raise ConfigError(f"--tier {text!r} is not understood; write {EXAMPLE}")
    name, size, rate, more = match.groups()
    known = (measured or {}).get(name.lower()) or presets().get(name.lower())
    if known is None and rate is None:
        raise ConfigError(f"--tier {name}: no preset ({', '.join(presets())}), so say how fast: {EXAMPLE}")
    tier = known or PlannedTier(name, name, _state_of(name), 1.0, 0.0, source="as given")
    if rate is not None:
        tier = replace(tier, bytes_per_s=_positive(rate, text) * 1e9, measured=False, source="as given")
    if size:
        tier = replace(tier, capacity_bytes=parse_size(size, f"--tier {name}"))
    for part in filter(None, more.split(",")):
        tier = _with(tier, part.strip(), text)
    return tier


def _with(tier: PlannedTier, part: str, text: str) -> PlannedTier:
    if latency := re.fullmatch(_NUMBER + r"\s*(us|ms|s)", part):
        return replace(tier, latency_s=float(latency[1]) * _SECONDS[latency[2]])
    if price := re.fullmatch(r"\$?" + _NUMBER, part):
        return replace(tier, usd_per_gb_month=float(price[1]))
    raise ConfigError(f"--tier {text!r}: {part!r} is neither a latency (0.1ms) nor a price ($0.08); write {EXAMPLE}")


def _positive(number: str, text: str) -> float:
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if value <= 0:
        raise ConfigError(f"--tier {text!r}: {number} is no rate in GB/s; write {EXAMPLE}")
    return value


def _state_of(name: str) -> str:
    """By what people call their tiers: memory, disks, and everything else is elsewhere."""
    name = name.lower()
    if any(word in name for word in ("nvme", "ssd", "disk")):
        return "D"
    return "R" if any(word in name for word in ("ram", "mem")) else "N"


def _of_row(row: Mapping[str, Any]) -> PlannedTier:
    return PlannedTier(
        row["name"], row["title"], row["state"], row["gb_s"] * 1e9, row["latency_s"],
        usd_per_gb_month=row["usd_per_gb_month"], source=row["source"],
    )  # fmt: skip
