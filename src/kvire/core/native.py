"""The compiled kernels, if the package was installed with them."""

import logging
from functools import cache
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from types import ModuleType

log = logging.getLogger(__name__)


@cache
def native_module() -> ModuleType | None:
    """kvire._native; None if it was not installed or cannot be loaded."""
    try:
        return import_module("kvire._native")
    except ModuleNotFoundError:
        return None
    except ImportError as error:
        log.warning("the C++ kernels were built but cannot be loaded: %s", error)
        return None


@cache
def kernels_digest() -> str:
    """Hex SHA-256 of the library behind kvire._native: sources, compiler and options.

    Empty without kernels.
    """
    native = native_module()
    return "" if native is None else sha256(Path(str(native.__file__)).read_bytes()).hexdigest()
