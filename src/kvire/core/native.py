"""The compiled kernels, if the package was installed with them."""

import logging
from functools import cache
from importlib import import_module
from types import ModuleType

log = logging.getLogger(__name__)


@cache
def native_module() -> ModuleType | None:
    """kvire._native; None where the package was installed without it, or it cannot be loaded."""
    try:
        return import_module("kvire._native")
    except ModuleNotFoundError:
        return None
    except ImportError as error:
        log.warning("the C++ kernels were built but cannot be loaded: %s", error)
        return None
