"""Two reports side by side: how much faster the second is, row by row, with intervals."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvire.bench.intervals import Interval, median_interval, ratio_interval
from kvire.bench.metrics import answered_in_both, by_repeat
from kvire.bench.results import BenchReport, BenchRow
from kvire.bench.states import TierState
from kvire.core.errors import ConfigError

KEY = ("workload", "state", "context_tokens", "concurrency", "rate_per_s")
MEASURES = ("ttft_s", "tpot_s", "e2e_s")
# Of the settings, what has to be equal for rows to be comparable.
SAME_SETTINGS = ("scripts", "output_tokens", "seed", "trace", "trace_sha256", "trace_scale")
# Fields that make it another model; kv_dtype and block size may be the subject of a comparison.
SAME_MODEL = ("name", "weights_bytes")


@dataclass(frozen=True, slots=True)
class Ratio:
    """One measure of one row, second report over first.

    row: its name.
    measure: of MEASURES.
    ratio: second over first; below 1, the second is faster.
    """

    row: Mapping[str, Any]
    measure: str
    first_s: float
    second_s: float
    ratio: Interval


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two reports side by side.

    differs: other differences of the two, to be read before the ratios.
    only: rows that one of them lacks.
    """

    ratios: tuple[Ratio, ...]
    differs: tuple[str, ...]
    only: tuple[str, ...]


def compare(first: BenchReport, second: BenchReport, arms: tuple[str, str] = ("A", "A")) -> Comparison:
    """Raises ConfigError where the reports measured different things."""
    _same(first, second, arms)
    ours, theirs = (_rows(report, arm) for report, arm in zip((first, second), arms, strict=True))
    shared = [key for key in ours if key in theirs]
    if not shared:
        raise ConfigError(
            "the two reports share no proved row: no workload, state, context length and concurrency is in both"
        )
    ratios = [ratio for key in shared for ratio in _ratios(ours[key], theirs[key], paired=False)]
    only = [_title(rows[key]) for rows, others in ((ours, theirs), (theirs, ours)) for key in rows if key not in others]
    differs = [*_differences(first, second, arms), *_failed(ours, "first"), *_failed(theirs, "second")]
    return Comparison(tuple(ratios), tuple(differs), tuple(only))


def within_run(report: BenchReport) -> list[Ratio]:
    """Arm B over arm A of one run, repeat by repeat: both were measured within minutes of each
    other.
    """
    ours, theirs = _rows(report, "A"), _rows(report, "B")
    return [ratio for key in ours if key in theirs for ratio in _ratios(ours[key], theirs[key], paired=True)]


def _ratios(one: BenchRow, other: BenchRow, *, paired: bool) -> Iterator[Ratio]:
    for measure in MEASURES:
        samples = answered_in_both(one["samples"], other["samples"]) if paired else (one["samples"], other["samples"])
        first, second = (by_repeat(row, measure) for row in samples)
        if not first or not second or min(first.values()) <= 0:  # a single piece has no time per token
            continue
        if paired:
            both = [repeat for repeat in first if repeat in second]
            ratio = median_interval([second[repeat] / first[repeat] for repeat in both]) if both else None
        else:
            ratio = ratio_interval(list(second.values()), list(first.values()))
        if ratio is not None:
            yield Ratio({name: one[name] for name in KEY}, measure, _middle(first), _middle(second), ratio)


def _rows(report: BenchReport, arm: str) -> dict[tuple[Any, ...], BenchRow]:
    if arm not in {each["name"] for each in report["arms"]}:
        raise ConfigError(f"a report has no arm {arm}: it has {', '.join(each['name'] for each in report['arms'])}")
    return {
        tuple(row[name] for name in KEY): row
        for row in report["rows"]
        if row["arm"] == arm and row["state"] != TierState.UNPROVED
    }


def _same(first: BenchReport, second: BenchReport, arms: tuple[str, str]) -> None:
    differs = [
        f"{name} is {one!r} in the first and {other!r} in the second"
        for name, one, other in [
            *_pairs(first["settings"], second["settings"], SAME_SETTINGS),
            *_pairs(_model(first, arms[0]), _model(second, arms[1]), SAME_MODEL),
        ]
        if one != other and not (name == "weights_bytes" and None in {one, other})  # not known behind a URL
    ]
    workloads = [sorted({row["workload"] for row in report["rows"]}) for report in (first, second)]
    if not set(workloads[0]) & set(workloads[1]):
        differs.append(f"the workloads are {', '.join(workloads[0])} and {', '.join(workloads[1])}")
    if differs:
        raise ConfigError(f"the two reports did not measure the same: {'; '.join(differs)}")


def _differences(first: BenchReport, second: BenchReport, arms: tuple[str, str]) -> Iterator[str]:
    """What may explain a ratio, or spoil it."""
    pairs = [
        *_pairs(first["machine"], second["machine"], ("cpu", "cores", "memory_bytes", "system", "packages")),
        *_pairs(_model(first, arms[0]), _model(second, arms[1]), ("kv_dtype", "block_tokens")),
        *_pairs(_arm(first, arms[0]), _arm(second, arms[1]), ("kind", "options", "store", "remote", "url")),
        ("commit", first.get("commit"), second.get("commit")),
        ("repeats", first["settings"].get("repeats"), second["settings"].get("repeats")),
    ]
    return (f"{name}: {one} and {other}" for name, one, other in pairs if one != other)


def _failed(rows: Mapping[tuple[Any, ...], BenchRow], which: str) -> Iterator[str]:
    """Ratios are over the answered requests."""
    for row in rows.values():
        if failed := sum(sample["error"] is not None for sample in row["samples"]):
            yield f"{_title(row)}: {failed} of {len(row['samples'])} requests failed in the {which}"


def _pairs(one: Mapping[str, Any], other: Mapping[str, Any], names: Sequence[str]) -> list[tuple[str, Any, Any]]:
    return [(name, one.get(name), other.get(name)) for name in names]


def _arm(report: BenchReport, name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next((arm for arm in report["arms"] if arm["name"] == name), {})
    return found


def _model(report: BenchReport, arm: str) -> Mapping[str, Any]:
    model: Mapping[str, Any] = _arm(report, arm).get("model") or report["model"]
    return model


def _title(row: BenchRow) -> str:
    return f"{row['workload']}, {row['context_tokens']:,} tokens, {row['concurrency']} at once, {row['state']}"


def _middle(values: Mapping[int, float]) -> float:
    return median_interval(list(values.values())).median
