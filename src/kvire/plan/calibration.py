"""A machine's speed from measured times: three constants of prefill and two of each tier, fitted to
relative errors.

What is measured is remembered in the cache folder, in one file: the last one.
"""

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvire.core.cache_folder import cache_folder
from kvire.core.errors import ConfigError
from kvire.plan.hardware import MEASURED_RANGE, Machine
from kvire.plan.serve import PromptShape
from kvire.plan.shape import Shape, Storage
from kvire.plan.tiers import PlannedTier, presets

SCHEMA = "kvire.calibration/1"
MOST_BYTES_PER_S = 100e9  # where noise hides a tier's time: no memory of one socket is copied faster
TIERS = {"R": "memory", "D": "disk"}  # by tier state: the store's names
TITLES = {"memory": "this machine's memory tier", "disk": "this machine's disk tier"}
PRESET = {"memory": "ram", "disk": "nvme4"}  # whose price is taken


class Asked(NamedTuple):
    """A kind of request.

    state: of the tier that the prompt's beginning lies in.
    new_tokens: at its end.
    """

    state: str
    tokens: int
    new_tokens: int


@dataclass(slots=True)
class CalibrationSamples:
    """Measured times.

    ttft_s: seconds to the first token, by what was asked.
    decode_s: per token after it, at the shortest length.
    """

    ttft_s: dict[Asked, list[float]] = field(default_factory=lambda: defaultdict(list))
    decode_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CalibrationTimes:
    """What was measured on what.

    memory_bytes: that were free before the model was loaded.
    """

    model: str
    kv_dtype: str
    cpu: str
    threads: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """One measurement: tokens from `start` to `stop` computed in `seconds`, alone, the KV of those
    before at hand.
    """

    start: int
    stop: int
    seconds: float


def fit(shape: Shape, measured: Sequence[Prefill]) -> tuple[float, float, float]:
    """(seconds per request, linear FLOP/s, attention FLOP/s) that miss the measurements least,
    relatively.

    A constant that would come out negative is left out: infinitely fast, or no overhead. Raises
    ConfigError if nothing fits.
    """
    rows = [(1.0, shape.linear_flops(m.stop - m.start), shape.attention_flops(m.start, m.stop)) for m in measured]
    seconds = np.array([m.seconds for m in measured])
    matrix = np.array(rows) / seconds[:, None]
    best: tuple[float, np.ndarray[Any, Any]] | None = None
    for columns in (c for size in (3, 2, 1) for c in combinations(range(3), size) if 1 in c):
        scale = np.abs(matrix[:, columns]).max(axis=0)
        found, *_ = np.linalg.lstsq(matrix[:, columns] / scale, np.ones(len(rows)), rcond=None)
        constants = np.zeros(3)
        constants[list(columns)] = found / scale
        error = float(np.square(matrix @ constants - 1).sum())
        if constants.min() >= 0 and constants[1] > 0 and (best is None or error < best[0]):
            best = (error, constants)
    if best is None:
        raise ConfigError("the measured times do not fit any speed: measure again while nothing else runs")
    overhead_s, linear, attention = best[1].tolist()
    return overhead_s, 1 / linear, 1 / attention if attention > 0 else float("inf")


def record(on: CalibrationTimes, shape: Shape, samples: CalibrationSamples) -> dict[str, Any]:
    """What was measured, and the constants that fit it (schema kvire.calibration/1)."""
    medians = {key: statistics.median(times) for key, times in samples.ttft_s.items()}
    storage = Storage(on.kv_dtype, 16)
    prefills = [
        Prefill(asked.tokens - asked.new_tokens, asked.tokens, seconds)
        for asked, seconds in medians.items()
        if asked.state in ("E", "G")
    ]
    overhead_s, linear, attention = fit(shape, prefills)
    fitted = Machine("fitted", "fitted", linear, attention, overhead_s)
    shortest = min(asked.tokens for asked in medians)
    read_bytes = shape.weights.read_bytes(1, "float32") + shape.sequence_bytes(shortest, storage)
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).date().isoformat(),
        **asdict(on),
        "overhead_s": overhead_s,
        "linear_flops_per_s": linear,
        "attention_flops_per_s": None if attention == float("inf") else attention,
        "decode_bytes_per_s": read_bytes / statistics.median(samples.decode_s),
        "tiers": {name: _tier_speed(shape, storage, fitted, medians, state) for state, name in TIERS.items()},
        "samples": [asked._asdict() | {"ttft_s": times} for asked, times in samples.ttft_s.items()],
    }


def _tier_speed(
    shape: Shape, storage: Storage, who: Machine, medians: Mapping[Asked, float], state: str
) -> dict[str, float]:
    """Latency and rate that explain what a tier adds to computing what it cannot give, by least
    squares over lengths.

    The plan adds the same computing again, so that what the fitted machine gets wrong there
    cancels.
    """
    sizes, added = [], []
    for asked, seconds in medians.items():
        if asked.state == state:
            reused = PromptShape(asked.tokens).reused(storage.block_tokens)
            size = shape.sequence_bytes(reused, storage)
            sizes.append(size)
            added.append(max(size / MOST_BYTES_PER_S, seconds - who.prefill_s(shape, reused, asked.tokens)))
    weighted = np.stack([1 / np.array(added), np.array(sizes) / np.array(added)], axis=1)
    (latency_s, per_byte), *_ = np.linalg.lstsq(weighted, np.ones(len(sizes)), rcond=None)
    if latency_s < 0 or per_byte <= 0:
        latency_s, per_byte = 0.0, sum(added) / sum(sizes)
    return {"latency_s": float(latency_s), "bytes_per_s": float(1 / per_byte)}


def measured_machine(record: Mapping[str, Any]) -> Machine:
    """The machine of a calibration file. Raises ConfigError if it is none."""
    if record.get("schema") != SCHEMA:
        raise ConfigError(f"the calibration has schema {record.get('schema')!r}, not {SCHEMA}: run --calibrate again")
    attention = record["attention_flops_per_s"]
    return Machine(
        name="measured",
        title=f"this machine ({record['cpu']}, {record['threads']} threads)",
        linear_flops_per_s=record["linear_flops_per_s"],
        attention_flops_per_s=float("inf") if attention is None else attention,
        overhead_s=record["overhead_s"],
        memory_bytes=record["memory_bytes"],
        memory_bytes_per_s=record["decode_bytes_per_s"],
        span=MEASURED_RANGE,
        measured_on=record["model"],
        source=f"measured with {record['model']}, KV in {record['kv_dtype']}, on {record['date']}",
    )


def calibration_file() -> Path:
    """Where the last measurement of this machine is remembered."""
    return cache_folder() / "plan" / "calibration.json"


def measured_tiers(record: dict[str, Any]) -> tuple[PlannedTier, ...]:
    """The tiers of a calibration file, with the prices of the table."""
    return tuple(
        PlannedTier(
            name, TITLES[name], state, speed["bytes_per_s"], speed["latency_s"],
            usd_per_gb_month=presets()[PRESET[name]].usd_per_gb_month, measured=True,
            source=f"measured on {record['date']}",
        )
        for state, name in TIERS.items()
        if (speed := record["tiers"].get(name)) is not None
    )  # fmt: skip


def remembered() -> tuple[Machine, tuple[PlannedTier, ...]]:
    """This machine as it was last measured, and its tiers.

    Raises ConfigError where it was not measured, or the file is damaged.
    """
    path = calibration_file()
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return measured_machine(record), measured_tiers(record)
    except FileNotFoundError as error:
        raise ConfigError("this machine was not measured yet: kvire plan MODEL --calibrate does it once") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}. Measure again: kvire plan MODEL --calibrate") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is damaged ({error!r}). Measure again: kvire plan MODEL --calibrate") from error
