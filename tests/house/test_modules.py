"""Over all modules of the source: a public class has its name for itself, and imports run in no circle."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"


def modules_of(source: Path) -> dict[str, ast.Module]:
    """By dotted name; a package's __init__ is the package."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text("utf-8"), str(path))
    return found


def class_names(module: ast.Module) -> Iterator[str]:
    """Public classes and the types that are assigned names like theirs, at a module's top level."""
    for statement in module.body:
        if isinstance(statement, ast.ClassDef):
            names = [statement.name]
        elif isinstance(statement, ast.Assign):
            names = [target.id for target in statement.targets if isinstance(target, ast.Name)]
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            names = [statement.target.id]
        else:
            continue
        yield from (name for name in names if name[0].isupper() and not name.isupper())


def named_twice(source: Path) -> dict[str, list[str]]:
    by_name = defaultdict(list)
    for module, tree in modules_of(source).items():
        for name in class_names(tree):
            by_name[name].append(module)
    return {name: modules for name, modules in by_name.items() if len(modules) > 1}


def imports_of(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """All that run at some time, in functions too; those for the type checker do not."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        else:
            yield from imports_of(node)


def import_graph(modules: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Which modules each one names. `from kvire.store import tier` names the module tier, not the package."""
    graph: dict[str, set[str]] = {}
    for module, tree in modules.items():
        named = set()
        for node in imports_of(tree):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            else:
                whole = {f"{node.module}.{alias.name}" for alias in node.names}
                named |= {name if name in modules else str(node.module) for name in whole}
        graph[module] = named & modules.keys() - {module}
    return graph


def circle(source: Path) -> list[str] | None:
    """The modules of one circle of imports, in order; None without any."""
    try:
        TopologicalSorter(import_graph(modules_of(source))).prepare()
    except CycleError as error:
        return list(error.args[1])
    return None


def test_no_two_public_classes_have_the_same_name() -> None:
    assert named_twice(SOURCE) == {}


def test_imports_run_in_no_circle() -> None:
    assert circle(SOURCE) is None


@pytest.fixture
def small(tmp_path: Path) -> Path:
    (tmp_path / "kvire").mkdir()
    (tmp_path / "kvire" / "__init__.py").touch()
    (tmp_path / "kvire" / "first.py").write_text("from kvire import second\nclass Plan: ...\nLIMIT = 1\n", "utf-8")
    (tmp_path / "kvire" / "second.py").write_text("class Tier: ...\nLIMIT = 2\n_Part = int\n", "utf-8")
    return tmp_path


def test_a_second_class_of_a_name_is_noticed(small: Path) -> None:
    assert named_twice(small) == {}
    second = small / "kvire" / "second.py"
    second.write_text("Plan = dict[str, int]\n", "utf-8")
    assert named_twice(small) == {"Plan": ["kvire.first", "kvire.second"]}


@pytest.mark.parametrize(
    "line", ["import kvire.first", "from kvire.first import Plan", "def f(): from kvire import first"]
)
def test_a_circle_is_noticed(small: Path, line: str) -> None:
    assert circle(small) is None
    second = small / "kvire" / "second.py"
    second.write_text(f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {line}\n", "utf-8")
    assert circle(small) is None
    second.write_text(line, "utf-8")
    assert set(circle(small) or ()) == {"kvire.first", "kvire.second"}
