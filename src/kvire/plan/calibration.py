"""A machine's speed from measured prefills: three constants, fitted to relative errors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from kvire.core.errors import ConfigError
from kvire.plan.hardware import MEASURED_RANGE, Machine
from kvire.plan.shape import Shape

SCHEMA = "kvire.calibration/1"


@dataclass(frozen=True, slots=True)
class Prefill:
    """One measurement: tokens from `start` to `stop` computed in `seconds`, alone, the KV of those before at hand."""

    start: int
    stop: int
    seconds: float


def fit(shape: Shape, measured: Sequence[Prefill]) -> tuple[float, float, float]:
    """(seconds per request, linear FLOP/s, attention FLOP/s) that miss the measurements least, relatively.

    A constant that would come out negative is left out: infinitely fast, or no overhead. Raises ConfigError if
    nothing fits.
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
