"""All groups of a model as one: a sequence holds the same number of blocks in each, or none at all."""

from collections.abc import Sequence

from kvire.cache.block_pool import BlockPool, Lease, PoolStats
from kvire.core.keys import BlockKey


class GroupedLease:
    """A sequence's blocks in every group; released exactly once."""

    def __init__(self, leases: list[Lease]) -> None:
        assert len({len(lease) for lease in leases}) == 1
        self.leases = leases

    def __len__(self) -> int:
        return len(self.leases[0])

    def extend(self, other: "GroupedLease") -> None:
        """Take over the blocks of `other`."""
        for mine, theirs in zip(self.leases, other.leases, strict=True):
            mine.extend(theirs)

    def release(self) -> None:
        """Give everything back. Raises RuntimeError the second time."""
        for lease in self.leases:
            lease.release()


class GroupedPool:
    """One BlockPool per group, used in step. Same contracts as BlockPool, all groups or none."""

    def __init__(self, num_groups: int, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.pools = [BlockPool(num_blocks, block_size) for _ in range(num_groups)]

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated in every group."""
        return min(pool.num_free for pool in self.pools)

    @property
    def num_remembered(self) -> int:
        """Free blocks whose KV can still be hit, in the group that has fewest."""
        return min(pool.num_remembered for pool in self.pools)

    @property
    def stats(self) -> PoolStats:
        """Counters summed over the groups."""
        return PoolStats(
            evictions=sum(pool.stats.evictions for pool in self.pools),
            collisions=sum(pool.stats.collisions for pool in self.pools),
            copies_on_write=sum(pool.stats.copies_on_write for pool in self.pools),
        )

    def match_length(self, root: BlockKey, keys: Sequence[BlockKey], token_ids: Sequence[int]) -> int:
        """Leading blocks that every group remembers. Changes nothing."""
        return min(pool.match_length(root, keys, token_ids) for pool in self.pools)

    def match(self, root: BlockKey, keys: Sequence[BlockKey], token_ids: Sequence[int]) -> GroupedLease:
        """Lease the leading blocks that every group remembers (perhaps none)."""
        keys = keys[: self.match_length(root, keys, token_ids)]
        return GroupedLease([pool.match(root, keys, token_ids) for pool in self.pools])

    def try_allocate(self, count: int) -> GroupedLease | None:
        """`count` blocks in each group, or None and no change."""
        if count > self.num_free:
            return None
        leases = [lease for pool in self.pools if (lease := pool.try_allocate(count)) is not None]
        assert len(leases) == len(self.pools)
        return GroupedLease(leases)

    def publish(
        self, lease: GroupedLease, index: int, key: BlockKey, parent: BlockKey, root: BlockKey, token_ids: Sequence[int]
    ) -> None:
        """Put block `index` of `lease` into every group's index."""
        for pool, part in zip(self.pools, lease.leases, strict=True):
            pool.publish(part.blocks[index], key, parent, root, token_ids)

    def fork(self, lease: GroupedLease) -> GroupedLease:
        """A second owner of the same blocks."""
        return GroupedLease([pool.fork(part) for pool, part in zip(self.pools, lease.leases, strict=True)])

    def make_writable(self, lease: GroupedLease, index: int) -> list[tuple[int, int, int]] | None:
        """(group, source, target) copies that give `lease` a block of its own; None if no block is free."""
        copies = []
        if not self.num_free and any(part.blocks[index].ref_count > 1 for part in lease.leases):
            return None
        for g, (pool, part) in enumerate(zip(self.pools, lease.leases, strict=True)):
            if (copy := pool.make_writable(part, index)) is not None:
                copies.append((g, *copy))
        return copies

    def was_evicted(self, key: BlockKey) -> bool:
        """Whether `key` had to make room, in any group, not long ago."""
        return any(pool.was_evicted(key) for pool in self.pools)

    def closest(self, parent: BlockKey, token_ids: Sequence[int]) -> int:
        """Leading tokens of `token_ids` that the most similar remembered block below `parent` shares."""
        return self.pools[0].closest(parent, token_ids)

    def forget(self, key: BlockKey) -> int:
        """Take a block and all below it out of every group's index; how many blocks that were."""
        return sum(pool.forget(key) for pool in self.pools)

    def clear(self) -> int:
        """Forget every prefix; how many blocks that were."""
        return sum(pool.clear() for pool in self.pools)

    def check(self) -> None:
        """Raise AssertionError if a pool is not in order."""
        for pool in self.pools:
            pool.check()
