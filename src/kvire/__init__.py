"""Kvire: a KV cache that is computed once, kept, found again by exact token prefix, and never wrong.

Start with `kvire.LLM` (Python), `kvire serve` (HTTP) or docs/architecture.md (the path of one request).
The folders and who may import whom are listed in docs/architecture.md; import-linter enforces them.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvire.llm import LLM, AsyncLLM

    __version__: str

__all__ = ["LLM", "AsyncLLM", "__version__"]


def __getattr__(name: str) -> Any:
    # LLM imports torch (seconds); `import kvire` and the torch-free folders must stay instant.
    if name == "__version__":
        return version("kvire")
    if name in ("LLM", "AsyncLLM"):
        return getattr(import_module("kvire.llm"), name)
    raise AttributeError(f"module 'kvire' has no attribute {name!r}")
