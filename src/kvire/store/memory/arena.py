"""One reservation of memory, handed out in extents: a hard limit without fragmentation.

A request is served in one piece if possible, else in several, so it succeeds whenever enough bytes
are free. The kernel allocates pages on first write, huge ones where it can. Not thread-safe; copies
may run beside each other as long as the memory being copied is not released.
"""

import contextlib
import mmap
from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from kvire.core.errors import StoreError

UNIT_BYTES = 4096  # extents start and end at multiples: few, long ones are left over when sizes mix
SCANNED_EXTENTS = 64  # free extents looked at for one that is long enough, before several are taken


class Extent(NamedTuple):
    """A run of bytes of the arena."""

    start: int
    length: int


class Arena:
    """capacity_bytes of memory, rounded down to whole units.

    Raises StoreError if the system refuses them.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = self.free_bytes = capacity_bytes // UNIT_BYTES * UNIT_BYTES
        self._free = [Extent(0, self.capacity_bytes)] if self.capacity_bytes else []  # by start; neighbours are merged
        try:
            pages = mmap.mmap(-1, max(self.capacity_bytes, UNIT_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise StoreError(f"cannot reserve {capacity_bytes:,} bytes of memory: {error}; ask for less") from error
        with contextlib.suppress(OSError, AttributeError):  # a kernel without huge pages, or not Linux
            pages.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(pages)  # the mapping is freed with its last view

    @staticmethod
    def rounded(size_bytes: int) -> int:
        """Bytes that `take(size_bytes)` takes."""
        return -(-size_bytes // UNIT_BYTES) * UNIT_BYTES

    def take(self, size_bytes: int) -> list[Extent] | None:
        """Extents of together at least `size_bytes` > 0.

        None and no change if fewer bytes are free.
        """
        missing = self.rounded(size_bytes)
        if missing > self.free_bytes:
            return None
        self.free_bytes -= missing
        for place, (start, length) in enumerate(islice(self._free, SCANNED_EXTENTS)):
            if length >= missing:
                self._free[place : place + 1] = [Extent(start + missing, length - missing)] if length > missing else []
                return [Extent(start, missing)]
        extents = []
        while missing:
            start, length = self._free.pop()
            if length > missing:
                self._free.append(Extent(start, length - missing))
                start, length = start + length - missing, missing
            extents.append(Extent(start, length))
            missing -= length
        return extents

    def give_back(self, extents: Sequence[Extent]) -> None:
        """Release the extents for reuse."""
        for start, length in extents:
            self.free_bytes += length
            place = bisect_left(self._free, (start, 0))
            first, end = start, start + length
            if place < len(self._free) and self._free[place].start == end:
                end += self._free.pop(place).length
            if place and sum(self._free[place - 1]) == start:
                first = self._free.pop(place - 1).start
            insort(self._free, Extent(first, end - first))

    def write(self, extents: Sequence[Extent], source: memoryview) -> None:
        """Copy `source` into the extents."""
        offset = 0
        for start, length in extents:
            count = min(length, len(source) - offset)
            self._view[start : start + count] = source[offset : offset + count]
            offset += count

    def view(self, extents: Sequence[Extent], size_bytes: int) -> memoryview | None:
        """The first `size_bytes` of the extents, in place; None if they are in several pieces."""
        start, length = extents[0]
        return self._view[start : start + size_bytes] if size_bytes <= length else None

    def read(self, extents: Sequence[Extent], size_bytes: int, targets: Sequence[memoryview]) -> None:
        """Copy the first `size_bytes` of the extents into the targets, in order.

        The targets have room for them.
        """
        rest = iter(extents)
        position, left = 0, 0
        for target in targets:
            offset = 0
            while offset < len(target) and size_bytes:
                if not left:
                    position, left = next(rest)
                count = min(left, len(target) - offset, size_bytes)
                target[offset : offset + count] = self._view[position : position + count]
                position, left = position + count, left - count
                offset, size_bytes = offset + count, size_bytes - count
