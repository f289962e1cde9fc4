"""A lossless codec for KV in floats: byte planes, of which the most significant is compressed.

Signs and exponents of KV repeat, mantissas do not: so only the plane that holds exponents goes
through zstd, and the others are stored unchanged. Savings and costs, measured:
docs/adr/0012-frames-and-seal.md.
"""

import struct
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import ClassVar, Self

import numpy as np

from kvire.codec.buffers import BytesLike
from kvire.core.dtypes import KV_DTYPES
from kvire.core.errors import FrameDamaged, FrameForeign

_HEAD = struct.Struct("<QQ")  # bytes of an element, bytes of the compressed plane
_WIDTHS = (2, 4)  # bytes of the floats that are split into planes

# Below this a tier gains more by fewer bytes than decoding them costs on one core: (1 - size) *
# decoding speed, the least of three dtypes, on KV of SmolLM2 (docs/adr/0012-frames-and-seal.md).
PAYS_BELOW_BYTES_PER_S = 250e6


@dataclass(frozen=True, slots=True)
class Planes:
    """Byte planes of floats.

    element_bytes: of one float, 2 or 4.
    """

    id: ClassVar[int] = 1
    shortens: ClassVar[bool] = True

    element_bytes: int

    @classmethod
    def for_tier(cls, kv_dtype: str, bytes_per_s: float) -> Self | None:
        """For floats in a tier slow enough; see PAYS_BELOW_BYTES_PER_S."""
        dtype = KV_DTYPES.get(kv_dtype)
        if bytes_per_s >= PAYS_BELOW_BYTES_PER_S or dtype is None or not dtype.has_exponents or _zstandard() is None:
            return None
        return cls(dtype.element_bytes)

    def encode(self, kv: memoryview) -> bytes | None:
        """See Codec; None also where zstandard is not installed."""
        return compress(kv, self.element_bytes)

    @staticmethod
    def decode(payload: BytesLike, out: memoryview) -> None:
        """See Codec."""
        decompress(payload, out)


CODEC = Planes


@cache
def _zstandard() -> ModuleType | None:
    """The compressor, an optional dependency: only slow tiers want it."""
    try:
        import zstandard  # noqa: PLC0415
    except ImportError:
        return None
    return zstandard


def compress(kv: memoryview, element_bytes: int) -> bytes | None:
    """Payload that `decompress` turns back into `kv`.

    None if it would be no shorter, or zstandard is not installed.
    """
    zstandard = _zstandard()
    if zstandard is None:
        return None
    lanes, rest = _lanes(kv, element_bytes)
    planes = [(lanes >> lanes.dtype.type(8 * i)).astype(np.uint8) for i in range(element_bytes)]
    top = zstandard.ZstdCompressor(level=1).compress(planes.pop())
    payload = b"".join([_HEAD.pack(element_bytes, len(top)), top, *planes, rest])
    return payload if len(payload) < len(kv) else None


def decompress(payload: BytesLike, out: memoryview) -> None:
    """Fill `out` with the KV. Raises FrameDamaged("codec") if the payload is not exactly that much.

    Raises FrameForeign("codec") where zstandard is not installed. Allocates less than len(out).
    """
    zstandard = _zstandard()
    if zstandard is None:
        raise FrameForeign("codec")
    width, top_bytes = _HEAD.unpack_from(payload) if len(payload) >= _HEAD.size else (0, 0)
    if width not in _WIDTHS or len(payload) != _HEAD.size + top_bytes + len(out) - len(out) // width:
        raise FrameDamaged("codec")
    lanes, rest = _lanes(out, width)
    body = memoryview(payload)[_HEAD.size :]
    lanes[:] = np.frombuffer(_plane(zstandard, body[:top_bytes], lanes.size), np.uint8)
    for i in reversed(range(width - 1)):
        start = top_bytes + i * lanes.size
        np.left_shift(lanes, 8, out=lanes)
        np.bitwise_or(lanes, np.frombuffer(body, np.uint8, lanes.size, start), out=lanes)
    rest[:] = body[len(body) - len(rest) :]


def _lanes(kv: memoryview, width: int) -> tuple[np.ndarray, memoryview]:
    """The elements as unsigned integers, and the bytes at the end that are no whole element."""
    count = len(kv) // width
    return np.frombuffer(kv, f"<u{width}", count), kv[count * width :]


def _plane(zstandard: ModuleType, compressed: memoryview, plane_bytes: int) -> bytes:
    """The plane, if it has that length.

    Its claimed size is checked before anything is allocated for it.
    """
    try:
        if zstandard.frame_content_size(compressed) == plane_bytes:
            return bytes(zstandard.ZstdDecompressor().decompress(compressed, allow_extra_data=False))
    except zstandard.ZstdError:
        pass
    raise FrameDamaged("codec")
