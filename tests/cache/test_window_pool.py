"""Groups that look back over a window: blocks come and go one by one, and hits are trailing windows."""

import random

import pytest

from kvire.cache.block_pool import BlockPool
from kvire.cache.grouped import GroupedPool
from kvire.cache.window_pool import WindowPool
from kvire.core.keys import BlockKey, block_keys
from kvire.core.spec import KVGroup, LayerKind

ROOT = BlockKey(b"r" * 32)
B = 4
FULL = KVGroup(LayerKind.FULL, (0,), 1, 8, 8)


def sliding(window: int) -> KVGroup:
    return KVGroup(LayerKind.SLIDING, (1,), 1, 8, 8, window=window)


def fill(pool: BlockPool, tokens: list[int]) -> list[BlockKey]:
    keys = block_keys(ROOT, tokens, B)
    with pool.try_allocate(len(keys)) as lease:
        for i, key in enumerate(keys):
            pool.publish(lease.blocks[i], key, keys[i - 1] if i else ROOT, ROOT, tokens[i * B : (i + 1) * B])
    return keys


@pytest.mark.parametrize("window", [1, 2, B - 1, B, B + 1, B + 2, 3 * B, 3 * B + 1])
def test_first_needed_and_span_agree_with_a_count_by_hand(window: int) -> None:
    pool = WindowPool(4, B, window)
    spans = set()
    for position in range(60):
        seen = range(max(0, position - window + 1), position + 1)
        assert pool.first_needed(position) == seen[0] // B
        spans.add(seen[-1] // B - seen[0] // B + 1)
    assert pool.span_blocks == max(spans)


@pytest.mark.parametrize("window", [1, 3, B, B + 1, B + 2, 2 * B + 1, 2 * B + 3, 100])
def test_a_match_is_the_longest_prefix_whose_window_is_there(window: int) -> None:
    """Against a search through all lengths, for random sets of blocks that are there."""
    rng = random.Random(window)
    tokens = list(range(40))
    for _ in range(200):
        pool = WindowPool(12, B, window)
        keys = fill(pool, tokens)
        there = [rng.random() < 0.6 for _ in keys]
        for key, keep in zip(keys, there, strict=True):
            if not keep:
                pool._unindex(key)
        pool.check()
        expected = max(n for n in range(11) if all(there[pool.first_needed(n * B) : n]))
        assert pool.match_length(ROOT, keys, tokens) == expected
        lease = pool.match(ROOT, keys, tokens)
        first = pool.first_needed(expected * B)
        assert [block is None for block in lease.blocks] == [i < first for i in range(expected)]
        lease.release()


def test_other_tokens_under_the_same_key_are_a_counted_miss() -> None:
    pool = WindowPool(4, B, B)
    tokens = list(range(2 * B))
    keys = fill(pool, tokens)
    assert pool.match_length(ROOT, keys, tokens) == 2
    assert pool.match_length(ROOT, keys, [*tokens[:-1], 99]) == 1
    assert pool.stats.collisions == 1


def test_eviction_takes_single_blocks_and_says_so() -> None:
    pool = WindowPool(3, B, B)
    keys = fill(pool, list(range(3 * B)))
    with pool.try_allocate(1):
        assert sum(pool.contains(key) for key in keys) == 2
        assert pool.was_evicted(keys[2]), "released last block first, so it was unused longest"
    pool.check()


def test_blocks_behind_the_window_are_given_back_and_can_be_hit() -> None:
    grouped = GroupedPool([FULL, sliding(B + 1)], [8, 8], B)
    tokens = list(range(6 * B))
    keys = block_keys(ROOT, tokens, B)
    lease = grouped.empty_lease()
    for i in range(6):
        assert grouped.try_extend(lease, 6 * B, now=(i + 1) * B)
        assert grouped.publish(lease, i, keys[i], keys[i - 1] if i else ROOT, ROOT, tokens[i * B : (i + 1) * B])
        grouped.give_back(lease, (i + 1) * B)
        # The next position looks at itself and B tokens before it.
        assert [block is None for block in lease.leases[1].blocks] == [True] * i + [False]
    assert grouped.pools[1].num_free == 7
    for n in range(7):
        hit = grouped.match(ROOT, keys[:n], tokens)
        assert hit.full_blocks == n
        hit.lease.release()
    lease.release()
    grouped.check()
    assert grouped.num_free == 8


def test_a_hit_is_as_long_as_every_group_allows() -> None:
    grouped = GroupedPool([FULL, sliding(2 * B)], [8, 8], B)
    tokens = list(range(6 * B))
    keys, _ = [fill(pool, tokens) for pool in grouped.pools]
    grouped.pools[1]._unindex(keys[3])
    assert grouped.match_length(ROOT, keys, tokens) == 6, "block 3 lies behind the window of position 24"
    assert grouped.match_length(ROOT, keys[:5], tokens) == 3, "position 20 looks at block 3"
    grouped.pools[0].forget(keys[1])
    assert grouped.match_length(ROOT, keys, tokens) == 1, "a full group has no holes"
    assert grouped.reach(ROOT, keys, tokens) == 1


def test_a_partial_hit_needs_its_source_in_every_group() -> None:
    grouped = GroupedPool([FULL, sliding(2 * B)], [8, 8], B)
    tokens = list(range(2 * B))
    keys, _ = [fill(pool, tokens) for pool in grouped.pools]
    wanted = [*tokens[: B + 2], 99, 98]
    hit = grouped.match(ROOT, keys[:1], wanted, partial_tokens=3)
    assert (hit.full_blocks, hit.partial_tokens) == (1, 2)
    assert hit.sources == tuple(pool._index[keys[1]].id for pool in grouped.pools)
    hit.lease.release()
    assert grouped.match(ROOT, keys[:1], wanted, partial_tokens=1).partial_tokens == 1
    grouped.pools[1]._unindex(keys[1])
    assert grouped.match(ROOT, keys[:1], wanted, partial_tokens=3).sources == ()


def test_extending_is_all_or_nothing_and_keeps_room_for_a_window() -> None:
    grouped = GroupedPool([FULL, sliding(3 * B)], [8, 4], B)
    lease = grouped.empty_lease()
    assert not grouped.try_extend(lease, 9 * B, now=B)
    assert [len(part) for part in lease.leases] == [0, 0]
    other = grouped.empty_lease()
    assert grouped.try_extend(other, B, now=B)
    assert not grouped.try_extend(lease, 5 * B, now=0), "a window of four blocks would not fit any more"
    assert not grouped.try_extend(lease, 3 * B, now=0, spare=[1, 1])
    assert grouped.try_extend(lease, 3 * B, now=0)
    assert [len(part) for part in lease.leases] == [3, 0]
    for one in (lease, other):
        one.release()
    assert [pool.num_free for pool in grouped.pools] == [8, 4]
