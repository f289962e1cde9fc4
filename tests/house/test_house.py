"""How the house is kept: what is checked when, and that nothing written lies about it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WHOLE_SUITE = 1_000  # tests; fewer were picked out by whoever runs them


def slow_lines() -> list[str]:
    lines = (ROOT / "tests" / "slow.txt").read_text("utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def git_status() -> str:
    command = ["git", "status", "--porcelain"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if told.returncode:
        pytest.skip("not a git checkout")
    return told.stdout


@pytest.mark.parametrize("line", slow_lines())
def test_each_line_of_the_slow_list_names_tests(line: str) -> None:
    path, _, name = line.partition("::")
    assert (ROOT / path).exists()
    function = name.partition("[")[0]
    assert not function or f"def {function}(" in (ROOT / path).read_text("utf-8")


def test_a_tenth_of_the_tests_at_most_is_left_to_make_test(request: pytest.FixtureRequest) -> None:
    items = request.session.items
    if len(items) < WHOLE_SUITE or request.config.option.markexpr:
        pytest.skip("only the whole suite tells")
    folders = tuple(line for line in slow_lines() if line.endswith("/"))
    outside = [item for item in items if not item.nodeid.startswith(folders)]
    moved = [
        item for item in outside if item.nodeid.startswith(tuple(slow_lines())) or item.get_closest_marker("mutant")
    ]
    kept = [item for item in outside if not item.get_closest_marker("slow")]
    assert len(moved) <= (len(moved) + len(kept)) / 10


def test_pre_commit_runs_what_make_lint_runs() -> None:
    recipe = re.search(r"^lint: .*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert recipe is not None
    commands = [line.strip().replace("$(VENV)", ".venv") for line in recipe[1].splitlines()]
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    assert [hook["entry"] for repo in config["repos"] for hook in repo["hooks"]] == commands


def test_lines_are_counted_once() -> None:
    told = subprocess.run([sys.executable, ROOT / "tools" / "lines.py"], capture_output=True, text=True, check=False)
    if told.returncode:
        pytest.skip("not a git checkout")
    rows = [line.split() for line in told.stdout.splitlines()[1:]]
    counts = {name: [0 if count == "-" else int(count) for count in counts] for name, *counts in rows}
    together = counts.pop("together")
    assert [sum(column) for column in zip(*counts.values(), strict=True)] == together
    assert counts["kvire/native"][1] == together[1] > 0


@pytest.mark.model
def test_the_demo_s_picture_leaves_the_tree_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "demo")
    import demo  # noqa: PLC0415 - a script

    before = git_status()
    monkeypatch.setattr(demo, "LENGTHS", (128, 192, 256))
    demo.PICTURE.unlink(missing_ok=True)
    demo.cache_off_and_on(demo.PICTURE)
    assert demo.PICTURE.read_text("utf-8").startswith("<svg")
    assert git_status() == before
