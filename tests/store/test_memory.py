"""The memory tier beyond the contract: its limit, who makes room, shares of tenants, expiry, bytes that never alias."""

import itertools
import random
import threading
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store.blocks import chain, frame_of, records_of, tenant_key

from kvire.core.errors import BlockMissing, StoreError
from kvire.core.record import BlockRecord
from kvire.store.memory.arena import UNIT_BYTES, Arena
from kvire.store.memory.tier import MemoryTier

FRAME_UNITS = 2  # of a frame with the default KV
ROOM = FRAME_UNITS * UNIT_BYTES


def put(tier: MemoryTier, record: BlockRecord, **options) -> bool:
    return tier.write(record, frame_of(record), tenant_key(record.tenant).tag, **options)


def held(tier: MemoryTier, records: list[BlockRecord]) -> list[bool]:
    return tier.held([record.id for record in records])


# The arena


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40_000)), max_size=80))
def test_an_arena_gives_every_byte_once_and_all_of_them_whatever_the_sizes(steps):
    arena = Arena(20 * UNIT_BYTES)
    taken: list[tuple[list, bytes]] = []
    for number, (take, size) in enumerate(steps):
        if take:
            extents = arena.take(size)
            assert (extents is not None) == (arena.rounded(size) <= 20 * UNIT_BYTES - _bytes(taken)), "only room counts"
            if extents is not None:
                content = bytes([number % 251]) * size
                arena.write(extents, memoryview(content))
                taken.append((extents, content))
        elif taken:
            arena.give_back(taken.pop(size % len(taken))[0])
        assert arena.free_bytes == 20 * UNIT_BYTES - _bytes(taken)
        for extents, content in taken:
            out = bytearray(len(content))
            arena.read(extents, len(content), [memoryview(out)])
            assert out == content
    for extents, _ in taken:
        arena.give_back(extents)
    assert arena.take(20 * UNIT_BYTES) == [(0, 20 * UNIT_BYTES)], "neighbours were merged"


def _bytes(taken) -> int:
    return sum(extent.length for extents, _ in taken for extent in extents)


def test_memory_that_the_system_does_not_have_is_refused_in_words():
    with pytest.raises(StoreError, match="cannot reserve"):
        MemoryTier(1 << 60)


# Limit and eviction


def test_the_limit_holds_and_old_blocks_rotate_out():
    """S55: a full tier goes on storing."""
    tier = MemoryTier(8 * ROOM)
    records = [record for seed in range(40) for record in chain(1, seed)]
    for record in records:
        assert put(tier, record)
        assert tier.stats().used_bytes <= 8 * ROOM
    assert held(tier, records) == [False] * 32 + [True] * 8
    assert tier.stats().evictions == {"room": 32}


def test_when_all_is_pinned_storing_is_skipped_and_counted():
    """S55, and lookups and reads go on."""
    tier = MemoryTier(4 * ROOM)
    pinned = chain(4)
    for record in pinned:
        put(tier, record)
    tier.pin([record.id for record in pinned], pinned=True)
    late = chain(2, seed=1)
    assert not put(tier, late[0])
    assert tier.stats().refused == {"pinned": 1}
    assert held(tier, pinned) == [True] * 4
    tier.pin([pinned[3].id], pinned=False)
    assert put(tier, late[0])
    assert held(tier, [*pinned, *late]) == [True, True, True, False, True, False]


def test_a_frame_larger_than_the_tier_is_refused_and_costs_nobody_anything():
    tier = MemoryTier(4 * ROOM)
    small = chain(2)
    for record in small:
        put(tier, record)
    assert not put(tier, chain(1, seed=3, kv_bytes=5 * ROOM)[0])
    assert tier.stats().refused == {"full": 1}
    assert held(tier, small) == [True, True]


def test_children_go_before_their_parents_though_parents_are_older():
    tier = MemoryTier(6 * ROOM)
    first = chain(4)
    for record in first:
        put(tier, record)
    second = chain(6, seed=1)
    for expected in ([1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]):
        put(tier, second.pop(0))
        assert held(tier, first) == [bool(x) for x in expected]


def test_a_parent_is_as_recent_as_its_youngest_child():
    tier = MemoryTier(5 * ROOM)
    trunk = chain(1)[0]
    put(tier, trunk)
    other = chain(2, seed=1)
    for record in other:
        put(tier, record)
    branch = records_of([*trunk.token_ids, *range(16)])[1]
    put(tier, branch)  # a child of the oldest block, newer than all others
    for record in chain(3, seed=2):
        put(tier, record)
    assert held(tier, [trunk, branch]) == [True, True]
    assert held(tier, other) == [False, False]


def test_touched_blocks_stay_and_looked_up_ones_do_not():
    """S36: lookups pin nothing and change no order."""
    tier = MemoryTier(4 * ROOM)
    records = [chain(1, seed)[0] for seed in range(4)]
    for record in records:
        put(tier, record)
    tier.touch([records[0].id])
    for _ in range(100):
        held(tier, records[1:])
    new = [chain(1, seed)[0] for seed in range(4, 7)]
    assert all(put(tier, record) for record in new)
    assert held(tier, records) == [True, False, False, False]


def test_a_large_frame_takes_several_small_ones_places():
    tier = MemoryTier(6 * ROOM)
    small = [chain(1, seed)[0] for seed in range(6)]
    for record in small:
        put(tier, record)
    tier.delete([small[0].id, small[2].id, small[4].id], "damaged")  # room in three places, none long enough
    large = chain(1, seed=9, kv_bytes=3 * ROOM - 400)[0]
    assert put(tier, large)
    assert held(tier, small) == [False, True, False, True, False, True]
    out = bytearray(4 * ROOM)
    length = tier.read(large.id, [memoryview(out)])
    assert bytes(out[:length]) == bytes(frame_of(large))


# Tenants


def test_a_flood_of_one_tenant_leaves_the_others_their_share():
    """S57: a quiet tenant within its equal share loses nothing; the flood's own blocks make room, counted."""
    tier = MemoryTier(40 * ROOM)
    quiet = [record for seed in range(10) for record in chain(2, seed, tenant="quiet")]
    for record in quiet:
        put(tier, record)
    for seed in range(1_000, 1_200):
        for record in chain(2, seed, tenant="loud"):
            put(tier, record)
    assert all(held(tier, quiet))
    uses = tier.tenants()
    assert uses[tenant_key("quiet").tag].evictions == 0
    assert uses[tenant_key("loud").tag].evictions == 400 - 20
    assert tier.stats().evictions == {"quota": 380}


def test_a_tenant_alone_may_have_everything_and_gives_it_back_to_others():
    tier = MemoryTier(20 * ROOM)
    loud = [chain(1, seed, tenant="loud")[0] for seed in range(20)]
    for record in loud:
        put(tier, record)
    assert all(held(tier, loud))
    quiet = [chain(1, seed, tenant="quiet")[0] for seed in range(30)]
    for record in quiet:
        assert put(tier, record)
    assert sum(held(tier, loud)) == 10 and sum(held(tier, quiet)) == 10


def test_a_tenant_that_pinned_its_share_takes_nothing_from_others():
    tier = MemoryTier(8 * ROOM)
    loud, quiet = chain(6, tenant="loud"), chain(2, seed=1, tenant="quiet")
    for record in loud + quiet:
        put(tier, record)
    tier.pin([record.id for record in loud], pinned=True)
    assert not put(tier, chain(1, seed=5, tenant="loud")[0])
    assert all(held(tier, quiet))
    assert tier.stats().refused == {"quota": 1}


# Time


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def test_expiry_follows_use_on_a_clock_that_never_jumps(monkeypatch):
    """S53: the wall clock may jump by a day in either direction."""
    clock = Clock()
    tier = MemoryTier(8 * ROOM, clock=clock)
    used, unused = chain(1)[0], chain(1, seed=1)[0]
    for record in (used, unused):
        put(tier, record, ttl_s=60)
    for jump_s in (-86_400, 86_400):
        monkeypatch.setattr("time.time", lambda jump_s=jump_s: 1_000_000.0 + jump_s)
        assert held(tier, [used, unused]) == [True, True]
    clock.now += 40
    tier.touch([used.id])
    clock.now += 40
    assert held(tier, [used, unused]) == [True, False]
    with pytest.raises(BlockMissing):
        tier.read(unused.id, [memoryview(bytearray(20_000))])
    put(tier, chain(1, seed=2)[0])  # a write gives the memory back
    assert tier.stats().evictions == {"expired": 1}
    assert tier.stats().used_bytes == 2 * ROOM


def test_pinned_blocks_do_not_expire():
    clock = Clock()
    tier = MemoryTier(8 * ROOM, clock=clock)
    record = chain(1)[0]
    put(tier, record, ttl_s=60)
    tier.pin([record.id], pinned=True)
    clock.now += 1_000
    assert held(tier, [record]) == [True]
    tier.pin([record.id], pinned=False)  # from here on it is unused
    assert held(tier, [record]) == [True]
    clock.now += 61
    assert held(tier, [record]) == [False]


# Bytes in use


def test_what_is_evicted_can_be_read_until_it_was_handed_on():
    tier = MemoryTier(2 * ROOM)
    handed_on = {}

    def keep(record, fill):
        out = bytearray(20_000)
        put_inside = chain(1, seed=50)[0]
        assert tier.held([put_inside.id]) == [False]  # no lock is held
        handed_on[record.id] = bytes(out[: fill([memoryview(out)])])

    tier.on_evict = keep
    records = [chain(1, seed)[0] for seed in range(5)]
    for record in records:
        put(tier, record)
    assert handed_on == {record.id: bytes(frame_of(record)) for record in records[:3]}
    assert tier.stats().used_bytes == 2 * ROOM


def test_readers_keep_their_bytes_while_everything_around_them_changes():
    """S08: a slot that is read is not reused, whether its block is evicted, replaced, deleted or cleared meanwhile."""
    large = 400_000
    tier = MemoryTier(4 * Arena.rounded(large + 1_000))
    records = [chain(1, seed, kv_bytes=large)[0] for seed in range(8)]
    frames = {record.id: frame_of(record) for record in records}
    errors, done, reads = [], threading.Event(), itertools.count()

    def read(seed: int) -> None:
        rng = random.Random(seed)
        out = bytearray(large + 1_000)
        while not done.is_set():
            block_id = rng.choice(records).id
            with suppress(BlockMissing):
                length = tier.read(block_id, [memoryview(out)])
                next(reads)
                if memoryview(out)[:length] != frames[block_id]:
                    errors.append(block_id)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    rng = random.Random(1)
    for step in range(1_500):
        record = rng.choice(records)
        tier.write(record, frames[record.id], tenant_key("").tag)
        if step % 50 == 0:
            tier.clear()
        elif step % 7 == 0:
            tier.delete([rng.choice(records).id], "damaged")
    done.set()
    for thread in threads:
        thread.join(10)
    assert not errors
    assert next(reads) > 100
    tier.clear()
    assert tier.stats().used_bytes == 0, "every reader gave its slot back"


# Relatives


def test_children_come_newest_first_and_contents_lead_to_their_namespaces():
    tier = MemoryTier(20 * ROOM)
    trunk = chain(1)[0]
    branches = [records_of([*trunk.token_ids, *([i] * 16)])[1] for i in range(5)]
    other_group = records_of([*trunk.token_ids, *([9] * 16)], group=1)[1]
    for record in [trunk, *branches, other_group]:
        put(tier, record)
    assert tier.children(trunk.id.key, 0, 3) == [record.id for record in reversed(branches[2:])]
    assert tier.children(trunk.id.key, 1, 3) == [other_group.id]
    tier.delete([branches[4].id], "damaged")
    assert tier.children(trunk.id.key, 0, 2) == [branches[3].id, branches[2].id]
    assert tier.children(branches[0].id.key, 0, 3) == []
    elsewhere = records_of(trunk.token_ids, weights="other")[0]
    put(tier, elsewhere)
    assert sorted(tier.roots_of(trunk.content)) == sorted([trunk.root, elsewhere.root])
    assert tier.roots_of(b"?" * 16) == []
    head = memoryview(bytearray(100))
    assert tier.peek(trunk.id, head) == 100
    assert bytes(head) == bytes(frame_of(trunk))[:100]


def test_nothing_goes_that_a_block_being_read_continues():
    """However far before it: the end of a prompt is of no use without its beginning."""
    tier = MemoryTier(5 * ROOM)
    long, others = chain(4), [record for seed in range(1, 5) for record in chain(1, seed)]
    for record in long:
        assert put(tier, record)
    with tier.lent([long[-1].id]):
        for record in others:
            put(tier, record)
        assert held(tier, long) == [True] * 4
    tier.close()
