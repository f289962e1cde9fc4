"""Figures of rows as people read them: what the terminal table and the HTML page have in common."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvire.bench.results import BenchReport, BenchRow
from kvire.bench.states import NAMES, TIERS, TierState

NOTHING = "\N{EN DASH}"
SMALL_GAIN = 1.2  # below, a speed-up is called small
LATE_S, LATE = 0.1, 0.1  # of an open loop: seconds, and share of TTFT, from which on it is said


def state(row: BenchRow) -> str:
    """Letter and name."""
    named = TierState(row["state"])
    return f"{row['asked']} {NAMES[named]}"


def letter(row: BenchRow) -> str:
    """The state in a chart, where there is little room."""
    return state(row) if row["state"] == TierState.UNPROVED else str(row["state"])


FigureColumn = tuple[str, Callable[[BenchRow], str]]
# What a row is about, and its figures; of these, BRIEF fit eighty columns.
CELL: tuple[FigureColumn, ...] = (
    ("arm", lambda row: str(row["arm"])),
    ("model", lambda row: str(row["model"])),
    ("workload", lambda row: str(row["workload"])),
    ("context", lambda row: f"{row['context_tokens']:,}"),
    ("at once", lambda row: str(row["concurrency"])),
)
FIGURES: tuple[FigureColumn, ...] = (
    ("state", state),
    ("TTFT", lambda row: interval(row["summary"].get("ttft_s"), rounded_seconds)),
    ("speed-up", lambda row: interval(row["summary"].get("speedup"), times)),
    ("TPOT", lambda row: middle(row["summary"].get("tpot_s"), rounded_seconds)),
    ("tok/s", lambda row: middle(row["summary"].get("tps_system"), number)),
    ("hit", lambda row: shown_or_dash(row["summary"].get("hit_rate"), percent)),
    ("ideal", lambda row: shown_or_dash(row["summary"].get("ideal_hit_rate"), percent)),
    ("by tier", lambda row: tiers(row["summary"].get("hit_by_tier"))),
    ("TTFT p95", lambda row: shown_or_dash(row["summary"].get("ttft_p95_s"), rounded_seconds)),
    ("E2E", lambda row: middle(row["summary"].get("e2e_s"), rounded_seconds)),
    ("ITL p50 / p99", lambda row: gaps(row["summary"].get("itl_s"))),
    ("tok/s per user", lambda row: shown_or_dash(row["summary"].get("tps_user"), number)),
    ("goodput/s", lambda row: middle(row["summary"].get("goodput_per_s"), number)),
    ("errors", lambda row: ", ".join(f"{n} {kind}" for kind, n in row["summary"]["errors"].items()) or "0"),
)
BRIEF = ("state", "TTFT", "speed-up", "TPOT", "tok/s", "hit", "ideal")


def place(report: BenchReport, row: BenchRow) -> str:
    """Which rows a line is about; the arm where there are several."""
    arm = f", arm {row['arm']}" if len(report["arms"]) > 1 else ""
    return f"{row['workload']}, {row['context_tokens']:,} tokens, {row['concurrency']} at once{arm}"


def bench_notes(report: BenchReport) -> list[str]:
    """What has to be read beside the figures, most important first."""
    found = []
    for row in report["rows"]:
        where = place(report, row)
        summary = row["summary"]
        if row["state"] == TierState.UNPROVED:
            found.append(
                f"{where}: {row['asked']} was asked for, but no state is named, since "
                f"{'; '.join(row['proof']['doubts'])}."
            )
        if failed := sum(summary["errors"].values()):
            kinds = ", ".join(f"{n} {kind}" for kind, n in summary["errors"].items())
            found.append(f"{where}, {state(row)}: {failed} of {summary['requests']} requests failed: {kinds}.")
        if summary["client_saturated"]:
            found.append(
                f"{where}: this client took {percent(summary['client_cpu'])} of a core: it may be what was measured."
            )
        if summary["late_s"] > max(LATE_S, LATE * (summary.get("ttft_s") or {"median": 0.0})["median"]):
            found.append(
                f"{where}, {state(row)}: a request was sent {rounded_seconds(summary['late_s'])} later than due, which "
                "is in none of the times."
            )
        outputs = summary["outputs"]
        if differ := outputs["compared"] - outputs["same"]:
            found.append(
                f"{where}, {state(row)}: {differ} of {outputs['compared']} answers differ from those without reuse."
            )
        if (gain := summary.get("speedup")) and gain["median"] < SMALL_GAIN:
            found.append(f"{where}, {state(row)}: the gain is small, {times(gain['median'])}.")
        if summary.get("tokens_per_piece") and summary["tokens_per_piece"] > 1.5:
            found.append(f"{where}, {state(row)}: pieces hold several tokens; gaps are between pieces.")
    return list(dict.fromkeys(found))


def comparisons(report: BenchReport) -> list[str]:
    """Beside each speed-up: the baseline that computes everything, and the bandwidth from which
    loading wins.
    """
    found = []
    for row in report["rows"]:
        baseline = row["summary"].get("baseline")
        if baseline is None or row["state"] != TierState.Z:
            continue
        takes = interval(baseline["ttft_s"], rounded_seconds)
        line = f"{place(report, row)}: computing everything takes {takes} to the first token"
        if baseline["prefill_tokens_per_s"]:
            line += f", {number(baseline['prefill_tokens_per_s'])} prompt tokens a second"
        if baseline["break_even_bytes_per_s"]:
            line += f"; loading beats computing from {number(baseline['break_even_bytes_per_s'] / 1e6)} MB/s on"
        found.append(line + ".")
    return found


def interval(value: Mapping[str, Any] | None, unit: Callable[[float], str]) -> str:
    """Median, and in brackets how far it may lie from the true one, in the same unit: 3.2 s
    (2.9-3.5).
    """
    if value is None:
        return NOTHING
    text, low, high = (unit(value[name]) for name in ("median", "low", "high"))
    if value["coverage"] is None:
        return text
    name = f" {text.rpartition(' ')[2]}"
    if low.endswith(name) and high.endswith(name):
        return f"{text} ({low.removesuffix(name)}-{high.removesuffix(name)})"
    return f"{text} ({low} - {high})"


def middle(value: Mapping[str, Any] | None, unit: Callable[[float], str]) -> str:
    """Median alone."""
    return NOTHING if value is None else unit(value["median"])


def shown_or_dash(value: float | None, unit: Callable[[float], str]) -> str:
    """A dash for an unknown figure."""
    return NOTHING if value is None else unit(value)


def gaps(value: Mapping[str, float] | None) -> str:
    """Between tokens."""
    return NOTHING if value is None else f"{rounded_seconds(value['p50'])} / {rounded_seconds(value['p99'])}"


def tiers(shares: Mapping[str, float] | None) -> str:
    """Tiers that gave something."""
    if shares is None:
        return NOTHING
    return ", ".join(f"{tier} {percent(shares[tier])}" for tier in TIERS if shares[tier]) or "none"


def number(value: float) -> str:
    """Three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def rounded_seconds(value: float) -> str:
    """0.42 s as 420 ms."""
    if value < 1:
        return f"{value * 1e3:.0f} ms" if value >= 0.01 else f"{value * 1e3:.2g} ms"
    return f"{value:.2f} s"


def percent(share: float) -> str:
    """In whole percents."""
    return f"{share * 100:.0f} %"


def times(ratio: float) -> str:
    """3.2 x."""
    return f"{ratio:.3g} x"


def coverage(rows: Sequence[BenchRow]) -> str:
    """What the brackets mean."""
    covers = {row["summary"]["ttft_s"]["coverage"] for row in rows if row["summary"].get("ttft_s")} - {None}
    if not covers:
        return "One repeat: no intervals."
    return f"In brackets: intervals that hold the true median with {min(covers):.1%} (order statistics of the repeats)."
