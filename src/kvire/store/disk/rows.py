"""Valid values of each column of the index. A damaged file may hold any value of any type.

Every column that a statement reads is listed here; a computed one is given a listed name (AS).
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvire.store.disk.segments import MOST_BYTES, MOST_SEGMENT, MOST_SLOTS, IndexDamagedError

READY, MAKING, SCANNING, GONE = range(4)  # states of a segment
LAST_S = 1e11  # seconds since the epoch; no clock of ours shows more
MOST_OWNERS = 1 << 40
MOST_COUNT = 1 << 62

FEW_ROWS = 4  # up to this many rows, checking values one by one is faster


@dataclass(frozen=True, slots=True)
class Column:
    """Valid values of a column.

    fits: checks one value, or all of several, which is faster for many.
    """

    fits: Callable[[Any], bool]
    all_fit: Callable[[Sequence[Any]], bool]


def column(name: str) -> Column:
    """The column of this name. Raises IndexDamagedError if it is not listed here."""
    if (known := _COLUMNS.get(name)) is None:  # SQLite tells names as the schema in the file spells them
        raise IndexDamagedError(f"it has a column {name!r}")
    return known


def check_rows(columns: Sequence[Column], rows: Sequence[tuple[Any, ...]]) -> None:
    """Check all values against type and range of their columns.

    Raises IndexDamagedError.
    """
    if len(rows) <= FEW_ROWS:
        sound = all(one.fits(value) for row in rows for one, value in zip(columns, row, strict=True))
    else:
        sound = all(one.all_fit(values) for one, values in zip(columns, zip(*rows, strict=True), strict=True))
    if not sound:
        raise IndexDamagedError("it holds what no block has")


def _whole(low: int, high: int) -> Column:
    def fits(value: Any) -> bool:
        return type(value) is int and low <= value <= high

    def all_fit(values: Sequence[Any]) -> bool:
        return set(map(type, values)) == {int} and low <= min(values) and max(values) <= high

    return Column(fits, all_fit)


def _digest(length: int) -> Column:
    def fits(value: Any) -> bool:
        return type(value) is bytes and len(value) == length

    def all_fit(values: Sequence[Any]) -> bool:
        return set(map(type, values)) == {bytes} and set(map(len, values)) == {length}

    return Column(fits, all_fit)


def _each(fits: Callable[[Any], bool]) -> Column:
    return Column(fits, lambda values: all(map(fits, values)))


def _or_none(other: Column) -> Column:
    return _each(lambda value: value is None or other.fits(value))


def _is_time(value: Any) -> bool:
    return type(value) is float and -LAST_S <= value <= LAST_S


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_note(value: Any) -> bool:
    """Fields of a namespace, as text."""
    if type(value) is not str:
        return False
    try:
        fields = json.loads(value)
    except (ValueError, RecursionError):
        return False
    return isinstance(fields, dict) and all(isinstance(text, str) for text in fields.values())


_TIME, _TEXT = _each(_is_time), _each(_is_text)
_COUNT = _whole(0, MOST_COUNT)
_COLUMNS: dict[str, Column] = {
    "1": _COUNT,
    "id": _whole(0, MOST_SEGMENT - 1),
    "slot": _whole(0, MOST_SEGMENT * MOST_SLOTS - 1),
    "slot_bytes": _whole(1, MOST_BYTES),
    "slots": _whole(1, MOST_SLOTS),
    "state": _whole(READY, GONE),
    "owner": _whole(0, MOST_OWNERS),
    "fresh": _whole(0, MOST_SLOTS),
    "scanned": _whole(0, MOST_SLOTS),
    "key": _digest(32),
    "parent": _digest(32),
    "root": _digest(32),
    "tenant": _digest(16),
    "tag": _digest(16),
    "content": _digest(16),
    "grp": _whole(0, (1 << 16) - 1),
    "place": _whole(0, (1 << 32) - 1),
    "frame_bytes": _whole(0, MOST_BYTES),
    "created": _TIME,
    "used": _TIME,
    "noted": _TIME,
    "expires": _or_none(_TIME),
    "least_used": _or_none(_TIME),
    "pinned": _whole(0, 1),
    "name": _TEXT,
    "fields": _each(_is_note),
    "sql": _TEXT,
    "value": _COUNT,
    "bytes": _COUNT,
    "blocks": _COUNT,
    "segments": _COUNT,
    "day": _COUNT,
    "newest": _or_none(_whole(0, MOST_COUNT)),
    # SQLite's own columns.
    "user_version": _whole(-(1 << 31), (1 << 31) - 1),
    "journal_mode": _TEXT,
    "mmap_size": _whole(0, MOST_COUNT),
    "wal_autocheckpoint": _COUNT,
    "busy": _COUNT,
    "log": _whole(-1, MOST_COUNT),
    "checkpointed": _whole(-1, MOST_COUNT),
}


def ascending(slots: Sequence[int], after: int) -> int:
    """The last of the slots that an ordered query gave beyond `after`.

    Raises IndexDamagedError if they are not in order: a loop over them might never end.
    """
    if any(later <= earlier for earlier, later in pairwise((after, *slots))):
        raise IndexDamagedError("its rows are not in order")
    return slots[-1]
