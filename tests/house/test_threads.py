"""docs/threads.md has a row for every place that starts threads, with the beginning of their name."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "threads.md"
STARTS = {"Thread", "ThreadPoolExecutor"}


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def name_of(call: ast.Call) -> str | None:
    """The constant beginning of the threads' name."""
    values = [word.value for word in call.keywords if word.arg in {"name", "thread_name_prefix"}]
    values += call.args[1:2] if called(call) == "ThreadPoolExecutor" else []
    for value in values:
        first = value.values[0] if isinstance(value, ast.JoinedStr) else value
        if isinstance(first, ast.Constant):
            return str(first.value).strip()
    return None


def started(source: Path) -> Iterator[tuple[str, str | None]]:
    """(file, name) of each place that starts threads."""
    for path in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and called(node) in STARTS:
                yield str(path.relative_to(source)), name_of(node)


def missing(source: Path, page: str) -> list[tuple[str, str | None]]:
    rows = [line for line in page.splitlines() if line.startswith("|")]
    return [
        (file, name)
        for file, name in started(source)
        if not any(file in row and (f"`{name}`" in row if name else "without a name" in row) for row in rows)
    ]


def test_every_thread_has_a_row() -> None:
    assert len(list(started(ROOT / "src" / "kvire"))) > 10
    assert missing(ROOT / "src" / "kvire", PAGE.read_text("utf-8")) == []


def test_a_thread_without_a_row_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text('threading.Thread(target=run, name=f"new {tier}")\n', "utf-8")
    assert missing(tmp_path, PAGE.read_text("utf-8")) == [("new.py", "new")]
