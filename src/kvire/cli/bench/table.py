"""Reports and comparisons of `kvire bench` in the terminal."""

import json
from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvire.bench import figures
from kvire.bench.compare import Comparison, Ratio, within_run
from kvire.bench.results import BenchReport, BenchRow
from kvire.bench.states import NAMES, TierState

WIDE = 150  # columns of a terminal that show every figure


def print_report(report: BenchReport) -> None:
    """Figures with their notes, and B over A if there are two arms."""
    out = Console()
    columns = [column for column in figures.FIGURES if out.width >= WIDE or column[0] in figures.BRIEF]
    for title, rows in groupby(report["rows"], key=lambda row: _title(report, row)):
        out.print(f"\n[bold]{escape(title)}[/]", highlight=False)
        table = Table(box=None, pad_edge=False)
        for name, _ in columns:
            table.add_column(name, no_wrap=name not in {"TTFT", "speed-up"})  # the two that have intervals
        for row in rows:
            table.add_row(*(value(row) for _, value in columns))
        out.print(table)
    out.print()
    out.print(figures.coverage(report["rows"]), highlight=False)
    for line in [*figures.comparisons(report), *figures.bench_notes(report)]:
        out.print(line, markup=False, highlight=False)
    if len(report["arms"]) == 2:
        out.print("\nB over A, repeat by repeat:")
        _print_ratios(out, within_run(report))


def _title(report: BenchReport, row: BenchRow) -> str:
    many = f", {row['concurrency']} at once" if row["concurrency"] > 1 else ""
    arm = f" (arm {row['arm']}, {row['model']})" if len(report["arms"]) > 1 else ""
    return f"{row['workload']}, {row['context_tokens']:,} tokens{many}{arm}"


def print_comparison(comparison: Comparison, *, as_json: bool) -> None:
    """Ratios, differences, and rows missing on one side."""
    if as_json:
        ratios = [
            {
                **one.row,
                "measure": one.measure,
                "first_s": one.first_s,
                "second_s": one.second_s,
                "ratio": one.ratio.as_dict(),
            }
            for one in comparison.ratios
        ]
        print(json.dumps({"ratios": ratios, "differs": comparison.differs, "only": comparison.only}, indent=1))
        return
    out = Console()
    _print_ratios(out, comparison.ratios)
    for line in comparison.differs:
        out.print(f"differs: {line}", markup=False, highlight=False)
    for line in comparison.only:
        out.print(f"only in one of them: {line}", markup=False, highlight=False)


def _print_ratios(out: Console, ratios: Sequence[Ratio]) -> None:
    table = Table("workload", "context", "at once", "state", "", "first", "second", "ratio", box=None, pad_edge=False)
    for one in ratios:
        state = TierState(one.row["state"])
        table.add_row(
            one.row["workload"],
            f"{one.row['context_tokens']:,}",
            str(one.row["concurrency"]),
            f"{state} {NAMES[state]}",
            one.measure.removesuffix("_s").upper(),
            figures.rounded_seconds(one.first_s),
            figures.rounded_seconds(one.second_s),
            figures.interval(one.ratio.as_dict(), figures.times),
        )
    out.print(table)
