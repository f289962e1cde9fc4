"""The allocator and prefix index, scenario by scenario."""

import pytest

from kvire.cache.block_pool import Block, BlockPool, Lease
from kvire.core.keys import BlockKey, block_key, block_keys

ROOT = BlockKey(b"r" * 32)
B = 4


def ids(text: str) -> list[int]:
    return [ord(c) for c in text]


def store(pool: BlockPool, text: str) -> tuple[Lease, list[BlockKey]]:
    """Lease and publish every full block of `text`, as a sequence would that shares nothing."""
    tokens = ids(text)
    keys = block_keys(ROOT, tokens, B)
    lease = pool.try_allocate(-(-len(tokens) // B))
    assert lease is not None
    for i, key in enumerate(keys):
        pool.publish(lease.blocks[i], key, keys[i - 1] if i else ROOT, ROOT, tokens[i * B : (i + 1) * B])
    return lease, keys


def match(pool: BlockPool, text: str) -> Lease:
    return pool.match(ROOT, block_keys(ROOT, ids(text), B), ids(text))


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(3, B)
    assert pool.try_allocate(4) is None
    assert pool.num_free == 3
    lease = pool.try_allocate(3)
    assert lease is not None and len(set(lease.block_ids)) == 3
    assert pool.try_allocate(1) is None
    lease.release()
    assert pool.num_free == 3
    pool.check()


def test_a_second_release_raises() -> None:
    pool = BlockPool(2, B)
    with pool.try_allocate(1) as lease:
        pass
    with pytest.raises(RuntimeError, match="released before"):
        lease.release()


def test_a_released_prefix_is_remembered_and_matched() -> None:
    pool = BlockPool(8, B)
    lease, keys = store(pool, "aaaabbbbccccdd")
    stored = lease.block_ids
    lease.release()
    assert pool.num_free == 8 and pool.num_remembered == 3
    hit = match(pool, "aaaabbbbXXXX")
    assert hit.block_ids == stored[:2]
    assert pool.match_length(ROOT, keys, ids("aaaabbbbcccc")) == 3
    pool.check()


def test_two_owners_of_one_block() -> None:
    pool = BlockPool(4, B)
    first, _ = store(pool, "aaaa")
    second = match(pool, "aaaa")
    assert second.block_ids == first.block_ids
    first.release()
    assert pool.num_free == 3
    second.release()
    assert pool.num_free == 4
    pool.check()


def test_leaves_are_evicted_before_their_parents() -> None:
    pool = BlockPool(4, B)
    store(pool, "aaaabbbbccccdddd")[0].release()
    for left in (3, 2, 1, 0):
        lease = pool.try_allocate(4 - left)
        assert pool.match_length(ROOT, block_keys(ROOT, ids("aaaabbbbccccdddd"), B), ids("aaaabbbbccccdddd")) == left
        lease.release()
        pool.check()


def test_the_prefix_unused_for_longest_goes_first() -> None:
    pool = BlockPool(4, B)
    store(pool, "aaaabbbb")[0].release()
    store(pool, "ccccdddd")[0].release()
    match(pool, "aaaabbbb").release()
    pool.try_allocate(2).release()
    assert len(match(pool, "aaaabbbb")) == 2
    assert len(match(pool, "ccccdddd")) == 0


def test_a_parent_older_than_its_child_is_kept_for_it() -> None:
    """A second sequence computed the parent's tokens once more; its child hangs below the first's block."""
    pool = BlockPool(6, B)
    store(pool, "aaaa")[0].release()
    twin, _ = store(pool, "aaaabbbb")
    twin.release()
    blank = pool.try_allocate(4)
    assert blank is not None
    with pool.try_allocate(1):
        assert len(match(pool, "aaaabbbb")) == 1, "the leaf went, its parent stayed"
    pool.check()


def test_a_leased_descendant_is_forgotten_with_its_parent_but_kept_by_its_owner() -> None:
    pool = BlockPool(3, B)
    store(pool, "aaaa")[0].release()
    twin, _ = store(pool, "aaaabbbb")
    with pool.try_allocate(1):
        assert len(match(pool, "aaaabbbb")) == 0
        assert len(twin) == 2
        pool.check()
    twin.release()
    pool.check()


@pytest.mark.parametrize("hole", range(10))
def test_a_hit_ends_at_the_first_hole(hole: int) -> None:
    """S28: after block k of ten is forgotten, exactly k blocks are a hit."""
    pool = BlockPool(20, B)
    text = "".join(c * B for c in "abcdefghij")
    lease, keys = store(pool, text)
    lease.release()
    pool.forget(keys[hole])
    assert len(match(pool, text)) == hole
    pool.check()


def test_colliding_keys_are_a_miss_and_counted() -> None:
    """S12: whatever the hash says, the real tokens and the parent decide."""
    pool = BlockPool(4, B)
    key = BlockKey(b"k" * 32)
    lease = pool.try_allocate(1)
    pool.publish(lease.blocks[0], key, ROOT, ROOT, ids("aaaa"))
    assert pool.match_length(ROOT, [key], ids("bbbb")) == 0
    assert pool.match_length(BlockKey(b"x" * 32), [key], ids("aaaa")) == 0
    assert pool.stats.collisions == 2
    assert pool.match_length(ROOT, [key], ids("aaaa")) == 1


def test_a_fork_copies_before_it_writes() -> None:
    pool = BlockPool(4, B)
    lease, _ = store(pool, "aaaabb")
    fork = pool.fork(lease)
    assert fork.block_ids == lease.block_ids
    source, target = pool.make_writable(fork, 1)
    assert source == lease.block_ids[1] and target == fork.block_ids[1] != source
    assert pool.make_writable(fork, 1) is None, "it owns the block now"
    assert pool.make_writable(lease, 1) is None, "so does the other"
    assert fork.block_ids[0] == lease.block_ids[0]
    lease.release()
    fork.release()
    assert pool.num_free == 4
    pool.check()


def test_copy_on_write_without_a_free_block_changes_nothing() -> None:
    pool = BlockPool(1, B)
    lease = pool.try_allocate(1)
    fork = pool.fork(lease)
    with pytest.raises(MemoryError):
        pool.make_writable(fork, 0)
    assert fork.block_ids == lease.block_ids
    pool.check()


def test_a_published_block_is_never_written_in_place() -> None:
    pool = BlockPool(2, B)
    lease, _ = store(pool, "aaaa")
    copy = pool.make_writable(lease, 0)
    assert copy is not None
    assert len(match(pool, "aaaa")) == 1
    pool.check()


def test_evicted_keys_are_remembered_as_such() -> None:
    pool = BlockPool(2, B)
    lease, keys = store(pool, "aaaabbbb")
    lease.release()
    assert not pool.was_evicted(keys[0])
    pool.try_allocate(2).release()
    assert pool.was_evicted(keys[0]) and pool.was_evicted(keys[1])


def test_relatives_share_tokens_below_a_parent() -> None:
    pool = BlockPool(8, B)
    _, keys = store(pool, "aaaabbbb")
    store(pool, "aaaabXXX")

    def shared(parent: BlockKey, text: str) -> list[tuple[int, str]]:
        return [(count, "".join(map(chr, block.token_ids))) for count, block in pool.relatives(parent, ids(text))]

    assert shared(ROOT, "aaXX") == [(2, "aaaa")]
    assert shared(keys[0], "bbbX") == [(3, "bbbb"), (1, "bXXX")]
    assert shared(keys[0], "bXXY") == [(3, "bXXX"), (1, "bbbb")]
    assert shared(ROOT, "zzzz") == []


def remember_tail(pool: BlockPool, text: str, parent: BlockKey = ROOT) -> Block:
    with pool.try_allocate(1) as lease:
        block = lease.blocks[0]
        pool.publish(block, block_key(parent, ids(text)), parent, ROOT, ids(text))
    pool.check()
    return block


def test_tails_are_found_by_their_tokens_and_never_matched_as_full_blocks() -> None:
    pool = BlockPool(8, B)
    tail = remember_tail(pool, "ab")
    assert pool.relatives(ROOT, ids("abcd")) == [(2, tail)]
    assert len(match(pool, "abcd")) == 0


def test_a_tail_gives_way_to_what_continues_it() -> None:
    pool = BlockPool(8, B)
    tail = remember_tail(pool, "ab")
    longer = remember_tail(pool, "abc")
    assert tail.key is None
    assert pool.relatives(ROOT, ids("abxx")) == [(2, longer)]
    remember_tail(pool, "ab")
    assert pool.num_remembered == 1, "the longer one holds it already"
    store(pool, "abcd")[0].release()
    assert longer.key is None and pool.num_remembered == 1
    other = remember_tail(pool, "abX")
    assert other.key is not None and pool.num_remembered == 2


def test_nothing_is_published_after_a_collision() -> None:
    """A key that stands for other tokens: what follows would be found as their continuation."""
    pool = BlockPool(8, B)
    _, keys = store(pool, "aaaa")
    with pool.try_allocate(1) as lease:
        assert not pool.publish(lease.blocks[0], keys[0], ROOT, ROOT, ids("zzzz"))
    assert pool.stats.collisions == 1
    with pool.try_allocate(1) as lease:
        assert pool.publish(lease.blocks[0], keys[0], ROOT, ROOT, ids("aaaa")), "the same tokens can be found"


def test_clear_forgets_everything_but_takes_nothing_from_owners() -> None:
    pool = BlockPool(8, B)
    lease, _ = store(pool, "aaaabbbb")
    store(pool, "ccccdddd")[0].release()
    assert pool.clear() == 4
    assert len(match(pool, "aaaabbbb")) == len(match(pool, "ccccdddd")) == 0
    assert pool.num_free == 6
    lease.release()
    pool.check()


def test_a_chain_of_thousands_of_blocks_is_forgotten_at_once() -> None:
    pool = BlockPool(5000, 1)
    tokens = list(range(5000))
    keys = block_keys(ROOT, tokens, 1)
    lease = pool.try_allocate(5000)
    for i, key in enumerate(keys):
        pool.publish(lease.blocks[i], key, keys[i - 1] if i else ROOT, ROOT, tokens[i : i + 1])
    lease.release()
    assert pool.forget(keys[0]) == 5000
    pool.check()
