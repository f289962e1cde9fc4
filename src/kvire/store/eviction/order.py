"""Order of eviction: least rank first, children before parents, from the largest tenant."""

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from kvire.core.keys import BlockKey
from kvire.core.record import BlockId
from kvire.store.eviction.policies.lru import LeastRecentlyUsed
from kvire.store.eviction.policy import EvictionPolicy

MOST_CUT_OFF = 1024  # blocks without room that are remembered


class CutOff:
    """Keys of blocks that recently found no room because their own prompt fills the tier.

    Blocks after one of them, in any group, are cut off as well: the end of a prompt is of no use
    without its beginning.
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
class Candidate:
    """One stored block, as seen by eviction.

    index, start_tokens: its place in its prompt, and the tokens before it.
    taken_bytes: bytes freed by its eviction.
    readers: reads in progress; it is not evicted meanwhile.
    uses, order: number of uses since it was stored; its rank and the time of its last use, which
        decide the order.
    indexed, queued: whether it is in the order, and in the heap of its tenant.
    """

    id: BlockId
    parent: BlockKey
    index: int
    start_tokens: int
    tenant_tag: bytes
    taken_bytes: int
    pinned: bool = False
    readers: int = 0
    uses: int = 0
    order: tuple[float, int] = (0.0, 0)
    indexed: bool = False
    queued: bool = False


@dataclass(slots=True)
class TenantBlocks:
    """Space used by one tenant, and how many of its blocks were evicted.

    heap: order, -index, tie, block.
    """

    used_bytes: int = 0
    blocks: int = 0
    evictions: int = 0
    heap: list[tuple[tuple[float, int], int, int, Any]] = field(default_factory=list, repr=False)


C = TypeVar("C", bound=Candidate)


class EvictionOrder(Generic[C]):
    """Blocks by tenant in order of eviction. Not thread-safe.

    A parent was used whenever a child was, of any group: its order is raised when it comes up
    before one. A single tenant gets all the space; several get equal shares when they compete.
    """

    def __init__(self, policy: EvictionPolicy | None = None) -> None:
        """policy: LRU by default."""
        self._policy = policy or LeastRecentlyUsed()
        self._last_rank = 0.0
        self.index: dict[BlockId, C] = {}
        self.children: dict[BlockKey, dict[BlockId, None]] = {}  # by parent, oldest first
        self.tenants: dict[bytes, TenantBlocks] = {}
        self._groups: set[int] = set()  # that were ever here
        self._stamp = 0
        self._ties = 0
        self.cut_off = CutOff()

    @property
    def compete(self) -> bool:
        """Whether more than one tenant has blocks."""
        return sum(use.blocks > 0 for use in self.tenants.values()) > 1

    def add(self, slot: C) -> None:
        """A block was stored, and used now."""
        use = self.tenants.setdefault(slot.tenant_tag, TenantBlocks())
        use.used_bytes += slot.taken_bytes
        use.blocks += 1
        slot.order, slot.indexed = (self._rank(slot), self._next_stamp()), True
        self.index[slot.id] = slot
        self._groups.add(slot.id.group)
        self.cut_off.discard(slot.id.key)
        self.children.setdefault(slot.parent, {})[slot.id] = None
        self.queue(slot)

    def touch(self, slots: Sequence[C]) -> None:
        """Blocks were used now, together."""
        stamp = self._next_stamp()
        for slot in slots:
            slot.uses += 1
            slot.order = (max(slot.order[0], self._rank(slot)), stamp)

    def remove(self, slot: C) -> None:
        """A block was removed."""
        del self.index[slot.id]
        slot.indexed = False
        siblings = self.children[slot.parent]
        del siblings[slot.id]
        if not siblings:
            del self.children[slot.parent]
        use = self.tenants[slot.tenant_tag]
        use.used_bytes -= slot.taken_bytes
        use.blocks -= 1
        if len(use.heap) > 64 + 2 * use.blocks:
            use.heap = [item for item in use.heap if item[3].indexed]
            heapq.heapify(use.heap)

    def queue(self, slot: C) -> None:
        """Make a block a candidate for eviction, unless it is pinned."""
        if slot.indexed and not slot.queued and not slot.pinned:
            slot.queued = True
            self._ties += 1
            item = (slot.order, -slot.index, self._ties, slot)
            heapq.heappush(self.tenants[slot.tenant_tag].heap, item)

    def victims(self, missing_bytes: int, tenant_tag: bytes, written: BlockKey, parent: BlockKey) -> list[C]:
        """Blocks to evict, in order, that together free enough bytes; none at all if that is not
        possible.

        written, parent: the block that needs the room, and the one before it, which is in use now
            together with all blocks before it.

        If there are no other victims, one prompt fills the tier: nothing is evicted, neither for
        the block nor for later ones in that prompt (CutOff). Victims come from the tenants that use
        at least as much as the writer, largest first: no tenant below the equal share loses
        anything to one above it. The caller removes the victims, or queues them again.
        """
        victims: list[C] = []
        if parent in self.cut_off:
            self.cut_off.add(written)
            return []
        own_prompt = self._hold(parent)
        own = self.tenants.get(tenant_tag)
        own_bytes = own.used_bytes if own else 0
        used = {tag: use.used_bytes for tag, use in self.tenants.items() if use.used_bytes >= own_bytes}
        while missing_bytes > 0 and used:
            largest = max(used, key=lambda tag: (used[tag], tag == tenant_tag))
            if (slot := self._first(self.tenants[largest])) is None:
                del used[largest]
                continue
            victims.append(slot)
            used[largest] -= slot.taken_bytes
            missing_bytes -= slot.taken_bytes
        for slot in own_prompt:
            slot.readers -= 1
        if missing_bytes > 0:
            self._queue_all(victims)
            if any(slot.queued and not slot.readers for slot in own_prompt):
                self.cut_off.add(written)
            return []
        self._last_rank = max(self._last_rank, *(slot.order[0] for slot in victims))
        return victims

    def _first(self, use: TenantBlocks) -> C | None:
        """Pop the next block from the heap. None: all are pinned or being read."""
        aside: dict[C, None] = {}
        found = None
        while use.heap and found is None:
            order, _, _, slot = heapq.heappop(use.heap)
            slot.queued = False
            if not slot.indexed or slot.pinned:
                continue
            below = self.children.get(slot.id.key)
            children = [self.index[block_id] for block_id in below] if below else []
            self._raise(slot)
            if slot.order > order:
                self.queue(slot)
            elif slot.readers or any(c.queued or c.pinned or c.readers or c in aside for c in children):
                aside[slot] = None  # it is being read, or below it there is something that cannot go now
            else:
                found = slot
        self._queue_all(list(aside))
        return found

    def _hold(self, key: BlockKey) -> list[C]:
        """Mark the block as in use, in all its groups, together with all before it: `_raise`.

        None of them is evicted until the caller takes their reader back.
        """
        held = []
        stamp = self._next_stamp()
        for group in self._groups:
            if (slot := self.index.get(BlockId(key, group))) is not None:
                slot.order = (slot.order[0], stamp)
                slot.readers += 1
                held.append(slot)
        return held

    def _raise(self, slot: C) -> None:
        """Set the block's last use to that of its newest descendant, and of all blocks between
        them.

        One pass for a whole prompt, not one for each of its blocks.
        """
        path, newest = [slot], slot
        while True:
            for block_id in self.children.get(path[-1].id.key, ()):
                child = self.index[block_id]
                if child.queued and child.order > newest.order:
                    newest = child
            if newest is path[-1]:
                break
            path.append(newest)
        for between in path:
            between.order = newest.order

    def _rank(self, slot: C) -> float:
        return self._policy.rank(slot.uses, slot.start_tokens, self._last_rank)

    def _next_stamp(self) -> int:
        self._stamp += 1
        return self._stamp

    def _queue_all(self, slots: Sequence[C]) -> None:
        for slot in slots:
            self.queue(slot)
