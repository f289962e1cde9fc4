"""One figure of a report: what was measured, beside its baseline, its limit and the bar it is held to.

Every benchmark writes {"machine", "limits", "break_even_mb_s", "table": [rows of `figure`], ...}, from which
table.py makes one page. A report's figures come from one interleaved run.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine


@dataclass(frozen=True)
class Bar:
    """What a figure's median must reach. op: one of >=, >, <=, <, or "about": within `value` of 1."""

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
    """A row. samples: one a round. limit: the best that physics allows, in `unit`; limit_is: where it comes from."""
    row = {"figure": name, "unit": unit, **machine.summary(samples), "baseline": baseline}
    row |= {"limit": limit, "limit_is": limit_is}
    if bar is not None:
        row |= {"bar": str(bar), "met": bar.met(row["median"])}
    return row


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """The ratio within each round, so that whatever slowed a round down hits both sides."""
    return [x / y for x, y in zip(over, under, strict=True)]


def medians(samples: Mapping[str, Sequence[float]], unit: str) -> str:
    """What several systems reached, in words."""
    return ", ".join(f"{name} {short(statistics.median(values))} {unit}" for name, values in samples.items())


def short(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def write(path: Path | None, report: Mapping[str, Any]) -> None:
    """Print the rows, and keep the report in `path`."""
    for row in report["table"]:
        line = f"{row['figure']}: {short(row['median'])} {row['unit']} ({short(row['min'])} to {short(row['max'])})"
        if "bar" in row:
            line += f", bar {row['bar']}: {'met' if row['met'] else 'NOT MET'}"
        print(line)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
