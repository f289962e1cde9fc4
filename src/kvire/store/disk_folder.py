"""One opened folder of a disk tier: its index, its segments, and this process among those that share it.

    lock                  byte 0: whoever makes or remakes the index; the others: one for each process at work
    index.db, -wal, -shm  the index (disk_index.py)
    *.seg                 the segments (disk_segments.py)

A process that is at work holds the lock of its byte. The system gives it back when the process ends, however it ends;
what a process without its lock had claimed is free again.
"""
# ruff: noqa: S608 - nothing but numbers and names of ours is put into a statement's text

import errno
import logging
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

from kvire.core.errors import StoreError
from kvire.store.disk_index import READY, SCANNING, DiskIndex, IndexDamagedError, is_damage
from kvire.store.disk_room import MIN_CAPACITY_BYTES, Evicted, Room, Segment, journal_bytes_for
from kvire.store.disk_segments import SegmentFiles
from kvire.store.files import Files

log = logging.getLogger(__name__)

INDEX, LOCK = "index.db", "lock"
INDEX_FILES = (INDEX, f"{INDEX}-wal", f"{INDEX}-shm")
MOST_OWNERS = 1 << 40
LOCK_TIMEOUT_S = 5.0


class DiskFolder:
    """An open folder. Thread-safe; `retire` it when `current` says that it no longer is what lies at its path."""

    def __init__(self, files: Files, path: Path, folder: int, lock: int) -> None:
        self.path = path
        self.files = files
        self.segments = SegmentFiles(files, folder)
        self.owner = 0
        self.users = 0  # calls under way; it is not retired before they end
        self.stale = False
        self._guard = Lock()
        self.index: DiskIndex  # set by `open`
        self.capacity_bytes: int  # set by `open`: of the folder, as of then
        self._folder = folder
        self._lock = lock

    @classmethod
    def open(
        cls, files: Files, path: Path, capacity_bytes: int | None, new_bytes: Callable[[Path], int] | None, now: float
    ) -> "DiskFolder":
        """Open what is there; make what is missing, and the index again if it is damaged.

        capacity_bytes: the limit from now on, for all who share the folder; None: the one it has, or if it has none,
        new_bytes of its path. Raises OSError, sqlite3.Error, StoreError.
        """
        folder = files.open_folder(path)
        try:
            lock = _open_lock(files, folder)
        except BaseException:
            files.close(folder)
            raise
        self = cls(files, path, folder, lock)
        try:
            self._enter()
            with self._alone():
                self._open_or_remake(capacity_bytes, new_bytes, now)
        except BaseException:
            self.retire()
            raise
        return self

    def current(self) -> bool:
        """Whether this still is what lies at the path. Raises OSError if nobody can tell."""
        return self.index.current()

    def alive(self, owner: int) -> bool:
        """Whether the process of that number is at work."""
        if owner == self.owner or not self.files.lock(self._lock, owner):
            return True
        self.files.unlock(self._lock, owner)
        return False

    @contextmanager
    def room(self, evicted: Evicted, *, may_grow: bool = True) -> Iterator[Room]:
        """One transaction of the index. evicted: is told what went, once that is certain."""
        gone = Evicted()
        with self.index.transaction() as run:
            yield Room(run, self.owner, may_grow=may_grow, evicted=gone, remove=self._remove, wipe=self._wipe)
        evicted.reasons.update(gone.reasons)
        evicted.tenants.update(gone.tenants)

    def remake(self, when: Callable[[], bool]) -> None:
        """Throw the index away, if `when` still says so when nobody else can; whoever opens the folder makes another.

        The segments stay: they are taken in again from what lies in them, unless they were removed before.
        """
        with self._alone():
            if when():
                self._remove_index()

    def clear(self, keep: tuple[str, ...]) -> None:
        """Remove every segment and the index, but for what is in the tables named in `keep`."""
        with self._alone(), self.index.lock:
            kept = {table: self.index.query(f"SELECT * FROM {table}") for table in keep}
            for segment, slot_bytes in self.segments.found():
                self.segments.remove(segment, slot_bytes)
            fresh = self._make_index(self.index.journal_bytes)
            try:
                with fresh.transaction() as run:
                    for table, rows in kept.items():
                        for row in rows:
                            run(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", *row)
            finally:
                fresh.retire()

    def retire(self) -> None:
        """Close everything. Nobody may use it any more."""
        self._close_index()
        self.segments.close()
        self.files.close(self._lock)
        self.files.close(self._folder)

    def _enter(self) -> None:
        while True:
            owner = 1 + secrets.randbelow(MOST_OWNERS)
            if self.files.lock(self._lock, owner):
                self.owner = owner
                return

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else, in any process, makes or remakes the index meanwhile."""
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        with self._guard:
            while not self.files.lock(self._lock, 0):
                if time.monotonic() > deadline:
                    raise TimeoutError(errno.ETIMEDOUT, f"{self.path / LOCK} is held by another process")
                time.sleep(0.005)
            try:
                yield
            finally:
                self.files.unlock(self._lock, 0)

    def _open_or_remake(self, capacity_bytes: int | None, new_bytes: Callable[[Path], int] | None, now: float) -> None:
        try:
            self._open_index(capacity_bytes, new_bytes)
            self._compare_segments(now)
        except (sqlite3.DatabaseError, IndexDamagedError) as error:
            if not is_damage(error):
                raise
            log.warning("the index of %s is damaged and made again from its segments: %s", self.path, error)
            if capacity_bytes is None:
                capacity_bytes = self._legible_limit()
            self._close_index()
            self._remove_index()
            self._open_index(capacity_bytes, new_bytes)
            self._compare_segments(now)

    def _open_index(self, capacity_bytes: int | None, new_bytes: Callable[[Path], int] | None) -> None:
        for name in (LOCK, *INDEX_FILES):
            if self.files.is_regular(self._folder, name) is False:
                self.files.unlink(self._folder, name)  # a link somebody put there; SQLite would follow it
        journal_bytes = journal_bytes_for(capacity_bytes or 0)
        if self.files.is_regular(self._folder, INDEX):
            self.index = DiskIndex(self.files, self.path / INDEX, journal_bytes)
        elif capacity_bytes is None and new_bytes is None:
            raise no_store(self.path)
        else:
            self.index = self._make_index(journal_bytes)
        stored = self._stored_limit()
        limit_bytes = stored if capacity_bytes is None else capacity_bytes
        if limit_bytes is None:
            if new_bytes is None:
                raise no_store(self.path)
            limit_bytes = new_bytes(self.path)
        if limit_bytes != stored:
            with self.index.transaction() as run:
                run("INSERT OR REPLACE INTO settings VALUES ('capacity_bytes', ?)", limit_bytes)
        self.capacity_bytes = limit_bytes
        self.index.journal_bytes = journal_bytes_for(limit_bytes)

    def _stored_limit(self) -> int | None:
        """The limit that the folder's index has; None if it was given none."""
        rows = self.index.query("SELECT value FROM settings WHERE name = 'capacity_bytes'")
        return int(rows[0][0]) if rows else None

    def _legible_limit(self) -> int | None:
        """The limit, of an index that is damaged somewhere; None if it cannot be read there."""
        with suppress(sqlite3.Error, IndexDamagedError, AttributeError, TypeError, ValueError):
            if (limit_bytes := self._stored_limit()) is not None and limit_bytes >= MIN_CAPACITY_BYTES:
                return limit_bytes
        return None

    def _make_index(self, journal_bytes: int) -> DiskIndex:
        self._remove_index()
        self.files.close(self.files.create(self._folder, INDEX))  # SQLite's own files get its mode
        return DiskIndex(self.files, self.path / INDEX, journal_bytes)

    def _remove_index(self) -> None:
        for name in INDEX_FILES:
            self.files.unlink(self._folder, name)

    def _close_index(self) -> None:
        if hasattr(self, "index"):
            with suppress(sqlite3.Error):
                self.index.retire()

    def _compare_segments(self, now: float) -> None:
        """Take in files that the index does not know; let go of those that are no longer there."""
        found = set(self.segments.found())
        if {row[:2] for row in self.index.query("SELECT id, slot_bytes FROM segments")} == found:
            return
        with self.room(Evicted()) as room:
            run = room.run
            known = run("SELECT id, slot_bytes, slots, state FROM segments")
            for gone, size, count, state in known:
                if state in (READY, SCANNING) and not self.segments.exists(gone, size):
                    room.drop(Segment(gone, size, count))
            for segment, slot_bytes in found - {(row[0], row[1]) for row in known}:
                slots = self.segments.slots(segment, slot_bytes) if self.segments.exists(segment, slot_bytes) else 0
                if slots == 0:
                    self.segments.remove(segment, slot_bytes)
                else:
                    run(
                        "INSERT INTO segments VALUES (?, ?, ?, ?, 0, ?, 0, ?, 0)",
                        segment, slot_bytes, slots, SCANNING, slots, now,
                    )  # fmt: skip

    def _wipe(self, slot: int, slot_bytes: int) -> None:
        with suppress(FileNotFoundError):
            self.segments.wipe(slot, slot_bytes, 0)

    def _remove(self, segment: Segment) -> None:
        self.segments.remove(segment.id, segment.slot_bytes)


def no_store(path: Path) -> StoreError:
    """For those who did not say how large a new store may become."""
    return StoreError(f"{path} holds no store yet: say how large it may become")


def _open_lock(files: Files, folder: int) -> int:
    """The lock file, made if it is missing."""
    if files.is_regular(folder, LOCK) is False:
        files.unlink(folder, LOCK)
    with suppress(FileNotFoundError):
        return files.open(folder, LOCK)
    try:
        return files.create(folder, LOCK)
    except FileExistsError:
        return files.open(folder, LOCK)  # another process was faster
