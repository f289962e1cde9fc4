"""Killed at any moment, or without power: the folder opens by itself, and no block is ever wrong."""

import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from store.disk_cases import MIB, Files, check_index, get, in_memory, put, record_of

from kvire.core.errors import BlockMissing
from kvire.store.disk.files import Answer
from kvire.store.disk.tier import DiskTier

PAGE = 4096


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    yield from in_memory()


def kill(*arguments: object) -> dict[str, int]:
    """Run disk_kill.py; its counts."""
    command = [sys.executable, str(Path(__file__).with_name("disk_kill.py")), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: int(count) for name, count in (part.split("=") for part in done.stdout.split())}


def test_killed_at_a_hundred_random_moments(tmp_path: Path) -> None:
    counts = kill("random", 100, tmp_path)
    assert counts["killed"] == 100 and counts["blocks"] > 2000


def test_killed_before_each_step_of_a_change(tmp_path: Path) -> None:
    assert kill("steps", tmp_path)["killed"] > 150


def test_killed_before_each_step_of_making_a_lost_index_again(tmp_path: Path) -> None:
    assert kill("rebuild", tmp_path)["killed"] > 80


def test_four_processes_start_on_a_missing_folder_and_one_is_killed_each_round(tmp_path: Path) -> None:
    """S45."""
    counts = kill("herd", tmp_path)
    assert counts["killed"] >= 10 and counts["blocks"] == 20 * 32


class LosingFiles(Files):
    """Remembers what each write replaced, until it is synced, and how long the journal was when it last was."""

    def __init__(self) -> None:
        self.unsynced: dict[str, list[tuple[int, bytes, int]]] = {}
        self.journal: tuple[bytes, int] = (b"", 0)

    def write(self, fd: int, frame: memoryview, offset: int) -> None:
        name = Path(f"/proc/self/fd/{fd}").readlink().name
        self.unsynced.setdefault(name, []).append((offset, os.pread(fd, len(frame), offset), len(frame)))
        super().write(fd, frame, offset)

    def sync(self, fd: int) -> None:
        self.unsynced.pop(Path(f"/proc/self/fd/{fd}").readlink().name, None)
        super().sync(fd)

    def execute(self, connection: sqlite3.Connection, sql: str, values: Sequence[Any] = ()) -> Answer:
        answer = super().execute(connection, sql, values)
        if "wal_checkpoint" in sql:
            [(_, _, path)] = connection.execute("PRAGMA database_list").fetchall()
            self.journal = journal_state(Path(path))
        return answer


def journal_state(index: Path) -> tuple[bytes, int]:
    """Which generation of the journal it is, and its length."""
    content = index.with_name("index.db-wal").read_bytes()
    return content[16:24], len(content)


def lose_power(folder: Path, after: Path, files: LosingFiles, rng: random.Random) -> None:
    """Copy the folder as a disk may hold it that wrote any part of what was not synced."""
    shutil.copytree(folder, after, ignore=lambda _, names: [name for name in names if name.endswith("-shm")])
    for name, writes in files.unsynced.items():
        if not (after / name).exists():
            continue
        with (after / name).open("r+b") as segment:
            for offset, old, length in reversed(writes):
                for start in range(offset - offset % PAGE, offset + length, PAGE):
                    low, high = max(start, offset), min(start + PAGE, offset + length)
                    if rng.random() < 0.3:
                        segment.seek(low)
                        segment.write(old[low - offset : high - offset])
    generation, synced = files.journal
    journal = after / "index.db-wal"
    now, length = journal_state(after / "index.db")
    os.truncate(journal, rng.randint(synced if now == generation else 0, length))


@pytest.mark.parametrize("seed", range(40))
def test_no_power(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    files = LosingFiles()
    written: dict[int, int] = {}
    after = tmp_path / "after"
    with DiskTier(tmp_path / "before", 8 * MIB, files=files) as tier:
        for version in range(rng.randint(5, 150)):
            number = rng.randrange(40)
            written[number] = version
            assert put(tier, record_of(number), version, size=rng.choice((700, 20_000)))
            if rng.random() < 0.05:
                tier._upkeep._next_sync = 0.0
                tier._upkeep.round()
        lose_power(tmp_path / "before", after, files, rng)
    with DiskTier(after, 8 * MIB) as tier:
        while tier._upkeep.round():
            pass
        for number, newest in written.items():
            try:
                version = get(tier, record_of(number))
            except BlockMissing:
                continue
            if version is None:  # as whoever reads it would find out
                tier.delete([record_of(number).id], "damaged")
            else:
                assert version <= newest
        for number in written:
            assert put(tier, record_of(number), 1000) and get(tier, record_of(number)) == 1000
    check_index(after)


def test_what_was_synced_survives_a_loss_of_power(tmp_path: Path) -> None:
    files = LosingFiles()
    with DiskTier(tmp_path / "before", 8 * MIB, files=files) as tier:
        for number in range(30):
            put(tier, record_of(number))
        tier._upkeep._next_sync = 0.0
        tier._upkeep.round()
        lose_power(tmp_path / "before", tmp_path / "after", files, random.Random(1))
    with DiskTier(tmp_path / "after", 8 * MIB) as tier:
        assert [get(tier, record_of(number)) for number in range(30)] == [0] * 30
