"""The disk tier, one promise a test. What all tiers promise together is in test_contract.py."""

import errno
import os
import sqlite3
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from harness.waiting import until
from store.disk_cases import (
    FRAME_BYTES,
    MIB,
    OTHER_TENANT,
    ROOT,
    TENANT,
    FaultyFiles,
    WatchedFiles,
    disk_usage,
    frame_of,
    get,
    held,
    in_memory,
    put,
    record_of,
    records_of,
    version_in,
)

from kvire.core.errors import BlockMissing, ConfigError, FrameDamaged, StoreError, TierUnavailable
from kvire.core.keys import BlockKey
from kvire.core.record import BlockId
from kvire.store.disk.files import Files
from kvire.store.disk.segments import SlotHeader
from kvire.store.disk.tier import DiskTier


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    yield from in_memory()


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    with DiskTier(tmp_path / "store", 16 * MIB) as tier:
        yield tier


def test_gives_back_what_was_written(tier: DiskTier) -> None:
    record = record_of(1)
    assert put(tier, record, 7)
    assert get(tier, record) == 7
    assert held(tier, [record, record_of(2)]) == [True, False]
    with pytest.raises(BlockMissing):
        get(tier, record_of(2))


def test_fills_several_buffers_in_order_and_no_further(tier: DiskTier) -> None:
    record = record_of(1)
    put(tier, record)
    buffers = [memoryview(bytearray(size)) for size in (100, 1, FRAME_BYTES)]
    assert tier.read(record.id, buffers) == FRAME_BYTES
    whole = b"".join(buffers)
    assert whole[:FRAME_BYTES] == bytes(frame_of(record)) and not any(whole[FRAME_BYTES:])


def test_a_frame_longer_than_the_buffers_is_damaged_but_can_be_peeked_into(tier: DiskTier) -> None:
    record = record_of(1)
    put(tier, record)
    with pytest.raises(FrameDamaged) as caught:
        get(tier, record, FRAME_BYTES - 1)
    assert caught.value.cause == "length"
    start = memoryview(bytearray(100))
    assert tier.peek(record.id, start) == 100
    assert start == frame_of(record)[:100]


def test_groups_of_one_key_are_apart(tier: DiskTier) -> None:
    record = record_of(1)
    put(tier, record)
    other = BlockId(record.id.key, 1)
    assert tier.held([other, record.id]) == [False, True]
    with pytest.raises(BlockMissing):
        tier.read(other, [memoryview(bytearray(FRAME_BYTES))])


def test_a_block_is_replaced_by_a_later_one_of_any_length(tier: DiskTier) -> None:
    record = record_of(1)
    for version, size in enumerate((FRAME_BYTES, FRAME_BYTES, 3 * FRAME_BYTES, 500)):
        assert put(tier, record, version, size=size)
        assert get(tier, record, 3 * FRAME_BYTES) == version
    assert tier.stats().blocks == 1


def test_an_earlier_frame_stays_whole_until_the_later_one_is_entered(tmp_path: Path) -> None:
    seen: list[int | None] = []
    record = record_of(1)

    def watch(name: str, _: tuple[object, ...]) -> None:
        if name == "write" and reader.stats().blocks:
            seen.append(get(reader, record))

    with DiskTier(tmp_path, 16 * MIB) as reader, DiskTier(tmp_path, files=WatchedFiles(watch)) as tier:
        put(tier, record, 0)
        put(tier, record, 1)
        assert seen == [0, 0, 0, 1]  # before each part of the second, and before the slot of the first is wiped
        assert get(tier, record) == 1


def test_a_reader_whose_slot_was_given_away_looks_again(tmp_path: Path) -> None:
    """Between a reader's look at the index and its read, another process replaces the block and reuses the slot."""
    record, others = record_of(1), records_of(2, 3)

    def watch(name: str, _: tuple[object, ...]) -> None:
        if name == "read":
            files.watch = lambda *_: None
            put(writer, record, 1)
            for other in others:
                put(writer, other)

    files = WatchedFiles(lambda *_: None)
    with DiskTier(tmp_path, 16 * MIB) as writer, DiskTier(tmp_path, files=files) as reader:
        put(writer, record, 0)
        held(reader, [record])
        files.watch = watch
        assert get(reader, record) == 1


def test_evicts_what_was_used_longest_ago_children_before_parents(tmp_path: Path) -> None:
    with DiskTier(tmp_path, 4 * MIB) as tier:
        sequences = [records_of(number, 8) for number in range(20)]
        for sequence in sequences:
            for record in sequence:
                put(tier, record)
            tier.touch([record.id for record in sequences[0]])
        here = [held(tier, sequence) for sequence in sequences]
        assert all(here[0]) and all(here[-1]) and not all(here[1]), here
        assert all(sorted(each, reverse=True) == each for each in here), here  # never a hole
        assert tier.stats().evictions["room"] == 160 - sum(map(sum, here))


def test_a_late_child_does_not_outlive_its_parent(tmp_path: Path) -> None:
    """The parent is old, the child was just written: the child still goes first."""
    with DiskTier(tmp_path, 4 * MIB) as tier:
        old = records_of(1, 4)
        for record in old[:3]:
            put(tier, record)
        for number in range(10, 14):
            put(tier, record_of(number))
        put(tier, old[3])
        for number in range(100, 400):
            put(tier, record_of(number))
            here = held(tier, old)
            assert sorted(here, reverse=True) == here
            if not any(here):
                break
        assert not any(here)


def test_pinned_blocks_stay_and_writes_without_room_are_refused(tmp_path: Path) -> None:
    with DiskTier(tmp_path, 4 * MIB) as tier:
        sequence = records_of(1, 300)
        kept = [record for record in sequence if put(tier, record) and tier.pin([record.id], pinned=True)]
        assert held(tier, kept) == [True] * len(kept)
        assert 50 < len(kept) < 300
        assert tier.stats().refused == {"pinned": 300 - len(kept)}
        assert tier.pin([record.id for record in sequence], pinned=False) == len(kept)
        assert put(tier, record_of(2))


def test_a_frame_that_can_never_fit_is_refused_and_costs_nobody_else(tmp_path: Path) -> None:
    with DiskTier(tmp_path, 4 * MIB) as tier:
        put(tier, record_of(1))
        assert not put(tier, record_of(2), size=4 * MIB)
        assert tier.stats().refused == {"full": 1}
        assert held(tier, [record_of(1)]) == [True]


def test_a_new_size_of_frames_takes_room_from_an_old_one(tmp_path: Path) -> None:
    with DiskTier(tmp_path, 8 * MIB) as tier:
        for number in range(400):
            put(tier, record_of(number))
        for number in range(1000, 1040):
            assert put(tier, record_of(number), size=100_000)
            assert get(tier, record_of(number), 100_000) == 0
        assert disk_usage(tmp_path) <= 8 * MIB
        until(lambda: sum(held(tier, [record_of(number) for number in range(1000, 1040)])) > 20)


def test_deletes_and_does_not_bring_back(tmp_path: Path) -> None:
    with DiskTier(tmp_path, 16 * MIB) as tier:
        sequence = records_of(1, 4)
        for record in sequence:
            put(tier, record)
        assert tier.delete([sequence[3].id, record_of(9).id], "damaged") == 1
        assert held(tier, sequence) == [True, True, True, False]
        assert tier.stats().evictions == {"damaged": 1}
    (tmp_path / "index.db").unlink()
    with DiskTier(tmp_path, 16 * MIB) as tier:
        until(lambda: held(tier, sequence)[:3] == [True] * 3)
        assert held(tier, sequence[3:]) == [False]


def test_forgets_a_tenant_and_overwrites_its_blocks(tmp_path: Path) -> None:
    with DiskTier(tmp_path, 16 * MIB) as tier:
        for number in range(40):
            put(tier, record_of(number), tenant=TENANT if number % 2 else OTHER_TENANT)
        assert tier.tenants()[OTHER_TENANT].blocks == 20
        assert tier.delete_tenant(OTHER_TENANT) == 20
        assert held(tier, [record_of(number) for number in range(40)]) == [False, True] * 20
        assert OTHER_TENANT not in {entry.tenant_tag for entry in tier.entries()}
    at_rest = b"".join(path.read_bytes() for path in tmp_path.glob("*.seg"))
    assert bytes(frame_of(record_of(1)))[100:200] in at_rest
    assert bytes(frame_of(record_of(2)))[100:200] not in at_rest


def test_clears_for_every_process_and_for_good(tmp_path: Path) -> None:
    with DiskTier(tmp_path, 16 * MIB) as tier, DiskTier(tmp_path) as other:
        sequence = records_of(1, 30)
        for record in sequence:
            put(tier, record)
        tier.note_namespace(ROOT, {"model": "m"})
        assert sum(held(other, sequence)) == 30
        assert tier.clear() == 30
        assert not any(held(other, sequence)) and not any(held(tier, sequence))
        assert other.stats().blocks == 0
        assert disk_usage(tmp_path) < MIB
        assert put(other, sequence[0]) and get(tier, sequence[0]) == 0
        assert tier.namespaces() == {ROOT: {"model": "m"}}
    with DiskTier(tmp_path) as again:
        assert sum(held(again, sequence)) == 1


def test_lists_everything_once(tier: DiskTier) -> None:
    records = [record_of(number) for number in range(700)]
    for record in records:
        put(tier, record, size=500, ttl_s=50.0 if record.id.key[0] % 2 else None)
    tier.pin([records[5].id], pinned=True)
    entries = list(tier.entries())
    assert sorted(entry.id for entry in entries) == sorted(record.id for record in records)
    assert [entry.id for entry in entries if entry.pinned] == [records[5].id]
    for entry in entries:
        assert entry.frame_bytes == 500 and entry.root == ROOT and entry.tenant_tag == TENANT and entry.index == 0
        assert entry.expires == (pytest.approx(entry.created + 50) if entry.id.key[0] % 2 else None)


def test_tells_children_namespaces_and_same_content(tier: DiskTier) -> None:
    other_root = BlockKey(bytes(32))
    first, second = record_of(1), record_of(2)
    put(tier, first)
    put(tier, second)
    assert tier.children(ROOT, 0, 5) == [second.id, first.id]
    assert tier.children(ROOT, 0, 1) == [second.id]
    assert tier.children(ROOT, 1, 5) == [] == tier.children(first.id.key, 0, 5)
    assert tier.roots_of(first.content) == [ROOT] and tier.roots_of(bytes(16)) == []
    tier.note_namespace(ROOT, {"model": "a"})
    tier.note_namespace(other_root, {"model": "b"})
    tier.note_namespace(ROOT, {"model": "c"})
    assert tier.namespaces() == {ROOT: {"model": "c"}, other_root: {"model": "b"}}
    for number in range(100):
        tier.note_namespace(BlockKey(number.to_bytes(32, "big")), {})
    assert len(tier.namespaces()) == 32
    with pytest.raises(ValueError, match="namespace"):
        tier.note_namespace(ROOT, {"model": "x" * 5000})


def test_writes_a_day_are_limited_for_all_processes_together(tmp_path: Path) -> None:
    with (
        DiskTier(tmp_path, 16 * MIB, writes_per_day_bytes=10 * 20_480) as tier,
        DiskTier(tmp_path, writes_per_day_bytes=10 * 20_480) as other,
    ):
        kept = [put(tier if number % 2 else other, record_of(number)) for number in range(12)]
        assert kept == [True] * 10 + [False] * 2
        assert tier.stats().refused == {"wear": 1} == other.stats().refused


def test_a_smaller_limit_is_kept_after_restart(tmp_path: Path) -> None:
    records = [record_of(number) for number in range(600)]
    with DiskTier(tmp_path, 16 * MIB) as tier:
        for record in records:
            put(tier, record)
    with DiskTier(tmp_path, 6 * MIB) as tier:
        until(lambda: disk_usage(tmp_path) <= 6 * MIB)
        while tier._upkeep.round():
            pass
        here = held(tier, records)
        assert sum(here) < 300
        assert sum(here[300:]) > 100, "what was used last stays"
        assert put(tier, record_of(1000)) and get(tier, record_of(1000)) == 0
        assert disk_usage(tmp_path) <= 6 * MIB
        assert all(get(tier, record) == 0 for record, here in zip(records, held(tier, records), strict=True) if here)


def test_refuses_what_cannot_be_a_store(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least"):
        DiskTier(tmp_path, MIB)
    with pytest.raises(StoreError, match="how large"):
        DiskTier(tmp_path / "new").open()
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreError, match="not a folder"):
        DiskTier(tmp_path / "file", 16 * MIB).open()
    assert (tmp_path / "file").read_text() == "not a folder"


def test_leaves_another_version_alone(tmp_path: Path) -> None:
    with DiskTier(tmp_path, 16 * MIB) as tier:
        put(tier, record_of(1))
    index = tmp_path / "index.db"
    with closing(sqlite3.connect(index)) as connection:
        connection.executescript("ALTER TABLE written RENAME TO worn; PRAGMA user_version = 99")
    content = index.read_bytes()
    with pytest.raises(StoreError, match="another version"):
        DiskTier(tmp_path, 16 * MIB).open()
    tier = DiskTier(tmp_path, 16 * MIB)
    with pytest.raises(TierUnavailable, match="another version"):
        held(tier, [record_of(1)])
    tier.close()
    assert index.read_bytes() == content and list(tmp_path.glob("*.seg"))


def test_only_the_owner_can_read_what_it_makes(tmp_path: Path) -> None:
    os.umask(0)
    try:
        with DiskTier(tmp_path / "a" / "store", 16 * MIB) as tier:
            put(tier, record_of(1))
            paths = list((tmp_path / "a" / "store").iterdir())
            assert {path.suffix for path in paths} == {".db", ".db-wal", ".db-shm", ".seg", ""}
            assert {stat.S_IMODE(path.lstat().st_mode) for path in paths} == {0o600}
            assert stat.S_IMODE((tmp_path / "a" / "store").stat().st_mode) == 0o700
    finally:
        os.umask(0o022)


def test_s56_follows_no_link_that_somebody_planted(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"untouched" * 10_000)
    before = victim.read_bytes()
    store = tmp_path / "store"
    store.mkdir()
    names = [f"{segment:011x}-5000.seg" for segment in range(1, 50)]
    for name in (*names, "index.db", "index.db-wal", "index.db-shm", "lock"):
        (store / name).symlink_to(victim)
    with DiskTier(store, 8 * MIB) as tier:
        for number in range(600):
            assert put(tier, record_of(number))
        assert get(tier, record_of(599)) == 0
        tier.clear()
    assert victim.read_bytes() == before and victim.stat().st_nlink == 1


def test_a_segment_that_was_replaced_by_a_link_is_gone(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    with DiskTier(tmp_path / "store", 8 * MIB) as tier:
        other = DiskTier(tmp_path / "store")
        other._upkeep.start = lambda: None  # it would open the segment before
        for number in range(20):
            put(tier, record_of(number))
        assert held(other, [record_of(3)]) == [True]
        [segment] = (tmp_path / "store").glob("*.seg")
        victim.write_bytes(segment.read_bytes())
        before = victim.read_bytes()
        segment.unlink()
        segment.symlink_to(victim)
        with pytest.raises(BlockMissing):
            get(other, record_of(3))
        for number in range(30):
            assert put(other, record_of(number), 1) and get(other, record_of(number)) == 1
        other.close()
        assert victim.read_bytes() == before


def test_a_slot_that_was_written_over_by_somebody_is_a_miss(tmp_path: Path) -> None:
    with DiskTier(tmp_path, 16 * MIB) as tier:
        put(tier, record_of(1))
        put(tier, record_of(2))
        [segment] = tmp_path.glob("*.seg")
        content = segment.read_bytes()
        segment.write_bytes(content[20_480:40_960] + content[:20_480])  # each in the other's place
        for record in (record_of(1), record_of(2)):
            with pytest.raises(BlockMissing):
                get(tier, record)
        assert held(tier, [record_of(1), record_of(2)]) == [True, False], "where it was found meanwhile"
        assert get(tier, record_of(1)) == 0


def test_any_bit_of_a_head_matters() -> None:
    record = record_of(3, 2)
    head = SlotHeader(record.id.key, 1, record.parent, ROOT, TENANT, record.content, 2, 999, 12.5, None)
    encoded = head.encode()
    assert SlotHeader.decode(encoded) == head
    for bit in range(8 * len(encoded)):
        flipped = bytearray(encoded)
        flipped[bit // 8] ^= 1 << bit % 8
        assert SlotHeader.decode(flipped) is None
    assert SlotHeader.decode(encoded[:-1]) is None


def test_reads_ahead_in_runs_and_only_where_there_is_something(tmp_path: Path) -> None:
    asked: list[tuple[int, int]] = []
    files = WatchedFiles(lambda name, args: asked.append(args[1:]) if name == "read_ahead" else None)
    with DiskTier(tmp_path, 16 * MIB, files=files) as tier:
        for number in range(6):
            put(tier, record_of(number))
        files.is_cached = lambda _, offset: 20_480 <= offset < 2 * 20_480  # of block 1 all, of the others nothing
        wanted = [record_of(number).id for number in (3, 4, 5, 2, 77, 1, 0)]
        tier.prefetch(wanted)  # before anybody has looked where they are
        tier.locate(wanted)
        tier.prefetch(wanted)
        until(lambda: len(asked) == 3)
        one = 192 + FRAME_BYTES
        assert asked == [(3 * 20_480, 2 * 20_480 + one), (2 * 20_480, one), (0, one)]


@pytest.mark.parametrize("bits", [0o020, 0o002])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, bits: int) -> None:
    """They could put another index there, or blocks."""
    with DiskTier(tmp_path / "store", 16 * MIB) as tier:
        put(tier, record_of(1))
    (tmp_path / "store").chmod(0o700 | bits)
    with pytest.raises(StoreError, match=r"others may write to the store .* chmod 700"):
        DiskTier(tmp_path / "store", 16 * MIB).open()
    (tmp_path / "store").chmod(0o755)
    with DiskTier(tmp_path / "store") as tier:
        assert get(tier, record_of(1)) == 0


def test_what_is_read_ahead_is_in_memory_then() -> None:
    files = Files()
    with tempfile.TemporaryFile() as file:
        file.write(bytes(3 << 20))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        offsets = range(0, 3 << 20, 4096)
        if all(files.is_cached(file.fileno(), offset) for offset in offsets):
            pytest.skip("this file system keeps its files in memory")
        files.read_ahead(file.fileno(), 4096, (2 << 20) + 4096)
        assert all(files.is_cached(file.fileno(), offset) for offset in offsets[1 : 2 + (2 << 20) // 4096])


def test_an_error_while_reading_ahead_is_nobody_s(tmp_path: Path) -> None:
    files = FaultyFiles()
    with DiskTier(tmp_path, 16 * MIB, files=files) as tier:
        put(tier, record_of(1))
        tier.locate([record_of(1).id])
        files.is_cached = lambda *_: False
        files.fail_from_now(errno.EIO, only=("read_ahead",))
        tier.prefetch([record_of(1).id])
        until(lambda: files.failed == ["read_ahead"])
        tier._prefetcher.close()  # it has done what it does about it
        assert tier.stats().unavailable == 0
        assert get(tier, record_of(1)) == 0


def test_close_leaves_no_thread_and_no_file_open(tmp_path: Path) -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    with DiskTier(tmp_path, 16 * MIB) as warm:
        put(warm, record_of(1))
    before = threading.active_count(), open_files()
    for _ in range(3):
        tier = DiskTier(tmp_path)
        assert get(tier, record_of(1)) == 0
        tier.prefetch([record_of(1).id])
        tier.close()
        tier.close()
        with pytest.raises(TierUnavailable):
            get(tier, record_of(1))
    assert (threading.active_count(), open_files()) == before


def test_the_frames_of_these_tests_tell_wrong_ones() -> None:
    record = record_of(1)
    frame = bytes(frame_of(record, 3))
    assert version_in(frame, record.id) == 3
    assert version_in(frame, record_of(2).id) is None
    assert version_in(frame[:-1], record.id) is None
    assert version_in(frame[:500] + b"\x00\x01" + frame[502:], record.id) is None
