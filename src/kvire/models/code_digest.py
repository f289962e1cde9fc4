"""Digest of the code that computes a model's KV.

A version number changes without a change of computing code, and stays the same when somebody edits
that code. So the digest follows the functions that the forwards of a model's modules name: methods,
globals, closures, and the selected attention. It covers their bytecode, with constants and
defaults. Comments, docstrings, line numbers and file locations do not count, and no source is
needed. Bytecode differs between versions of Python, and so do the digests.

Torch is not followed: its version identifies it; but a function that replaces one of torch's is
followed. Code compiled to machine code counts by its name and its package's version.
"""

import functools
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from hashlib import sha256
from importlib import metadata
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn
from transformers import cache_utils

from kvire.core.keys import field
from kvire.models.loaded_state import is_plain, ordered

OF_VERSIONS = sys.stdlib_module_names | {"torch", "numpy"}  # packages that are not followed
# Parts of transformers that compute nothing of KV: outputs, losses, loading, sampling, and
# decorators, whose inner functions are followed nevertheless. The result of loading is digested
# instead (loaded_state.py).
WITHOUT_ARITHMETIC = tuple(
    f"transformers.{part}"
    for part in ("generation", "loss", "modeling_outputs", "modeling_utils", "processing_utils", "utils")
)
# Classes whose objects in use are digested or passed in; their other objects do not matter.
HANDED_IN = (
    nn.Module,
    *(
        vars(cache_utils)[name]
        for name in ("Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin")
        if name in vars(cache_utils)  # not in every version
    ),
)
SELECTIONS = ("_attn_implementation", "_experts_implementation")  # of a config: which implementations are in use
MOST_ENTRIES = 64  # of a table of functions that is followed
DOCSTRING_FLAG = 0x4000000  # of code objects since Python 3.13: the first constant is a docstring


class ModelCode:
    """The Python code of a model's forward.

    also: methods, by class, of objects that are handed to the model, such as its cache.
    without: prefixes of modules that are not followed besides WITHOUT_ARITHMETIC.
    """

    def __init__(self, model: nn.Module, *, also: Mapping[type, Iterable[str]], without: tuple[str, ...] = ()) -> None:
        self._model = model
        self._also = also
        self._without = (*WITHOUT_ARITHMETIC, *without)
        self._walk = self._walked()

    def current(self) -> str:
        """64 hexadecimal digits of the current code; takes a millisecond if it is unchanged."""
        if not self._walk.holds(self._model):
            self._walk = self._walked()
        return self._walk.hexdigest

    def _walked(self) -> "_Walk":
        return _Walk(self._model, self._also, self._without)


class _Walk:
    """One breadth-first walk through the code; it can check later whether it would still find the
    same.

    Each piece of code gets a number when it is met first, and counts by this number afterwards: so
    the digest covers which code names which, in an order that is the same in every process.
    """

    def __init__(self, model: nn.Module, also: Mapping[type, Iterable[str]], without: tuple[str, ...]) -> None:
        self._without = without
        self._selected = _selected(model)
        self._classes = [type(module) for module in model.modules()]
        self._met: dict[tuple[int, int], tuple[int, Any]] = {}  # (id of a piece, of its owner) -> number, and the piece
        self._waiting: deque[tuple[Any, type | None]] = deque()
        self._entries: list[tuple[Mapping[str, Any], str, Any]] = []  # a mapping, a name, and its value then
        self._attributes: list[tuple[type, str, Any]] = []
        self._functions: list[tuple[FunctionType, CodeType, Any]] = []
        self._digest = sha256(field("kvire", b"code"))
        self._say("python", str(sys.implementation.cache_tag))
        for kind in dict.fromkeys(self._classes):
            self._say("module", kind.__qualname__)
            for name in ("__call__", "forward"):
                self._attribute(kind, name)
        for module in model.modules():
            for name, value in vars(module).items():
                if isinstance(value, FunctionType | MethodType | functools.partial):
                    self._entry(vars(module), name)
        for kind, names in also.items():
            for name in names:
                self._attribute(kind, name)
        while self._waiting:
            self._read(*self._waiting.popleft())
        self.hexdigest = self._digest.hexdigest()

    def holds(self, model: nn.Module) -> bool:
        """Whether every name that was followed still leads to the same code."""
        return (
            [type(module) for module in model.modules()] == self._classes
            and _selected(model) == self._selected
            and all(where.get(name) is value for where, name, value in self._entries)
            and all(_static(kind, name) is value for kind, name, value in self._attributes)
            and all(f.__code__ is code and f.__defaults__ is defaults for f, code, defaults in self._functions)
        )

    def _say(self, tag: str, text: str) -> None:
        self._digest.update(field(tag, text.encode("utf-8", "surrogatepass")))

    def _see(self, value: Any, owner: type | None) -> None:
        """Count a value: by itself if it is plain, else by a number, and look into it later.

        owner: of a method.
        """
        value = _unwrapped(value)
        if is_plain(value):
            self._say("value", repr(ordered(value)))
        elif isinstance(value, type) and (issubclass(value, HANDED_IN) or not self._is_followed(value.__module__)):
            self._say("class", f"{value.__module__}.{value.__qualname__}")
        elif isinstance(value, FunctionType | type | dict | list | tuple):
            known = (id(value), id(owner))
            if known not in self._met:
                self._met[known] = len(self._met), value
                self._waiting.append((value, owner))
            self._say("met", str(self._met[known][0]))
        elif hasattr(value, "_global_mapping"):  # a registry of transformers: only selected entries matter
            for name in self._selected:
                if value.get(name) is not None:
                    self._entry(value, name)
            self._see(type(value), None)
        else:
            self._see_object(value)

    def _see_object(self, value: Any) -> None:
        """Count a stateful object by its class, and a compiled one also by its package's
        version.
        """
        package = _package(getattr(value, "__module__", None))
        if callable(value) and package not in OF_VERSIONS and not self._is_followed(type(value).__module__):
            self._say("compiled", f"{package} {_version(package)} {getattr(value, '__qualname__', '')}")
        self._see(type(value), None)

    def _read(self, value: Any, owner: type | None) -> None:
        """Look into an object that was met."""
        if isinstance(value, FunctionType):
            self._read_function(value, owner)
        elif isinstance(value, type):
            for name in sorted({name for kind in value.__mro__ for name in vars(kind)}):
                if isinstance(_unwrapped(_static(value, name)), FunctionType):
                    self._attribute(value, name)
        elif isinstance(value, dict):
            for name in list(value)[:MOST_ENTRIES]:
                self._entry(value, name)
        else:
            for each in value:
                self._see(each, None)

    def _read_function(self, function: FunctionType, owner: type | None) -> None:
        for cell in function.__closure__ or ():
            self._see(_content(cell), owner)
        if not self._is_followed(function.__globals__.get("__name__")):
            return
        self._functions.append((function, function.__code__, function.__defaults__))
        self._say("code", repr(_normal(function.__code__)))
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._see(default, None)
        names = sorted(_names(function.__code__))
        for name in names:
            if isinstance(module := function.__globals__.get(name), ModuleType):
                self._read_module(module, names, set())
            elif name in function.__globals__:
                self._entry(function.__globals__, name)
            if owner is not None:
                self._attribute(owner, name)
                if "super" in names:
                    self._inherited(owner, name)

    def _read_module(self, module: ModuleType, names: Iterable[str], seen: set[int]) -> None:
        """The names that a function may take from a module, and from modules in it: all those
        present.
        """
        seen.add(id(module))
        for name in names:
            inner = vars(module).get(name)
            if not isinstance(inner, ModuleType):
                self._entry(vars(module), name)
            elif id(inner) not in seen:
                self._read_module(inner, names, seen)

    def _entry(self, where: Mapping[str, Any], name: str) -> None:
        value = where.get(name)
        self._entries.append((where, name, value))
        if value is not None:
            self._say("name", str(name))
            self._see(value, None)

    def _attribute(self, kind: type, name: str) -> None:
        value = _static(kind, name)
        self._attributes.append((kind, name, value))
        if value is not None:
            self._say("attribute", name)
            self._see(value, kind)

    def _inherited(self, kind: type, name: str) -> None:
        """The object that super() may find under a name."""
        for base in kind.__mro__[1:]:
            if name in vars(base) and isinstance(_unwrapped(vars(base)[name]), FunctionType):
                self._attribute(base, name)

    def _is_followed(self, module: str | None) -> bool:
        return _package(module) not in OF_VERSIONS and not str(module).startswith(self._without)


def _selected(model: nn.Module) -> list[str]:
    """Names of the implementations selected by a model's config."""
    config: Any = getattr(model, "config", None)
    return [str(name) for kind in SELECTIONS if (name := getattr(config, kind, None)) is not None]


def _unwrapped(value: Any) -> Any:
    """The function in a method, property or cache, a partial as a tuple of its parts.

    Anything else unchanged.
    """
    if isinstance(value, staticmethod | classmethod | MethodType):
        return _unwrapped(value.__func__)
    if isinstance(value, property):
        return _unwrapped(value.fget)
    if isinstance(value, functools.cached_property):
        return _unwrapped(value.func)
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    return value.__wrapped__ if isinstance(value, _CACHED) else value


_CACHED = type(functools.cache(_unwrapped))


def _static(kind: type, name: str) -> Any:
    """The raw attribute of `kind` under `name`; None if there is none."""
    for base in kind.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return None


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that nothing was assigned to yet
        return None


def _names(code: CodeType) -> set[str]:
    """Names of globals and attributes that the code, or a function in it, reads."""
    inner = (_names(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*inner)


def _normal(code: CodeType) -> tuple[Any, ...]:
    """The code's operations, without its location and descriptions."""
    constants = list(code.co_consts)
    if constants and isinstance(constants[0], str) and _has_docstring(code):
        constants[0] = None
    return (
        code.co_code,
        (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & ~DOCSTRING_FLAG),
        (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars),
        code.co_exceptiontable,
        [_constant(each) for each in constants],
    )


def _has_docstring(code: CodeType) -> bool:
    """Whether the first constant is a docstring. Until Python 3.12 every function's is one, or
    None.
    """
    if sys.version_info >= (3, 13):
        return bool(code.co_flags & DOCSTRING_FLAG)
    return not code.co_name.startswith("<")


def _constant(value: Any) -> Any:
    """A constant in a form with the same repr in every process."""
    if isinstance(value, CodeType):
        return _normal(value)
    if isinstance(value, frozenset):
        return sorted(map(repr, value))
    return [_constant(each) for each in value] if isinstance(value, tuple) else value


def _package(module: str | None) -> str:
    return str(module).partition(".")[0]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
