"""The store behind SGLang's HiCache: a storage backend that SGLang loads by name (docs/sglang.md).

Read first: storage.py, which answers SGLang's calls. pages.py names pages, judges and moves them;
facts.py identifies the server; prefill.py measures its speed; options.py reads
--hicache-storage-backend-extra-config. Only storage.py imports SGLang, and facts.py when it is
asked.
"""

from importlib import import_module
from typing import Any

__all__ = ["KvireStorage"]


def __getattr__(name: str) -> Any:
    # SGLang is optional: the rest of Kvire is used and tested without it.
    if name in __all__:
        return getattr(import_module("kvire.connectors.sglang.storage"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
