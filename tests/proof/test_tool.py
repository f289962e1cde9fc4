"""tools/prove.py counts, judges and writes what it found."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "prove.py"


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        (["differential", "--requests", "6", "--mode", "both"], 6),
        (["canary", "--responses", "1"], 800),
        (["pool", "--operations", "200"], 200),
    ],
    ids=["differential", "canary", "pool"],
)
def test_a_small_run(arguments: list[str], count: int, tmp_path: Path) -> None:
    path = tmp_path / "proof.json"
    run = subprocess.run(
        [sys.executable, TOOL, *arguments, "--json", path], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert f"N {count}, wrong 0" in run.stdout
    (result,) = json.loads(path.read_text(encoding="utf-8")).values()
    assert (result["n"], result["wrong"], result["upper_bound_95"]) == (count, 0, 3 / count)
