"""A benchmark's report: rows of figures, each beside its baseline, its limit and its bar.

Every benchmark writes {"machine", "limits", "break_even_mb_s", "table": [rows of `figure`], ...},
from which table.py makes one page. The figures of a report come from one interleaved run. The
report is kept without its raw samples; with them it lies in build/bench until the next run.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvire.bench.figures import number
from kvire.bench.machine import commit, cpu_name
from kvire.bench.machine import machine_facts as describe_machine

ROOT = Path(__file__).parents[1]
RAW_FOLDER = ROOT / "build" / "bench"
RAW_FIELDS = frozenset({"samples", "runs", "rounds", "passes", "nll", "answers"})  # dropped where they hold values


def describe() -> dict[str, Any]:
    """Machine, versions and commit."""
    found = describe_machine()
    return {
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "python": found["python"],
        "torch": torch.__version__,
        "commit": commit() or "unknown",
    }


@dataclass(frozen=True)
class Bar:
    """What a figure's median must reach.

    op: one of >=, >, <=, <, or "about": within `value` of 1.
    """

    op: str
    value: float

    def __str__(self) -> str:
        return f"within {self.value:g} of 1" if self.op == "about" else f"{self.op} {self.value:g}"

    def met(self, value: float) -> bool:
        """Whether `value` reaches it."""
        holds = {
            ">=": value >= self.value,
            ">": value > self.value,
            "<=": value <= self.value,
            "<": value < self.value,
            "about": abs(value - 1) <= self.value,
        }
        return holds[self.op]


def figure(
    name: str,
    unit: str,
    samples: Sequence[float],
    *,
    baseline: str = "",
    limit: float | None = None,
    limit_is: str = "",
    bar: Bar | None = None,
) -> dict[str, Any]:
    """A row.

    samples: one a round.
    limit: the best that physics allows, in `unit`;
    limit_is: where it comes from.
    """
    row = {"figure": name, "unit": unit, **summary(samples), "baseline": baseline}
    row |= {"limit": limit, "limit_is": limit_is}
    if bar is not None:
        row |= {"bar": str(bar), "met": bar.met(row["median"])}
    return row


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Median, interval and the raw samples."""
    return {"median": statistics.median(samples), "min": min(samples), "max": max(samples), "samples": list(samples)}


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """The ratio within each round, so that a disturbance of a round hits both sides."""
    return [x / y for x, y in zip(over, under, strict=True)]


def medians(samples: Mapping[str, Sequence[float]], unit: str) -> str:
    """The medians of several systems, in words."""
    return ", ".join(f"{name} {number(statistics.median(values))} {unit}" for name, values in samples.items())


def write(path: Path | None, report: Mapping[str, Any]) -> None:
    """Print the rows, and keep the report in `path`: compact there, with its samples in
    build/bench.
    """
    for row in report.get("table", ()):
        line = f"{row['figure']}: {number(row['median'])} {row['unit']} ({number(row['min'])} to {number(row['max'])})"
        if "bar" in row:
            line += f", bar {row['bar']}: {'met' if row['met'] else 'NOT MET'}"
        print(line)
    if path:
        for folder, kept in ((path.parent, compact(report)), (RAW_FOLDER, dict(report))):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / path.name).write_text(json_text(kept), encoding="utf-8")


def compact(value: Any) -> Any:
    """A report without its raw samples."""
    if isinstance(value, Mapping):
        return {
            name: compact(inner)
            for name, inner in value.items()
            if not (name in RAW_FIELDS and isinstance(inner, Mapping | list))
        }
    return [compact(inner) for inner in value] if isinstance(value, list) else value


def json_text(report: Mapping[str, Any]) -> str:
    """One line a field, and one a row of a table, so that a new measurement shows as the rows that
    changed.
    """
    fields = []
    for name, value in report.items():
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            rows = ",\n  ".join(json.dumps(row) for row in value)
            fields.append(f" {json.dumps(name)}: [\n  {rows}\n ]")
        else:
            fields.append(f" {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(fields) + "\n}\n"
