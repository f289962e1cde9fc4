"""The report of a run as JSON, schema kvire.bench/1: made from passes, written, and read again with
care.

docs/bench.md lists the fields. `summary` of a row can be computed again from its samples and
passes; `compare` does so.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from kvire.bench.arm import MeasuredPass, by_tier
from kvire.bench.intervals import median_interval
from kvire.bench.load import Sample
from kvire.bench.metrics import SPLIT, Slo, answered_in_both, by_repeat, prefill_tokens_per_s, summarise
from kvire.bench.settings import GridCell, Settings
from kvire.bench.states import TierState
from kvire.core.errors import ConfigError

SCHEMA = "kvire.bench/1"
BenchReport = dict[str, Any]
BenchRow = dict[str, Any]
# Fields that a reader relies on, and their types.
FIELDS: Mapping[str, type] = {
    "schema": str,
    "machine": dict,
    "model": dict,
    "settings": dict,
    "arms": list,
    "rows": list,
}
ARM_FIELDS: Mapping[str, type] = {"name": str, "kind": str, "model": dict, "ideal_by": str}
ROW_FIELDS: Mapping[str, Any] = {
    "arm": str, "workload": str, "state": str, "asked": str, "context_tokens": int, "concurrency": int,
    "rate_per_s": (int, float, type(None)), "proof": dict,
    "passes": list, "samples": list, "summary": dict,
}  # fmt: skip
PASS_FIELDS: Mapping[str, Any] = {
    "repeat": int,
    "wall_s": (int, float),
    "client_cpu": (int, float),
    "late_s": (int, float),
}
SAMPLE_FIELDS: Mapping[str, Any] = {
    "repeat": int, "sent_s": (int, float), "ttft_s": (int, float), "e2e_s": (int, float),
    "tpot_s": (int, float, type(None)), "gaps_s": list,
    "prompt_tokens": (int, type(None)), "cached_tokens": (int, type(None)), "by_tier": (dict, type(None)),
    "ideal_tokens": (int, float), "output_tokens": int, "pieces": int, "server": dict, "error": (str, type(None)),
}  # fmt: skip


def rows_of(
    arm: str, described: Mapping[str, Any], passes: Sequence[MeasuredPass], settings: Settings
) -> list[BenchRow]:
    """One row for each cell and state of an arm, in the order of settings and of states."""
    groups: dict[tuple[GridCell, TierState], list[MeasuredPass]] = {}
    for one in passes:
        groups.setdefault((one.cell, one.state), []).append(one)
    order = [(cell, state) for cell in settings.cells() for state in TierState if (cell, state) in groups]
    oracle = {
        (one.cell, one.repeat): one
        for one in passes
        if one.state is TierState.Z and one.same_prompts and one.proof.holds
    }
    rows = [_row(arm, described, group, oracle, settings) for group in map(groups.__getitem__, order)]
    for row in rows:
        _set_beside(row, rows, described)
    return rows


def write(report: BenchReport, path: Path) -> None:
    """Raises ConfigError where that is not possible."""
    try:
        path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; name a file in a folder that exists") from error


def read_report(path: Path) -> BenchReport:
    """A report that has every field of its schema.

    Raises ConfigError, which names the first that is wrong.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {error}; give a file that `kvire bench --json` wrote") from error
    if not isinstance(report, dict) or report.get("schema") != SCHEMA:
        raise ConfigError(f"{path} is no report of schema {SCHEMA}; give a file that `kvire bench --json` wrote")
    _check(path, "the report", report, FIELDS)
    for i, arm in enumerate(report["arms"]):
        _check(path, f"arms[{i}]", arm, ARM_FIELDS)
    for i, row in enumerate(report["rows"]):
        _check(path, f"rows[{i}]", row, ROW_FIELDS)
        if row["state"] not in set(TierState):
            raise ConfigError(f"{path}: rows[{i}] is in no known state: {row['state']!r}")
        for kind, fields in (("passes", PASS_FIELDS), ("samples", SAMPLE_FIELDS)):
            for j, record in enumerate(row[kind]):
                _check(path, f"rows[{i}].{kind}[{j}]", record, fields)
    return dict(report)


def _check(path: Path, where: str, record: object, fields: Mapping[str, Any]) -> None:
    if not isinstance(record, dict):
        raise ConfigError(f"{path}: {where} is no object")
    for name, kind in fields.items():
        if name not in record or not isinstance(record[name], kind) or isinstance(record[name], bool):
            raise ConfigError(f"{path}: {where} has no {name} of the right kind")


def _row(
    arm: str,
    described: Mapping[str, Any],
    group: list[MeasuredPass],
    oracle: Mapping[tuple[GridCell, int], MeasuredPass],
    settings: Settings,
) -> BenchRow:
    """A state is named if every one of its passes proved it."""
    first = group[0]
    proved = all(one.proof.holds for one in group)
    samples = [_sample(one, i, oracle) for one in group for i in range(len(one.done.samples))]
    passes = [
        {"repeat": m.repeat, "wall_s": m.done.wall_s, "client_cpu": m.done.client_cpu, "late_s": m.done.late_s}
        for m in group
    ]
    summary = summarise(samples, passes, settings.slo)
    compared = [s["differs_at"] for s in samples if s["compared"]]
    summary["outputs"] = {"compared": len(compared), "same": compared.count(None)}
    return {
        "arm": arm,
        "model": described["model"]["name"],
        "workload": first.cell.workload,
        "state": str(first.state if proved else TierState.UNPROVED),
        "asked": str(first.state),
        "context_tokens": first.cell.context_tokens,
        "concurrency": first.cell.at_once,
        "rate_per_s": settings.rate_per_s,
        "same_prompts": all(one.same_prompts for one in group),
        "proof": {
            "holds": proved,
            "evidence": list(dict.fromkeys(line for one in group for line in one.proof.evidence)),
            "doubts": list(dict.fromkeys(line for one in group for line in one.proof.doubts)),
        },
        "passes": passes,
        "samples": samples,
        "summary": summary,
    }


def _sample(one: MeasuredPass, index: int, oracle: Mapping[tuple[GridCell, int], MeasuredPass]) -> dict[str, Any]:
    sample = one.done.samples[index]
    answer = sample.answer
    kvire, cache = answer.kvire, answer.kvire.get("cache") or {}
    same = _counterpart(one, sample, oracle)
    return {
        "repeat": one.repeat,
        "script": sample.script,
        "turn": sample.turn,
        "sent_s": sample.sent_s,
        "ttft_s": answer.ttft_s,
        "tpot_s": answer.tpot_s,
        "e2e_s": answer.e2e_s,
        "gaps_s": [round(gap, 6) for gap in answer.gaps_s],
        "pieces": len(answer.pieces),
        "prompt_tokens": answer.prompt_tokens,
        "output_tokens": answer.output_tokens,
        "cached_tokens": answer.cached_tokens,
        "by_tier": by_tier(cache),
        "ideal_tokens": one.ideal[index] * (answer.prompt_tokens or 0),
        "server": {name: kvire.get("timing", {}).get(name) for name in ("ttft_s", *SPLIT)},
        "miss": cache.get("miss"),
        "miss_detail": cache.get("miss_detail"),
        "saved_s": cache.get("saved_s"),
        "output_sha256": hashlib.sha256("".join(answer.pieces).encode()).hexdigest()[:16],
        "compared": same is not None,
        "differs_at": None if same is None else first_difference(answer.pieces, same.answer.pieces),
        "error": answer.error,
        "detail": answer.detail,
    }


def _counterpart(
    one: MeasuredPass, sample: Sample, oracle: Mapping[tuple[GridCell, int], MeasuredPass]
) -> Sample | None:
    """The same prompt without reuse."""
    other = oracle.get((one.cell, one.repeat))
    if other is None or other is one or not one.same_prompts or sample.answer.error is not None:
        return None
    found = (s for s in other.done.samples if (s.script, s.turn) == (sample.script, sample.turn))
    return next((s for s in found if s.answer.error is None), None)


def first_difference(one: Sequence[str], other: Sequence[str]) -> int | None:
    """Index of the first piece, which is a token that shows, in which two answers differ; None if
    they are the same.
    """
    if "".join(one) == "".join(other):  # servers that send several tokens in a piece do not always cut alike
        return None
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)


def _set_beside(row: BenchRow, rows: Sequence[BenchRow], described: Mapping[str, Any]) -> None:
    """Beside a speed-up: what computing everything takes, and the bandwidth from which loading
    wins.
    """
    key = ("workload", "context_tokens", "concurrency")
    same = [other for other in rows if all(other[name] == row[name] for name in key)]
    baseline = next((other for other in same if other["state"] == TierState.Z), None)
    if baseline is None:
        return
    prefill = prefill_tokens_per_s(baseline["samples"])
    kv_bytes = loaded_bytes_per_token(described["model"].get("kv_groups"), baseline["samples"])
    row["summary"]["baseline"] = {
        "ttft_s": baseline["summary"].get("ttft_s"),
        "prefill_tokens_per_s": prefill,
        "break_even_bytes_per_s": prefill * kv_bytes if prefill and kv_bytes else None,
    }
    if row["state"] in {TierState.Z, TierState.UNPROVED} or not row["same_prompts"]:
        return  # an E that sends the fill asks other questions; and what is not proved is no speed-up of anything
    both = answered_in_both(row["samples"], baseline["samples"])
    ours, theirs = (by_repeat(samples, "ttft_s") for samples in both)
    ratios = [theirs[repeat] / ours[repeat] for repeat in ours]
    if ratios:
        row["summary"]["speedup"] = median_interval(ratios).as_dict()


def loaded_bytes_per_token(
    groups: Sequence[Mapping[str, Any]] | None, samples: Sequence[Mapping[str, Any]]
) -> float | None:
    """Bytes of KV that a tier gives for each token of a prompt of median length: of layers with a
    window, the window.

    None where groups are not told.
    """
    lengths = [s["prompt_tokens"] for s in samples if s["error"] is None and s["prompt_tokens"]]
    if not groups or not lengths:
        return None
    tokens: float = median(lengths)
    kept = (group["bytes_per_token"] * min(tokens, group["window"] or tokens) for group in groups)
    return float(sum(kept)) / tokens


def slo_of(report: BenchReport) -> Slo:
    """The limits that a report was made with."""
    slo = report["settings"].get("slo") or {}
    return Slo(slo.get("ttft_s", Slo().ttft_s), slo.get("tpot_s", Slo().tpot_s))
