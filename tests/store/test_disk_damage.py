"""Nothing that the index says ends a caller, and nothing that it says costs more than it must: it is made again."""

import errno
import random
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from harness.waiting import until
from store.disk_cases import (
    MIB,
    ROOT,
    TENANT,
    FaultyFiles,
    WatchedFiles,
    check_index,
    get,
    held,
    in_memory,
    put,
    record_of,
    records_of,
)
from store.index_damage import (
    BLOCKS,
    CAPACITY_BYTES,
    GIVEN_UP,
    LENGTH,
    Tally,
    Trial,
    damages,
    make,
    settle,
    size_of,
    tier_of,
)

from kvire.core.errors import BlockMissing, TierUnavailable
from kvire.store.disk.folder import WRITING_BYTE
from kvire.store.disk.index import DiskIndex, is_damage
from kvire.store.disk.tier import DiskTier

NOTE = {"weights": "w", "block_size": "16"}  # what `make` notes of ROOT


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    yield from in_memory()


def change(folder: Path, *statements: str) -> None:
    """Change an index that nobody has open."""
    with closing(sqlite3.connect(folder / "index.db")) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def here(tier: DiskTier) -> int:
    """How many of BLOCKS are there; all that are have to be right."""
    count = 0
    for record in BLOCKS:
        try:
            assert get(tier, record, size_of(record)) == 0
            count += 1
        except (BlockMissing, TierUnavailable):
            tier.clocks.wait(10.0)
    return count


def mend(tier: DiskTier) -> None:
    """What upkeep and those who ask do in a minute."""
    looks = (lambda: held(tier, BLOCKS), lambda: here(tier), lambda: list(tier.entries()))
    for action in (*looks, lambda: settle(tier), lambda: settle(tier)):
        try:
            action()
        except TierUnavailable:
            tier.clocks.wait(10.0)


def opened(folder: Path, capacity_bytes: int | None = None) -> DiskTier:
    return tier_of(folder, capacity_bytes).open()


def test_random_damages(tmp_path: Path) -> None:
    tally = Tally()
    for _ in damages(tmp_path, bits=40, bursts=20, seed=7, tally=tally):
        pass
    tally.check()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_a_thousand_random_damages(tmp_path: Path, part: int) -> None:
    tally = Tally()
    for _ in damages(tmp_path, bits=400, bursts=100, seed=100_000 + 500 * part, tally=tally):
        pass
    tally.check()


COLUMNS = {
    "blocks": ("slot_bytes", "key", "grp", "parent", "root", "tenant", "place", "frame_bytes", "created", "used"),
    "segments": ("slot_bytes", "slots", "state", "fresh", "used"),
    "settings": ("value",),
    "tenants": ("bytes", "blocks"),
    "namespaces": ("root", "fields", "noted"),
    "free": ("slot_bytes",),
}
IMPOSSIBLE = ("'text'", "x'ff'", "-5e12", "9e300", "9223372036854775807", "CAST(x'fffe' AS TEXT)")


@pytest.mark.parametrize("table", COLUMNS)
def test_what_no_column_can_hold_is_damage_and_mended(tmp_path: Path, table: str) -> None:
    tally, template, folder = Tally(), tmp_path / "template", tmp_path / "folder"
    make(template)
    for column, value in [(column, value) for column in COLUMNS[table] for value in IMPOSSIBLE]:
        shutil.copytree(template, folder)
        change(folder, f"UPDATE {table} SET {column} = {value}")
        trial = Trial(tally, f"{table}.{column} = {value}")
        tier = trial.opened(folder, None)
        trial.use(tier, random.Random(len(value)))
        tier.close()
        found, _ = trial.count(folder)
        tally.check()
        assert found == len(BLOCKS) - len(GIVEN_UP), trial.name
        check_index(folder)
        shutil.rmtree(folder)


LIES = {
    "a segment that was never finished": "UPDATE segments SET state = 1, owner = 7 WHERE id = 1",
    "a segment to be looked at again": "UPDATE segments SET state = 2, scanned = 0 WHERE id = 1",
    "a segment that is gone": "UPDATE segments SET state = 3 WHERE id = 1",
    "a segment with more slots than its file": "UPDATE segments SET slots = 1048000 WHERE id = 1",
    "a segment with slots of another size": "UPDATE segments SET slot_bytes = slot_bytes + 4096 WHERE id = 1",
    "slots given away twice": "UPDATE segments SET fresh = 3",
    "free slots that hold blocks": "INSERT INTO free SELECT slot, slot_bytes FROM blocks",
    "a small limit": "UPDATE settings SET value = 4194304 / 4 WHERE name = 'capacity_bytes'",
    "segments without end": "UPDATE sqlite_sequence SET seq = 9223372036854775807",
    "other sizes of frames": "UPDATE blocks SET frame_bytes = frame_bytes - 1",
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_that_could_be_true_costs_no_block(tmp_path: Path, lie: str) -> None:
    make(tmp_path)
    change(tmp_path, LIES[lie])
    new = records_of(5_000, 30)
    with closing(opened(tmp_path)) as tier:
        mend(tier)
        for record in new:
            try:
                put(tier, record, size=size_of(record))
            except TierUnavailable:
                tier.clocks.wait(10.0)
        mend(tier)
        assert here(tier) == len(BLOCKS)
        for record in new:
            assert not held(tier, [record])[0] or get(tier, record, 20_000) == 0
        assert tier.stats().limit_bytes == CAPACITY_BYTES


def test_pins_notes_and_the_limit_outlive_the_index(tmp_path: Path) -> None:
    make(tmp_path)
    change(tmp_path, "UPDATE segments SET used = 'never'")
    with closing(opened(tmp_path)) as tier:
        mend(tier)
        assert here(tier) == len(BLOCKS)
        pinned = {entry.id for entry in tier.entries() if entry.pinned}
        assert pinned == {record.id for record in BLOCKS[-LENGTH:]}
        assert tier.namespaces() == {ROOT: NOTE} and tier.stats().limit_bytes == CAPACITY_BYTES
    check_index(tmp_path)


def test_a_statement_that_finds_no_end_is_ended(tmp_path: Path) -> None:
    """It cannot be known whether it would end; none of ours takes so long."""
    endless = (
        "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 3000000) SELECT max(i) AS id FROM n"
    )
    with DiskTier(tmp_path, 4 * MIB) as tier, tier._access.reads() as folder:
        with pytest.raises(sqlite3.Error) as ended:
            folder.index.query(endless, cpu_s=0.02)
        assert is_damage(ended.value)
        assert folder.index.query(endless, cpu_s=60.0) == [(3_000_000,)]


def test_a_number_of_a_version_alone_is_damage(tmp_path: Path) -> None:
    make(tmp_path)
    change(tmp_path, "PRAGMA user_version = 5")
    with closing(opened(tmp_path)) as tier:
        mend(tier)
        assert here(tier) == len(BLOCKS)


def test_nobody_checkpoints_while_another_commits(tmp_path: Path) -> None:
    """SQLite before 3.51.3 may lose what was committed then."""
    order: list[str] = []
    waits = threading.Event()

    def watch(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "lock" and arguments[1] == WRITING_BYTE:
            waits.set()
        if name == "execute" and "wal_checkpoint" in arguments[1]:
            order.append("checkpoint")
            waits.set()

    one, two = DiskTier(tmp_path, 4 * MIB), DiskTier(tmp_path, 4 * MIB, files=WatchedFiles(watch))
    for tier in (one, two):
        tier._upkeep.start = lambda: None
        assert put(tier, record_of(1))
    with one._access.writes() as mine, two._access.writes() as theirs:
        waits.clear(), order.clear()
        other = threading.Thread(target=theirs.index.checkpoint)
        with mine.index.transaction() as run:
            other.start()
            until(waits.is_set)
            run("UPDATE blocks SET used = used")
            order.append("commit")
        other.join()
    assert order == ["commit", "checkpoint"]
    one.close(), two.close()


def test_what_living_processes_write_is_not_taken_from_them(tmp_path: Path) -> None:
    """Nor what they have claimed for it."""

    def watch(name: str, _: tuple[Any, ...]) -> None:
        if name == "write":  # in the middle of a block
            other._upkeep._next_sync = 0.0
            other._upkeep.round()

    writer, other = DiskTier(tmp_path, 4 * MIB, files=WatchedFiles(watch)), DiskTier(tmp_path, 4 * MIB)
    for tier in (writer, other):
        tier._upkeep.start = lambda: None
    assert put(other, record_of(1))
    assert put(writer, record_of(2)), writer.stats()
    assert get(other, record_of(2)) == 0
    writer.close(), other.close()


def test_a_head_is_written_when_its_frame_is_there(tmp_path: Path) -> None:
    """Who dies in between leaves a slot that stands for nothing, or for the block before, whole."""
    for step in range(1, 7):
        folder = tmp_path / str(step)
        with DiskTier(folder, 4 * MIB) as tier:
            put(tier, record_of(1))
            tier.delete([record_of(1).id], "damaged")
            put(tier, record_of(2))
        files = FaultyFiles()
        dying = DiskTier(folder, 4 * MIB, files=files)
        dying._upkeep.start = lambda: None
        assert held(dying, [record_of(2)]) == [True]
        files.fail_from_now(errno.EIO, only=("write",))
        files.first += step - 1
        for version in (1, 2):
            with suppress(TierUnavailable):
                put(dying, record_of(2), version)
        dying.close()
        (folder / "index.db").unlink()
        with tier_of(folder) as tier:
            settle(tier)
            with suppress(BlockMissing):
                assert get(tier, record_of(2)) is not None, "a head before its frame"


def test_a_schema_that_is_spelt_otherwise_meanwhile_is_damage(tmp_path: Path) -> None:
    """SQLite knows `SLOT` for `slot`, and tells it so, to a connection that is opened now."""
    make(tmp_path)
    with closing(opened(tmp_path)) as tier:
        index = tmp_path / "index.db"
        content = index.read_bytes()
        index.write_bytes(content.replace(b"blocks (slot INTEGER", b"blocks (SLOT INTEGER"))
        with tier._access.reads() as folder:
            while folder.index._idle:
                folder.index._idle.pop().close()
        mend(tier)
        assert here(tier) == len(BLOCKS)


@pytest.mark.parametrize("call", [lambda tier: list(tier.entries()), lambda tier: tier.delete_tenant(TENANT)])
def test_rows_out_of_order_are_damage_and_no_loop_without_an_end(tmp_path, monkeypatch, call):
    execute = DiskIndex._execute

    def turned(index, connection, sql, *rest):
        rows = execute(index, connection, sql, *rest)
        return rows[::-1] if "ORDER BY slot" in sql else rows

    with DiskTier(tmp_path / "disk", 16 * MIB) as tier:
        for place in range(4):
            put(tier, record_of(1, place))
            put(tier, record_of(1, place), 1)  # written again: the slots before are free
        with monkeypatch.context() as patch:
            patch.setattr(DiskIndex, "_execute", turned)
            with pytest.raises(TierUnavailable, match="not in order"):
                call(tier)
        assert len(list(tier.entries())) in {0, 4}
