"""Is a change as fast as what it replaced? Two trees of Kvire take turns on the same benchmarks.

    python bench/before_after.py BEFORE AFTER [--turns 3] [--json FILE]

BEFORE, AFTER: working trees, each with an environment in .venv. A turn runs the server's workloads and the rows of the
store in one tree and then in the other, the order turned round from one turn to the next. A figure's ratio is that of
its medians within a turn; above 1, the new tree took more time, or gave more where more is better.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from time import perf_counter

from reporting import describe, figure, medians, write

RUNS = {
    "serving": ("--rounds", "1", "--without", "llama.cpp", "vLLM", "vLLM on all cores"),
    "store_tiers": ("--rounds", "9"),
}
TIMES = {"ms", "s", "decode steps"}  # units of which less is better
Found = dict[tuple[str, str], dict[str, list[float]]]  # figure and unit -> tree -> one median a turn


def main() -> None:
    options = _options()
    trees = {"before": options.before.resolve(), "after": options.after.resolve()}
    found: Found = defaultdict(lambda: defaultdict(list))
    for turn in range(options.turns):
        for name, tree in list(trees.items())[:: 1 if turn % 2 else -1]:
            for benchmark, arguments in RUNS.items():
                for row in run(tree, benchmark, arguments):
                    found[f"{benchmark}: {row['figure']}", row["unit"]][name].append(row["median"])
            print(f"turn {turn + 1}: {name} is done", flush=True)
    commits = {name: _commit(tree) for name, tree in trees.items()}
    rows = [_row(name, unit, values) for (name, unit), values in found.items() if unit != "%" and len(values) == 2]
    write(options.json, {"machine": describe(), "commits": commits, "turns": options.turns, "table": rows})


def run(tree: Path, benchmark: str, arguments: tuple[str, ...]) -> list[dict]:
    """The rows of one benchmark of a tree, run by its own script in its own environment."""
    started = perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        call = [tree / ".venv" / "bin" / "python", tree / "bench" / f"{benchmark}.py", *arguments, "--json", report]
        subprocess.run(call, check=True, cwd=tree, stdout=subprocess.DEVNULL)
        rows = json.loads(report.read_text(encoding="utf-8"))["table"]
    print(f"  {benchmark}: {perf_counter() - started:.0f} s", flush=True)
    return rows


def _row(name: str, unit: str, values: dict[str, list[float]]) -> dict:
    ratios = [after / before for before, after in zip(values["before"], values["after"], strict=True) if before]
    better = "less" if unit in TIMES else "more"
    beside = f"{medians(values, unit)}; {better} is better"
    return figure(f"{name}: after / before", "x", ratios or [statistics.nan], baseline=beside)


def _commit(tree: Path) -> str:
    call = ["git", "-C", tree, "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(call, check=True, capture_output=True, text=True).stdout.strip()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
