"""The store's own tiers without bytes: every tier runs the real tiers' eviction.

As in the store: a request reads each block from the fastest tier that has it, and that copies it
into the faster ones; computed blocks are written to every tier, in order; when it ends, all its
blocks count as used in every tier. tests/replay drives the real tiers beside these and compares
every hit.
"""

from collections.abc import Sequence

from kvire.core.keys import BlockKey
from kvire.core.record import BlockId
from kvire.replay.trace import Trace
from kvire.store.eviction.order import Candidate, EvictionOrder
from kvire.store.eviction.policy import EvictionPolicy

TENANT = b""
ROOT = BlockKey(b"root")


class StoreTier:
    """One tier. Blocks of a trace are of one size: capacity is counted in blocks."""

    def __init__(self, trace: Trace, capacity_blocks: int, policy: EvictionPolicy | None = None) -> None:
        """Over one tier of `capacity_blocks`.

        policy: LRU by default.
        """
        self.capacity_blocks = capacity_blocks
        self._trace = trace
        self._order: EvictionOrder[Candidate] = EvictionOrder(policy)

    def holds(self, block: int) -> bool:
        """Whether it is here."""
        return _id(block) in self._order.index

    def write(self, block: int) -> list[int]:
        """Keep it if there is room or can be made; the blocks evicted for it."""
        block_id, above, depth = _id(block), self._trace.parents[block], self._trace.depths[block]
        parent = _key(above) if above >= 0 else ROOT
        victims: list[Candidate] = []
        if len(self._order.index) >= self.capacity_blocks:
            victims = self._order.victims(1, TENANT, block_id.key, parent)
            if not victims:
                return []
        for victim in victims:
            self._order.remove(victim)
        start_tokens = depth * self._trace.block_tokens
        self._order.add(Candidate(block_id, parent, depth, start_tokens, TENANT, taken_bytes=1))
        return [int.from_bytes(victim.id.key, "little") for victim in victims]

    def touch(self, blocks: Sequence[int]) -> None:
        """They were used together."""
        index = self._order.index
        self._order.touch([found for block in blocks if (found := index.get(_id(block))) is not None])


class StoreTiers:
    """Tiers, fastest first, as a store runs them."""

    def __init__(self, tiers: Sequence[StoreTier]) -> None:
        self.tiers = tiers

    def look(self, blocks: Sequence[int]) -> list[int]:
        """For each leading block in any tier, the number of the fastest tier that has it."""
        found = []
        for block in blocks:
            number = next((n for n, tier in enumerate(self.tiers) if tier.holds(block)), None)
            if number is None:
                break
            found.append(number)
        return found

    def use(self, blocks: Sequence[int], found: Sequence[int]) -> None:
        """A request read what `look` found and computed the rest."""
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
        """Evicted blocks are handed to the next tier below, unless a lower tier has them."""
        for victim in self.tiers[number].write(block):
            below = self.tiers[number + 1 :]
            if below and not any(tier.holds(victim) for tier in below):
                self._write(number + 1, victim)


def _key(block: int) -> BlockKey:
    """A name made from the block's number in its trace."""
    return BlockKey(block.to_bytes(8, "little"))


def _id(block: int) -> BlockId:
    return BlockId(_key(block), 0)
