"""What the tests of the disk tier share: blocks whose frames can be told from wrong ones, and systems that fail."""

import errno
import os
import sqlite3
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_digest

from kvire.core.keys import BlockKey
from kvire.core.record import BlockId, BlockRecord
from kvire.store.disk.files import Files
from kvire.store.disk.tier import DiskTier

MIB = 1 << 20
FRAME_BYTES = 20_000
ROOT = BlockKey(sha256(b"a namespace").digest())
TENANT, OTHER_TENANT = b"tenant one......", b"tenant two......"
PREFIX = struct.Struct("<32sHxxI")


def key_of(sequence: int, place: int) -> BlockKey:
    return BlockKey(sha256(b"%d/%d" % (sequence, place)).digest())


def record_of(sequence: int, place: int = 0, root: BlockKey = ROOT) -> BlockRecord:
    """Block `place` of a sequence."""
    parent = key_of(sequence, place - 1) if place else root
    content = sha256(b"content %d/%d" % (sequence, place)).digest()[:16]
    return BlockRecord(BlockId(key_of(sequence, place), 0), parent, root, place, (1, 2, 3), FRAME_BYTES, content)


def records_of(sequence: int, count: int) -> list[BlockRecord]:
    return [record_of(sequence, place) for place in range(count)]


def frame_of(record: BlockRecord, version: int = 0, size: int = FRAME_BYTES) -> memoryview:
    """A frame that says whose it is and which version, with a checksum over all of it."""
    start = PREFIX.pack(record.id.key, record.id.group, version)
    body = (sha256(start).digest() * (size // 32 + 1))[: size - len(start) - 16]
    return memoryview(start + body + xxh3_128_digest(start + body))


def version_in(frame: bytes | memoryview, block_id: BlockId) -> int | None:
    """Which version of the block's frame this is; None if it is not a whole frame of that block."""
    frame = bytes(frame)
    if len(frame) < PREFIX.size + 16 or xxh3_128_digest(frame[:-16]) != frame[-16:]:
        return None
    key, group, version = PREFIX.unpack(frame[: PREFIX.size])
    return version if (key, group) == block_id else None


def put(tier: DiskTier, record: BlockRecord, version: int = 0, tenant: bytes = TENANT, **options: Any) -> bool:
    size = options.pop("size", FRAME_BYTES)
    return tier.write(record, frame_of(record, version, size), tenant, **options)


def get(tier: DiskTier, record: BlockRecord, size: int = FRAME_BYTES) -> int | None:
    """Read a block; its version, None if its bytes are not right. Raises what the tier raises."""
    buffer = memoryview(bytearray(size))
    return version_in(buffer[: tier.read(record.id, [buffer])], record.id)


def held(tier: DiskTier, records: Sequence[BlockRecord]) -> list[bool]:
    return tier.held([record.id for record in records])


def disk_usage(folder: Path) -> int:
    """Bytes that the folder takes, as `du` counts them."""
    total = 0
    for path in (folder, *folder.rglob("*")):
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def in_memory() -> Iterator[Path]:
    """A folder that no disk slows down, where there is one; the system calls are the same."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


class Clocks:
    """Two clocks under control."""

    def __init__(self, wall: float = 1_800_000_000.0) -> None:
        self.wall_s = wall
        self.elapsed_s = 0.0

    def wall(self) -> float:
        return self.wall_s

    def elapsed(self) -> float:
        return self.elapsed_s

    def wait(self, seconds: float) -> None:
        self.wall_s += seconds
        self.elapsed_s += seconds


OPERATIONS = tuple(name for name in vars(Files) if not name.startswith("_"))
# Errors of calls that no failing disk can cause, or that only look at a name that may well be absent.
HARMLESS = ("close", "unlock")


class WatchedFiles(Files):
    """Files that tell `watch` the name of every call before it is made; what it raises, the call raises."""

    def __init__(self, watch: Callable[[str, tuple[Any, ...]], None]) -> None:
        self.watch = watch

    def __getattribute__(self, name: str) -> Any:
        method = object.__getattribute__(self, name)
        if name not in OPERATIONS:
            return method

        def watched(*args: Any) -> Any:
            object.__getattribute__(self, "watch")(name, args)
            return method(*args)

        return watched


SQLITE_CODES = {
    errno.ENOSPC: (sqlite3.SQLITE_FULL, "database or disk is full"),
    errno.EIO: (sqlite3.SQLITE_IOERR, "disk I/O error"),
    errno.EMFILE: (sqlite3.SQLITE_CANTOPEN, "unable to open database file"),
    errno.EROFS: (sqlite3.SQLITE_READONLY, "attempt to write a readonly database"),
    errno.EACCES: (sqlite3.SQLITE_PERM, "access permission denied"),
}


def failure(name: str, number: int) -> Exception:
    """What a call of that name raises when the system answers `number`."""
    if name in ("execute", "execute_many", "connect"):
        code, message = SQLITE_CODES[number]
        error = sqlite3.OperationalError(message)
        error.sqlite_errorcode = code
        return error
    return OSError(number, os.strerror(number))


class FaultyFiles(WatchedFiles):
    """From call number `first` on, `count` calls fail with `number`."""

    def __init__(self, first: int = -1, count: int = 0, number: int = errno.EIO, only: Sequence[str] = ()) -> None:
        super().__init__(self._maybe_fail)
        self.calls = 0
        self.failed: list[str] = []
        self.first, self.count, self.number, self.only = first, count, number, only

    def fail_from_now(self, number: int, count: int = 1 << 60, only: Sequence[str] = ()) -> None:
        self.first, self.count, self.number, self.only = self.calls + 1, count, number, only

    def mend(self) -> None:
        self.count = 0

    def _maybe_fail(self, name: str, _: tuple[Any, ...]) -> None:
        if name in HARMLESS or (self.only and name not in self.only):
            return
        self.calls += 1
        if self.first <= self.calls < self.first + self.count:
            self.failed.append(name)
            raise failure(name, self.number)


def check_index(folder: Path) -> None:
    """Whether the index of a folder that nobody uses says what is there: every slot once, every file known."""
    connection = sqlite3.connect(folder / "index.db")
    try:
        ask = lambda sql: connection.execute(sql).fetchall()
        assert ask("PRAGMA integrity_check") == [("ok",)]
        assert ask("SELECT * FROM claims") == [], "claimed by nobody who lives"
        assert ask("SELECT id FROM segments WHERE state != 0") == []
        files = {path.name for path in folder.glob("*.seg")}
        assert files == {f"{segment:011x}-{size:x}.seg" for segment, size in ask("SELECT id, slot_bytes FROM segments")}
        used = ask("SELECT slot FROM free UNION ALL SELECT slot FROM blocks ORDER BY 1")
        assert used == ask("SELECT slot FROM free UNION SELECT slot FROM blocks ORDER BY 1"), "a slot twice"
        fresh = ask("SELECT id, fresh FROM segments ORDER BY id")
        assert used == [(segment << 20 | place,) for segment, count in fresh for place in range(count)], (
            "a slot that is nobody's, and not free"
        )
        assert ask("SELECT key, grp FROM blocks GROUP BY key, grp HAVING count(*) > 1") == [], "a block twice"
        tenants = ask("SELECT tenant, sum(slot_bytes), count(*) FROM blocks GROUP BY tenant ORDER BY tenant")
        assert tenants == ask("SELECT * FROM tenants ORDER BY tag")
    finally:
        connection.close()
