"""TieredStore over real tiers: what was saved comes back, from wherever it is, or not at all."""

import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from store.blocks import chain, kv_of, records_of, wanted
from store.stores import MIB, BentTier, blocks, load_all, open_store, ready, save_all

from kvire.core.errors import StoreError, TierUnavailable
from kvire.core.record import BlockRecord
from kvire.core.tier_kind import TierKind
from kvire.store.disk.tier import DiskTier
from kvire.store.loader import LOCAL_THREADS, MOST_IN_RUN
from kvire.store.memory.tier import MemoryTier
from kvire.store.remote.open import open_remote
from kvire.store.ticket import FailureReason, LoadState

REMOTE = TierKind.REMOTE


def all_kinds(path):
    """One tier of each kind that needs no server, fastest first."""
    return (
        MemoryTier(16 * MIB),
        DiskTier(path / "disk", 64 * MIB),
        open_remote(f"file://{path / 'remote'}", timeout_s=5),
    )


@pytest.mark.parametrize("encrypt", [False, True])
def test_saved_blocks_come_back_from_every_tier(tmp_path, encrypt):
    memory, disk, remote = all_kinds(tmp_path)
    with open_store(tmp_path, memory, disk, remote, encrypt=encrypt, load_timeout_s=5) as store:
        records = blocks(store, 12)
        ids = [record.id for record in records]
        assert store.held(ids) == [None] * 12
        save_all(store, records)
        for tier, kind in ((memory, TierKind.MEMORY), (disk, TierKind.DISK), (remote, REMOTE)):
            assert store.held(ids) == [tier.name if tier.local else None] * 12
            ticket = load_all(store, records)
            assert ready(ticket) == [True] * 12
            assert {ticket.source(i) for i in range(12)} == {kind}
            assert store.flush(10)
            for faster in (memory, disk):  # what a slower tier gave was promoted
                faster.clear()
                if faster is tier:
                    break
        assert ready(load_all(store, blocks(store, 12, seed=1))) == [False] * 12


def test_blocks_outlive_the_process(tmp_path):
    with open_store(tmp_path, DiskTier(tmp_path / "disk", 64 * MIB), encrypt=True) as store:
        save_all(store, blocks(store, 8))
    with open_store(tmp_path, MemoryTier(MIB), DiskTier(tmp_path / "disk", 64 * MIB), encrypt=True) as store:
        assert ready(load_all(store, blocks(store, 8))) == [True] * 8


@pytest.mark.parametrize("from_the_back", [False, True])
def test_blocks_are_read_in_the_order_asked_for(tmp_path, from_the_back):
    tier = BentTier()
    with open_store(tmp_path, tier, readers=1) as store:  # several threads may overtake each other
        records = blocks(store, 20)
        save_all(store, records)
        load_all(store, records, from_the_back=from_the_back)
        assert tier.log == [record.id for record in (records[::-1] if from_the_back else records)]


def test_random_use_does_what_a_dict_does(tmp_path):
    """Whatever is asked in whatever order: a block is there if it was saved and not removed, and never another one."""
    rng = random.Random(11)
    memory, disk, remote = all_kinds(tmp_path)
    with open_store(tmp_path, memory, disk, remote, encrypt=True, buffer_bytes=32 * MIB, load_timeout_s=10) as store:
        tenants = ("", "other")
        pool = {name: blocks(store, 10, tenant=name) + blocks(store, 6, seed=1, tenant=name) for name in tenants}
        saved: set[BlockRecord] = set()
        hits = 0
        for _ in range(120):
            name = rng.choice(tenants)
            some = rng.sample(pool[name], rng.randrange(1, 8))
            match rng.randrange(12):
                case 0 | 1 | 2 | 3:
                    for record in some:
                        assert store.save(record, kv_of(record))
                    saved.update(some)
                case 4:
                    store.touch([record.id for record in some])
                case 5:
                    rng.choice([memory, disk]).clear()
                case 6 if rng.random() < 0.3:
                    store.clear()
                    saved.clear()
                case 7 if rng.random() < 0.5:
                    store.forget(name)
                    saved -= set(pool[name])
                    pool[name] = blocks(store, 10, tenant=name) + blocks(store, 6, seed=1, tenant=name)
                case _:
                    assert store.flush(10)
                    ticket = load_all(store, some, from_the_back=rng.random() < 0.5)
                    assert ready(ticket) == [record in saved for record in some]
                    hits += sum(ready(ticket))
        assert hits > 50
        stats = store.stats()
        assert all(handle.counts.damaged == handle.counts.dropped == 0 for handle in stats.handles.values())
        assert stats.dropped_saves == 0


# Loads


def test_a_herd_reads_once(tmp_path):
    """S35: fifty loads of one prefix, one read of each block, and hardly slower than one load."""
    tier = BentTier()
    tier.slow_s = 0.005
    with open_store(tmp_path, tier) as store:
        records = blocks(store, 16)
        save_all(store, records)
        start = time.monotonic()
        load_all(store, records)
        alone_s = time.monotonic() - start
        tier.log.clear()
        tickets = [store.load(wanted(records)) for _ in range(50)]
        start = time.monotonic()
        assert all(ticket.wait(20) for ticket in tickets)
        herd_s = time.monotonic() - start
        assert all(ticket.wanted[i].out == kv_of(records[i]) for ticket in tickets for i in range(16))
        assert all(ready(ticket) == [True] * 16 for ticket in tickets)
        assert len(tier.log) <= 2 * 16, "later tickets get what the first one reads"
        assert store.stats().shared_reads >= 48 * 16
        assert herd_s < 5 * alone_s + 0.5


def test_a_block_given_to_another_load_is_copied_before_anybody_may_change_it(tmp_path):
    """The reader whose memory the others' copies come from gets it last."""
    tier = BentTier()
    with open_store(tmp_path, tier) as store:
        (record,) = blocks(store, 1)
        save_all(store, [record])
        tier.gate.clear()
        first = store.load(wanted([record]))
        assert tier.waiting.wait(5)
        ready_now = first.ready

        def change_at_once(i, source):
            ready_now(i, source)
            first.wanted[i].out[:] = bytes(record.kv_bytes)

        first.ready = change_at_once
        others = [store.load(wanted([record])) for _ in range(6)]
        while store.stats().shared_reads < 6:
            time.sleep(0.001)
        tier.gate.set()
        assert first.wait(5)
        assert all(ticket.wait(5) and ticket.wanted[0].out == kv_of(record) for ticket in others)


def test_claimed_blocks_are_never_written_and_ready_ones_are_right(tmp_path):
    """A storm of claims and cancels against loads from all tiers."""
    memory, disk = MemoryTier(MIB), BentTier()
    remote = BentTier(REMOTE, "remote")
    rng = random.Random(3)
    claims = cancels = loaded = 0
    with open_store(tmp_path, memory, disk, remote, load_timeout_s=5) as store:
        records = blocks(store, 24, kv_bytes=20_000)
        save_all(store, records)
        for round_ in range(150):
            memory.delete([record.id for record in rng.sample(records, 12)], "test")
            disk.inner.delete([record.id for record in rng.sample(records, 6)], "test")
            disk.slow_s = rng.choice([0, 0, 0.0003])
            ticket = store.load(wanted(records), from_the_back=rng.random() < 0.5)
            mine = {}
            for i in rng.sample(range(24), 12):
                if rng.random() < 0.2:
                    time.sleep(rng.random() * 0.001)
                if ticket.claim(i):
                    mine[i] = bytes([i + 1]) * records[i].kv_bytes
                    ticket.wanted[i].out[:] = mine[i]
            claims += len(mine)
            if round_ % 3 == 0:
                ticket.cancel()
                cancels += 1
                while ticket.active:
                    pass
                before = [bytes(item.out) for item in ticket.wanted]
                time.sleep(0.0005)
                assert [bytes(item.out) for item in ticket.wanted] == before, "written after active was 0"
            assert ticket.wait(10)
            for i, record in enumerate(records):
                if i in mine:
                    assert ticket.wanted[i].out == mine[i], "a claimed block was written"
                elif ticket.state(i) is LoadState.READY:
                    assert ticket.wanted[i].out == kv_of(record)
                    loaded += 1
            assert ticket.active == 0
            for record in records:
                store.save(record, kv_of(record))
            store.flush(5)
    assert claims > 300 and loaded > 500 and cancels == 50


def test_a_block_is_nobodys_before_all_of_it_is_there_and_verified(tmp_path):
    tier = BentTier()
    with open_store(tmp_path, tier) as store:
        (record,) = blocks(store, 1)
        save_all(store, [record])
        seen = []
        ticket = None

        def bend(_, buffers, length):
            seen.append(ticket.state(0))
            return length

        tier.bend = bend
        tier.gate.clear()
        ticket = store.load(wanted([record]))
        assert tier.waiting.wait(5)
        assert ticket.state(0) is LoadState.READING and ticket.active == 1
        tier.gate.set()
        assert ticket.wait(5) and seen == [LoadState.READING] and ready(ticket) == [True]


def test_what_was_handed_out_is_the_callers_and_what_was_handed_in_stays_the_callers(tmp_path):
    """S14: neither changes what is stored."""
    memory, disk = MemoryTier(4 * MIB), BentTier()
    with open_store(tmp_path, memory, disk) as store:
        records = blocks(store, 4)
        for record in records:
            kv = memoryview(bytearray(kv_of(record)))
            assert store.save(record, kv)
            kv[:] = bytes(len(kv))  # the pool goes on at once
        store.flush(5)
        for _ in range(3):
            ticket = load_all(store, records)
            assert ready(ticket) == [True] * 4
            for item in ticket.wanted:
                item.out[:] = bytes(len(item.out))


def test_a_slow_remote_tier_costs_the_deadline_and_holds_no_memory(tmp_path):
    memory, remote = MemoryTier(4 * MIB), BentTier(REMOTE, "remote")
    with open_store(tmp_path, memory, remote, load_timeout_s=0.2) as store:
        records = blocks(store, 10)
        save_all(store, records)
        memory.delete([record.id for record in records[5:]], "test")
        remote.gate.clear()
        start = time.monotonic()
        ticket = store.load(wanted(records))
        assert ticket.wait(5)
        assert 0.15 < time.monotonic() - start < 1
        assert ready(ticket) == [True] * 5 + [False] * 5
        assert {ticket.failure(i).reason for i in range(5, 10)} == {FailureReason.UNAVAILABLE}
        assert ticket.active == 0, "its threads still hang, but not in our memory"
        remote.gate.set()
        time.sleep(0.1)
        assert all(item.out == b"\xee" * len(item.out) for item in ticket.wanted[5:])
        assert ready(load_all(store, records)) == [True] * 10, "and it serves again"


def test_remote_tiers_are_asked_in_turn_and_only_for_what_is_not_here(tmp_path):
    memory, near, far = MemoryTier(4 * MIB), BentTier(REMOTE, "near"), BentTier(REMOTE, "far")
    with open_store(tmp_path, memory, near, far, load_timeout_s=5) as store:
        assert store.remote_speed() is not None
        records = blocks(store, 9)
        save_all(store, records)
        memory.delete([record.id for record in records[3:]], "test")
        near.inner.delete([record.id for record in records[6:]], "test")
        far.inner.delete([records[8].id], "test")
        ticket = load_all(store, records)
        assert ready(ticket) == [True] * 8 + [False]
        assert sorted(near.log) == sorted(record.id for record in records[3:6])
        assert sorted(far.log) == sorted(record.id for record in records[6:8])
        assert ticket.failure(8).reason is FailureReason.MISSING
        near.dead = True
        memory.clear()
        assert ready(load_all(store, records[:8])) == [True] * 8


def test_a_dying_tier_is_a_miss_and_the_next_tier_serves(tmp_path):
    disk, remote = BentTier(), BentTier(REMOTE, "remote")
    with open_store(tmp_path, disk, remote, load_timeout_s=5) as store:
        records = blocks(store, 12)
        save_all(store, records)
        alive = {record.id for record in records[:6]}

        def die(block_id, _, length):
            if block_id not in alive:
                raise TierUnavailable("gone in the middle of a read")
            return length

        disk.bend = die
        ticket = load_all(store, records)
        assert ready(ticket) == [True] * 12
        assert [ticket.source(i) for i in (0, 11)] == [TierKind.DISK, REMOTE]
        assert store.stats().handles["bent"].counts.unavailable == 6
        disk.dead = remote.dead = True
        ticket = load_all(store, records)
        assert {ticket.failure(i).reason for i in range(12)} == {FailureReason.UNAVAILABLE}
        assert store.held([record.id for record in records]) == [None] * 12


def test_a_block_that_vanished_after_the_lookup_is_a_miss_at_once(tmp_path):
    """S34: for one, five and all blocks; and the next lookup does not promise it again."""
    disk = BentTier()
    with open_store(tmp_path, disk) as store:
        records = blocks(store, 10)
        for gone in (1, 5, 10):
            save_all(store, records)
            ids = [record.id for record in records]
            assert store.held(ids) == ["bent"] * 10
            disk.inner.delete(ids[-gone:], "test")
            ticket = load_all(store, records)
            assert ready(ticket) == [True] * (10 - gone) + [False] * gone
            assert ticket.failure(9).reason is FailureReason.MISSING
            assert store.held(ids) == ["bent"] * (10 - gone) + [None] * gone


# Bytes that are wrong


@pytest.mark.parametrize("at", [-1, -17, 5, 100, 200, 262, 300])
def test_damage_is_found_removed_and_counted(tmp_path, at):
    disk, remote = BentTier(), BentTier(REMOTE, "remote")
    with open_store(tmp_path, disk, remote, load_timeout_s=5) as store:
        records = blocks(store, 3)
        save_all(store, records)
        disk.spoil(records[1], at)
        ticket = load_all(store, records)
        assert ready(ticket) == [True] * 3, "the slower tier has it whole"
        if store.stats().handles["bent"].counts.foreign == 0:
            assert store.stats().handles["bent"].counts.damaged == 1
            assert disk.log.count(records[1].id) == 2, "a second read confirms"
        store.flush(5)
        assert store.held([records[1].id]) == ["bent"], "and repairs the faster one"
        assert ready(load_all(store, records)) == [True] * 3


def test_damage_without_another_copy_is_a_miss(tmp_path):
    disk = BentTier()
    with open_store(tmp_path, disk, encrypt=True) as store:
        records = blocks(store, 3)
        save_all(store, records)
        disk.spoil(records[1])
        ticket = load_all(store, records)
        assert ready(ticket) == [True, False, True]
        assert ticket.failure(1).reason is FailureReason.DAMAGED
        assert store.held([records[1].id]) == [None]
        assert ready(load_all(store, records)) == [True, False, True]
        save_all(store, records)
        assert ready(load_all(store, records)) == [True] * 3


def test_a_block_replaced_while_it_is_read_is_read_again(tmp_path):
    disk = BentTier()
    with open_store(tmp_path, disk) as store:
        records = blocks(store, 2)
        save_all(store, records)
        other = disk.frame(records[1])

        def bend(block_id, buffers, length):
            disk.bend = None
            data = memoryview(other)
            for buffer in buffers:
                buffer[: len(data)], data = data[: len(buffer)], data[len(buffer) :]
            return length

        disk.bend = bend
        assert ready(load_all(store, records[:1])) == [True]
        counts = store.stats().handles["bent"].counts
        assert (counts.damaged, counts.foreign) == (0, 0)
        assert disk.log == [records[0].id] * 2


def test_another_blocks_frame_is_never_taken_and_stays(tmp_path):
    """S07, S08: sound bytes of somebody else's block, of the same length, under this block's id."""
    disk = BentTier()
    with open_store(tmp_path, disk) as store:
        mine, theirs = blocks(store, 4), blocks(store, 4, seed=1, tenant="other")
        save_all(store, mine + theirs)
        for record, foreign in ((mine[0], mine[1]), (mine[1], theirs[1])):
            disk.put(record, disk.frame(foreign))
        ticket = load_all(store, mine)
        assert ready(ticket) == [False, False, True, True]
        assert {ticket.failure(i).reason for i in (0, 1)} == {FailureReason.FOREIGN}
        assert disk.held([record.id for record in mine]) == [True] * 4, "only damage removes"
        assert store.held([record.id for record in mine]) == [None, None, "bent", "bent"], "and promises nothing"
        save_all(store, mine)
        assert ready(load_all(store, mine)) == [True] * 4, "until it is stored anew"


def test_keys_that_collide_are_told_apart_by_tokens_and_parents(tmp_path):
    """S12: the same address for other tokens, another parent, place, namespace or tenant is a miss."""
    memory, disk = MemoryTier(4 * MIB), BentTier()
    with open_store(tmp_path, memory, disk) as store:
        record = blocks(store, 2)[1]
        save_all(store, [record])
        other = blocks(store, 3, seed=9, tenant="other")[2]
        for name in ("parent", "root", "index", "token_ids", "content", "tenant"):
            fields = {f: getattr(record, f) for f in record.__slots__} | {name: getattr(other, name)}
            twin = BlockRecord(**fields)
            ticket = store.load(wanted([twin]))
            assert ticket.wait(5) and ready(ticket) == [False], name
            assert ticket.failure(0).reason is FailureReason.FOREIGN, name
        swapped = BlockRecord(
            **{f: getattr(record, f) for f in record.__slots__} | {"token_ids": (1, *record.token_ids[1:])}
        )
        both = [store.load(wanted([item])) for item in (record, swapped, record)]  # not one read for all of them
        assert [ticket.wait(5) and ready(ticket) for ticket in both] == [[True], [False], [True]]


def test_a_tier_that_lies_about_lengths_costs_a_miss(tmp_path):
    disk = BentTier()
    with open_store(tmp_path, disk) as store:
        (record,) = blocks(store, 1)
        for lie in (0, -1, 1, 17, 100_000, -5_000, 1 << 60):
            save_all(store, [record])
            disk.bend = lambda _, __, length, lie=lie: max(0, length + lie) if lie else 0
            assert ready(load_all(store, [record])) == [False]
            disk.bend = None


def test_salts_keep_tenants_apart_in_every_tier(tmp_path):
    """S20, paired: another tenant hits nothing, the same one everything, in each tier alone."""
    tiers = all_kinds(tmp_path)
    with open_store(tmp_path, *tiers, load_timeout_s=5) as store:
        prompt = [int(x) for x in np.random.default_rng(0).integers(0, 50_000, 20 * 16)]
        a = records_of(prompt, tenant="a", salt=store.tenant("a").salt)
        b = records_of(prompt, tenant="b", salt=store.tenant("b").salt)
        save_all(store, a)
        for tier in tiers:
            assert sum(ready(load_all(store, b))) == 0
            ticket = load_all(store, a)
            assert {ticket.source(i) for i in range(20)} == {tier.kind}
            store.flush(10)
            for faster in tiers:  # promotion fills them again
                faster.clear()
                if faster is tier:
                    break
        as_a = [BlockRecord(**{f: getattr(r, f) for f in r.__slots__} | {"tenant": "b"}) for r in a]
        assert sum(ready(load_all(store, as_a))) == 0, "nor does asking for its ids help"


# Life and death


def test_a_store_without_tiers_is_a_store_in_which_nothing_is(tmp_path):
    """S43, and: what is switched off needs no special case."""
    with open_store(tmp_path) as store:
        records = chain(3)
        assert not store.save(records[0], kv_of(records[0]))
        assert store.held([record.id for record in records]) == [None] * 3
        assert store.remote_speed() is None
        ticket = load_all(store, records)
        assert {ticket.failure(i).reason for i in range(3)} == {FailureReason.MISSING}
        store.touch([records[0].id])
        store.end_of_turn([records[0].id])
        assert (store.clear(), store.forget("nobody"), store.pin([records[0].id], pinned=True)) == (0, 0, 0)
        assert store.flush(1)
        assert store.stats().handles == {}


def test_loading_nothing_is_finished_and_loading_the_unknown_misses(tmp_path):
    """S43."""
    with open_store(tmp_path, MemoryTier(MIB)) as store:
        assert load_all(store, []).finished
        assert store.held([]) == []
        ticket = load_all(store, chain(2))
        assert ready(ticket) == [False, False] and ticket.failure(0).reason is FailureReason.MISSING


def test_two_tiers_of_one_name_are_refused(tmp_path):
    with pytest.raises(StoreError, match="same name"):
        open_store(tmp_path, MemoryTier(MIB), MemoryTier(MIB))


def test_closing_gives_everything_back(tmp_path):
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    threads, files = set(threading.enumerate()), open_files()
    for _ in range(3):
        store = open_store(tmp_path, *all_kinds(tmp_path), encrypt=True)
        store.open()
        records = blocks(store, 20)
        for record in records:
            store.save(record, kv_of(record))
        ticket = store.load(wanted(records))
        store.close()
        store.close()
        assert ticket.wait(5) and ticket.active == 0
        assert set(threading.enumerate()) - threads == set()
    assert open_files() <= files + 1
    with open_store(tmp_path, *all_kinds(tmp_path), encrypt=True) as store:
        assert ready(load_all(store, records)) == [True] * 20, "what was queued was written before"


def test_a_closed_store_misses_and_a_store_in_use_can_be_closed(tmp_path):
    disk = BentTier()
    store = open_store(tmp_path, disk)
    count = 3 * MOST_IN_RUN  # more than two threads begin to read
    records = blocks(store, count)
    assert ready(load_all(store, records)) == [False] * count, "not open yet"
    store.open()
    save_all(store, records)
    disk.gate.clear()
    ticket = store.load(wanted(records))
    assert disk.waiting.wait(5)
    closing = threading.Thread(target=store.close)
    closing.start()
    time.sleep(0.05)
    assert ticket.active > 0, "what is read may still write"
    disk.gate.set()
    closing.join(10)
    assert ticket.finished and ticket.active == 0
    reasons = {ticket.failure(i).reason for i in range(count) if ticket.state(i) is LoadState.FAILED}
    assert reasons == {FailureReason.UNAVAILABLE}
    assert not store.save(records[0], kv_of(records[0]))
    assert ready(load_all(store, records)) == [False] * count


def test_a_key_file_that_cannot_be_read_is_a_miss_for_the_engine(tmp_path):
    disk = BentTier()
    with open_store(tmp_path, disk, encrypt=True) as store:
        records = blocks(store, 2)
        save_all(store, records)
        key_file = tmp_path / "keys" / "keyring.json"
        key_file.chmod(0o644)
        key_file.write_text("{")
        ticket = load_all(store, records)
        assert {ticket.failure(i).reason for i in range(2)} == {FailureReason.UNAVAILABLE}
        assert not store.save(records[0], kv_of(records[0]))
        with pytest.raises(StoreError):
            store.tenant("")


def test_speed_is_a_prior_until_it_is_measured(tmp_path):
    disk, remote = BentTier(), BentTier(REMOTE, "remote")
    with open_store(tmp_path, disk, remote, load_timeout_s=5) as store:
        assert store.speed("bent") == (1e-4, 1e9, 0) and store.speed("remote") == (5e-3, 1e8, 0)
        records = blocks(store, 30, kv_bytes=100_000)
        save_all(store, records)
        disk.slow_s = 0.01
        load_all(store, records)
        speed = store.speed("bent")
        assert speed.samples == 30
        assert 0.3e7 < speed.bytes_per_s < 1.1e7 * LOCAL_THREADS, "100 kB in 10 ms, by each thread"
        assert speed.latency_s < 0.02
        assert store.speed("remote").samples == 0
        disk.slow_s = 0
        for _ in range(5):
            load_all(store, records)
        assert store.speed("bent").bytes_per_s > 5e7, "what is measured later counts more"


PROMISED = ("held", "read", "write", "touch", "delete", "delete_tenant", "clear", "pin", "stats")


def test_whatever_a_tier_raises_is_a_tier_that_is_unavailable(tmp_path, caplog):
    """It costs hits, told once, and ends neither the caller nor a thread."""

    def lawless(*_args, **_options):
        raise RuntimeError("no tier may raise this")

    tier = BentTier()
    with open_store(tmp_path, tier) as store:
        records = blocks(store, 4)
        save_all(store, records[:2])
        for name in PROMISED:
            setattr(tier, name, lawless)
        for _ in range(2):
            assert store.held([record.id for record in records]) == [None] * 4
            assert not any(ready(load_all(store, records)))
            assert store.save(records[2], kv_of(records[2])) and store.flush(10)
            store.touch([records[0].id])
            assert store.stats().handles["bent"].counts.unavailable > 0
            for action in (store.clear, lambda: store.pin([records[0].id], pinned=True)):
                with pytest.raises(TierUnavailable):
                    action()
        assert store.flush(10)
        for name in PROMISED:
            delattr(tier, name)
        assert store.held([record.id for record in records]) == ["bent", "bent", None, None]
        assert ready(load_all(store, records)) == [True, True, False, False]
    assert caplog.text.count("failed as no tier may") == 1
