"""docs/threads.md has a row for every place that starts threads, with the beginning of their name; and for every
thread that runs in a server with a store.
"""

import ast
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.waiting import PATIENCE_S, until
from server.serving import MODEL, running, tiny_engine

from kvire.core.config import StoreConfig
from kvire.store.open import open_store

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


def described(page: str) -> set[str]:
    """Beginnings of the names that the page has rows for."""
    rows = [line for line in page.splitlines() if line.startswith("|")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}


def alive() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.is_alive()}


@pytest.mark.slow
def test_live_threads_are_those_of_the_page(tmp_path: Path) -> None:
    before = alive()
    seen: set[str] = set()
    config = StoreConfig(
        path=tmp_path / "disk",
        disk_bytes=64 << 20,
        ram_bytes=1 << 20,
        remote=(f"file://{tmp_path / 'shared'}",),
        key_file=tmp_path / "keys.json",
        encrypt=False,
    )
    with open_store(config) as store, running(tiny_engine(blocks=24, store=store, max_model_len=256)) as served:
        for letter in "ababc":  # the second time from the store: the pool holds one prompt and its answer
            body = {"model": MODEL, "prompt": letter * 150, "max_tokens": 2}
            assert served.post("/v1/completions", body).status == 200
            assert store.flush(PATIENCE_S)
            seen |= {thread.name for thread in alive() - before}
        left = alive() - before
    until(lambda: not any(thread.is_alive() for thread in left))
    names = described(PAGE.read_text("utf-8"))
    others = {name for name in seen if not name.startswith(tuple(names))}
    assert not {name for name in others if not re.fullmatch(r"Thread-\d+ \(run\)", name)}  # the tests' own server
    assert {"kvire-engine", "kvire load", "kvire write", "kvire look"} <= {
        name for name in names if any(thread.startswith(name) for thread in seen)
    }
