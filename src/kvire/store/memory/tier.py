"""The memory tier: frames in one arena of this process, with a hard limit.

eviction/ chooses the blocks to evict. A block being read keeps its bytes until the read ends, even
if it is removed meanwhile. Beside the arena each block costs about 1 KiB of index.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, runtime_checkable

from kvire.core.errors import BlockMissing, FrameDamaged, TierUnavailable
from kvire.core.keys import BlockKey
from kvire.core.record import BlockId, BlockRecord
from kvire.core.tier_kind import TierKind
from kvire.store.eviction.order import Candidate, EvictionOrder, TenantBlocks
from kvire.store.eviction.policy import EvictionPolicy
from kvire.store.memory.arena import Arena, Extent
from kvire.store.tier import Buffer, Entry, TierStats

SWEEP_S = 1.0  # expired blocks are invisible at once; their memory comes back this much later, with the next write

Fill = Callable[[Sequence[Buffer]], int]  # as Tier.read: fills the buffers with a frame, returns its length


@dataclass(slots=True, eq=False, kw_only=True)
class StoredFrame(Candidate):
    """One stored block and the location of its frame.

    extents: of the arena; empty once released.
    created: seconds since the epoch, for display.
    used_s: time of the last use on the monotonic clock, from which ttl_s counts.
    """

    record: BlockRecord
    extents: list[Extent]
    frame_bytes: int
    created: float
    ttl_s: float | None
    used_s: float

    def is_alive(self, now: float) -> bool:
        """Whether it has not expired."""
        return (expires_s := self.expires_s()) is None or now < expires_s

    def expires_s(self) -> float | None:
        """Time of expiry, on the monotonic clock."""
        return None if self.ttl_s is None or self.pinned else self.used_s + self.ttl_s


@runtime_checkable
class Evicting(Protocol):
    """A tier that reports evicted blocks while the frame can still be read through `Fill`."""

    on_evict: Callable[[BlockRecord, Fill], None] | None


class MemoryTier:
    """A Tier in memory.

    capacity_bytes: hard limit of all frames together.
    clock: seconds that never jump.
    policy: order of eviction, LRU by default.
    on_evict: called, outside all locks, for each evicted block before its bytes are reused.

    Raises StoreError if the system refuses so much memory.
    """

    kind = TierKind.MEMORY
    local = True

    def __init__(
        self, capacity_bytes: int, *, name: str = "memory", clock: Callable[[], float] = time.monotonic,
        policy: EvictionPolicy | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.on_evict: Callable[[BlockRecord, Fill], None] | None = None
        self._clock = clock
        self._arena = Arena(capacity_bytes)
        self._lock = threading.Lock()
        self._order: EvictionOrder[StoredFrame] = EvictionOrder(policy)
        self._contents: dict[bytes, dict[BlockId, None]] = {}
        self._epoch_s = time.time() - clock()  # to show times of the clock as times of the day
        self._sweep_at = clock()
        self._closed = False
        self._stats = TierStats(limit_bytes=self._arena.capacity_bytes)

    def held(self, ids: Sequence[BlockId], timeout_s: float | None = None) -> list[bool]:  # noqa: ARG002 - never waits
        """See Tier."""
        with self._lock:
            return [slot is not None for slot in self._find(ids)]

    def read(self, block_id: BlockId, buffers: Sequence[Buffer], timeout_s: float | None = None) -> int:  # noqa: ARG002
        """See Tier."""
        slots = self._hold([block_id])
        try:
            size_bytes = self._copy_out(self._found(slots[0]), buffers)
        finally:
            self._release(slots)
        self._count(1, size_bytes)
        return size_bytes

    @contextmanager
    def lent(self, ids: Sequence[BlockId]) -> Iterator[list[Buffer | None]]:
        """See LendsFrames. A frame in several pieces is not lent."""
        slots = self._hold(ids)
        try:
            frames = [None if slot is None else self._arena.view(slot.extents, slot.frame_bytes) for slot in slots]
            yield frames
        finally:
            self._release(slots)
        lent = [len(frame) for frame in frames if frame is not None]
        self._count(len(lent), sum(lent))

    def write(self, record: BlockRecord, frame: Buffer, tenant_tag: bytes, *, ttl_s: float | None = None) -> bool:
        """See Tier."""
        if (extents := self._make_room(Arena.rounded(len(frame)), tenant_tag, record)) is None:
            return False
        self._arena.write(extents, frame)  # outside the lock: no other thread knows of them yet
        slot = StoredFrame(
            record.id, record.parent, record.index, record.index * len(record.token_ids), tenant_tag,
            sum(extent.length for extent in extents),
            record=record, extents=extents, frame_bytes=len(frame), created=time.time(), ttl_s=ttl_s,
            used_s=self._clock(),
        )  # fmt: skip
        with self._lock:
            if self._closed:
                self._arena.give_back(extents)
                raise TierUnavailable(f"{self.name} is closed")
            if (old := self._order.index.get(record.id)) is not None:
                slot.pinned = old.pinned
                self._unindex(old)
            self._order.add(slot)
            self._contents.setdefault(record.content, {})[record.id] = None
            self._stats.writes += 1
            self._stats.written_bytes += len(frame)
        return True

    def touch(self, ids: Sequence[BlockId]) -> None:
        """See Tier."""
        with self._lock:
            now = self._clock()
            slots = [slot for slot in self._find(ids) if slot is not None]
            self._order.touch(slots)
            for slot in slots:
                slot.used_s = now

    def delete(self, ids: Sequence[BlockId], reason: str) -> int:
        """See Tier."""
        with self._lock:
            return self._remove([slot for i in ids if (slot := self._order.index.get(i)) is not None], reason)

    def delete_tenant(self, tenant_tag: bytes) -> int:
        """See Tier."""
        with self._lock:
            return self._remove([s for s in self._order.index.values() if s.tenant_tag == tenant_tag], "forgotten")

    def clear(self) -> int:
        """See Tier."""
        with self._lock:
            return self._remove(list(self._order.index.values()), "cleared")

    def pin(self, ids: Sequence[BlockId], *, pinned: bool) -> int:
        """See Tier."""
        with self._lock:
            slots = [slot for slot in self._find(ids) if slot is not None]
            for slot in slots:
                slot.pinned, slot.used_s = pinned, self._clock()
                self._order.queue(slot)
            return len(slots)

    def entries(self) -> Iterator[Entry]:
        """See Tier."""
        with self._lock:
            now = self._clock()
            return iter([_entry(slot, self._epoch_s) for slot in self._order.index.values() if slot.is_alive(now)])

    def stats(self) -> TierStats:
        """See Tier."""
        with self._lock:
            stats = self._stats
            return replace(
                stats, used_bytes=self._arena.capacity_bytes - self._arena.free_bytes, blocks=len(self._order.index),
                evictions=dict(stats.evictions), refused=dict(stats.refused),
            )  # fmt: skip

    def tenants(self) -> dict[bytes, TenantBlocks]:
        """Space used by each tenant, by its tag."""
        with self._lock:
            return {tag: replace(use, heap=[]) for tag, use in self._order.tenants.items()}

    def children(self, parent: BlockKey, group: int, limit: int) -> list[BlockId]:
        """The newest blocks below `parent` (a block's key or a root), at most `limit`."""
        with self._lock:
            ids = [i for i in reversed(self._order.children.get(parent, {})) if i.group == group]
            return [slot.record.id for slot in self._find(ids[:limit]) if slot is not None]

    def roots_of(self, content: bytes) -> list[BlockKey]:
        """Namespaces under which the same tokens are stored."""
        with self._lock:
            slots = self._find(list(self._contents.get(content, {})))
            return list(dict.fromkeys(slot.record.root for slot in slots if slot is not None))

    def peek(self, block_id: BlockId, buffer: Buffer) -> int:
        """Fill `buffer` with the first bytes of the block's frame; returns how many.

        Raises BlockMissing.
        """
        slots = self._hold([block_id])
        try:
            slot = self._found(slots[0])
            count = min(slot.frame_bytes, len(buffer))
            self._arena.read(slot.extents, count, [buffer])
            return count
        finally:
            self._release(slots)

    def close(self) -> None:
        """See Tier. Frames being read stay readable until the read ends."""
        with self._lock:
            self._closed = True
            self._remove(list(self._order.index.values()), "closed")

    def _make_room(self, size_bytes: int, tenant_tag: bytes, record: BlockRecord) -> list[Extent] | None:
        """Extents of `size_bytes`, or None (counted) if not enough can be evicted."""
        while True:
            with self._lock:
                if self._closed:
                    raise TierUnavailable(f"{self.name} is closed")
                self._sweep()
                if (extents := self._arena.take(size_bytes)) is not None:
                    return extents
                victims: list[StoredFrame] = []
                if size_bytes <= self._arena.capacity_bytes:
                    missing_bytes = size_bytes - self._arena.free_bytes
                    victims = self._order.victims(missing_bytes, tenant_tag, record.id.key, record.parent)
                if not victims:
                    too_long = size_bytes > self._arena.capacity_bytes or record.id.key in self._order.cut_off
                    reason = "quota" if self._order.compete else "pinned"
                    _count(self._stats.refused, "full" if too_long else reason)
                    return None
                reason = "quota" if self._order.compete else "room"
                for slot in victims:
                    slot.readers += 1  # keeps the bytes until on_evict is done with them
                    self._order.tenants[slot.tenant_tag].evictions += 1
                self._remove(victims, reason)
            for slot in victims:
                try:
                    if self.on_evict is not None:
                        self.on_evict(slot.record, partial(self._copy_out, slot))
                finally:
                    self._release([slot])

    def _sweep(self) -> None:
        """Remove expired blocks, at most once in SWEEP_S."""
        if (now := self._clock()) >= self._sweep_at:
            self._sweep_at = now + SWEEP_S
            self._remove([slot for slot in self._order.index.values() if not slot.is_alive(now)], "expired")

    def _find(self, ids: Sequence[BlockId]) -> list[StoredFrame | None]:
        now, index = self._clock(), self._order.index
        slots = (index.get(block_id) for block_id in ids)
        return [slot if slot is not None and slot.is_alive(now) else None for slot in slots]

    def _remove(self, slots: Sequence[StoredFrame], reason: str) -> int:
        for slot in slots:
            self._unindex(slot)
        if slots:
            _count(self._stats.evictions, reason, len(slots))
        return len(slots)

    def _unindex(self, slot: StoredFrame) -> None:
        self._order.remove(slot)
        same = self._contents[slot.record.content]
        del same[slot.record.id]
        if not same:
            del self._contents[slot.record.content]
        if not slot.readers:
            self._give_back(slot)

    def _hold(self, ids: Sequence[BlockId]) -> list[StoredFrame | None]:
        """Blocks whose bytes are kept until `_release`; None for missing ones."""
        with self._lock:
            slots = self._find(ids)
            for slot in slots:
                if slot is not None:
                    slot.readers += 1
            return slots

    def _release(self, slots: Sequence[StoredFrame | None]) -> None:
        with self._lock:
            for slot in slots:
                if slot is not None:
                    slot.readers -= 1
                    if not slot.readers and not slot.indexed:
                        self._give_back(slot)

    def _found(self, slot: StoredFrame | None) -> StoredFrame:
        if slot is None:
            raise BlockMissing(f"{self.name} does not hold the block")
        return slot

    def _count(self, reads: int, read_bytes: int) -> None:
        with self._lock:
            self._stats.reads += reads
            self._stats.read_bytes += read_bytes

    def _give_back(self, slot: StoredFrame) -> None:
        extents, slot.extents = slot.extents, []
        self._arena.give_back(extents)

    def _copy_out(self, slot: StoredFrame, buffers: Sequence[Buffer]) -> int:
        if slot.frame_bytes > sum(map(len, buffers)):
            raise FrameDamaged("length")
        self._arena.read(slot.extents, slot.frame_bytes, buffers)
        return slot.frame_bytes


def _count(counters: dict[str, int], reason: str, amount: int = 1) -> None:
    counters[reason] = counters.get(reason, 0) + amount


def _entry(slot: StoredFrame, epoch_s: float) -> Entry:
    record, expires_s = slot.record, slot.expires_s()
    return Entry(
        id=record.id, parent=record.parent, root=record.root, tenant_tag=slot.tenant_tag, index=record.index,
        frame_bytes=slot.frame_bytes, created=slot.created, used=epoch_s + slot.used_s,
        expires=None if expires_s is None else epoch_s + expires_s, pinned=slot.pinned,
    )  # fmt: skip
