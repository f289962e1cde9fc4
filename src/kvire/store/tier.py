"""The protocol of a tier. Implementable from this file alone; tests/store/test_contract.py checks
it.

A tier keeps frames (codec/frame.py) under BlockIds and never looks into them. All methods may be
called from any thread. Three failures are kept apart: the block is not there (BlockMissing), the
tier cannot say or not in time (TierUnavailable), or, as only the reader of a frame can tell, the
bytes are damaged.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from kvire.core.errors import BlockMissing, FrameDamaged, TierUnavailable
from kvire.core.record import BlockId, BlockRecord
from kvire.core.tier_kind import TierKind

Buffer = memoryview  # one-dimensional, of bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored block, for listing, pinning, checking or clearing. Times in seconds since the
    epoch.

    root, tenant_tag: its namespace and tenant, as known to the tier.
    expires: None for never.
    """

    id: BlockId
    parent: bytes
    root: bytes
    tenant_tag: bytes
    index: int
    frame_bytes: int
    created: float
    used: float
    expires: float | None
    pinned: bool


@dataclass(slots=True)
class TierStats:
    """Space and counters of a tier. Counters only grow.

    used_bytes, limit_bytes: current size, and its limit (None: no limit of ours).
    evictions: removed blocks, by reason: room, expired, forgotten, damaged, quota.
    refused: writes that were not kept, by reason: full, pinned, quota, unavailable.
    unavailable: calls that the tier could not answer.
    """

    used_bytes: int = 0
    limit_bytes: int | None = None
    blocks: int = 0
    reads: int = 0
    read_bytes: int = 0
    writes: int = 0
    written_bytes: int = 0
    unavailable: int = 0
    evictions: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)


ReadOutcome = int | BlockMissing | TierUnavailable | FrameDamaged  # the frame's length, or why there is none


class Tier(Protocol):
    """A place that keeps frames.

    name: unique among the tiers of a store, for metrics.
    local: whether `held` answers within microseconds from an index on this machine; others are
        asked only in the background.
    """

    name: str
    kind: TierKind
    local: bool

    def held(self, ids: Sequence[BlockId], timeout_s: float | None = None) -> list[bool]:
        """Whether each block is here. Changes nothing, not even recency. Raises TierUnavailable."""

    def read(self, block_id: BlockId, buffers: Sequence[Buffer], timeout_s: float | None = None) -> int:
        """Fill `buffers` in order with the block's frame; returns its length. Changes only
        counters.

        Raises BlockMissing, TierUnavailable, or FrameDamaged("length") for a frame longer than the
        buffers. After an error the content of the buffers is undefined.
        """

    def write(self, record: BlockRecord, frame: Buffer, tenant_tag: bytes, *, ttl_s: float | None = None) -> bool:
        """Keep a copy of `frame`, in place of an earlier one of that id; False if not kept
        (counted).

        Readers see the old frame, the new one, or none: never a part. Makes room by evicting the
        least recently used blocks, children before parents, nothing pinned. Raises TierUnavailable.
        """

    def touch(self, ids: Sequence[BlockId]) -> None:
        """The blocks were used, in order of a sequence: no parent is evicted before its child.

        Never raises.
        """

    def delete(self, ids: Sequence[BlockId], reason: str) -> int:
        """Remove blocks; returns how many were present. Raises TierUnavailable."""

    def delete_tenant(self, tenant_tag: bytes) -> int:
        """Remove every block of a tenant; returns how many. Raises TierUnavailable."""

    def clear(self) -> int:
        """Remove every block; returns how many. Raises TierUnavailable."""

    def pin(self, ids: Sequence[BlockId], *, pinned: bool) -> int:
        """Exempt blocks from eviction and expiry, or end that; returns how many are present.

        Raises TierUnavailable.
        """

    def entries(self) -> Iterator[Entry]:
        """Every block, in no order; a listing of a changing tier may miss or repeat some.

        Raises TierUnavailable.
        """

    def stats(self) -> TierStats:
        """Counters so far. Never raises, never waits."""

    def close(self) -> None:
        """Close threads, files and sockets. Idempotent."""


@runtime_checkable
class ReadsRuns(Protocol):
    """A tier that reads several blocks faster together than one after the other."""

    def read_run(self, ids: Sequence[BlockId], buffers: Sequence[Sequence[Buffer]]) -> list[ReadOutcome]:
        """As Tier.read for each block; an error is returned in its place.

        Unlike there, a block that is being rewritten may come with parts of both frames: for
        callers that verify.
        """


@runtime_checkable
class LendsFrames(Protocol):
    """A tier with its frames in this process's memory."""

    def lent(self, ids: Sequence[BlockId]) -> AbstractContextManager[list[Buffer | None]]:
        """Frames in place, valid until the end of the context; None for frames that cannot be
        lent.
        """


@runtime_checkable
class Prefetching(Protocol):
    """A tier that reads faster with advance notice. For loads, not for mere lookups."""

    def locate(self, ids: Sequence[BlockId]) -> list[bool]:
        """As Tier.held, remembering the locations for `prefetch` and for reads."""

    def prefetch(self, ids: Sequence[BlockId]) -> None:
        """These blocks, just found by `locate`, will be read soon and in this order.

        Never raises or waits.
        """
