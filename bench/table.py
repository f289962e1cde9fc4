"""One page of all figures: docs/results/*.json becomes docs/results/README.md.

    python bench/table.py [FOLDER]

A report with a "table" (figures.py) gives its rows; decode attention keeps raw rows of its own,
which are put beside plain reads here; any other report is linked.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import reporting

from kvire.bench.figures import CELL, FIGURES, number

RESULTS = reporting.ROOT / "docs" / "results"
TITLES = {
    "engine": "The engine beside transformers and llama.cpp",
    "serving": "The server beside llama.cpp and vLLM",
    "field": "Everybody who runs here, the same words",
    "fifty_pages": "Fifty pages, after a restart",
    "store_engine": "What the store is worth to the engine, and what it costs",
    "store_tiers": "4,096 tokens from each tier",
    "before_after": "Before and after the planner of reuse",
    "vllm_connector": "Under vLLM",
    "vllm_tiers": "Beside what else vLLM can keep KV in",
    "transformers_connector": "Under transformers",
    "kvire_bench": "What `kvire bench` says of this machine, by default",
    "bench_agrees": "Does `kvire bench` measure what another client measures",
    "plan_check": "Does `kvire plan` predict what is measured",
    "log_tools": "Reading logs and traces",
    "pool_waste": "Blocks in use that hold nothing",
    "kv_cache_modes": "Paged, contiguous, off",
    "int8_quality": "KV in int8",
    "decode_attention": "Decode attention over blocks",
}
HEAD = """# Results

Made by `make bench` and `bench/run.py NAME` (`bench/table.py`) from the JSON files beside this page; the raw samples
of the last run lie in build/bench. Value: the median over rounds, with the least and the most in brackets. Systems of
one section took turns within each round; ratios are medians of the ratio within a round. Limit: the best that this
machine's arithmetic and memory allow, both measured in the same run. Break-even: a place that gives back KV faster
than that beats computing it again on this machine.
"""
COLUMNS = ("figure", "value", "baseline", "limit", "break-even", "bar", "met")


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    reports = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")}
    order = [name for name in TITLES if name in reports] + sorted(reports.keys() - TITLES.keys())
    page = "\n".join([HEAD, *(section(name, reports[name]) for name in order)])
    (folder / "README.md").write_text(page, encoding="utf-8")
    print(page)


def section(name: str, report: Mapping[str, Any]) -> str:
    if name == "decode_attention":
        rows = attention_rows(report)
    elif "table" in report:
        rows = report["table"]
    elif "schema" in report and name == "kvire_bench":
        return bench_section(name, report)
    else:
        return f"## {TITLES.get(name, name)}\n\nIn [{name}.json]({name}.json).\n"
    even = report.get("break_even_mb_s")
    cells = [cells_of(row, f"{number(even)} MB/s" if even else "") for row in rows]
    lines = [f"## {TITLES.get(name, name)}", "", f"[{name}.json]({name}.json), `bench/{name}.py`. {facts(report)}"]
    lines += [f"Took no part: {why}" for why in report.get("skipped", ())]
    return "\n".join([*lines, "", *markdown(cells), ""])


def bench_section(name: str, report: Mapping[str, Any]) -> str:
    """What `kvire bench` itself prints of its rows."""
    made = f"`{' '.join(report['command'])}`, commit {report['commit']}"
    head = f"## {TITLES[name]}\n\n[{name}.json]({name}.json), {made}.\n"
    columns = [*CELL, *FIGURES]
    lines = [[title for title, _ in columns], ["---"] * len(columns)]
    lines += [[text_of(row) for _, text_of in columns] for row in report["rows"]]
    return "\n".join([head, *("| " + " | ".join(line) + " |" for line in lines), ""])


def facts(report: Mapping[str, Any]) -> str:
    where = report["machine"]
    text = f"{where['cpu']}, {where['threads']} threads, torch {where['torch']}, commit {where['commit']}."
    if limits := report.get("limits"):
        text += f" Reads {limits['read_gb_s']:.0f} GB/s, products {limits['matmul_gflops']:.0f} GFLOPS."
    return text


def cells_of(row: Mapping[str, Any], break_even: str) -> list[str]:
    value = f"{number(row['median'])} {row['unit']}"
    if row["min"] != row["max"]:
        value += f" ({number(row['min'])} to {number(row['max'])})"
    limit = "" if row.get("limit") is None else f"{number(row['limit'])} {row['unit']}"
    if row.get("limit_is"):
        limit = f"{limit}: {row['limit_is']}" if limit else row["limit_is"]
    met = {True: "yes", False: "**no**"}.get(row.get("met"), "")
    return [row["figure"], value, row.get("baseline", ""), limit, break_even, row.get("bar", ""), met]


def markdown(cells: Sequence[Sequence[str]]) -> list[str]:
    """A table; columns that are empty in every row are left out."""
    kept = [i for i in range(len(COLUMNS)) if any(row[i] for row in cells)]
    lines = [[COLUMNS[i] for i in kept], ["---"] * len(kept), *([row[i] for i in kept] for row in cells)]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def attention_rows(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """decode_attention.json: GB/s of stored KV, the limit being a plain read of the same pool."""
    return [
        {
            "figure": f"{row['dtype']}, heads {row['shape']}, {row['sequences']} x {row['context']} tokens",
            "unit": "GB/s",
            **{key: row["decode_gb_s"][key] for key in ("median", "min", "max")},
            "limit": row["read_gb_s"]["median"],
            "limit_is": f"a plain read; {row['decode_gb_s']['median'] / row['read_gb_s']['median']:.0%} of it",
        }
        for row in report["rows"]
    ]


if __name__ == "__main__":
    main()
