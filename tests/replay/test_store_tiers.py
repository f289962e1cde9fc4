"""What is replayed is what the store does: the real tiers, beside their simulation, hit the same blocks every time."""

from dataclasses import replace

import pytest
from replay.traces import random_trace, trace_of
from store.blocks import frame_of, records_of
from store.stores import load_all, open_store, save_all

from kvire.core.record import BlockId
from kvire.replay import store_tiers as simulated
from kvire.replay.caches import RankCache
from kvire.replay.simulate import run_store, simulate
from kvire.store.disk.tier import DiskTier
from kvire.store.eviction.order import EvictionOrder
from kvire.store.eviction.policy import policies
from kvire.store.memory.tier import MemoryTier

TAG = b"t" * 16
UNIT = 4096  # a small frame takes one unit of the memory tier's arena
MIB = 1 << 20


def chains_of(trace, **options):
    """Each request's blocks as records of the store."""
    tokens = [[block * 16 + i for i in range(16)] for block in range(len(trace.parents))]
    return [records_of([t for b in request.blocks for t in tokens[b]], **options) for request in trace.requests]


def drive(tier, chain, *, touched=True):
    """One request against a real tier, as the store would; how many leading blocks it found. touched: it was not given
    up before its end.
    """
    ids = [record.id for record in chain]
    held = [*tier.held(ids), False]
    count = held.index(False)
    for record in chain[count:]:
        if not tier.held([record.id])[0]:
            tier.write(record, frame_of(record), TAG)
    if touched:
        tier.touch(ids)
    return count


def drive_simulated(tier, blocks, *, touched):
    """The same against a simulated one."""
    held = [*map(tier.holds, blocks), False]
    count = held.index(False)
    for block in blocks[count:]:
        if not tier.holds(block):
            tier.write(block)
    if touched:
        tier.touch(blocks)
    return count


def found(trace, store):
    """What the simulation finds, request by request."""
    counts = []
    for request in trace.requests:
        there = store.look(request.blocks)
        counts.append(len(there))
        store.use(request.blocks, there)
    return counts


@pytest.mark.parametrize("blocks", [3, 8, 20])
@pytest.mark.parametrize("seed", range(4))
def test_the_memory_tier(seed, blocks):
    trace = random_trace(seed)
    tier = MemoryTier(blocks * UNIT)
    real = [drive(tier, chain) for chain in chains_of(trace, kv_bytes=600)]
    tier.close()
    memory = simulated.StoreTier(trace, blocks)
    assert real == found(trace, simulated.StoreTiers([memory]))
    assert any(real) and tier.stats().evictions["room"]


def disk_blocks(path):
    """How many blocks of this size a disk tier of the smallest size holds."""
    with DiskTier(path, 4 * MIB) as tier:
        for number, chain in enumerate(chains_of(trace_of([(("x", n), 21) for n in range(2000)]), kv_bytes=30_000)):
            tier.write(chain[0], frame_of(chain[0]), TAG) if not number else None
            tier.write(chain[1], frame_of(chain[1]), TAG)
            if tier.stats().evictions:
                return number + 1
    raise AssertionError("it never was full")


def test_the_disk_tier(tmp_path):
    blocks = disk_blocks(tmp_path / "size")
    trace = random_trace(5, requests=150, sessions=blocks // 4)
    ended = [number % 3 > 0 for number in range(150)]
    clock = 0.0
    with DiskTier(tmp_path / "disk", 4 * MIB, elapsed=lambda: clock, wall=lambda: 1e9 + clock) as tier:
        real = []
        for chain, end in zip(chains_of(trace, kv_bytes=30_000), ended, strict=True):
            clock += 100.0
            real.append(drive(tier, chain, touched=end))
        evicted = tier.stats().evictions["room"]
    disk = simulated.StoreTier(trace, blocks)
    requests = zip(trace.requests, ended, strict=True)
    assert real == [drive_simulated(disk, request.blocks, touched=end) for request, end in requests]
    assert sum(real) > 50 and evicted > 50


def test_a_prompt_longer_than_the_disk_tier_keeps_its_beginning(tmp_path):
    blocks = disk_blocks(tmp_path / "size")
    long = tuple(range(blocks + 20))
    trace = trace_of([((("other", n),), 10) for n in range(5)] + [(long, 10 * len(long))] * 3)
    clock = 0.0
    real = []
    with DiskTier(tmp_path / "disk", 4 * MIB, elapsed=lambda: clock, wall=lambda: 1e9 + clock) as tier:
        for chain in chains_of(trace, kv_bytes=30_000):
            clock += 100.0
            real.append(drive(tier, chain))
        assert tier.stats().refused["full"] > 20
    assert real == found(trace, simulated.StoreTiers([simulated.StoreTier(trace, blocks)]))
    assert real[-2:] == [blocks, blocks], "the others made room, its own beginning did not"


def test_a_store_of_two_tiers(tmp_path):
    """Promotion, write-through and touches of a real TieredStore, block by block and tier by tier."""
    trace = random_trace(6, requests=40)
    fast, slow = MemoryTier(6 * UNIT), DiskTier(tmp_path / "disk", 16 * MIB)
    memory = simulated.StoreTier(trace, 6)
    store = simulated.StoreTiers([memory, simulated.StoreTier(trace, 1000)])
    names = {"memory": 0, "disk": 1}
    both = 0
    with open_store(tmp_path, fast, slow, readers=1) as real:
        chains = chains_of(trace, kv_bytes=600, salt=real.tenant("").salt)
        for request, chain in zip(trace.requests, chains, strict=True):
            held = [*real.held([record.id for record in chain]), None]
            there = [names[name] for name in held[: held.index(None)]]
            assert there == store.look(request.blocks)
            both += len(set(there)) == 2
            load_all(real, chain[: len(there)])
            assert real.flush(10)
            save_all(real, chain[len(there) :])
            real.touch([record.id for record in chain])
            assert real.flush(10)
            store.use(request.blocks, there)
    assert both > 5


def hit_tokens(trace, blocks, policy=None):
    return run_store(trace, simulated.StoreTiers([simulated.StoreTier(trace, blocks, policy)])).tokens


def nobody_touches(self, slots):
    pass


def newest_first(self, use):
    slots = [slot for slot in self.index.values() if slot.queued and slot.id.key not in self.children]
    slot = max(slots, key=lambda slot: slot.order)
    slot.queued = False
    return slot


def parents_first(self, use):
    slot = min((s for s in self.index.values() if s.queued), key=lambda s: (s.order, s.index))
    slot.queued = False
    return slot


OFTEN = ("hot", 1, 2, 3)
COLD = [((i, 1), (i, 2), (i, 3), (i, 4)) for i in range(60)]
HOT_AND_COLD = [
    chain for i in range(0, 60, 2) for chain in (OFTEN, COLD[i], COLD[i + 1])
]  # 8 blocks: the hot one stays
TURNS = [OFTEN, COLD[0]] * 20  # in 6 blocks, the first two of the other one stay


@pytest.mark.parametrize(
    ("name", "replacement", "chains", "blocks", "tokens"),
    [
        ("touch", nobody_touches, HOT_AND_COLD, 12, 29 * 40),
        ("_first", newest_first, HOT_AND_COLD, 12, 29 * 40),
        ("_first", parents_first, TURNS, 6, 38 * 20),
    ],
)
def test_a_store_that_evicts_worse_shows(name, replacement, chains, blocks, tokens, monkeypatch):
    """The code that is replayed is the store's: a fault there is a fall of the curve here."""
    trace = trace_of([(chain, 41) for chain in chains])
    assert hit_tokens(trace, blocks) == tokens
    monkeypatch.setattr(EvictionOrder, name, replacement)
    assert hit_tokens(trace, blocks) < tokens


@pytest.mark.parametrize("policy", policies().values(), ids=list(policies()))
@pytest.mark.parametrize("seed", range(3))
def test_the_store_and_the_fast_replay_hit_the_same(seed, policy):
    """With prompts that fit: the order of the store's tiers, and the same policy over whole requests."""
    trace = random_trace(seed, requests=200)
    for blocks in (12, 20, 30):
        assert hit_tokens(trace, blocks, policy) == simulate(trace, RankCache(trace, blocks, policy)).tokens


def test_a_prompt_that_does_not_fit_keeps_its_beginning():
    """Its end would be of no use, and would cost the beginning."""
    names = tuple(range(30))
    trace = trace_of([(names, 301), (names, 301), ((*names[:4], "other"), 51), (names, 301)])
    memory = simulated.StoreTier(trace, 10)
    assert found(trace, simulated.StoreTiers([memory])) == [0, 10, 4, 9]


def test_such_a_prompt_is_refused_as_too_long():
    """By the real tier; and what comes after it finds room as ever."""
    long, short = chains_of(trace_of([(range(10), 101), ("ab", 21)]), kv_bytes=600)
    tier = MemoryTier(4 * UNIT)
    assert drive(tier, long) == 0
    assert tier.held([record.id for record in long]) == [True] * 4 + [False] * 6
    assert tier.stats().refused == {"full": 6}
    assert drive(tier, short) == 0
    assert all(tier.held([record.id for record in short]))
    assert drive(tier, long) == 2


def in_all_groups(tier, chain):
    """Write a prompt's blocks as the engine does; how many leading ones are there in every group."""
    for record in chain:
        for group in (0, 1):
            own = replace(record, id=BlockId(record.id.key, group))
            if not tier.held([own.id])[0]:
                tier.write(own, frame_of(own), TAG)
    tier.touch([BlockId(record.id.key, group) for record in chain for group in (0, 1)])
    there = [all(tier.held([BlockId(record.id.key, group) for group in (0, 1)])) for record in chain]
    return [*there, False].index(False)


def test_groups_of_one_prompt_do_not_make_room_for_each_other(tmp_path):
    """Of what does not fit, the beginning is kept in every group."""
    [long] = chains_of(trace_of([(range(30), 301)]), kv_bytes=600)
    memory = MemoryTier(20 * UNIT)
    assert [in_all_groups(memory, long) for _ in range(3)] == [10] * 3
    blocks = disk_blocks(tmp_path / "size")
    [long] = chains_of(trace_of([(range(blocks), 10 * blocks + 1)]), kv_bytes=30_000)
    with DiskTier(tmp_path / "disk", 4 * MIB) as disk:
        assert [in_all_groups(disk, long) for _ in range(2)] == [blocks // 2] * 2


def test_what_another_process_found_room_for_is_not_cut_off(tmp_path):
    """One process had no room for a block; another wrote it later, so what follows it has its beginning again."""
    blocks = disk_blocks(tmp_path / "size")
    [long] = chains_of(trace_of([(range(blocks + 2), 10 * blocks + 20)]), kv_bytes=30_000)
    with DiskTier(tmp_path / "disk", 4 * MIB) as one, DiskTier(tmp_path / "disk", 4 * MIB) as other:
        drive(one, long)
        after = len(long) - 2
        assert one.held([record.id for record in long[after - 1 :]]) == [True, False, False]
        other.delete([record.id for record in long[:3]], "cleared")  # makes room
        assert other.write(long[after], frame_of(long[after]), TAG)
        assert one.write(long[after + 1], frame_of(long[after + 1]), TAG)


def test_a_write_below_does_not_bring_back_what_has_expired(tmp_path):
    [chain] = chains_of(trace_of([("ab", 21)]), kv_bytes=600)
    clock = 0.0
    with DiskTier(tmp_path / "disk", 4 * MIB, elapsed=lambda: clock, wall=lambda: 1e9 + clock) as tier:
        tier.write(chain[0], frame_of(chain[0]), TAG, ttl_s=100)
        tier._upkeep.close()  # nothing takes expired blocks out meanwhile
        clock = 101.0
        tier.write(chain[1], frame_of(chain[1]), TAG)
        assert tier.held([record.id for record in chain]) == [False, True]
