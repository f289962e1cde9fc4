"""The protocol of a codec, and the known codecs: one per file of the folder codecs.

A new one is a file there with a class called CODEC, and a line for its id in docs/format.md.
"""

from functools import cache
from typing import ClassVar, Protocol, Self

from kvire.codec.buffers import BytesLike
from kvire.core.discovery import parts

FOLDER = "kvire.codec.codecs"
MAX_ID = 255  # a byte of the header


class Codec(Protocol):
    """How KV becomes a frame's payload, and KV again.

    Instances are frozen: two are equal if they write the same.

    id: in the header of every frame; never given to another codec.
    shortens: a payload is shorter than its KV; if not, it is exactly as long.
    """

    id: ClassVar[int]
    shortens: ClassVar[bool]

    @classmethod
    def for_tier(cls, kv_dtype: str, bytes_per_s: float) -> Self | None:
        """The codec set up for KV of this dtype and a tier of this bandwidth; None if it does not
        pay.
        """

    def encode(self, kv: memoryview) -> BytesLike | None:
        """The payload; None where it would not be shorter: the frame is raw then."""

    @staticmethod
    def decode(payload: BytesLike, out: memoryview) -> None:
        """Fill `out` with exactly the KV that was encoded; allocates less than len(out).

        Raises FrameDamaged("codec") for a payload that is no encoding of len(out) bytes,
        FrameForeign("codec") if a package that it needs is not installed.
        """


class Raw:
    """KV as it is."""

    id: ClassVar[int] = 0
    shortens: ClassVar[bool] = False

    @classmethod
    def for_tier(cls, kv_dtype: str, bytes_per_s: float) -> Self | None:  # noqa: ARG003 - it saves nothing anywhere
        """None: raw is the fallback."""
        return None

    def encode(self, kv: memoryview) -> BytesLike | None:
        """`kv` itself."""
        return kv

    @staticmethod
    def decode(payload: BytesLike, out: memoryview) -> None:
        """A copy."""
        out[:] = payload


RAW: Codec = Raw()


@cache
def codecs() -> dict[int, type[Codec]]:
    """All codecs by id. Two with one id are a bug of ours."""
    found: list[type[Codec]] = [Raw, *parts(FOLDER, "CODEC")]
    by_id = {codec.id: codec for codec in found}
    assert len(by_id) == len(found) and all(0 <= known <= MAX_ID for known in by_id), (
        "a codec's id is a byte of its own"
    )
    return by_id


def codec_for(kv_dtype: str, bytes_per_s: float) -> Codec:
    """The codec with the shortest time to read KV of this dtype from a tier of this bandwidth."""
    paying = (codec.for_tier(kv_dtype, bytes_per_s) for codec in codecs().values())
    return next((codec for codec in paying if codec is not None), RAW)
