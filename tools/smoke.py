"""Does every module of Kvire import with nothing but its runtime dependencies? `make smoke`.

Also where more is installed: modules of other packages are not found then.
"""

import re
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pkgutil import walk_packages
from types import ModuleType
from typing import ClassVar

# What is there for something else may need it: module -> where it may be missing.
OPTIONAL = {"vllm": "kvire.connectors.", "sglang": "kvire.connectors.", "obstore": "kvire.store."}
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def main() -> None:
    kept = runtime_distributions()
    owners = packages_distributions()
    Hiding.hidden = {module for module, of in owners.items() if not {canonical(name) for name in of} & kept}
    sys.meta_path = [Hiding if finder is PathFinder else finder for finder in sys.meta_path]
    imported, wrong = 0, []
    import kvire  # noqa: PLC0415 - after other packages are hidden

    for module in walk_packages(kvire.__path__, "kvire."):
        try:
            import_module(module.name)
            imported += 1
        except ModuleNotFoundError as error:
            where = OPTIONAL.get((error.name or "").partition(".")[0])
            if where is None or not module.name.startswith(where):
                wrong.append(f"{module.name}: {error}")
    print("\n".join([f"{imported} modules import with {len(kept)} packages", *wrong]))
    sys.exit(1 if wrong else 0)


class Hiding(PathFinder):
    """PathFinder, which does not find some modules that are there."""

    hidden: ClassVar[set[str]] = set()

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See MetaPathFinder."""
        return None if fullname.partition(".")[0] in cls.hidden else super().find_spec(fullname, path, target)


def runtime_distributions() -> set[str]:
    """Kvire, and what it needs without extras, and what that needs."""
    found, unseen = set(), ["kvire"]
    while unseen:
        name = unseen.pop()
        if name in found:
            continue
        try:
            needed = requires(name) or []
        except PackageNotFoundError:  # for another system
            continue
        found.add(name)
        unseen += [canonical(match[0]) for line in needed if "extra ==" not in line and (match := _NAME.match(line))]
    return found


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
