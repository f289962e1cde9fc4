"""All groups of a model as one: a sequence is given blocks in every group, or in none at all."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvire.cache.block_pool import BlockPool, Lease, PoolStats
from kvire.cache.window_pool import WindowPool
from kvire.core.keys import BlockKey
from kvire.core.spec import KVGroup


class GroupedLease:
    """A sequence's blocks in every group; released exactly once."""

    def __init__(self, leases: list[Lease]) -> None:
        self.leases = leases

    @property
    def released(self) -> bool:
        """Whether everything was given back."""
        return self.leases[0].released

    def release(self) -> None:
        """Give everything back. Raises RuntimeError the second time."""
        for lease in self.leases:
            lease.release()


@dataclass(frozen=True, slots=True, eq=False)
class Hit:
    """Remembered part of a prompt.

    full_blocks: leading blocks that `lease` shares.
    partial_tokens: further tokens that can be copied from the blocks `sources`, one per group.
    """

    lease: GroupedLease
    full_blocks: int
    partial_tokens: int = 0
    sources: tuple[int, ...] = ()


class GroupedPool:
    """One pool per group, used in step. All methods belong to one thread; none of them waits.

    num_blocks: of each group. Groups with a window need fewer: only the blocks of the window.
    """

    def __init__(self, groups: Sequence[KVGroup], num_blocks: Sequence[int], block_size: int) -> None:
        self.block_size = block_size
        self.pools = [
            BlockPool(count, block_size) if group.window is None else WindowPool(count, block_size, group.window)
            for group, count in zip(groups, num_blocks, strict=True)
        ]
        # The group that remembers longest comes first: a window group holds no more prefixes than a
        # full one.
        self._by_reach = sorted(self.pools, key=lambda pool: pool.span_blocks is not None)

    @property
    def scarcest(self) -> BlockPool:
        """The pool of the group with the smallest share of free blocks."""
        return min(self.pools, key=lambda pool: pool.num_free / pool.num_blocks)

    @property
    def num_blocks(self) -> int:
        """Blocks of the scarcest group."""
        return self.scarcest.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks of the scarcest group that can be allocated."""
        return self.scarcest.num_free

    @property
    def num_remembered(self) -> int:
        """Free blocks of the scarcest group whose KV can still be hit."""
        return self.scarcest.num_remembered

    @property
    def stats(self) -> PoolStats:
        """Counters summed over the groups."""
        return PoolStats(
            evictions=sum(pool.stats.evictions for pool in self.pools),
            collisions=sum(pool.stats.collisions for pool in self.pools),
            copies_on_write=sum(pool.stats.copies_on_write for pool in self.pools),
        )

    def empty_lease(self) -> GroupedLease:
        """A lease of nothing, to be extended."""
        return GroupedLease([Lease(pool, []) for pool in self.pools])

    def match_length(self, root: BlockKey, keys: Sequence[BlockKey], token_ids: Sequence[int]) -> int:
        """Leading blocks after which a sequence can go on in every group. Changes nothing."""
        count, before = len(keys), -1
        while count != before:  # a shorter match moves the windows
            before = count
            for pool in self._by_reach:
                count = pool.match_length(root, keys[:count], token_ids)
        return count

    def match(
        self, root: BlockKey, keys: Sequence[BlockKey], token_ids: Sequence[int], *, partial_tokens: int = 0
    ) -> Hit:
        """Lease the part of `token_ids`, whose full blocks have `keys`, that every group remembers.

        partial_tokens: beyond full blocks, look for that many more tokens of the next one.
        """
        count = self.match_length(root, keys, token_ids)
        lease = GroupedLease([pool.match(root, keys[:count], token_ids) for pool in self.pools])
        if partial_tokens <= 0:
            return Hit(lease, count)
        at = count * self.block_size
        shared, sources = self._relative(keys[count - 1] if count else root, token_ids[at : at + self.block_size])
        return Hit(lease, count, min(shared, partial_tokens), sources)

    def reach(self, root: BlockKey, keys: Sequence[BlockKey], token_ids: Sequence[int]) -> int:
        """Leading remembered blocks, ignoring windows. Changes nothing."""
        return self._by_reach[0].match_length(root, keys, token_ids)

    def _relative(self, parent: BlockKey, token_ids: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """The most tokens that a block below `parent` shares in every group, and its ids."""
        for shared, block in self.pools[0].relatives(parent, token_ids):
            assert block.key is not None
            same = [pool.find(block.key, like=block) for pool in self.pools]
            blocks = [one for one in same if one is not None]
            if len(blocks) < len(self.pools):
                continue
            for pool, one in zip(self.pools, blocks, strict=True):
                pool.touch(one)
            return shared, tuple(one.id for one in blocks)
        return 0, ()

    @property
    def has_windows(self) -> bool:
        """Whether some group holds only the blocks of a window."""
        return any(pool.span_blocks is not None for pool in self.pools)

    def first_needed(self, group: int, position: int) -> int:
        """Index of the first block of `group` that the token at `position`, or any later one, looks
        at.
        """
        return self.pools[group].first_needed(position)

    def try_extend(
        self,
        lease: GroupedLease,
        num_tokens: int,
        *,
        now: int,
        spare: Sequence[int] | None = None,
        loaded: int | None = None,
    ) -> bool:
        """Let `lease` hold blocks for `num_tokens` tokens, of which `now` are computed next.

        Window groups get blocks for those only, and keep room for a window.

        spare: per group, blocks that must stay free when blocks are allocated.
        loaded: the next token to be computed, if everything before it will be loaded; window groups
            then skip the blocks it does not look at.

        False, and no change, if there are not enough blocks.
        """
        counts, firsts = [], []
        for g, (pool, part) in enumerate(zip(self.pools, lease.leases, strict=True)):
            first = len(part) if loaded is None else max(len(part), self.first_needed(g, loaded))
            count = room = self._blocks(num_tokens) - first
            if pool.span_blocks is not None:
                count = self._blocks(now) - first
                room = max(count, min(room, pool.span_blocks))
            if room > 0 and room + (spare[g] if spare else 0) > pool.num_free:
                return False
            counts.append(max(0, count))
            firsts.append(first)
        for pool, part, count, first in zip(self.pools, lease.leases, counts, firsts, strict=True):
            if first > len(part):
                part.skip_to(first)
            more = pool.try_allocate(count)
            assert more is not None
            part.extend(more)
        return True

    def still_to_come(self, lease: GroupedLease, num_computed: int, num_tokens: int) -> list[int]:
        """Per group, blocks that a sequence of `num_tokens` tokens takes before its first release,
        plus one.
        """
        counts = []
        for pool, part in zip(self.pools, lease.leases, strict=True):
            count = 0
            if pool.span_blocks is not None:
                held = len(part) - pool.first_needed(num_computed)
                count = min(self._blocks(num_tokens) - len(part), pool.span_blocks - held)
            counts.append(max(0, count) + 1)
        return counts

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """A sequence whose blocks have these keys is done (BlockPool.touch_chain)."""
        for pool in self.pools:
            pool.touch_chain(keys[pool.first_needed(len(keys) * self.block_size) :])

    def give_back(self, lease: GroupedLease, num_computed: int) -> None:
        """Release blocks that no token from position `num_computed` on looks at."""
        for pool, part in zip(self.pools, lease.leases, strict=True):
            part.give_back(pool.first_needed(num_computed))

    def publish(
        self, lease: GroupedLease, index: int, key: BlockKey, parent: BlockKey, root: BlockKey, token_ids: Sequence[int]
    ) -> bool:
        """Put block `index` of `lease` into the index of every group that has it.

        Returns whether it can be found in all groups. A window group loaded no further back than
        its reach does not have it. See BlockPool.publish.
        """
        found = True
        for pool, part in zip(self.pools, lease.leases, strict=True):
            if (block := part.blocks[index]) is not None:
                found &= pool.publish(block, key, parent, root, token_ids)
            else:
                assert pool.span_blocks is not None
        return found

    def fork(self, lease: GroupedLease) -> GroupedLease:
        """A second owner of the same blocks."""
        return GroupedLease([pool.fork(part) for pool, part in zip(self.pools, lease.leases, strict=True)])

    def make_writable(self, lease: GroupedLease, index: int) -> list[tuple[int, int, int]] | None:
        """(group, source, target) copies that give `lease` a block of its own; None if no block is
        free.
        """
        copies = []
        if any(
            not pool.num_free and pool.is_shared(part, index)
            for pool, part in zip(self.pools, lease.leases, strict=True)
        ):
            return None
        for g, (pool, part) in enumerate(zip(self.pools, lease.leases, strict=True)):
            if (copy := pool.make_writable(part, index)) is not None:
                copies.append((g, *copy))
        return copies

    def swap(self, lease: GroupedLease, index: int) -> GroupedLease | None:
        """Replace the blocks at `index` by blank ones in every group; returns the old ones as a
        lease.

        None if no blocks are free.
        """
        if not all(pool.num_free for pool in self.pools):
            return None
        olds = [pool.swap(part, index) for pool, part in zip(self.pools, lease.leases, strict=True)]
        return GroupedLease([old for old in olds if old is not None])

    def was_evicted(self, key: BlockKey) -> bool:
        """Whether `key` was evicted recently, in any group."""
        return any(pool.was_evicted(key) for pool in self.pools)

    def closest(self, parent: BlockKey, token_ids: Sequence[int]) -> int:
        """Leading tokens of `token_ids` that the most similar remembered block below `parent`
        shares.
        """
        return next((shared for shared, _ in self.pools[0].relatives(parent, token_ids)), 0)

    def forget(self, key: BlockKey) -> int:
        """Remove a block and its descendants from every group's index; returns how many blocks."""
        return sum(pool.forget(key) for pool in self.pools)

    def clear(self) -> int:
        """Forget every prefix; returns how many blocks."""
        return sum(pool.clear() for pool in self.pools)

    def check(self) -> None:
        """Raise AssertionError if a pool is not in order."""
        for pool in self.pools:
            pool.check()

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
