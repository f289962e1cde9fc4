"""Kvire: a KV cache computed once, kept, found again by exact token prefix, and never wrong.

Start with `kvire.LLM` (Python), `kvire serve` (HTTP) or docs/architecture.md (the path of one
request). docs/architecture.md also lists the folders and their allowed imports; import-linter
enforces them.
"""

import os
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvire.llm import LLM, AsyncLLM

    __version__: str

# Read by OpenMP when torch is first imported, so it has to be set here. By default idle threads
# spin at every barrier; one other busy process then costs a scheduler tick (4 ms) per barrier, and
# a token takes five times as long. On a quiet machine it makes no measurable difference to a step
# (docs/adr/0005-torch-thread-pool.md).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

__all__ = ["LLM", "AsyncLLM", "__version__"]


def __getattr__(name: str) -> Any:
    # LLM imports torch (seconds); `import kvire` and the torch-free folders must stay instant.
    if name == "__version__":
        return version("kvire")
    if name in ("LLM", "AsyncLLM"):
        return getattr(import_module("kvire.llm"), name)
    raise AttributeError(f"module 'kvire' has no attribute {name!r}")
