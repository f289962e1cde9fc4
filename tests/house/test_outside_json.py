"""JSON from outside that is nested too deeply is refused like any other that is wrong."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "kvire"


def caught(handler: ast.ExceptHandler) -> set[str]:
    return {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)} if handler.type else set()


def parses_json(node: ast.Try) -> bool:
    calls = (call.func for part in node.body for call in ast.walk(part) if isinstance(call, ast.Call))
    return any(isinstance(call, ast.Attribute) and ast.unparse(call) in {"json.load", "json.loads"} for call in calls)


def careless(source: Path) -> Iterator[str]:
    """Places that answer wrong JSON, and not JSON that is nested too deeply."""
    for path in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Try) and parses_json(node):
                names = set().union(*map(caught, node.handlers))
                if "ValueError" in names and not names & {"RecursionError", "Exception"}:
                    yield f"{path.relative_to(source)}:{node.lineno}"


def test_deep_json_is_answered_wherever_wrong_json_is() -> None:
    assert list(careless(SOURCE)) == []


@pytest.mark.parametrize("handler", ["ValueError", "(OSError, ValueError)"])
def test_a_careless_place_is_noticed(tmp_path: Path, handler: str) -> None:
    (tmp_path / "new.py").write_text(f"try:\n    json.loads(text)\nexcept {handler}:\n    value = None\n", "utf-8")
    assert list(careless(tmp_path)) == ["new.py:1"]
