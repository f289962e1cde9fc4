"""One opened folder of a disk tier: index, segments, and the processes that share it.

    lock                  byte 0: held to make or remake the index
                          last byte: held to write to the index or checkpoint it
                          others: one per process at work
    index.db, -wal, -shm  the index (disk/index.py)
    *.seg                 the segments (disk/segments.py)

A process that is at work holds the lock of its byte. The system gives it back when the process
ends, however it ends; claims of a process without its lock are free again.
"""
# ruff: noqa: S608 - nothing but numbers and names of ours is put into a statement's text

import errno
import logging
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from threading import Lock

from kvire.core.errors import StoreError
from kvire.store.disk.allocator import (
    Evicted,
    Segment,
    SlotAllocator,
    capacity_for,
    journal_bytes_for,
    note_capacity,
    noted_capacity,
)
from kvire.store.disk.files import Files
from kvire.store.disk.index import DiskIndex, is_damage
from kvire.store.disk.rows import MOST_OWNERS, READY, SCANNING
from kvire.store.disk.salvage import Salvaged, salvage
from kvire.store.disk.segments import IndexDamagedError, SegmentFiles

log = logging.getLogger(__name__)

INDEX, LOCK = "index.db", "lock"
INDEX_FILES = (INDEX, f"{INDEX}-wal", f"{INDEX}-shm", f"{INDEX}-journal")
MAKING_BYTE, WRITING_BYTE = 0, MOST_OWNERS + 1  # of the lock file
LOOK_EVERY_S = 0.0005  # whether the other process is done
LOCK_TIMEOUT_S = 5.0


class DiskFolder:
    """An open folder. Thread-safe; `retire` it when `current` says that another one is at its
    path.
    """

    def __init__(self, files: Files, path: Path, folder: int, lock: int) -> None:
        self.path = path
        self.files = files
        self.segments = SegmentFiles(files, folder)
        self.owner = 0
        self.users = 0  # calls under way; it is not retired before they end
        self.stale = False
        self._guards = {MAKING_BYTE: Lock(), WRITING_BYTE: Lock()}  # among the threads of this process
        self.index: DiskIndex  # set by `open`
        self.capacity_bytes: int  # set by `open`: of the folder, as of then
        self._folder = folder
        self._lock = lock

    @classmethod
    def open(
        cls, files: Files, path: Path, capacity_bytes: int | None, new_bytes: Callable[[Path], int] | None, now: float
    ) -> "DiskFolder":
        """Open the folder; make missing parts, and the index again if it is damaged.

        capacity_bytes: the limit from now on, for all processes that share the folder; None: its
            existing one, or if it has none, new_bytes of its path.

        Raises OSError, sqlite3.Error, StoreError.
        """
        folder = files.open_folder(path)
        try:
            if files.mode(folder) & 0o022:
                raise StoreError(f"others may write to the store in {path}, and so change it: chmod 700 {path}")
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
        """Whether this folder still is the one at the path. Raises OSError if that cannot be
        told.
        """
        return self.index.current()

    def alive(self, owner: int) -> bool:
        """Whether the process of that number is at work."""
        if not 1 <= owner <= MOST_OWNERS:
            raise IndexDamagedError("it knows an owner that never was")
        if owner == self.owner or not self.files.lock(self._lock, owner):
            return True
        self.files.unlock(self._lock, owner)
        return False

    @contextmanager
    def allocator(self, evicted: Evicted, *, may_grow: bool = True) -> Iterator[SlotAllocator]:
        """One transaction of the index.

        evicted: collects evicted blocks; filled once the transaction is certain.
        """
        gone = Evicted()
        with self.index.transaction() as run:
            yield SlotAllocator(run, self.owner, may_grow=may_grow, evicted=gone, remove=self._remove, wipe=self._wipe)
        evicted.reasons.update(gone.reasons)
        evicted.tenants.update(gone.tenants)

    def remake(self) -> None:
        """Make a new index in place of this damaged one, unless another process did.

        The segments stay: opening the folder takes in their blocks again.
        """
        with self._alone():
            if self.index.is_in_place():
                left = self._legible()
                self._make_again(left.capacity_bytes or self.capacity_bytes, left).retire()

    def clear(self, keep: tuple[str, ...]) -> None:
        """Remove every segment and the index, except for the tables named in `keep`."""
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
        """Close everything. The folder must not be used any more."""
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

    def _alone(self) -> AbstractContextManager[None]:
        """Exclusive right, among all processes, to make or remake the index."""
        return self._holding(MAKING_BYTE)

    def _writing(self) -> AbstractContextManager[None]:
        """Exclusive right, among all processes, to write to the index or checkpoint it."""
        return self._holding(WRITING_BYTE)

    @contextmanager
    def _holding(self, byte: int) -> Iterator[None]:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        with self._guards[byte]:
            while not self.files.lock(self._lock, byte):
                if time.monotonic() > deadline:
                    raise TimeoutError(errno.ETIMEDOUT, f"{self.path / LOCK} is held by another process")
                time.sleep(LOOK_EVERY_S)
            try:
                yield
            finally:
                self.files.unlock(self._lock, byte)

    def _open_or_remake(self, capacity_bytes: int | None, new_bytes: Callable[[Path], int] | None, now: float) -> None:
        try:
            self._open_index(capacity_bytes, new_bytes)
            self._compare_segments(now)
        except (sqlite3.DatabaseError, IndexDamagedError) as error:
            if not is_damage(error):
                raise
            log.warning("the index of %s is damaged and made again from its segments: %s", self.path, error)
            left = self._legible()
            self._close_index()
            limit_bytes = capacity_bytes or left.capacity_bytes
            if limit_bytes is None and new_bytes is not None:
                limit_bytes = new_bytes(self.path)
            self._make_again(limit_bytes, left).retire()
            self._open_index(limit_bytes, new_bytes)
            self._compare_segments(now)

    def _open_index(self, capacity_bytes: int | None, new_bytes: Callable[[Path], int] | None) -> None:
        for name in (LOCK, *INDEX_FILES):
            if self.files.is_regular(self._folder, name) is False:
                self.files.unlink(self._folder, name)  # a foreign link; SQLite would follow it
        journal_bytes = journal_bytes_for(capacity_bytes or 0)
        if self.files.is_regular(self._folder, INDEX):
            self.index = DiskIndex(self.files, self.path / INDEX, journal_bytes, self._writing)
        elif capacity_bytes is None and new_bytes is None:
            raise no_store(self.path)
        else:
            self.index = self._make_index(journal_bytes)
        noted = noted_capacity(self.index.query)
        limit_bytes = noted if capacity_bytes is None else capacity_bytes
        if limit_bytes is None:
            if new_bytes is None:
                raise no_store(self.path)
            limit_bytes = new_bytes(self.path)
        if limit_bytes != noted:
            with self.index.transaction() as run:
                note_capacity(run, limit_bytes)
        self.capacity_bytes = limit_bytes
        self.index.journal_bytes = journal_bytes_for(limit_bytes)

    def _legible(self) -> Salvaged:
        """The readable rest of a damaged index."""
        return salvage(self.index) if hasattr(self, "index") else Salvaged()

    def _make_again(self, capacity_bytes: int | None, left: Salvaged) -> DiskIndex:
        """A new index in place of a damaged one, with the rows saved from that.

        capacity_bytes: None for the size of the existing segments.
        """
        limit_bytes = capacity_bytes or self._capacity_for_all()
        fresh = self._make_index(journal_bytes_for(limit_bytes))
        try:
            left.enter(fresh)
            with fresh.transaction() as run:
                note_capacity(run, limit_bytes)
        except BaseException:
            fresh.retire()
            raise
        return fresh

    def _capacity_for_all(self) -> int:
        """The smallest limit under which every segment can stay."""
        found = self.segments.found()
        slots = [self.segments.slots(segment, slot_bytes) for segment, slot_bytes in found]
        used_bytes = sum(count * slot_bytes for count, (_, slot_bytes) in zip(slots, found, strict=True))
        return capacity_for(used_bytes, len(found), sum(slots))

    def _make_index(self, journal_bytes: int) -> DiskIndex:
        self._remove_index()
        self.files.close(self.files.create(self._folder, INDEX))  # SQLite's own files get its mode
        return DiskIndex(self.files, self.path / INDEX, journal_bytes, self._writing)

    def _remove_index(self) -> None:
        for name in INDEX_FILES:
            self.files.unlink(self._folder, name)

    def _close_index(self) -> None:
        if hasattr(self, "index"):
            with suppress(sqlite3.Error):
                self.index.retire()

    def _compare_segments(self, now: float) -> None:
        """Take in files that the index does not know; drop segments whose files are gone."""
        found = set(self.segments.found())
        if {row[:2] for row in self.index.query("SELECT id, slot_bytes FROM segments")} == found:
            return
        with self.allocator(Evicted()) as allocator:
            run = allocator.run
            known = run("SELECT id, slot_bytes, slots, state FROM segments")
            sizes = {segment: slot_bytes for segment, slot_bytes, _, _ in known}
            if any(sizes.get(segment, slot_bytes) != slot_bytes for segment, slot_bytes in found):
                raise IndexDamagedError("a segment's slots are of another size than it says")
            for gone, size, count, state in known:
                if state in (READY, SCANNING) and not self.segments.exists(gone, size):
                    allocator.drop(Segment(gone, size, count))
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
    """The error for a new store without a size."""
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
