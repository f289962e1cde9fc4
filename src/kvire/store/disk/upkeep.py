"""Background work of a disk tier, on its own thread, in small transactions for short waits."""
# ruff: noqa: S608 - nothing but numbers and names of ours is put into a statement's text

import logging
import threading
import time
from collections.abc import Iterable
from contextlib import suppress

from kvire.core.errors import KvireError
from kvire.core.record import BlockId
from kvire.store.disk.access import DiskAccess
from kvire.store.disk.allocator import Evicted, Segment, SlotAllocator, spare_bytes
from kvire.store.disk.folder import DiskFolder
from kvire.store.disk.index import MOST_ASKED, Location
from kvire.store.disk.rows import GONE, LAST_S, MAKING, READY, SCANNING, ascending
from kvire.store.disk.segments import (
    HEAD_BYTES,
    SLOT_BITS,
    IndexDamagedError,
    SlotHeader,
    place_of,
    segment_of,
    slots_of,
)
from kvire.store.disk.writer import DiskWriter

log = logging.getLogger(__name__)

EVERY_S = 0.25
SYNC_EVERY_S = 5.0
EXPIRED_AT_ONCE, EXPIRE_EVERY_S = 256, 0.5  # a clock that is put forward must not empty the store at once
FROM_THE_FUTURE_S = 300.0  # clocks of processes differ by less
SCANNED_AT_ONCE = 256  # slots
MOST_TOUCHED = 1 << 17
NEXT_TO_SCAN = "SELECT id, slot_bytes, slots, scanned, used FROM segments WHERE state = ? ORDER BY id LIMIT 1"


class Touches:
    """Used blocks and their times of use, until they are written. Thread-safe; ignores more when
    full.
    """

    def __init__(self) -> None:
        self._used: dict[BlockId, float] = {}
        self._lock = threading.Lock()

    def add(self, ids: Iterable[BlockId], now: float) -> None:
        """One time for all of them."""
        with self._lock:
            if len(self._used) < MOST_TOUCHED:
                self._used.update(dict.fromkeys(ids, now))

    def flush(self, folder: DiskFolder) -> None:
        """Write the times, parents first: at no moment is a parent older than its child."""
        with self._lock:
            used, self._used = self._used, {}
        rows = [(stamp, stamp, *block_id) for block_id, stamp in used.items()]
        most = min(MOST_ASKED, folder.index.rows_at_once)
        for start in range(0, len(rows), most):
            part = rows[start : start + most]
            with folder.index.transaction() as run:
                folder.index.run_many(
                    f"UPDATE blocks SET used = max(used, ?), expires = max(expires, min(? + ttl_s, {LAST_S})) "
                    "WHERE key = ? AND grp = ?",
                    part,
                )
                run(
                    "UPDATE segments SET used = max(used, ?) WHERE id IN "
                    f"(SELECT slot >> {SLOT_BITS} FROM blocks WHERE key IN ({', '.join('?' * len(part))}))",
                    max(row[0] for row in part),
                    *(row[2] for row in part),
                )


class Upkeep:
    """The thread. An error ends one round and counts as the tier's outage; the next round tries
    again.
    """

    def __init__(self, access: DiskAccess, touches: Touches, writer: DiskWriter, evicted: Evicted) -> None:
        self._access = access
        self._touches = touches
        self._writer = writer
        self._evicted = evicted
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._rounds = threading.Lock()
        self._known: DiskFolder | None = None
        self._next_sync = self._next_expiry = 0.0

    def start(self) -> None:
        """Start the thread, if it is not running."""
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None and not self._ending.is_set():
                self._thread = threading.Thread(target=self._run, name="disk upkeep", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End after the current round, writing pending touches. Idempotent."""
        self._ending.set()
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
            with suppress(KvireError), self._access.changes() as folder:
                if folder is not None:
                    self._touches.flush(folder)

    def round(self) -> bool:
        """Do the pending work; True if there is more. Raises TierUnavailable."""
        with self._rounds, self._access.changes() as folder:
            if folder is None:
                return False
            clock = time.monotonic()
            if folder is not self._known:
                self._known, self._next_sync = folder, 0.0
                folder.index.warm()
            self._writer.settle(folder)
            self._touches.flush(folder)
            more = self._sweep(folder)
            more |= self._scan(folder)
            more |= self._shrink(folder)
            if clock >= self._next_expiry:
                self._next_expiry = clock + EXPIRE_EVERY_S
                self._expire(folder)
            if clock >= self._next_sync:
                self._next_sync = clock + SYNC_EVERY_S
                look_over(folder)
                more |= self._reclaim(folder)
                self._back_from_the_future(folder)
                self._sync(folder)
            elif folder.index.needs_checkpoint():
                self._sync(folder)
            return more

    def _run(self) -> None:
        while not self._ending.is_set():
            more = False
            try:
                more = self.round()
            except KvireError:
                pass  # counted where it was raised
            except Exception:  # no error may end the rounds: no other thread frees, expires or syncs
                log.exception("the upkeep of a store failed")
            self._ending.wait(0.001 if more else EVERY_S)

    def _sweep(self, folder: DiskFolder) -> bool:
        """Remove blocks of dropped segments from the index."""
        gone = folder.index.query("SELECT id, slot_bytes FROM segments WHERE state = ? LIMIT 1", GONE)
        for segment, slot_bytes in gone:
            if folder.segments.exists(segment, slot_bytes):
                raise IndexDamagedError("it says that a segment is gone, and it is there")
            with folder.allocator(self._evicted) as allocator:
                allocator.sweep(segment, "room", folder.index.rows_at_once)
        return bool(gone)

    def _scan(self, folder: DiskFolder) -> bool:
        """Take in the blocks of a segment that the index did not know."""
        rows = folder.index.query(NEXT_TO_SCAN, SCANNING)
        for *fields, scanned, used in rows:
            segment = Segment(*fields)
            places = range(scanned, min(segment.slots, scanned + min(SCANNED_AT_ONCE, folder.index.rows_at_once)))
            try:
                if folder.segments.slots(segment.id, segment.slot_bytes) != segment.slots:
                    raise IndexDamagedError("its segments are not as large as it says")
                slots = [segment.id << SLOT_BITS | place for place in places]
                heads = [(slot, folder.segments.head(slot, segment.slot_bytes)) for slot in slots]
            except FileNotFoundError:
                with folder.allocator(self._evicted) as allocator:
                    allocator.drop(segment)
                return True
            with folder.allocator(self._evicted) as allocator:
                now_at = allocator.run("SELECT scanned FROM segments WHERE id = ? AND state = ?", segment.id, SCANNING)
                if now_at == [(scanned,)]:  # else another process was faster
                    for slot, head in heads:
                        take_in(allocator, slot, segment.slot_bytes, head, used)
                    state = READY if places.stop == segment.slots else SCANNING
                    allocator.run(
                        "UPDATE segments SET scanned = ?, state = ? WHERE id = ?", places.stop, state, segment.id
                    )
                    if not allocator.run("SELECT 1 FROM segments WHERE state = ? LIMIT 1", SCANNING):
                        allocator.run("DELETE FROM pins")
                if allocator.run(NEXT_TO_SCAN, SCANNING) == rows:
                    raise IndexDamagedError("a segment's state cannot be set")
        return bool(rows)

    def _shrink(self, folder: DiskFolder) -> bool:
        """Remove segments while the folder exceeds a lowered limit."""
        if spare_bytes(folder.index.query) >= 0:
            return False
        must_be_as_long_as_files(folder)
        with folder.allocator(self._evicted) as allocator:
            for segment in () if spare_bytes(allocator.run) >= 0 else allocator.coldest(None, before=float("inf"))[:1]:
                log.warning("%s is above its limit: %d slots are given back", folder.path, segment.slots)
                allocator.drop(segment)
                return True
        return False

    def _expire(self, folder: DiskFolder) -> None:
        now, most = self._access.now(), min(EXPIRED_AT_ONCE, folder.index.rows_at_once)
        due = "FROM blocks WHERE expires <= ? AND NOT pinned ORDER BY expires LIMIT ?"
        if not folder.index.query(f"SELECT 1 {due}", now, 1):
            return
        with folder.allocator(self._evicted) as allocator:
            remove_rows(
                folder, allocator, f"SELECT slot, slot_bytes, frame_bytes, tenant {due}", (now, most), "expired"
            )

    def _reclaim(self, folder: DiskFolder) -> bool:
        """Free claims of ended processes."""
        owners = folder.index.query("SELECT owner FROM claims UNION SELECT owner FROM segments WHERE state = ?", MAKING)
        dead = [owner for (owner,) in owners if not folder.alive(owner)]
        for owner in dead:
            with folder.allocator(self._evicted) as allocator:
                reclaim(allocator, owner)
        return bool(dead)

    def _back_from_the_future(self, folder: DiskFolder) -> None:
        """Reset times ahead of the clock: such blocks would otherwise outlive all others."""
        now, future = self._access.now(), self._access.latest() + FROM_THE_FUTURE_S
        late = (
            "SELECT b.slot FROM (SELECT DISTINCT slot_bytes FROM segments) s, tenants t, blocks b "
            "WHERE b.slot_bytes = s.slot_bytes AND b.tenant = t.tag AND b.pinned IN (0, 1) AND b.used > ? LIMIT ?"
        )
        before: list[tuple[object, ...]] = []
        while slots := folder.index.query(late, future, folder.index.rows_at_once):
            if slots == before:
                raise IndexDamagedError("a block's time cannot be set")
            before = slots
            with folder.index.transaction() as run:
                for (slot,) in slots:
                    run(
                        f"UPDATE blocks SET used = ?, expires = min(? + ttl_s, {LAST_S}) WHERE slot = ?", now, now, slot
                    )
                run("UPDATE segments SET used = ? WHERE used > ?", now, future)

    @staticmethod
    def _sync(folder: DiskFolder) -> None:
        """Sync data first, then the index, so that a power loss leaves few entries without data."""
        unsynced = folder.index.query("SELECT id, slot_bytes, used FROM segments WHERE unsynced AND state = ?", READY)
        for segment, slot_bytes, _ in unsynced:
            with suppress(FileNotFoundError):
                folder.segments.sync(segment, slot_bytes)
        if unsynced:
            with folder.index.transaction() as run:
                for segment, _, used in unsynced:
                    run("UPDATE segments SET unsynced = 0 WHERE id = ? AND used = ?", segment, used)
        grown = folder.index.needs_checkpoint()
        if unsynced or grown:
            folder.index.checkpoint(truncate=grown)


def look_over(folder: DiskFolder) -> None:
    """Check rows that no call reads: those only counted or only searched.

    Raises IndexDamagedError.
    """
    spare_bytes(folder.index.query)
    folder.index.query("SELECT id, slot_bytes, slots, state, owner, fresh, scanned, used FROM segments")
    folder.index.query("SELECT tag, bytes, blocks FROM tenants")
    folder.index.query("SELECT root, fields FROM namespaces")


def must_be_as_long_as_files(folder: DiskFolder) -> None:
    """Check that segments are as large as the index says, before blocks are evicted for room.

    Raises IndexDamagedError.
    """
    rows = folder.index.query("SELECT id, slot_bytes, slots FROM segments WHERE state = ?", READY)
    for segment, slot_bytes, slots in rows:
        with suppress(FileNotFoundError):
            if folder.segments.slots(segment, slot_bytes) != slots:
                raise IndexDamagedError("its segments are not as large as it says")


def take_in(allocator: SlotAllocator, slot: int, slot_bytes: int, head: SlotHeader | None, used: float) -> None:
    """Enter a slot's content into the index: the block that its head names, or nothing."""
    if head is not None and head.frame_bytes <= slot_bytes - HEAD_BYTES:
        same = allocator.run("SELECT slot, slot_bytes, created FROM blocks WHERE key = ? AND grp = ?", *head.id)
        if any(old == slot for old, _, _ in same):
            raise IndexDamagedError("it looks again for what it has")
        if not any(created >= head.created for _, _, created in same):
            for old, old_bytes, _ in same:
                allocator.wipe(old, old_bytes)
                allocator.run("DELETE FROM blocks WHERE slot = ?", old)
            pinned = allocator.run("SELECT 1 FROM pins WHERE key = ? AND grp = ?", *head.id)
            allocator.enter(slot, slot_bytes, head, used, pinned=bool(pinned))
            return
    if head is not None:
        allocator.wipe(slot, slot_bytes)
    allocator.run("INSERT INTO free VALUES (?, ?)", slot, slot_bytes)


def reclaim(allocator: SlotAllocator, owner: int) -> None:
    """Free the claims of the process of that number, and the segments that it did not finish."""
    for slot, slot_bytes in allocator.run("SELECT slot, slot_bytes FROM claims WHERE owner = ?", owner):
        allocator.free(slot, slot_bytes, owner)
    rows = allocator.run("SELECT id, slot_bytes, slots FROM segments WHERE owner = ? AND state = ?", owner, MAKING)
    if allocator.run("SELECT slot FROM claims WHERE owner = ? LIMIT 1", owner):
        raise IndexDamagedError("a claim cannot be freed")
    for row in rows:
        segment = Segment(*row)
        if allocator.run("SELECT 1 FROM blocks WHERE slot BETWEEN ? AND ? LIMIT 1", *slots_of(segment.id)):
            raise IndexDamagedError("it has blocks in a segment that was never finished")
        allocator.drop(segment)


def remove_rows(folder: DiskFolder, allocator: SlotAllocator, sql: str, values: tuple[object, ...], reason: str) -> int:
    """Remove the blocks that a query names (slot, slot_bytes, frame_bytes, tenant); returns how
    many.

    Their heads are wiped before the index forgets them, so that none comes back if the index is
    lost; forgotten blocks are overwritten.
    """
    rows = allocator.run(sql, *values)
    for slot, slot_bytes, frame_bytes, tenant in rows:
        if frame_bytes > slot_bytes - HEAD_BYTES:
            raise IndexDamagedError("a frame is longer than its slot")
        with suppress(FileNotFoundError):
            folder.segments.wipe(slot, slot_bytes, frame_bytes if reason == "forgotten" else 0)
        allocator.run("DELETE FROM blocks WHERE slot = ?", slot)
        allocator.evicted.add(reason, tenant)
    if rows and allocator.run("SELECT 1 FROM blocks WHERE slot = ?", rows[0][0]):
        raise IndexDamagedError("a removed block is still there")
    return len(rows)


def overwrite_free(folder: DiskFolder, at_once: int) -> None:
    """Overwrite free slots: they hold earlier frames of blocks that were written again."""
    after: int | None = -1
    while after is not None:
        with folder.allocator(Evicted()) as allocator:
            rows = allocator.run(
                "SELECT slot, slot_bytes FROM free WHERE slot > ? ORDER BY slot LIMIT ?", after, at_once
            )
            for slot, slot_bytes in rows:
                with suppress(FileNotFoundError):
                    folder.segments.wipe(slot, slot_bytes, slot_bytes - HEAD_BYTES)
        after = ascending([slot for slot, _ in rows], after) if rows else None


def vanished(folder: DiskFolder, allocator: SlotAllocator, block_id: BlockId, place: Location) -> None:
    """Handle a block that is not where the index says.

    Drops its segment if the file is missing, else believes the slot. Raises IndexDamagedError if
    the index contradicts itself about the block.
    """
    rows = allocator.run(
        "SELECT slot_bytes, frame_bytes, tenant FROM blocks WHERE slot = ? AND key = ? AND grp = ?",
        place.slot, *block_id,
    )  # fmt: skip
    segments = allocator.run("SELECT id, slot_bytes, slots, state FROM segments WHERE id = ?", segment_of(place.slot))
    if [row[:2] for row in rows] != [(place.slot_bytes, place.frame_bytes)]:
        raise IndexDamagedError("its tables contradict each other about a block")
    if [row[1] for row in segments] != [place.slot_bytes]:
        raise IndexDamagedError("its tables contradict each other about a segment")
    [(*fields, state)], head = segments, None
    if folder.segments.exists(segment_of(place.slot), place.slot_bytes):
        head = folder.segments.head(place.slot, place.slot_bytes)
        if head is not None and (head.id, head.frame_bytes) == (block_id, place.frame_bytes):
            if place_of(place.slot) < folder.segments.slots(segment_of(place.slot), place.slot_bytes):
                return  # it was written again just now
            head = None  # the file was cut
    elif state != GONE:
        allocator.drop(Segment(*fields))
    allocator.run("DELETE FROM blocks WHERE slot = ?", place.slot)
    allocator.evicted.add("damaged", rows[0][2])
    if allocator.run("SELECT 1 FROM free WHERE slot = ?", place.slot):  # its segment is there
        allocator.run("DELETE FROM free WHERE slot = ?", place.slot)
        take_in(allocator, place.slot, place.slot_bytes, head, head.created if head else 0.0)
