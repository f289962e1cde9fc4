"""Commands and modules that are imported when they are used: `--help` must not wait for torch.

The only place for lazy imports.

A group knows the modules that declare its commands; help pages take their first lines from the
source text.
"""

import ast
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup


class Declared(NamedTuple):
    """A command's place: a function, or a typer.Typer of commands.

    about: text in lists of commands; None: the beginning of its docstring.
    """

    module: str
    name: str
    about: str | None = None


class _Deferred:
    """A module that is imported at the first use of one of its names."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._name), name)


def deferred(module: str) -> Any:
    """A stand-in for a module that takes seconds to import."""
    return _Deferred(module)


class _Commands(dict[str, Any]):
    """Commands by name, each loaded when asked for."""

    def __init__(self, declared: Mapping[str, Declared]) -> None:
        super().__init__()
        self._declared = declared

    def __missing__(self, name: str) -> Any:
        self[name] = loaded(name, self._declared[name])
        return self[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self._declared else default

    def __contains__(self, name: object) -> bool:
        return name in self._declared

    def __iter__(self) -> Iterator[str]:
        return iter(self._declared)

    def __len__(self) -> int:
        return len(self._declared)

    def keys(self) -> Any:
        return self._declared.keys()

    def values(self) -> Any:
        return [self[name] for name in self._declared]

    def items(self) -> Any:
        return [(name, self[name]) for name in self._declared]


def group(declared: Mapping[str, Declared]) -> type[TyperGroup]:
    """The class of a group with these commands: typer.Typer(cls=group(...))."""

    class LazyGroup(TyperGroup):
        """Loads a command when it is run, and none to list them."""

        def __init__(self, **options: Any) -> None:
            super().__init__(**options | {"commands": {}})
            self.commands = _Commands(declared)
            self._listing = False

        def list_commands(self, ctx: Any) -> list[str]:
            """In the order in which they are declared."""
            del ctx
            return list(declared)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            """A stand-in with the help text alone while commands are listed."""
            if self._listing:
                return TyperCommand(cmd_name, help=about(declared[cmd_name]))
            return super().get_command(ctx, cmd_name)

        def format_help(self, ctx: Any, formatter: Any) -> None:
            """Without importing any command."""
            self._listing = True
            try:
                super().format_help(ctx, formatter)
            finally:
                self._listing = False

    return LazyGroup


def loaded(name: str, declared: Declared) -> Any:
    """Import a command. Its module may have an EPILOG."""
    module = import_module(declared.module)
    found = getattr(module, declared.name)
    if not isinstance(found, typer.Typer):
        single = typer.Typer(rich_markup_mode="rich", add_completion=False)
        single.command(name, epilog=getattr(module, "EPILOG", None))(found)
        found = single
    command: Any = typer.main.get_command(found)
    command.name = name
    return command


def about(declared: Declared) -> str:
    """A command's text in a list: the beginning of its docstring, read without importing it."""
    if declared.about is not None:
        return declared.about
    spec = find_spec(declared.module)
    source = spec.origin if spec is not None else None
    if source is None or not source.endswith(".py"):
        return str(getattr(import_module(declared.module), declared.name).__doc__ or "")
    for node in ast.parse(Path(source).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == declared.name:
            return ast.get_docstring(node) or ""
    raise AssertionError(f"{declared.module} declares no command {declared.name}")
