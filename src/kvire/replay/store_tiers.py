"""The store's own tiers without bytes: what eviction.py and disk_room.py would keep. tests/replay drives the real ones
beside these and compares every hit.

As in the store: a request reads each block from the fastest tier that has it, and that copies it into the faster
ones; what it computed is written to every tier, in order; when it ends, all its blocks count as used in every tier.
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from kvire.core.keys import BlockKey
from kvire.core.record import BlockId, BlockRecord
from kvire.replay.trace import Trace
from kvire.store.arena import Extent
from kvire.store.eviction import EvictionOrder, Slot

TENANT = b""
ONE = Extent(0, 1)  # blocks of one trace are of one size: capacity is counted in blocks


class StoreTier(ABC):
    """One tier of `capacity_blocks`."""

    def __init__(self, trace: Trace, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.parents, self.depths = trace.parents, trace.depths

    def begin(self) -> None:  # noqa: B027  (a memory tier need not know)
        """A request begins: what it writes is written in one go."""

    @abstractmethod
    def holds(self, block: int) -> bool:
        """Whether it is here."""

    @abstractmethod
    def write(self, block: int) -> list[int]:
        """Keep it, if there is room or can be made; the blocks that went for it."""

    @abstractmethod
    def touch(self, blocks: Sequence[int]) -> None:
        """They were used together."""


class MemoryTier(StoreTier):
    """Runs the memory tier's own EvictionOrder."""

    def __init__(self, trace: Trace, capacity_blocks: int, records: "Records") -> None:
        super().__init__(trace, capacity_blocks)
        self._records = records
        self._order = EvictionOrder()

    def holds(self, block: int) -> bool:
        """See StoreTier."""
        return self._records.ids[block] in self._order.index

    def write(self, block: int) -> list[int]:
        """See StoreTier."""
        order, record = self._order, self._records.records[block]
        victims: list[Slot] = []
        if len(order.index) >= self.capacity_blocks:
            victims = order.victims(ONE.length, TENANT, record)
            if not victims:
                return []
        for victim in victims:
            order.remove(victim)
        order.add(Slot(record, TENANT, [ONE], ONE.length, created=0.0, ttl_s=None))
        return [self._records.numbers[victim.record.id] for victim in victims]

    def touch(self, blocks: Sequence[int]) -> None:
        """See StoreTier."""
        index, ids = self._order.index, self._records.ids
        self._order.touch([slot for block in blocks if (slot := index.get(ids[block])) is not None])


class DiskTier(StoreTier):
    """The order in which disk_room.py takes blocks: by time of use, then the deeper one. Writing a block is a use of
    all before it, and it takes over its parent's time. Checked against the SQL by tests/replay.
    """

    def __init__(self, trace: Trace, capacity_blocks: int) -> None:
        super().__init__(trace, capacity_blocks)
        self._used: dict[int, int] = {}
        self._heap: list[tuple[int, int, int]] = []  # used, -depth, block
        self._clock = self._began = 0
        self._cut_off: set[int] = set()

    def begin(self) -> None:
        """See StoreTier."""
        self._clock += 1
        self._began = self._clock
        self._cut_off.clear()  # what it forgets in time, a prompt's end here

    def holds(self, block: int) -> bool:
        """See StoreTier."""
        return block in self._used

    def write(self, block: int) -> list[int]:
        """See StoreTier."""
        parent = self.parents[block]
        self._use_above(parent)
        victims: list[int] = []
        if parent in self._cut_off:
            self._cut_off.add(block)
            return []
        if len(self._used) >= self.capacity_blocks:
            if (oldest := self._oldest()) == parent:
                self._queue(parent)
                self._cut_off.add(block)
                return []
            victims.append(oldest)
            del self._used[oldest]
        self._clock += 1
        self._used[block] = min(self._clock, self._used.get(parent, self._clock))
        self._queue(block)
        return victims

    def touch(self, blocks: Sequence[int]) -> None:
        """See StoreTier."""
        self._clock += 1
        for block in blocks:
            if block in self._used:
                self._used[block] = self._clock

    def _use_above(self, block: int) -> None:
        while self._used.get(block, self._began) < self._began:
            self._used[block] = self._began
            block = self.parents[block]

    def _queue(self, block: int) -> None:
        heapq.heappush(self._heap, (self._used[block], -self.depths[block], block))

    def _oldest(self) -> int:
        while True:
            used, _, block = heapq.heappop(self._heap)
            if self._used.get(block) == used:
                return block
            if block in self._used:
                self._queue(block)


@dataclass(slots=True)
class Records:
    """Blocks of a trace as the store knows them."""

    records: list[BlockRecord]
    ids: list[BlockId]
    numbers: dict[BlockId, int]


def records_of(trace: Trace) -> Records:
    """Names made from the blocks' numbers."""
    root = BlockKey(b"root")
    keys = [BlockKey(number.to_bytes(8, "little")) for number in range(len(trace.parents))]
    ids = [BlockId(key, 0) for key in keys]
    records = [
        BlockRecord(block_id, keys[parent] if parent >= 0 else root, root, depth, (), 1, b"")
        for block_id, parent, depth in zip(ids, trace.parents, trace.depths, strict=True)
    ]
    return Records(records, ids, {block_id: number for number, block_id in enumerate(ids)})


class StoreTiers:
    """Tiers, fastest first, as a store runs them."""

    def __init__(self, tiers: Sequence[StoreTier]) -> None:
        self.tiers = tiers

    def look(self, blocks: Sequence[int]) -> list[int]:
        """For each leading block that is somewhere, the number of the fastest tier that has it."""
        found = []
        for block in blocks:
            number = next((n for n, tier in enumerate(self.tiers) if tier.holds(block)), None)
            if number is None:
                break
            found.append(number)
        return found

    def use(self, blocks: Sequence[int], found: Sequence[int]) -> None:
        """A request read what `look` found and computed the rest."""
        for tier in self.tiers:
            tier.begin()
        for block, number in zip(blocks, found, strict=False):
            for faster in range(number):
                self._write(faster, block)
        for block in blocks[len(found) :]:
            for number, tier in enumerate(self.tiers):
                if not tier.holds(block):
                    self._write(number, block)
        for tier in self.tiers:
            tier.touch(blocks)

    def _write(self, number: int, block: int) -> None:
        """What has to go for it is handed to the next tier below, unless one below has it."""
        for victim in self.tiers[number].write(block):
            below = self.tiers[number + 1 :]
            if below and not any(tier.holds(victim) for tier in below):
                self._write(number + 1, victim)
