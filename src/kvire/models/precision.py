"""Whether float32 means float32: torch can be told to multiply float32 matrices with fewer bits."""

from typing import Any

import torch

FULL = frozenset({"none", "ieee"})
BACKENDS = {"cpu": "mkldnn", "cuda": "cuda"}  # which of torch.backends multiplies on a kind of device


def matmul_precision(device_type: str) -> str:
    """How a process multiplies float32 matrices now.

    "" in full; else tf32, bf16, or torch's name of another precision. It covers every way of
    setting it: torch.set_float32_matmul_precision, allow_tf32, fp32_precision, or another program's
    option that ends there (vLLM's VLLM_FLOAT32_MATMUL_PRECISION).
    """
    backend: Any = getattr(torch.backends, BACKENDS.get(device_type, ""), None)
    if backend is None:  # other devices follow the setting for all
        return "" if (found := torch.get_float32_matmul_precision()) == "highest" else found
    found = backend.matmul.fp32_precision
    return "" if found in FULL else str(found)
