"""Candidate engines for a disk tier, measured for docs/adr/0013-disk-tier.md.

    python bench/disk_engines.py [--folder FOLDER] [--json FILE]

Needs `pip install lmdb` and 4 GB of disk.

segments  kvire's disk tier: an SQLite index, frames in preallocated segment files
lmdb      one memory-mapped B-tree with the frames as values
files     a file per frame, 256 folders, written under another name and renamed

None syncs before a write returns. Blocks of 368,900 bytes (16 tokens of
SmolLM2, float16). Cold: synced, and dropped from the page cache.
"""
# ruff: noqa: D101, D102 - three engines with the same five methods: put, get, ahead, held, close

import argparse
import contextlib
import json
import os
import random
import shutil
import sqlite3
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import lmdb
import reporting

from kvire.core.keys import BlockKey
from kvire.core.record import BlockId, BlockRecord
from kvire.store.disk.tier import DiskTier

FRAME_BYTES = 368_900
BLOCKS = 1000
READ_TOGETHER = 256
TAG = b"a tenant's tag.."
ROOT = BlockKey(bytes(32))


def record(number: int) -> BlockRecord:
    key = BlockKey(sha256(b"%d" % number).digest())
    parent = BlockKey(sha256(b"%d" % (number - 1)).digest()) if number % READ_TOGETHER else ROOT
    return BlockRecord(BlockId(key, 0), parent, ROOT, number % READ_TOGETHER, (), FRAME_BYTES, key[:16])


class Segments:
    def __init__(self, folder: Path) -> None:
        self.tier = DiskTier(folder, 4 * 10**9).open()

    def put(self, number: int, frame: memoryview) -> None:
        assert self.tier.write(record(number), frame, TAG)

    def get(self, number: int, out: memoryview) -> None:
        self.tier.read(record(number).id, [out])

    def ahead(self, numbers: range) -> None:
        self.tier.prefetch([record(number).id for number in numbers])

    def held(self, numbers: list[int]) -> int:
        return sum(self.tier.held([record(number).id for number in numbers]))

    def close(self) -> None:
        self.tier.close()


class Lmdb:
    def __init__(self, folder: Path) -> None:
        self.env = lmdb.open(str(folder), map_size=4 * 10**9, sync=False, metasync=False, readahead=True)

    def put(self, number: int, frame: memoryview) -> None:
        with self.env.begin(write=True, buffers=True) as transaction:
            transaction.put(record(number).id.key, frame)

    def get(self, number: int, out: memoryview) -> None:
        with self.env.begin(buffers=True) as transaction:
            out[:] = transaction.get(record(number).id.key)

    def ahead(self, numbers: range) -> None:
        pass  # the kernel reads ahead of a fault by itself

    def held(self, numbers: list[int]) -> int:
        with self.env.begin(buffers=True) as transaction:
            return sum(transaction.get(record(number).id.key) is not None for number in numbers)

    def close(self) -> None:
        self.env.sync(True)
        self.env.close()


class FilePerFrame:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for number in range(256):
            (folder / f"{number:02x}").mkdir(parents=True, exist_ok=True)

    def path(self, number: int) -> Path:
        name = record(number).id.key.hex()
        return self.folder / name[:2] / name

    def put(self, number: int, frame: memoryview) -> None:
        path = self.path(number)
        temporary = path.with_suffix(f".{os.getpid()}")
        with temporary.open("wb", buffering=0) as file:
            file.write(frame)
        temporary.rename(path)

    def get(self, number: int, out: memoryview) -> None:
        with self.path(number).open("rb", buffering=0) as file:
            file.readinto(out)

    def ahead(self, numbers: range) -> None:
        for number in numbers:
            with self.path(number).open("rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    def held(self, numbers: list[int]) -> int:
        return sum(self.path(number).exists() for number in numbers)

    def close(self) -> None:
        pass


ENGINES = {"segments": Segments, "lmdb": Lmdb, "files": FilePerFrame}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        report = {"machine": reporting.describe(), **compare(folder), "index": index_sizes(folder)}
    finally:
        shutil.rmtree(folder)
    print(json.dumps(report["index"], indent=1))
    if options.json:
        reporting.write(options.json, report)


def compare(folder: Path) -> dict[str, Any]:
    """Rounds of all engines in turn; medians."""
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in ENGINES}
    limits: list[dict[str, float]] = []
    for number in range(3):
        for name, engine in ENGINES.items():
            rounds[name].append(measure(folder / f"{name}-{number}", engine))
        limits.append(machine_limits(folder))
    report = {name: {key: median(rounds[name], key) for key in rounds[name][0]} for name in ENGINES}
    report["limits"] = {key: median(limits, key) for key in limits[0]}
    for name, row in report.items():
        print(name, {key: round(value, 2) for key, value in row.items()})
    return {"medians": report, "rounds": rounds, "limit_rounds": limits}


def measure(folder: Path, engine: Callable[[Path], Any]) -> dict[str, float]:
    folder.mkdir()
    store = engine(folder)
    frame, out = memoryview(os.urandom(FRAME_BYTES)), memoryview(bytearray(READ_TOGETHER * FRAME_BYTES))
    outs = [out[start : start + FRAME_BYTES] for start in range(0, len(out), FRAME_BYTES)]
    row = {}
    with timed(row, "put_us", BLOCKS):
        for number in range(BLOCKS):
            store.put(number, frame)
    asked = [random.Random(1).randrange(BLOCKS) for _ in range(128)]
    with timed(row, "held_128_us", 1):
        assert store.held(asked) == 128
    for _ in range(2):  # the first touches the memory
        with timed(row, "get_gb_s", 1):
            for number, part in enumerate(outs):
                store.get(number, part)
    row["get_gb_s"] = len(out) / row["get_gb_s"] * 1e6 / 1e9
    store.close()
    row["du_per_payload"] = disk_usage(folder) / (BLOCKS * FRAME_BYTES)
    drop(folder)
    store = engine(folder)
    with timed(row, "cold_mb_s", 1):
        store.ahead(range(READ_TOGETHER))
        for number, part in enumerate(outs):
            store.get(number, part)
    row["cold_mb_s"] = len(out) / row["cold_mb_s"]
    store.close()
    shutil.rmtree(folder)
    return row


def machine_limits(folder: Path) -> dict[str, float]:
    """A copy in memory, and reading a file past the page cache."""
    row: dict[str, float] = {}
    source, out = (
        memoryview(os.urandom(READ_TOGETHER * FRAME_BYTES)),
        memoryview(bytearray(READ_TOGETHER * FRAME_BYTES)),
    )
    for _ in range(3):
        with timed(row, "copy_gb_s", 1):
            out[:] = source
    row["copy_gb_s"] = len(out) / row["copy_gb_s"] * 1e6 / 1e9
    path = folder / "plain"
    path.write_bytes(source)
    drop(folder)
    with timed(row, "dd_direct_mb_s", 1):
        command = ["dd", f"if={path}", "of=/dev/null", "iflag=direct", "bs=4M"]
        subprocess.run(command, check=True, capture_output=True)
    row["dd_direct_mb_s"] = len(out) / row["dd_direct_mb_s"]
    path.unlink()
    return row


def index_sizes(folder: Path) -> list[dict[str, float]]:
    """Open, and look up 128 blocks, among 10^5 and 10^6; the segments are sparse files, nothing
    else differs.
    """
    rows = []
    for blocks in (100_000, 1_000_000):
        store = folder / f"index-{blocks}"
        fill_index(store, blocks)
        drop(store)
        row: dict[str, float] = {
            "blocks": blocks,
            "index_bytes_per_block": (store / "index.db").stat().st_size / blocks,
        }
        rng = random.Random(2)
        with timed(row, "open_and_first_lookup_ms", 1000):
            tier = DiskTier(store).open()
            assert sum(tier.held([record(0).id])) == 1
        time.sleep(2)  # what it reads in the background
        asked = [[record(rng.randrange(blocks)).id for _ in range(128)] for _ in range(100)]
        for when in ("first", "again"):
            times = []
            for ids in asked:
                with timed(row, "last_ms", 1000):
                    assert all(tier.held(ids))
                times.append(row.pop("last_ms"))
            row |= {f"held_128_ms_{when}_median": statistics.median(times), f"held_128_ms_{when}_max": max(times)}
        tier.close()
        rows.append(row)
        shutil.rmtree(store)
    return rows


def fill_index(store: Path, blocks: int) -> None:
    """The index as it is after that many writes."""
    capacity_bytes = blocks * 400_000
    with DiskTier(store, capacity_bytes) as tier:
        tier.write(record(0), memoryview(bytes(FRAME_BYTES)), TAG)
        assert tier.stats().blocks == 1
    connection = sqlite3.connect(store / "index.db", isolation_level=None)
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("PRAGMA cache_size = -1000000")
    [(slot_bytes, slots)] = connection.execute("SELECT slot_bytes, slots FROM segments").fetchall()
    for segment in range(2, -(-blocks // slots) + 1):
        with (store / f"{segment:011x}-{slot_bytes:x}.seg").open("wb") as file:
            file.truncate(slots * slot_bytes)
        values = (segment, slot_bytes, slots, 0, 0, slots, 0, 1.0, 0)
        connection.execute("INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
    for start in range(1, blocks, 50_000):
        connection.execute("BEGIN")
        connection.executemany(
            "INSERT INTO blocks VALUES (?, ?, ?, 0, ?, ?, ?, ?, ?, ?, ?, ?, NULL, NULL, 0)",
            (
                (
                    (number // slots + 1) << 20 | number % slots, slot_bytes, each.id.key, each.parent, each.root, TAG,
                    each.index, FRAME_BYTES, each.content, float(number), float(number // READ_TOGETHER),
                )
                for number, each in ((number, record(number)) for number in range(start, min(blocks, start + 50_000)))
            ),
        )  # fmt: skip
        connection.execute("COMMIT")
    connection.close()


def drop(folder: Path) -> None:
    """Write everything to the disk and out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def disk_usage(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


@contextlib.contextmanager
def timed(row: dict[str, float], name: str, count: float) -> Iterator[None]:
    """Microseconds for each of `count`."""
    started = time.perf_counter()
    yield
    row[name] = 1e6 * (time.perf_counter() - started) / count


def median(rows: list[dict[str, float]], key: str) -> float:
    return statistics.median(row[key] for row in rows)


if __name__ == "__main__":
    main()
