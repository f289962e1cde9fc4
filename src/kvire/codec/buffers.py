"""Memory for frames and KV, aligned as both are; checksums, and copies with checksums, of many
buffers at once.

With the compiled kernels a whole list takes one call outside the interpreter's lock: between single
blocks, threads would spend more time contending for that lock than working. Without them the
results are the same.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import xxhash

from kvire.core.native import native_module

BytesLike = bytes | bytearray | memoryview

ALIGNMENT_BYTES = 64  # copies between addresses that are aligned alike take a quarter less time: docs/format.md
DIGEST_BYTES = 16
LEAST_HASHED_BYTES, MOST_HEAD_BYTES = 256, 256  # limits of the kernel


def aligned_buffer(size_bytes: int) -> memoryview:
    """Writable, uninitialised memory, aligned to ALIGNMENT_BYTES."""
    memory = np.empty(size_bytes + ALIGNMENT_BYTES, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory.data[start : start + size_bytes]


def checksums(pieces: Sequence[tuple[bytes, BytesLike]]) -> list[bytes]:
    """XXH3-128, canonical, of each (head, data)."""
    native = native_module()
    if native is not None and _fit(pieces):
        return _split(native.checksums(list(pieces)))
    return [checksum(head, data) for head, data in pieces]


def copied_checksums(pieces: Sequence[tuple[bytes, memoryview, memoryview]]) -> list[bytes]:
    """As `checksums`, of each (head, source, target), copying source to target.

    Both have equal length; the hash is that of the copy.
    """
    native = native_module()
    if native is not None and _fit(pieces):
        return _split(native.copied_checksums(list(pieces)))
    for _, source, target in pieces:
        target[:] = source
    return [checksum(head, target) for head, _, target in pieces]


def checksum(head: bytes, data: BytesLike) -> bytes:
    """XXH3-128, canonical, of head and data together: DIGEST_BYTES."""
    digest = xxhash.xxh3_128(head)
    digest.update(data)
    return digest.digest()


def _fit(pieces: Iterable[tuple[bytes, BytesLike] | tuple[bytes, BytesLike, memoryview]]) -> bool:
    return all(len(piece[0]) <= MOST_HEAD_BYTES and len(piece[1]) >= LEAST_HASHED_BYTES for piece in pieces)


def _split(digests: bytes) -> list[bytes]:
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]
