"""Parts discovered by their folder: adding one is adding a file."""

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any


def parts(package: ModuleType | str, name: str) -> list[Any]:
    """The object called `name` of each module in a package, in the modules' order.

    Modules without one are left out.
    """
    package = import_module(package) if isinstance(package, str) else package
    modules = sorted(found.name for found in iter_modules(package.__path__))
    loaded = [import_module(f"{package.__name__}.{module}") for module in modules]
    return [getattr(module, name) for module in loaded if hasattr(module, name)]
