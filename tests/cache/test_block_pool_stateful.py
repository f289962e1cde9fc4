"""S29: random programs against a reference model of 80 lines; check() after each of 10^5 operations."""

import os
import random
from collections import Counter

import pytest

from kvire.cache.block_pool import BlockPool, Lease
from kvire.cache.window_pool import WindowPool
from kvire.core.keys import BlockKey, block_key, block_keys

ROOT = BlockKey(b"r" * 32)
B = 3
NUM_BLOCKS = 64
OPERATIONS = int(os.environ.get("KVIRE_POOL_OPERATIONS", "100000"))
CHECK_ALL = 10**5  # longer runs look at the whole pool every tenth operation


class Holder:
    """A sequence as the scheduler would hold it: tokens, lease, how many blocks it published."""

    def __init__(self, tokens: list[int], lease: Lease) -> None:
        self.tokens, self.lease, self.published = tokens, lease, 0
        self.detached = False


class Reference:
    """Who holds which block, counted without the pool's own counters."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.holders: list[Holder] = []
        self.contents: dict[int, tuple[int, ...]] = {}  # block -> every token up to its end, when computed

    def verify(self) -> None:
        held = Counter(block.id for holder in self.holders for block in holder.lease.blocks if block)
        for block in self.pool._blocks:
            assert block.ref_count == held.get(block.id, 0)
        assert self.pool.num_free == NUM_BLOCKS - len(held)

    def start(self, rng: random.Random) -> None:
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 24))]
        keys = block_keys(ROOT, tokens, B)
        lease = self.pool.match(ROOT, keys[: (len(tokens) - 1) // B], tokens)
        for i, block in enumerate(lease.blocks):
            if block is not None:
                assert self.contents[block.id] == tuple(tokens[: (i + 1) * B]), "a hit holds exactly these tokens"
        at = len(lease) * B
        for shared, block in self.pool.relatives(keys[len(lease) - 1] if len(lease) else ROOT, tokens[at : at + B]):
            assert self.contents[block.id][: at + shared] == tuple(tokens[: at + shared]), "and so does a source"
        more = self.pool.try_allocate(-(-len(tokens) // B) - len(lease))
        if more is None:
            lease.release()
            return
        holder = Holder(tokens, lease)
        holder.published = len(lease)
        lease.extend(more)
        self.holders.append(holder)

    def compute(self, holder: Holder) -> None:
        """Fill and publish the next block, if it is full."""
        i = holder.published
        if (i + 1) * B > len(holder.tokens):
            return
        copy = self.pool.make_writable(holder.lease, i) if self.pool.num_free else None
        if copy is None and holder.lease.blocks[i].ref_count > 1:
            return  # shared, and no block to copy it to: the scheduler would preempt
        keys = block_keys(ROOT, holder.tokens, B)
        self.contents[holder.lease.block_ids[i]] = tuple(holder.tokens[: (i + 1) * B])
        self.publish(holder, keys[i], holder.tokens[i * B : (i + 1) * B])
        holder.published += 1
        if isinstance(self.pool, WindowPool):
            holder.lease.give_back(self.pool.first_needed(holder.published * B))

    def publish(self, holder: Holder, key: BlockKey, tokens: list[int]) -> None:
        i = holder.published
        parent = block_keys(ROOT, holder.tokens, B)[i - 1] if i else ROOT
        if not holder.detached:
            holder.detached = not self.pool.publish(holder.lease.blocks[i], key, parent, ROOT, tokens)

    def grow(self, holder: Holder, rng: random.Random) -> None:
        if len(holder.tokens) % B == 0:
            more = self.pool.try_allocate(1)
            if more is None:
                return
            holder.lease.extend(more)
        holder.tokens.append(rng.randrange(2))

    def fork(self, holder: Holder) -> None:
        twin = Holder(list(holder.tokens), self.pool.fork(holder.lease))
        twin.published, twin.detached = holder.published, holder.detached
        self.holders.append(twin)

    def finish(self, holder: Holder) -> None:
        """Remember the tail, if all before it is published and the block is the holder's own."""
        i = holder.published
        tail = holder.tokens[i * B :]
        if 0 < len(tail) < B and holder.lease.blocks[i].ref_count == 1:
            self.contents[holder.lease.block_ids[i]] = tuple(holder.tokens)
            parent = block_keys(ROOT, holder.tokens, B)[i - 1] if i else ROOT
            self.publish(holder, block_key(parent, tail), tail)
        holder.lease.release()
        self.holders.remove(holder)


@pytest.mark.parametrize(
    "pool", [BlockPool(NUM_BLOCKS, B), WindowPool(NUM_BLOCKS, B, 2 * B + 1)], ids=["full", "window"]
)
def test_random_programs(pool: BlockPool) -> None:
    rng = random.Random(20261129)
    reference = Reference(pool)
    done: Counter[str] = Counter()
    for step in range(OPERATIONS):
        action = rng.choices(["start", "compute", "grow", "fork", "finish", "forget"], [20, 45, 12, 4, 18, 1])[0]
        if action == "start" or not reference.holders:
            reference.start(rng)
        elif action == "forget":
            keys = sorted(reference.pool._index)
            if keys:
                reference.pool.forget(rng.choice(keys))
        else:
            holder = rng.choice(reference.holders)
            if action == "compute":
                reference.compute(holder)
            elif action == "grow":
                reference.grow(holder, rng)
            elif action == "fork":
                reference.fork(holder)
            else:
                reference.finish(holder)
        done[action] += 1
        if OPERATIONS <= CHECK_ALL or step % 10 == 0:
            reference.pool.check()
            reference.verify()
    stats = reference.pool.stats
    assert min(done.values()) > 0 and stats.evictions > 0 and stats.copies_on_write > 0
    assert stats.collisions == 0
    for holder in list(reference.holders):
        reference.finish(holder)
    reference.pool.check()
    assert reference.pool.num_free == NUM_BLOCKS
