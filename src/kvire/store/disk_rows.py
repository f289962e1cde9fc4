"""What each column of the index may hold. A damaged file can say anything, of any type; nothing of it goes further.

Every column that a statement reads has its name here: one that is computed is given a name of these (AS).
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from kvire.store.disk_segments import HEAD_BYTES, MOST_BYTES, MOST_SEGMENT, MOST_SLOTS

READY, MAKING, SCANNING, GONE = range(4)  # states of a segment
LAST_S = 1e11  # seconds since the epoch; no clock of ours shows more
MOST_OWNERS = 1 << 40
MOST_COUNT = 1 << 62

Fits = Callable[[Sequence[Any]], bool]  # whether all values of a column are such as we write


class IndexDamagedError(Exception):
    """The index cannot be read as one: it has to be made again from the segments."""


def check_rows(columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> None:
    """Raises IndexDamagedError unless all values are of the type and in the range of their columns."""
    if not rows:
        return
    values = dict(zip(columns, zip(*rows, strict=True), strict=True))
    for name, column in values.items():
        if not _FITS[name](column):
            raise IndexDamagedError(f"{name!r} holds what no block has")
    if "frame_bytes" in values and "slot_bytes" in values:
        pairs = zip(values["frame_bytes"], values["slot_bytes"], strict=True)
        if any(frame_bytes > slot_bytes - HEAD_BYTES for frame_bytes, slot_bytes in pairs):
            raise IndexDamagedError("a frame is longer than its slot")


def _whole(low: int, high: int) -> Fits:
    return lambda values: set(map(type, values)) == {int} and low <= min(values) and max(values) <= high


def _digest(length: int) -> Fits:
    return lambda values: set(map(type, values)) == {bytes} and set(map(len, values)) == {length}


def _time(values: Sequence[Any]) -> bool:
    return set(map(type, values)) == {float} and min(values) >= -LAST_S and max(values) <= LAST_S


def _text(values: Sequence[Any]) -> bool:
    return set(map(type, values)) == {str}


def _notes(values: Sequence[Any]) -> bool:
    return _text(values) and all(map(_is_note, values))


def _is_note(text: str) -> bool:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(fields, dict) and all(isinstance(value, str) for value in fields.values())


def _or_none(fits: Fits) -> Fits:
    def fits_or_none(values: Sequence[Any]) -> bool:
        there = [value for value in values if value is not None]
        return not there or fits(there)

    return fits_or_none


_COUNT = _whole(0, MOST_COUNT)
_FITS: dict[str, Fits] = {
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
    "created": _time,
    "used": _time,
    "noted": _time,
    "expires": _or_none(_time),
    "least_used": _or_none(_time),
    "pinned": _whole(0, 1),
    "name": _text,
    "fields": _notes,
    "sql": _text,
    "value": _COUNT,
    "bytes": _COUNT,
    "blocks": _COUNT,
    "segments": _COUNT,
    "day": _COUNT,
    "newest": _or_none(_whole(0, MOST_COUNT)),
    # What SQLite says of itself.
    "user_version": _whole(-(1 << 31), (1 << 31) - 1),
    "journal_mode": _text,
    "mmap_size": _whole(0, MOST_COUNT),
    "wal_autocheckpoint": _COUNT,
    "busy": _COUNT,
    "log": _whole(-1, MOST_COUNT),
    "checkpointed": _whole(-1, MOST_COUNT),
}
