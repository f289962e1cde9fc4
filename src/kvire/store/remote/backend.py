"""The interface of remote tiers to servers: named values (remote/redis.py, remote/objects.py).

A block's value is a stamp and then its frame. The stamp holds the times of writing and expiry, in
milliseconds since the epoch, u64 little endian each; expiry 0 is never. It is needed because some
servers keep no such times.
"""

import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvire.codec.frame import HEADER_BYTES
from kvire.store.remote.deadline import Deadline
from kvire.store.tier import Buffer

BATCH = 256  # names in one request: 128 ids go in one, and a listing's answer stays far below a megabyte
BLOCKS = "kvire/1/"
PINS = "kvire/pin/1/"  # an empty value for each pinned block
_STAMP = struct.Struct("<QQ")
STAMP_BYTES = _STAMP.size
HEAD_BYTES = STAMP_BYTES + HEADER_BYTES  # of a value: the part before its KV

Value = Sequence[bytes | Buffer]  # one after the other


def stamp(ttl_s: float | None) -> bytes:
    """The stamp of a value that is written now."""
    now = time.time()
    return _STAMP.pack(round(now * 1000), 0 if ttl_s is None else round((now + ttl_s) * 1000))


def stamped(value: bytes | Buffer) -> tuple[float, float | None]:
    """Times of writing and expiry of a value, in seconds since the epoch; 0 and never without a
    stamp.
    """
    if len(value) < STAMP_BYTES:
        return 0.0, None
    written_ms, expires_ms = _STAMP.unpack_from(value)
    return written_ms / 1000, expires_ms / 1000 if expires_ms else None


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One value, as known to the server.

    head: its first HEAD_BYTES, or fewer if it is shorter.
    expires: in seconds since the epoch, None for never.
    """

    name: str
    head: bytes
    size_bytes: int
    expires: float | None


class Backend(Protocol):
    """Named values on the server.

    At most BATCH names in one call, from any thread. All methods raise TierUnavailable, by the
    deadline at the latest.
    """

    def exists(self, names: Sequence[str], deadline: Deadline) -> list[bool]:
        """Whether each name has a value; not even recency changes."""

    def get(self, name: str, buffers: Sequence[Buffer], deadline: Deadline) -> int:
        """Fill `buffers` in order; returns the value's length.

        Raises BlockMissing, FrameDamaged("length" or "type").
        """

    def put(self, name: str, value: Value, ttl_s: float | None, deadline: Deadline) -> str | None:
        """Keep the value, in place of an older one, in one step.

        Returns the reason of a refusal ("full" or "refused"), or None.
        """

    def touch(self, names: Sequence[str], ttl_s: float | None, deadline: Deadline) -> None:
        """The values were used, the last one last.

        They live for `ttl_s` from now on, unless they have no expiry.
        """

    def keep(self, names: Sequence[str], ttl_s: float | None, deadline: Deadline) -> None:
        """The values live for `ttl_s` from now on, or have no expiry."""

    def remove(self, names: Sequence[str], deadline: Deadline) -> None:
        """Remove the values of these names."""

    def names(self, prefix: str, timeout_s: float) -> Iterator[list[str]]:
        """All names with that prefix, a batch per `timeout_s` at the latest."""

    def describe(self, names: Sequence[str], deadline: Deadline) -> list[StoredObject]:
        """The existing values among these names, expired ones too as long as they take room."""

    def close(self) -> None:
        """Close threads and sockets."""
