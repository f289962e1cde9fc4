"""Prose in the source fits on a page: lines of docstrings and comments end at column 100."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "kvire"
LONGEST = 100


def docstring_lines(text: str) -> set[int]:
    """Numbers, from 1, of lines of text that stands by itself: docstrings."""
    alone = [
        node.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    return {line for value in alone for line in range(value.lineno, (value.end_lineno or value.lineno) + 1)}


def long_prose(text: str) -> list[int]:
    """Numbers, from 1, of lines of docstrings and comments beyond the limit; code may be longer."""
    prose = docstring_lines(text)
    return [
        number
        for number, line in enumerate(text.splitlines(), 1)
        if len(line) > LONGEST and (number in prose or line.lstrip().startswith("#"))
    ]


def parts() -> list[Path]:
    """The folders and files directly in the package."""
    return sorted(path for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists())


@pytest.mark.parametrize("part", parts(), ids=lambda path: path.name)
def test_lines_of_prose_end_at_column_100(part: Path) -> None:
    files = sorted(part.rglob("*.py")) if part.is_dir() else [part]
    found = {str(file.relative_to(SOURCE)): long_prose(file.read_text("utf-8")) for file in files}
    assert {file: lines for file, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "text", [f'"""{"a" * 100}"""\n', f'def f():\n    """One.\n\n    {"b" * 100}\n    """\n', f"# {'c' * 100}\n"]
)
def test_a_longer_line_of_prose_is_found(text: str) -> None:
    assert long_prose(text)


def test_code_may_be_longer() -> None:
    assert long_prose(f'text = "{"d" * 100}"  # and a comment behind it\n') == []
