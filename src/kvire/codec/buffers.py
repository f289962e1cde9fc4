"""Memory for frames and KV, aligned as both are."""

import numpy as np

BytesLike = bytes | bytearray | memoryview

ALIGNMENT_BYTES = 64  # copies between addresses that are aligned alike take a quarter less time: docs/format.md


def aligned_buffer(size_bytes: int) -> memoryview:
    """Writable, uninitialised memory, aligned to ALIGNMENT_BYTES."""
    memory = np.empty(size_bytes + ALIGNMENT_BYTES, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory.data[start : start + size_bytes]
