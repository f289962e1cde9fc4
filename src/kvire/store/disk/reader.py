"""Reads frames from a disk tier's folder: location, slot, and retries for blocks that moved."""

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress

from kvire.core.errors import BlockMissing, FrameDamaged, TierUnavailable
from kvire.core.record import BlockId
from kvire.store.disk.access import ERRORS, DiskAccess
from kvire.store.disk.allocator import Evicted
from kvire.store.disk.folder import DiskFolder
from kvire.store.disk.index import Location, is_damage
from kvire.store.disk.segments import is_head_of
from kvire.store.disk.upkeep import vanished
from kvire.store.tier import Buffer, ReadOutcome

log = logging.getLogger(__name__)

RUN_BYTES = 3 << 20  # read by one request of slots that follow each other: 88 % of the disk's speed, 75 by single slots
MOST_WAITING = 1 << 14


class ReadAhead:
    """A thread that reads blocks into the page cache ahead of their loads.

    It ignores errors: the load's own read will meet them.
    """

    def __init__(self, access: DiskAccess) -> None:
        self._access = access
        self._wanted: deque[Location] = deque(maxlen=MOST_WAITING)
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, places: Sequence[Location]) -> None:
        """Fetch these next, in this order."""
        with self._condition:
            if self._closed or not places:
                return
            self._wanted.extend(places)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="disk prefetch", daemon=True)
                self._thread.start()
            self._condition.notify()

    def close(self) -> None:
        """End the thread. Idempotent."""
        with self._condition:
            self._closed = True
            self._condition.notify()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._wanted and not self._closed:
                    self._condition.wait()
                if self._closed:
                    return
                run = self._next_run()
            try:
                self._fetch(run)
            except TierUnavailable:
                pass  # the load's own read will meet it
            except Exception:  # the next run may go well
                log.exception("reading ahead failed")

    def _next_run(self) -> list[Location]:
        """Neighbouring slots, from the first wanted one on. Called with the lock held."""
        run = [self._wanted.popleft()]
        while self._wanted and run[-1].is_before(self._wanted[0]) and len(run) * run[0].slot_bytes < RUN_BYTES:
            run.append(self._wanted.popleft())
        return run

    def _fetch(self, run: list[Location]) -> None:
        with self._access.reads() as folder, suppress(OSError):
            if folder is not None:
                first, last = run[0], run[-1]
                length = (len(run) - 1) * first.slot_bytes + last.frame_bytes
                folder.segments.read_ahead(first.slot, first.slot_bytes, length)


LOOKS = 3  # at a block that is replaced while it is read
MOST_AT_ONCE = 64  # slots per call to the system, which takes a limited number of pieces


class DiskReader:
    """Reads for one DiskTier; thread-safe.

    evicted: called with blocks whose file is missing.
    """

    def __init__(self, access: DiskAccess, evicted: Evicted) -> None:
        self._access = access
        self._evicted = evicted
        self._lock = threading.Lock()
        self._found: dict[BlockId, Location] = {}  # by the last load's look; a slot's head says if it is so still
        self.reads = self.read_bytes = 0

    def held(self, ids: Sequence[BlockId]) -> list[bool]:
        """See Tier."""
        places = self._places(ids)
        return [block_id in places for block_id in ids]

    def locate(self, ids: Sequence[BlockId]) -> list[bool]:
        """As held, for a load: its reads need no second lookup."""
        self._found = places = self._places(ids)
        return [block_id in places for block_id in ids]

    def found(self, ids: Sequence[BlockId]) -> list[Location]:
        """Locations found by the last load."""
        found = self._found
        return [place for block_id in ids if (place := found.get(block_id)) is not None]

    def forget(self, block_id: BlockId) -> None:
        """The block was written again, perhaps to another slot."""
        self._found.pop(block_id, None)

    def _places(self, ids: Sequence[BlockId]) -> dict[BlockId, Location]:
        with self._access.reads() as folder:
            return {} if folder is None else folder.index.places(ids, self._access.now())

    def read(self, block_id: BlockId, buffers: Sequence[Buffer], *, whole: bool = True) -> int:
        """See Tier. Not whole: only the frame's first bytes, up to the length of the buffers."""
        with self._access.reads() as folder:
            for _ in range(LOOKS if folder is not None else 0):
                assert folder is not None
                place = self._found.pop(block_id, None) or folder.index.place(block_id, self._access.now())
                if place is None:
                    break
                wanted = _first(buffers, place.frame_bytes)
                size = sum(map(len, wanted))
                if whole and size < place.frame_bytes:
                    if self._lies_there(folder, block_id, place):
                        raise FrameDamaged("length")
                    continue
                try:
                    head, got = folder.segments.read(place.slot, place.slot_bytes, wanted)
                except FileNotFoundError:
                    head, got = None, 0
                if _is_frame(head, got, block_id, place, size):
                    self._count(1, size)
                    return size
                self._not_there(folder, block_id, place)
        raise BlockMissing(f"{self._access.path} does not hold the block")

    def read_run(self, ids: Sequence[BlockId], buffers: Sequence[Sequence[Buffer]]) -> list[ReadOutcome]:
        """See ReadsRuns. Neighbouring slots are read by one call.

        Blocks that do not match are read again, one by one.
        """
        sizes: dict[int, int] = {}
        with suppress(TierUnavailable), self._access.reads() as folder:
            if folder is not None:
                self._read_neighbours(folder, ids, buffers, sizes)
        return [
            sizes[i] if i in sizes else self._outcome(block_id, targets)
            for i, (block_id, targets) in enumerate(zip(ids, buffers, strict=True))
        ]

    def _read_neighbours(
        self,
        folder: DiskFolder,
        ids: Sequence[BlockId],
        buffers: Sequence[Sequence[Buffer]],
        sizes: dict[int, int],
    ) -> None:
        """Put the lengths of frames found at their indexed location into `sizes`, by position in
        `ids`.
        """
        found = self._found
        places = {block_id: place for block_id in ids if (place := found.pop(block_id, None)) is not None}
        if unknown := [block_id for block_id in ids if block_id not in places]:
            places |= folder.index.places(unknown, self._access.now())
        there = sorted((place.slot, i) for i, block_id in enumerate(ids) if (place := places.get(block_id)) is not None)
        for run in _side_by_side([(places[ids[i]], i) for _, i in there]):
            first = places[ids[run[0]]]
            wanted = [_first(buffers[i], places[ids[i]].frame_bytes) for i in run]
            try:
                read = folder.segments.read_run(first.slot, first.slot_bytes, wanted)
            except FileNotFoundError:  # another process removed the segment: misses, and no trouble with the disk
                continue
            for i, (head, got) in zip(run, read, strict=True):
                place = places[ids[i]]
                if _is_frame(head, got, ids[i], place, place.frame_bytes):
                    sizes[i] = place.frame_bytes
                    self._count(1, place.frame_bytes)

    def _outcome(self, block_id: BlockId, buffers: Sequence[Buffer]) -> ReadOutcome:
        try:
            return self.read(block_id, buffers)
        except (BlockMissing, TierUnavailable, FrameDamaged) as error:
            return error

    def _not_there(self, folder: DiskFolder, block_id: BlockId, place: Location) -> None:
        """Handle a slot that does not hold the block.

        The block moved during the read, or its file was removed or overwritten.
        """
        try:
            with folder.allocator(self._evicted) as allocator:
                if folder.index.place(block_id, self._access.now(), allocator.run) == place:
                    vanished(folder, allocator, block_id, place)
        except ERRORS as error:
            if is_damage(error):
                raise

    def _lies_there(self, folder: DiskFolder, block_id: BlockId, place: Location) -> bool:
        """Whether the slot's head matches the index about the block."""
        head = None
        with suppress(FileNotFoundError):
            head = folder.segments.head(place.slot, place.slot_bytes)
        if head is not None and (head.id, head.frame_bytes) == (block_id, place.frame_bytes):
            return True
        self._not_there(folder, block_id, place)
        return False

    def _count(self, reads: int, read_bytes: int) -> None:
        with self._lock:
            self.reads += reads
            self.read_bytes += read_bytes


def _is_frame(head: bytes | None, got: int, block_id: BlockId, place: Location, size: int) -> bool:
    """Whether a slot that was read holds the indexed block, and at least `size` bytes of it
    came.
    """
    return head is not None and got >= size and is_head_of(head, block_id, place.frame_bytes)


def _side_by_side(places: Sequence[tuple[Location, int]]) -> Iterator[list[int]]:
    """Positions of places in order of their slots, grouped into runs of neighbours."""
    run: list[int] = []
    before: Location | None = None
    for place, number in places:
        if run and not (before and before.is_before(place) and len(run) < MOST_AT_ONCE):
            yield run
            run = []
        run.append(number)
        before = place
    if run:
        yield run


def _first(buffers: Sequence[Buffer], count: int) -> Sequence[Buffer]:
    """The first `count` bytes of the buffers."""
    if sum(map(len, buffers)) <= count:
        return buffers
    wanted = []
    for buffer in buffers:
        if count > 0:
            wanted.append(buffer[:count])
        count -= len(buffer)
    return wanted
