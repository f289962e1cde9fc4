"""Saved blocks on their way: bounds, admission, slow and dead tiers, promotion, demotion, forgetting."""

import threading
import time

import pytest
from store.blocks import kv_of, wanted
from store.stores import MIB, BentTier, blocks, load_all, open_store, ready, save_all

from kvire.core.errors import TierUnavailable
from kvire.core.tier_kind import TierKind
from kvire.store.disk.tier import DiskTier
from kvire.store.keyring import Keyring
from kvire.store.memory.tier import MemoryTier
from kvire.store.write_queue import QUEUED_CALLS

REMOTE = TierKind.REMOTE
KV = 100_000


def names(store, records):
    return store.held([record.id for record in records])


# Bounds


def test_saving_never_waits_and_what_finds_no_room_is_dropped_and_counted(tmp_path):
    disk = BentTier()
    with open_store(tmp_path, disk, buffer_bytes=10 * KV) as store:
        records = blocks(store, 40, kv_bytes=KV)
        disk.gate.clear()
        start = time.monotonic()
        kept = [store.save(record, kv_of(record)) for record in records]
        assert time.monotonic() - start < 1
        assert kept == [True] * 10 + [False] * 30, "the beginning of the prompt is worth more than its end"
        stats = store.stats()
        assert (stats.saves, stats.dropped_saves) == (40, 30)
        assert stats.handles["bent"].counts.dropped == 30
        assert (stats.handles["bent"].queued_blocks, stats.handles["bent"].queued_bytes) == (10, 10 * KV)
        disk.gate.set()
        assert store.flush(5)
        assert ready(load_all(store, records)) == kept
        assert store.stats().handles["bent"].queued_bytes == 0


def test_large_blocks_get_room_for_eight(tmp_path):
    disk = BentTier()
    with open_store(tmp_path, disk, buffer_bytes=1_000) as store:
        disk.gate.clear()
        records = blocks(store, 10, kv_bytes=KV)
        assert [store.save(record, kv_of(record)) for record in records] == [True] * 8 + [False] * 2
        disk.gate.set()


def test_loads_come_first_but_saves_do_not_wait_for_ever(tmp_path):
    memory, disk = MemoryTier(4 * MIB), BentTier()
    with open_store(tmp_path, memory, disk) as store:
        loaded, saved = blocks(store, 2), blocks(store, 2, seed=1)
        save_all(store, loaded)
        memory.clear()
        disk.gate.clear()
        ticket = store.load(wanted(loaded))
        assert disk.waiting.wait(5)
        for record in saved:
            store.save(record, kv_of(record))
        time.sleep(0.05)
        assert names(store, saved) == [None, None], "a load is under way"
        end = time.monotonic() + 5
        while names(store, saved) != ["memory"] * 2 and time.monotonic() < end:
            time.sleep(0.01)
        assert names(store, saved) == ["memory"] * 2 and not ticket.finished


def test_a_dead_remote_tier_holds_up_nobody(tmp_path):
    memory, disk, remote = MemoryTier(16 * MIB), DiskTier(tmp_path / "disk", 64 * MIB), BentTier(REMOTE, "remote")
    with open_store(tmp_path, memory, disk, remote, buffer_bytes=30 * KV) as store:
        remote.gate.clear()
        records = blocks(store, 60, kv_bytes=KV)
        start = time.monotonic()
        for record in records:
            while store.stats().handles["disk"].queued_blocks > 5:  # a prompt is computed more slowly than this
                time.sleep(0.001)
            assert store.save(record, kv_of(record))
        assert time.monotonic() - start < 5
        end = time.monotonic() + 2  # at rest it is a few milliseconds
        while not all(disk.held([record.id for record in records])) and time.monotonic() < end:
            time.sleep(0.01)
        assert all(disk.held([record.id for record in records])), "on disk soon"
        handles = store.stats().handles
        assert handles["remote"].counts.dropped >= 60 - 10
        assert handles["disk"].queued_bytes == 0
        remote.dead = True
        remote.gate.set()
        assert store.flush(5)
        assert handles["disk"].counts.unavailable == 0 and store.stats().handles["remote"].counts.unavailable > 0


def test_blocks_that_a_tier_has_are_touched_and_not_written_again(tmp_path):
    disk = BentTier()
    with open_store(tmp_path, disk) as store:
        records = blocks(store, 5)
        save_all(store, records)
        disk.touched.clear()
        save_all(store, records)
        assert set(disk.writes.values()) == {1} and len(disk.writes) == 5
        assert {block_id for ids in disk.touched for block_id in ids} == {record.id for record in records}
        assert store.stats().handles["bent"].counts.known == 5


def test_touches_reach_every_tier_and_decide_who_stays(tmp_path):
    memory = MemoryTier(8 * 8_192)
    with open_store(tmp_path, memory) as store:
        old, other = blocks(store, 4), blocks(store, 4, seed=1)
        save_all(store, old + other)
        store.touch([record.id for record in old])
        store.flush(5)
        save_all(store, blocks(store, 4, seed=2))
        assert names(store, old + other) == ["memory"] * 4 + [None] * 4


def test_a_tier_that_raises_what_it_must_not_goes_on(tmp_path):
    disk = BentTier()
    with open_store(tmp_path, disk) as store:
        records = blocks(store, 4)
        write, disk.inner.write = disk.inner.write, None  # a TypeError
        for record in records[:2]:
            store.save(record, kv_of(record))
        assert store.flush(5)
        disk.inner.write = write
        save_all(store, records[2:])
        assert names(store, records) == [None, None, "bent", "bent"]
        assert store.stats().handles["bent"].queued_bytes == 0


# Admission


def test_by_turn_nothing_is_kept_before_its_turn_ends(tmp_path):
    disk = BentTier()
    with open_store(tmp_path, disk, admission="turn") as store:
        records = blocks(store, 6)
        save_all(store, records)
        assert names(store, records) == [None] * 6
        store.end_of_turn([record.id for record in records[:2]])
        store.save(records[2], kv_of(records[2]))  # seen twice
        store.touch([records[3].id])  # used by somebody else
        store.flush(5)
        assert names(store, records) == ["bent"] * 4 + [None] * 2
        assert ready(load_all(store, records)) == [True] * 4 + [False] * 2


def test_by_turn_the_longest_waiting_make_room_and_the_second_sight_counts_all_the_same(tmp_path):
    disk = BentTier()
    with open_store(tmp_path, disk, admission="turn", buffer_bytes=20 * KV) as store:
        records = blocks(store, 15, kv_bytes=KV)
        save_all(store, records)
        assert store.stats().unadmitted == 5
        store.end_of_turn([record.id for record in records])
        store.flush(5)
        assert names(store, records) == [None] * 5 + ["bent"] * 10
        save_all(store, records[:1])  # not waiting any more, but seen before
        assert names(store, records[:1]) == ["bent"]


# Up and down


def test_what_a_slower_tier_gives_goes_up(tmp_path):
    memory, disk, remote = MemoryTier(4 * MIB), BentTier(), BentTier(REMOTE, "remote")
    with open_store(tmp_path, memory, disk, remote, load_timeout_s=5) as store:
        records = blocks(store, 6)
        save_all(store, records)
        memory.clear()
        disk.inner.delete([record.id for record in records[3:]], "test")
        load_all(store, records)
        store.flush(5)
        assert names(store, records) == ["memory"] * 6
        assert disk.held([record.id for record in records]) == [True] * 6
        counts = {name: handle.counts for name, handle in store.stats().handles.items()}
        assert counts["memory"].promoted == 6 and counts["bent"].promoted == 3 and counts["remote"].promoted == 0


def test_what_memory_evicts_goes_down_if_it_is_nowhere_below(tmp_path):
    memory, disk = MemoryTier(8 * 8_192), BentTier()
    with open_store(tmp_path, memory, disk, encrypt=True) as store:
        disk.dead = True
        first = blocks(store, 8)
        save_all(store, first)
        assert names(store, first) == ["memory"] * 8
        disk.dead = False
        save_all(store, blocks(store, 8, seed=1))
        assert store.flush(5)
        assert names(store, first) == ["bent"] * 8
        assert ready(load_all(store, first)) == [True] * 8
        counts = store.stats().handles["bent"].counts
        assert counts.demoted == 8
        save_all(store, blocks(store, 8, seed=2))
        store.flush(5)
        assert store.stats().handles["bent"].counts.demoted == 8, "what is below already is not written again"


def test_what_is_damaged_in_memory_does_not_go_down(tmp_path):
    memory, disk = MemoryTier(4 * 8_192), BentTier()
    with open_store(tmp_path, memory, disk) as store:
        disk.dead = True
        first = blocks(store, 4)
        save_all(store, first)
        memory._arena.write(memory._order.index[first[1].id].extents, memoryview(b"\0" * 500))
        disk.dead = False
        save_all(store, blocks(store, 4, seed=1))
        store.flush(5)
        assert names(store, first) == ["bent", None, "bent", "bent"]


def test_pinned_blocks_stay(tmp_path):
    memory = MemoryTier(6 * 8_192)
    with open_store(tmp_path, memory, BentTier()) as store:
        kept = blocks(store, 3)
        save_all(store, kept)
        assert store.pin([record.id for record in kept], pinned=True) == 3
        for seed in range(1, 10):
            save_all(store, blocks(store, 3, seed=seed))
        assert names(store, kept) == ["memory"] * 3
        store.pin([record.id for record in kept], pinned=False)
        save_all(store, blocks(store, 6, seed=20))
        assert names(store, kept) == ["bent"] * 3


# Forgetting


def test_forgetting_a_tenant_removes_it_everywhere_and_nobody_else(tmp_path):
    memory, disk, remote = MemoryTier(4 * MIB), BentTier(), BentTier(REMOTE, "remote")
    with open_store(tmp_path, memory, disk, remote, encrypt=True, load_timeout_s=5) as store:
        mine, theirs = blocks(store, 5), blocks(store, 5, tenant="gone")
        save_all(store, mine + theirs)
        salt = store.tenant("gone").salt
        assert store.forget("gone") == 15
        assert store.tenant("gone").salt != salt
        assert [len(list(tier.entries())) for tier in (memory, disk, remote)] == [5, 5, 5]
        assert ready(load_all(store, mine + theirs)) == [True] * 5 + [False] * 5
        assert store.forget("never seen") == 0


@pytest.mark.parametrize("forget", ["forget", "clear", "elsewhere"])
def test_nothing_on_its_way_comes_back(tmp_path, forget):
    """Blocks queued, being written and being loaded when their tenant is forgotten, or the store cleared."""
    memory, disk, remote = MemoryTier(4 * MIB), BentTier(), BentTier(REMOTE, "remote")
    with open_store(tmp_path, memory, disk, remote, load_timeout_s=10) as store:
        records = blocks(store, 8, tenant="gone")
        late = blocks(store, 4, seed=1, tenant="gone")
        save_all(store, records)
        memory.clear()
        disk.inner.clear()
        remote.gate.clear()
        disk.gate.clear()
        ticket = store.load(wanted(records))  # from the remote tier, to be promoted
        for record in late:
            store.save(record, kv_of(record))
        assert disk.waiting.wait(5) and remote.waiting.wait(5)
        tag = store.tenant("gone").tag
        threading.Timer(0.2, disk.gate.set).start()
        if forget == "forget":
            store.forget("gone")
        elif forget == "clear":
            store.clear()
        else:  # another process did, and this one only meets new keys
            Keyring(tmp_path / "keys" / "keyring.json", encrypt=False).forget("gone")
            memory.delete_tenant(tag)
        remote.gate.set()
        assert ticket.wait(5) and store.flush(5)
        assert names(store, records + late)[:8] == [None] * 8
        if forget != "elsewhere":  # what was with the disk then is that process's business
            assert list(disk.entries()) == list(memory.entries()) == list(remote.entries()) == []
        else:
            assert list(memory.entries()) == [] and len(list(disk.entries())) <= 1


def test_a_writer_that_does_not_end_cleans_up_after_itself(tmp_path, monkeypatch):
    """forget waits for writers, but not for ever."""
    monkeypatch.setattr("kvire.store.tiered.STALE_S", 0.1)
    remote = BentTier(REMOTE, "remote")
    with open_store(tmp_path, remote) as store:
        records = blocks(store, 3, tenant="gone")
        remote.gate.clear()
        for record in records:
            store.save(record, kv_of(record))
        assert remote.waiting.wait(5)
        start = time.monotonic()
        store.forget("gone")
        assert 0.05 < time.monotonic() - start < 1
        remote.gate.set()
        assert store.flush(5)
        assert list(remote.entries()) == []


def test_forgetting_and_saving_at_once_leaves_only_the_new(tmp_path):
    memory, disk = MemoryTier(8 * MIB), BentTier()
    with open_store(tmp_path, memory, disk, encrypt=True) as store:
        done = threading.Event()
        saved = []

        def save() -> None:
            seed = 0
            while not done.is_set():
                seed += 1
                for record in blocks(store, 3, seed=seed, tenant="gone"):
                    store.save(record, kv_of(record))
                    saved.append(record)

        thread = threading.Thread(target=save)
        thread.start()
        for _ in range(15):
            time.sleep(0.02)
            store.forget("gone")
        done.set()
        thread.join(10)
        store.forget("gone")
        assert store.flush(5)
        assert len(saved) > 30
        assert list(memory.entries()) == [] and list(disk.entries()) == []
        save_all(store, fresh := blocks(store, 2, seed=1, tenant="gone"))
        assert ready(load_all(store, fresh)) == [True, True]


def test_clear_really_clears(tmp_path):
    memory, disk = MemoryTier(4 * MIB), DiskTier(tmp_path / "disk", 64 * MIB)
    with open_store(tmp_path, memory, disk) as store:
        records = blocks(store, 6)
        save_all(store, records)
        assert store.clear() == 12
        assert names(store, records) == [None] * 6
        assert ready(load_all(store, records)) == [False] * 6
        save_all(store, records)
        assert ready(load_all(store, records)) == [True] * 6


def test_what_cannot_be_cleared_is_said_and_the_rest_is_cleared(tmp_path):
    memory, disk = MemoryTier(4 * MIB), BentTier()
    with open_store(tmp_path, disk, memory) as store:
        records = blocks(store, 2)
        save_all(store, records)

        def refuse():
            raise TierUnavailable("not now")

        disk.clear = refuse
        with pytest.raises(TierUnavailable, match="bent"):
            store.clear()
        assert list(memory.entries()) == []


def test_unused_blocks_expire_in_every_tier(tmp_path):
    memory, disk = MemoryTier(4 * MIB), DiskTier(tmp_path / "disk", 64 * MIB)
    with open_store(tmp_path, memory, disk, ttl_s=1.5) as store:
        records = blocks(store, 3)
        save_all(store, records)
        assert names(store, records) == ["memory"] * 3
        time.sleep(1.8)
        assert names(store, records) == [None] * 3
        assert ready(load_all(store, records)) == [False] * 3


def test_a_flood_of_small_things_loses_no_discard(tmp_path):
    """Of too many touches the oldest are lost; what must not be met is removed all the same."""
    disk = BentTier()
    with open_store(tmp_path, disk) as store:
        records = blocks(store, 6)
        save_all(store, records)
        disk.gate.clear()  # the writer stands in the middle of a block
        late = blocks(store, 1, seed=5)[0]
        store.save(late, kv_of(late))
        assert disk.waiting.wait(5)
        store.discard([record.id for record in records[3:]])
        for _ in range(QUEUED_CALLS + 50):
            store.touch([records[0].id])
        disk.gate.set()
        assert store.flush(10)
        assert disk.held([record.id for record in records]) == [True] * 3 + [False] * 3
        assert len(disk.touched) <= QUEUED_CALLS + len(records) + 1, "and of the touches the oldest went"
