"""Writes a block into a disk tier: claim a slot, fill it, enter it.

An interruption after any step leaves a state that other processes can clean up.
"""

import sqlite3
from collections.abc import Callable, Sequence

from kvire.core.record import BlockId
from kvire.store.disk.allocator import Evicted, OwnPrompt, Segment
from kvire.store.disk.files import NO_SPACE
from kvire.store.disk.folder import DiskFolder
from kvire.store.disk.index import JournalFullError, Run
from kvire.store.disk.rows import MAKING, READY
from kvire.store.disk.segments import SlotHeader
from kvire.store.eviction.order import CutOff

DAY_S = 86_400
# Writing a block uses all blocks before it. Noting that costs 0.1 s and 12 MB of journal for a
# prompt of 8,000 blocks: so it is noted once in this many seconds, and when the prompt is next to
# be evicted.
NOTED_EVERY_S, NOTED_IN_ITS_TURN_S = 15.0, 1.0
GROW_AGAIN_AFTER_S = 2.0


class DiskWriter:
    """The writing side of one tier. Thread-safe.

    writes_per_day_bytes: of all processes together; None: no limit.
    used: notes that blocks were used at a time.
    """

    def __init__(
        self,
        evicted: Evicted,
        used: Callable[[DiskFolder, Sequence[BlockId], float], None],
        writes_per_day_bytes: int | None,
        elapsed: Callable[[], float],
    ) -> None:
        self._evicted = evicted
        self._used = used
        self._writes_per_day_bytes = writes_per_day_bytes
        self._elapsed = elapsed
        self._grow_from = 0.0
        self._cut_off = CutOff()
        self._owed: list[tuple[DiskFolder, int | Segment, int]] = []

    def settle(self, folder: DiskFolder) -> None:
        """Retry releases that failed together with an earlier write."""
        owed, self._owed = self._owed, []
        for debt in owed:
            if debt[0] is folder:
                self._give_back(*debt)

    def write(self, folder: DiskFolder, slot_bytes: int, head: SlotHeader, frame: memoryview) -> str | None:
        """Keep the frame; returns None, or why it is not kept. Raises OSError, sqlite3.Error."""
        self._use_above(folder, head, NOTED_EVERY_S)
        slot = self._claim(folder, slot_bytes, head)
        if isinstance(slot, str):
            return slot
        try:
            folder.segments.write(slot, slot_bytes, head, frame)
            with folder.allocator(self._evicted) as allocator:
                old = allocator.keep(slot, slot_bytes, head)
        except BaseException as error:
            self._give_back(folder, slot, slot_bytes)
            if isinstance(error, OSError) and error.errno in NO_SPACE:
                return "full"  # a file system that shares or compresses blocks, and is full of others' files
            if isinstance(error, FileNotFoundError):
                return "unavailable"  # its segment was removed just now
            raise
        for each in old or ():
            self._give_back(folder, each.slot, each.slot_bytes)
        return "unavailable" if old is None else None

    def _claim(self, folder: DiskFolder, slot_bytes: int, head: SlotHeader) -> int | str:
        if head.parent in self._cut_off:
            if folder.index.place(BlockId(head.parent, head.group), head.created) is None:
                self._cut_off.add(head.key)
                return "full"
            self._cut_off.discard(head.parent)  # another process wrote it
        its_turn = False
        while True:
            with folder.allocator(self._evicted, may_grow=self._elapsed() >= self._grow_from) as allocator:
                limit = self._writes_per_day_bytes
                if limit is not None and self._written_today(allocator.run, head.created) + slot_bytes > limit:
                    return "wear"
                claimed = allocator.claim(slot_bytes, head.tenant_tag, head.created, head.parent)
                if limit is not None and isinstance(claimed, int):
                    allocator.run("UPDATE written SET bytes = bytes + ?", slot_bytes)
            if isinstance(claimed, OwnPrompt) and not its_turn:
                its_turn = True  # unless others are older, once that is noted
                self._use_above(folder, head, NOTED_IN_ITS_TURN_S)
                continue
            if isinstance(claimed, OwnPrompt):
                self._cut_off.add(head.key)
                return "full"
            if not isinstance(claimed, Segment):
                self._cut_off.discard(head.key)
                return claimed
            if not self._make(folder, claimed):
                self._grow_from = self._elapsed() + GROW_AGAIN_AFTER_S

    def _use_above(self, folder: DiskFolder, head: SlotHeader, every_s: float) -> None:
        """Refresh the blocks before this one, so that they are not evicted for their own
        continuation.
        """
        above = folder.index.unused_above(head.parent, head.created - every_s, head.created)
        if above:
            self._used(folder, above, head.created)

    def _make(self, folder: DiskFolder, segment: Segment) -> bool:
        """Make the file of a segment that the index already counts.

        False if the file system is full.
        """
        try:
            folder.segments.make(segment.id, segment.slot_bytes, segment.slots)
            with folder.index.transaction() as run:
                run("UPDATE segments SET state = ? WHERE id = ? AND state = ?", READY, segment.id, MAKING)
        except (OSError, sqlite3.Error, JournalFullError) as error:
            self._give_back(folder, segment, segment.slot_bytes)
            if isinstance(error, OSError) and error.errno in NO_SPACE:
                return False
            raise
        return True

    def _give_back(self, folder: DiskFolder, claimed: int | Segment, slot_bytes: int) -> None:
        try:
            with folder.allocator(self._evicted) as allocator:
                if isinstance(claimed, Segment):
                    allocator.drop(claimed)
                else:
                    allocator.free(claimed, slot_bytes)
        except (OSError, sqlite3.Error, JournalFullError):
            self._owed.append((folder, claimed, slot_bytes))

    def _written_today(self, run: Run, now: float) -> int:
        """Bytes that all processes wrote since midnight, UTC."""
        day = int(now // DAY_S)
        run("DELETE FROM written WHERE day != ?", day)
        run("INSERT OR IGNORE INTO written VALUES (?, 0)", day)
        [(written,)] = run("SELECT bytes FROM written")
        return int(written)
