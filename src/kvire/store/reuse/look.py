"""Stored blocks of a prompt beyond the device's own. A lookup changes nothing."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf
from typing import Self

from kvire.core.spec import KVSpec, first_needed
from kvire.plan.cost import Speed

Row = Sequence[str | None]  # of one block: by part, the fastest tier known to have it


@dataclass(frozen=True, slots=True)
class Part:
    """Stored part of each block under one number (BlockId.group): a group's KV, or a worker's
    share.

    size_bytes: of its KV.
    window: tokens that a position sees in these layers, itself included; None: all before it.
    """

    size_bytes: int
    window: int | None = None


def parts_of_groups(spec: KVSpec) -> tuple[Part, ...]:
    """One for each group of a model."""
    return tuple(Part(spec.block_bytes(number), group.window) for number, group in enumerate(spec.groups))


class Word(StrEnum):
    """How far a lookup can be relied on.

    SURE: all tiers were asked.
    OPEN: from `Found.known` on a remote tier may have more; it was not asked.
    ASKING: a remote tier is being asked. Look again soon.
    """

    SURE = "sure"
    OPEN = "open"
    ASKING = "asking"


@dataclass(frozen=True, slots=True)
class Found:
    """Blocks that can be loaded after the device's first blocks.

    first: leading blocks that the device has.
    known: blocks up to here are certainly present.
    stop: blocks up to here are to be loaded; beyond `known`, only a remote tier may have them.
    limit: blocks of the prompt that could be of use.
    word: how far the lookup can be relied on.
    rows: tiers of each block's parts, of the blocks from `start` on.
    needed: (index, part) of all parts to be loaded, ascending, without those outside every window.
    speed: of the load, all tiers together.
    size_bytes: of the load.
    """

    first: int
    known: int
    stop: int
    limit: int
    word: Word
    start: int
    rows: Sequence[Row]
    needed: Sequence[tuple[int, int]]
    speed: Speed
    size_bytes: int

    @classmethod
    def nothing(cls, first: int, limit: int) -> Self:
        """The result without a lookup."""
        return cls(first, first, first, limit, Word.SURE, first, (), (), Speed(0.0, inf), 0)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to load."""
        return not self.needed

    def tier(self, index: int, part: int) -> str | None:
        """The tier known to have that part of block `index`; None if no tier is."""
        return self.rows[index - self.start][part]

    def whole(self, index: int) -> bool:
        """Whether tiers have every part of block `index`."""
        return None not in self.rows[index - self.start]

    def blocks_by_tier(self) -> Counter[str]:
        """How many of the blocks from `first` to `known` come from each tier.

        A block of which no window needs any part counts for the tier of the last one.
        """
        rows = self.rows[self.first - self.start : self.known - self.start]
        nearest = next(filter(None, rows[-1])) if rows else ""
        return Counter(next(filter(None, row), nearest) for row in rows)

    def without(self, index: int) -> "Found":
        """Leave block `index` out."""
        return replace(self, needed=[place for place in self.needed if place[0] != index])


def reach(
    windows: Sequence[int | None], block_size: int, first: int, stop: int, has: Callable[[int, int], bool]
) -> int:
    """The most leading blocks, at most `stop`, after which every part can go on.

    Never less than `first`.

    windows: of each part of a block, in tokens; None looks at everything before it.
    first: leading blocks that the device has.
    has: has(index, part) says whether that part of block `index` is available; only asked about
        needed parts.
    """
    stop, before = max(first, stop), None
    while stop != before:  # a shorter extent moves the windows
        before = stop
        for part, window in enumerate(windows):
            begin = max(first, first_needed(window, stop * block_size, block_size))
            stop = next((index for index in range(begin, stop) if not has(index, part)), stop)
    return stop


def needed(parts: Sequence[Part], block_size: int, first: int, stop: int) -> list[tuple[int, int]]:
    """(index, part) of the state after `stop` blocks, from block `first` on, ascending."""
    begins = [first_needed(part.window, stop * block_size, block_size) for part in parts]
    return [(index, part) for index in range(first, stop) for part, begin in enumerate(begins) if index >= begin]


def together(pieces: Sequence[tuple[Speed, int]]) -> Speed:
    """Combined speed of several tiers, read one after the other.

    pieces: each tier's speed, and its bytes (above 0).
    """
    if not pieces:
        return Speed(0.0, inf)
    seconds = sum(size / speed.bytes_per_s for speed, size in pieces)
    return Speed(max(speed.latency_s for speed, _ in pieces), sum(size for _, size in pieces) / seconds)
