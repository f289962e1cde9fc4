"""Which blocks make room: unused longest, children before parents, from whoever takes most. No bytes here."""

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvire.core.keys import BlockKey
from kvire.core.record import BlockId, BlockRecord
from kvire.store.arena import Extent

MOST_CUT_OFF = 1024  # blocks without room that are remembered


class CutOff:
    """Blocks that lately found no room because their own prompt fills the tier. What follows one of them is cut off as
    well: the end of a prompt is of no use without its beginning.
    """

    def __init__(self) -> None:
        self._ids: OrderedDict[BlockId, None] = OrderedDict()

    def __contains__(self, block_id: BlockId) -> bool:
        return block_id in self._ids

    def add(self, block_id: BlockId) -> None:
        """A block found no room."""
        self._ids[block_id] = None
        if len(self._ids) > MOST_CUT_OFF:
            self._ids.popitem(last=False)

    def discard(self, block_id: BlockId) -> None:
        """It found some."""
        self._ids.pop(block_id, None)


def parent_of(record: BlockRecord) -> BlockId:
    """Of the same group."""
    return BlockId(record.parent, record.id.group)


@dataclass(slots=True, eq=False)
class Slot:
    """One stored block. stamp orders uses; the clock only counts for expiry. extents: empty once given back."""

    record: BlockRecord
    tenant_tag: bytes
    extents: list[Extent]
    frame_bytes: int
    created: float  # since the epoch, to be shown
    ttl_s: float | None
    used_s: float = 0.0  # of the monotonic clock
    stamp: int = 0
    pinned: bool = False
    readers: int = 0
    indexed: bool = False
    queued: bool = False  # has an item in the heap of its tenant

    @property
    def taken_bytes(self) -> int:
        """Of the arena."""
        return sum([extent.length for extent in self.extents])

    def is_alive(self, now: float) -> bool:
        """Whether it has not expired."""
        return (expires_s := self.expires_s()) is None or now < expires_s

    def expires_s(self) -> float | None:
        """When it does, on the monotonic clock."""
        return None if self.ttl_s is None or self.pinned else self.used_s + self.ttl_s


@dataclass(slots=True)
class TenantUse:
    """What one tenant takes, and how many of its blocks had to make room."""

    used_bytes: int = 0
    blocks: int = 0
    evictions: int = 0
    heap: list[tuple[int, int, int, Slot]] = field(default_factory=list, repr=False)  # stamp, -index, tie, slot


class EvictionOrder:
    """Slots by tenant in the order in which they would go. Not thread-safe.

    A parent was used whenever a child was: its stamp is raised when one is written, and when it comes up before one. A
    single tenant gets all there is; several get equal shares when they compete.
    """

    def __init__(self) -> None:
        self.index: dict[BlockId, Slot] = {}
        self.children: dict[BlockKey, dict[BlockId, None]] = {}  # by parent, oldest first
        self.tenants: dict[bytes, TenantUse] = {}
        self._stamp = 0
        self._ties = 0
        self.cut_off = CutOff()

    @property
    def compete(self) -> bool:
        """Whether more than one tenant has blocks."""
        return sum(use.blocks > 0 for use in self.tenants.values()) > 1

    def add(self, slot: Slot) -> None:
        """A block came, used now."""
        use = self.tenants.setdefault(slot.tenant_tag, TenantUse())
        use.used_bytes += slot.taken_bytes
        use.blocks += 1
        slot.stamp, slot.indexed = self._stamp_below(parent_of(slot.record)), True
        self.index[slot.record.id] = slot
        self.cut_off.discard(slot.record.id)
        self.children.setdefault(slot.record.parent, {})[slot.record.id] = None
        self.queue(slot)

    def touch(self, slots: Sequence[Slot]) -> None:
        """Blocks were used now, together."""
        stamp = self._next_stamp()
        for slot in slots:
            slot.stamp = stamp
        self._next_stamp()  # what is written below one of them from now on is newer

    def remove(self, slot: Slot) -> None:
        """A block went."""
        del self.index[slot.record.id]
        slot.indexed = False
        siblings = self.children[slot.record.parent]
        del siblings[slot.record.id]
        if not siblings:
            del self.children[slot.record.parent]
        use = self.tenants[slot.tenant_tag]
        use.used_bytes -= slot.taken_bytes
        use.blocks -= 1
        if len(use.heap) > 64 + 2 * use.blocks:
            use.heap = [item for item in use.heap if item[3].indexed]
            heapq.heapify(use.heap)

    def queue(self, slot: Slot) -> None:
        """Let it be evicted some time, if it is not pinned."""
        if slot.indexed and not slot.queued and not slot.pinned:
            slot.queued = True
            self._ties += 1
            item = (slot.stamp, -slot.record.index, self._ties, slot)
            heapq.heappush(self.tenants[slot.tenant_tag].heap, item)

    def victims(self, missing_bytes: int, tenant_tag: bytes, written: BlockRecord) -> list[Slot]:
        """Blocks that together free so much, in the order in which they go; none at all if that is not possible.

        written: the block that needs the room; all before it is in use now. If the turn of its parent comes all the
        same, one prompt fills the tier: nothing goes, neither for it nor for what follows it in that prompt (CutOff).
        They come from the tenants that take at least as much as the one that writes, most first: nobody below the equal
        share loses anything to somebody above it. The caller removes them, or queues them again.
        """
        victims: list[Slot] = []
        parent = parent_of(written)
        if parent in self.cut_off:
            self.cut_off.add(written.id)
            return []
        self._stamp_below(parent)
        own = self.tenants.get(tenant_tag)
        own_bytes = own.used_bytes if own else 0
        used = {tag: use.used_bytes for tag, use in self.tenants.items() if use.used_bytes >= own_bytes}
        while missing_bytes > 0 and used:
            largest = max(used, key=lambda tag: (used[tag], tag == tenant_tag))
            if (slot := self._oldest(self.tenants[largest])) is None:
                del used[largest]
                continue
            victims.append(slot)
            if slot.record.id == parent:
                self.cut_off.add(written.id)
                break
            used[largest] -= slot.taken_bytes
            missing_bytes -= slot.taken_bytes
        if missing_bytes > 0:
            self._queue_all(victims)
            return []
        return victims

    def _oldest(self, use: TenantUse) -> Slot | None:
        """Take the block unused for longest out of the heap. None: all are pinned or being read."""
        aside: list[Slot] = []
        found = None
        while use.heap and found is None:
            stamp, _, _, slot = heapq.heappop(use.heap)
            slot.queued = False
            if not slot.indexed or slot.pinned:
                continue
            below = self.children.get(slot.record.id.key)
            children = [self.index[block_id] for block_id in below] if below else []
            for child in children:
                if child.queued and child.stamp > slot.stamp:
                    slot.stamp = child.stamp
            if slot.stamp > stamp:
                self.queue(slot)
            elif slot.readers or any(child.queued or child.pinned or child.readers for child in children):
                aside.append(slot)  # it is being read, or below it there is something that cannot go now
            else:
                found = slot
        self._queue_all(aside)
        return found

    def _stamp_below(self, parent: BlockId) -> int:
        """For a block that is written below `parent`: a use of all that comes before it. A prompt that is written in
        one go gets one stamp, so that this costs a step per block and not one per block and ancestor.
        """
        above = self.index.get(parent)
        if above is not None and above.stamp == self._stamp:
            return self._stamp
        stamp = self._next_stamp()
        while above is not None and above.stamp < stamp:
            above.stamp = stamp
            above = self.index.get(parent_of(above.record))
        return stamp

    def _next_stamp(self) -> int:
        self._stamp += 1
        return self._stamp

    def _queue_all(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self.queue(slot)
