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
    """Keys of blocks that lately found no room because their own prompt fills the tier. What follows one of them, in
    any group, is cut off as well: the end of a prompt is of no use without its beginning.
    """

    def __init__(self) -> None:
        self._keys: OrderedDict[BlockKey, None] = OrderedDict()

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._keys

    def add(self, key: BlockKey) -> None:
        """A block found no room."""
        self._keys.pop(key, None)
        self._keys[key] = None
        if len(self._keys) > MOST_CUT_OFF:
            self._keys.popitem(last=False)

    def discard(self, key: BlockKey) -> None:
        """It found some."""
        self._keys.pop(key, None)


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

    A parent was used whenever a child was, of any group: its stamp is raised when it comes up before one. A single
    tenant gets all there is; several get equal shares when they compete.
    """

    def __init__(self) -> None:
        self.index: dict[BlockId, Slot] = {}
        self.children: dict[BlockKey, dict[BlockId, None]] = {}  # by parent, oldest first
        self.tenants: dict[bytes, TenantUse] = {}
        self._groups: set[int] = set()  # that were ever here
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
        slot.stamp, slot.indexed = self._next_stamp(), True
        self.index[slot.record.id] = slot
        self._groups.add(slot.record.id.group)
        self.cut_off.discard(slot.record.id.key)
        self.children.setdefault(slot.record.parent, {})[slot.record.id] = None
        self.queue(slot)

    def touch(self, slots: Sequence[Slot]) -> None:
        """Blocks were used now, together."""
        stamp = self._next_stamp()
        for slot in slots:
            slot.stamp = stamp

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
        if written.parent in self.cut_off:
            self.cut_off.add(written.id.key)
            return []
        self._use(written.parent)
        own = self.tenants.get(tenant_tag)
        own_bytes = own.used_bytes if own else 0
        used = {tag: use.used_bytes for tag, use in self.tenants.items() if use.used_bytes >= own_bytes}
        while missing_bytes > 0 and used:
            largest = max(used, key=lambda tag: (used[tag], tag == tenant_tag))
            if (slot := self._oldest(self.tenants[largest])) is None:
                del used[largest]
                continue
            victims.append(slot)
            if slot.record.id.key == written.parent:
                self.cut_off.add(written.id.key)
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
            self._raise(slot)
            if slot.stamp > stamp:
                self.queue(slot)
            elif slot.readers or any(child.queued or child.pinned or child.readers for child in children):
                aside.append(slot)  # it is being read, or below it there is something that cannot go now
            else:
                found = slot
        self._queue_all(aside)
        return found

    def _use(self, key: BlockKey) -> None:
        """The block is in use now, in all its groups, and with it all before it: `_raise`."""
        stamp = self._next_stamp()
        for group in self._groups:
            if (slot := self.index.get(BlockId(key, group))) is not None:
                slot.stamp = stamp

    def _raise(self, slot: Slot) -> None:
        """The block was used when the newest of those below it was, and all between them: one pass for a whole prompt,
        not one for each of its blocks.
        """
        path, newest = [slot], slot
        while True:
            for block_id in self.children.get(path[-1].record.id.key, ()):
                child = self.index[block_id]
                if child.queued and child.stamp > newest.stamp:
                    newest = child
            if newest is path[-1]:
                break
            path.append(newest)
        for between in path:
            between.stamp = newest.stamp

    def _next_stamp(self) -> int:
        self._stamp += 1
        return self._stamp

    def _queue_all(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self.queue(slot)
