"""A report as one HTML page."""

from kvire.bench import figures
from kvire.bench.results import BenchReport, BenchRow
from kvire.bench.states import NAMES, TIERS, TierState
from kvire.report.charts import Labels, Series, bars, lines
from kvire.report.page import Page

METHOD = (
    "A repeat sends a fill to an empty cache, and then a probe whose prompts begin like the fill's, once in every "
    "state. A state is named only where counters and answers prove it. Times are seen by the client. Medians are over "
    "repeats; a speed-up is the median of the ratios within a repeat, against the same prompts without reuse (behind "
    "a mark of their own, where a server has no other way)."
)

CELL = ("arm", "workload", "context", "at once")


def page(report: BenchReport) -> Page:
    """Summary first, then times, hits, proofs, and the machine."""
    model = report["model"]
    made = Page(f"kvire bench: {model['name']}", _lead(report))
    made.text(METHOD)
    for note in figures.bench_notes(report):
        made.note(note)
    made.heading("Figures")
    columns = [column for column in (*figures.CELL, *figures.FIGURES) if _tells(report, column)]
    rows = [[value(row) for _, value in columns] for row in report["rows"]]
    made.table([name for name, _ in columns], rows, figures.coverage(report["rows"]))
    for line in figures.comparisons(report):
        made.text(line)
    made.heading("Time to first token")
    for arm in report["arms"]:
        _charts(made, [row for row in report["rows"] if row["arm"] == arm["name"]], _named(report, arm["name"]))
    _split(made, report)
    _proofs(made, report)
    _about(made, report)
    return made


def _tells(report: BenchReport, column: figures.FigureColumn) -> bool:
    """Arm and model are columns only where there are several."""
    name, value = column
    return name not in {"arm", "model"} or len({value(row) for row in report["rows"]}) > 1


def _lead(report: BenchReport) -> str:
    """The best proved gain, in a sentence."""
    gains = [(row["summary"]["speedup"]["median"], row) for row in report["rows"] if row["summary"].get("speedup")]
    if not gains:
        return "No gain is stated: for that, no reuse has to be proved, and a state that sends the same prompts."
    gain, row = max(gains, key=lambda pair: pair[0])
    where = f"{row['workload']} at {row['context_tokens']:,} tokens{_named(report, row['arm'])}"
    starts = figures.middle(row["summary"]["ttft_s"], figures.rounded_seconds)
    return f"Up to {figures.times(gain)}: {where}, {NAMES[TierState(row['state'])]}, starts after {starts}."


def _charts(made: Page, rows: list[BenchRow], title: str) -> None:
    """TTFT by state for each workload: bars, or lines where there are several context lengths; then
    hits.
    """
    for workload, at_once in dict.fromkeys((row["workload"], row["concurrency"]) for row in rows):
        mine = [
            r for r in rows if (r["workload"], r["concurrency"]) == (workload, at_once) and r["summary"].get("ttft_s")
        ]
        if not mine:
            continue
        name = f"{workload}, {at_once} at once{title}"
        contexts = sorted({row["context_tokens"] for row in mine})
        if len(contexts) > 1:
            made.figure(
                _over_context(mine, contexts, name), f"{name}: median and interval of the time to the first token."
            )
        else:
            made.figure(_by_state(mine, name), f"{name}, {contexts[0]:,} tokens: median and interval.")
        for context in contexts:
            here = [row for row in mine if row["context_tokens"] == context]
            about = f"{name}, {context:,} tokens"
            made.figure(_hits(here, about), f"{about}: prompt tokens that were not computed, by where they came from.")


def _over_context(rows: list[BenchRow], contexts: list[int], name: str) -> str:
    series = []
    for state in dict.fromkeys(map(figures.letter, rows)):
        by_context = {row["context_tokens"]: row["summary"]["ttft_s"] for row in rows if figures.letter(row) == state}
        here = [by_context.get(context) for context in contexts]
        values, low, high = ([None if one is None else one[k] for one in here] for k in ("median", "low", "high"))
        series.append(Series(state, values, contexts, low, high))
    labels = Labels(
        name, "Time to the first token over context length, one line for each state.", "context, tokens", "TTFT, s"
    )
    return lines(series, labels, log_y=True)


def _by_state(rows: list[BenchRow], name: str) -> str:
    times = [row["summary"]["ttft_s"] for row in rows]
    middles, lows, highs = ([one[k] for one in times] for k in ("median", "low", "high"))
    series = Series("TTFT", middles, low=lows, high=highs)
    labels = Labels(name, "Time to the first token in each state.", "state", "TTFT, s")
    return bars([figures.letter(row) for row in rows], [series], labels)


def _hits(rows: list[BenchRow], name: str) -> str:
    told = [row["summary"].get("hit_by_tier") for row in rows]
    if any(told):
        series = [Series(tier, [(one or {}).get(tier, 0.0) for one in told]) for tier in TIERS]
    else:
        series = [Series("reused", [row["summary"].get("hit_rate") or 0.0 for row in rows])]
    labels = Labels(f"Reused: {name}", "Share of prompt tokens that were reused.", "state", "share of prompt tokens")
    return bars([figures.letter(row) for row in rows], series, labels, stacked=True)


def _split(made: Page, report: BenchReport) -> None:
    """Where the time to the first token went, as far as the server tells."""
    rows = []
    for row in report["rows"]:
        split = row["summary"].get("split") or {}
        outside = row["summary"].get("outside_server_s")
        values = [figures.shown_or_dash(one, figures.rounded_seconds) for one in (*split.values(), outside)]
        if split and any(value != figures.NOTHING for value in values):
            rows.append([*_cell(row), figures.letter(row), *values])
    if rows:
        made.heading("Where the first token's time goes")
        made.table([*CELL, "state", "queue", "load", "prefill", "outside the server"], rows)


def _proofs(made: Page, report: BenchReport) -> None:
    made.heading("Proofs")
    rows = [
        [*_cell(row), figures.state(row), "; ".join(row["proof"][kind])]
        for row in report["rows"]
        for kind in ("evidence", "doubts")
        if row["proof"][kind] and (kind == "doubts" or row["proof"]["holds"])
    ]
    made.table([*CELL, "state", "what was seen"], rows)


def _cell(row: BenchRow) -> list[str]:
    return [row["arm"], row["workload"], f"{row['context_tokens']:,}", str(row["concurrency"])]


def _about(made: Page, report: BenchReport) -> None:
    made.heading("Measured on")
    machine, settings = report["machine"], report["settings"]
    made.facts(
        {
            "CPU": machine["cpu"], "cores": machine["cores"], "memory": f"{machine['memory_bytes'] / 1e9:.0f} GB",
            "system": machine["system"], "versions": ", ".join(f"{k} {v}" for k, v in machine["packages"].items()),
            "commit": report["commit"], "made": report["created"], "repeats": settings["repeats"],
            "seed": str(settings["seed"]), "nonce": settings["nonce"], "answer tokens": settings["output_tokens"],
            "SLO": f"TTFT {settings['slo']['ttft_s']:g} s, TPOT {settings['slo']['tpot_s']:g} s",
        }
    )  # fmt: skip
    for arm in report["arms"]:
        facts = {name: value for name, value in arm["model"].items() if value is not None and name != "kv_groups"}
        where = {"options": " ".join(arm["options"]) or "none", "store": arm.get("store"), "URL": arm.get("url")}
        made.text(f"Arm {arm['name']}; ideal hit rate from {arm['ideal_by']}.")
        made.facts({name: str(value) for name, value in {**facts, **where}.items() if value is not None})


def _named(report: BenchReport, arm: str) -> str:
    return f", arm {arm}" if len(report["arms"]) > 1 else ""
