"""Blocks of local tiers are read several at once: faster, and never another result than one by one."""

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from store.blocks import chain, frame_of, kv_of, tenant_key, wanted
from store.disk_cases import WatchedFiles
from store.stores import load_all, open_store, ready, save_all

from kvire.codec.frame import Frames
from kvire.core.record import BlockRecord
from kvire.store.disk.tier import DiskTier
from kvire.store.handle import TierHandle
from kvire.store.memory.tier import MemoryTier
from kvire.store.ticket import FailureReason, LoadState
from kvire.store.tier import LendsFrames, ReadsRuns, Tier

MIB = 1 << 20
FRAMES = Frames(tenant_key)


@contextmanager
def opened(kind: str, folder: Path, files: WatchedFiles | None = None) -> Iterator[Tier]:
    tier = MemoryTier(16 * MIB) if kind == "memory" else DiskTier(folder, 32 * MIB, files=files)
    try:
        yield tier
    finally:
        tier.close()


def put(tier: Tier, record: BlockRecord, version: int = 0) -> None:
    assert tier.write(record, frame_of(record, version=version), tenant_key(record.tenant).tag)


def fetched(handle: TierHandle, records: list[BlockRecord]) -> list[bytes | None]:
    outs = [memoryview(bytearray(record.kv_bytes)) for record in records]
    done = handle.fetch_run(list(zip(records, outs, strict=True)))
    return [bytes(out) if is_done else None for out, is_done in zip(outs, done, strict=True)]


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_run_gives_what_single_reads_give(kind, tmp_path):
    with opened(kind, tmp_path) as tier:
        assert isinstance(tier, LendsFrames if kind == "memory" else ReadsRuns)
        handle = TierHandle(tier, FRAMES)
        records = chain(100)
        there = [record for i, record in enumerate(records) if i % 7 != 3]
        for record in there[::2] + there[1::2]:  # so that neighbours in the chain are none in the file
            put(tier, record)
        before = tier.stats()
        orders = (records, records[::-1], records[::3], records[5:6], [])
        for order in orders:
            expected = [None if i % 7 == 3 else bytes(kv_of(r)) for i, r in enumerate(records)]
            assert fetched(handle, order) == [expected[record.index] for record in order]
        after = tier.stats()
        reads = sum(record in there for order in orders for record in order)
        assert after.reads - before.reads == reads == handle.counts.loaded_blocks
        assert after.read_bytes - before.read_bytes == reads * FRAMES.frame_bytes(records[0])
        tier.clear()
        assert set(fetched(handle, records)) == {None}


@pytest.mark.parametrize("encrypt", [False, True], ids=["checksummed", "sealed"])
@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_damage_in_a_run_is_one_miss_and_no_more(kind, encrypt, tmp_path):
    with opened(kind, tmp_path / "disk") as tier, open_store(tmp_path, tier, encrypt=encrypt) as store:
        records = chain(40, salt=store.tenant("").salt)
        save_all(store, records)
        for number in (7, 20, 21, 39):
            spoil(tier, records[number], store)
        ticket = load_all(store, records)
        bad = [i for i in range(40) if ticket.state(i) is not LoadState.READY]
        assert bad == [7, 20, 21, 39]
        assert {ticket.failure(i).reason for i in bad} == {FailureReason.DAMAGED}
        assert store.stats().handles[tier.name].counts.damaged == 4
        assert tier.held([record.id for record in records]) == [i not in bad for i in range(40)], (
            "deleted, the rest stays"
        )
        assert ready(load_all(store, records)) == [i not in bad for i in range(40)]


def spoil(tier: Tier, record: BlockRecord, store) -> None:
    """Change one byte of a block's KV where it lies."""
    buffer = memoryview(bytearray(2 * record.kv_bytes))
    length = tier.read(record.id, [buffer])
    buffer[length - 500] ^= 1
    assert tier.write(record, buffer[:length], store.tenant(record.tenant).tag)


def test_a_broken_sector_costs_the_block_that_lies_there(tmp_path):
    """S45."""
    records = chain(20)
    slot_bytes = 8192
    broken_at = range(9 * slot_bytes, 10 * slot_bytes)

    def watch(name, args):
        if name == "read":
            _, buffers, offset = args
            if offset < broken_at.stop and broken_at.start < offset + sum(map(len, buffers)):
                raise OSError(errno.EIO, "a broken sector")

    files = WatchedFiles(lambda *_: None)
    with opened("disk", tmp_path, files) as tier:
        for record in records:
            put(tier, record)
        files.watch = watch
        handle = TierHandle(tier, FRAMES)
        assert fetched(handle, records) == [None if i == 9 else bytes(kv_of(r)) for i, r in enumerate(records)]


def test_a_segment_that_is_gone_is_a_miss_and_no_trouble_with_the_disk(tmp_path):
    records = chain(12)

    def gone(name, _):
        if name in {"open", "read"}:  # of a segment: whether it was open already is the other thread's affair
            raise FileNotFoundError(errno.ENOENT, "another process removed the segment")

    files = WatchedFiles(lambda *_: None)
    with opened("disk", tmp_path, files) as tier:
        for record in records:
            put(tier, record)
        handle = TierHandle(tier, FRAMES)
        assert tier.held([record.id for record in records]) == [True] * 12
        files.watch = gone
        assert fetched(handle, records) == [None] * 12
        files.watch = lambda *_: None
        assert tier.stats().unavailable == 0 and not tier.degraded


def test_blocks_replaced_while_a_run_reads_them_come_whole_or_not_at_all(tmp_path):
    """S11: a run does not look at slots twice as single reads do; the checksums have to tell."""
    for kind in ("memory", "disk"):
        with opened(kind, tmp_path / kind) as tier:
            handle = TierHandle(tier, FRAMES)
            records = chain(16, kv_bytes=60_000)
            versions = {r.id: {bytes(kv_of(r, version)) for version in range(3)} for r in records}
            for record in records:
                put(tier, record)
            done = threading.Event()

            def replace(tier=tier, records=records, done=done) -> None:
                version = 0
                while not done.is_set():
                    version += 1
                    for record in records:
                        put(tier, record, version % 3)

            writer = threading.Thread(target=replace)
            writer.start()
            try:
                whole = 0
                for _ in range(60):
                    for record, kv in zip(records, fetched(handle, records), strict=True):
                        assert kv is None or kv in versions[record.id]
                        whole += kv is not None
            finally:
                done.set()
                writer.join(20)
            assert whole > 0


def test_a_lent_frame_stays_until_it_is_given_back(tmp_path):
    with opened("memory", Path()) as tier:
        records = chain(3)
        for record in records:
            put(tier, record)
        ids = [record.id for record in records]
        with tier.lent(ids) as frames:
            tier.clear()
            for record in chain(60, seed=9, kv_bytes=200_000):  # all of the arena, if it were free
                tier.write(record, frame_of(record), tenant_key("").tag)
            for frame, record in zip(frames, records, strict=True):
                assert bytes(frame) == bytes(frame_of(record))
        assert tier.held(ids) == [False] * 3


def test_frames_in_several_pieces_are_read_all_the_same(tmp_path):
    """An arena that is full of holes has no room in one piece."""
    with opened("memory", Path()) as tier:
        small = chain(4000, kv_bytes=3000)
        for record in small:
            put(tier, record)
        tier.delete([record.id for record in small[::2]], "room")
        large = chain(10, seed=1, kv_bytes=300_000)
        for record in large:
            put(tier, record)
        with tier.lent([record.id for record in large]) as frames:
            assert None in frames, "the case that this is about"
        outs = wanted(large)
        handle = TierHandle(tier, FRAMES)
        for want in outs:
            handle.fetch(want.record, want.out)
            assert want.out == kv_of(want.record)
