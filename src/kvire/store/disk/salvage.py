"""Rows of a damaged index that segments do not hold: the limit, pins, and notes of namespaces."""
# ruff: noqa: S608 - nothing but names of ours is put into a statement's text

import sqlite3
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kvire.store.disk.allocator import MIN_CAPACITY_BYTES, noted_capacity
from kvire.store.disk.index import DiskIndex
from kvire.store.disk.segments import IndexDamagedError

TROUBLE = (OSError, sqlite3.Error, IndexDamagedError)

TableRows = list[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Salvaged:
    """Rows of tables, unchanged.

    capacity_bytes: None if the index does not say.
    """

    capacity_bytes: int | None = None
    pins: TableRows = field(default_factory=list)
    namespaces: TableRows = field(default_factory=list)
    written: TableRows = field(default_factory=list)

    def enter(self, index: DiskIndex) -> None:
        """Write the rows into a new index. Pins wait there until their blocks are found."""
        tables = {"pins": self.pins, "namespaces": self.namespaces, "written": self.written}
        for table, rows in tables.items():
            for start in range(0, len(rows), index.rows_at_once):
                with index.transaction() as run:
                    for row in rows[start : start + index.rows_at_once]:
                        run(f"INSERT OR IGNORE INTO {table} VALUES ({', '.join('?' * len(row))})", *row)


def salvage(index: DiskIndex) -> Salvaged:
    """The readable rows of a damaged index; never raises for unreadable ones."""
    pinned = "SELECT key, grp FROM blocks {} WHERE pinned"
    pins = _rows(index, pinned.format("INDEXED BY by_key")) or _rows(index, pinned.format("NOT INDEXED"))
    capacity_bytes = None
    with suppress(*TROUBLE):
        capacity_bytes = noted_capacity(index.query)
    return Salvaged(
        capacity_bytes if capacity_bytes is not None and capacity_bytes >= MIN_CAPACITY_BYTES else None,
        pins + _rows(index, "SELECT key, grp FROM pins"),
        _rows(index, "SELECT root, fields, noted FROM namespaces"),
        _rows(index, "SELECT day, bytes FROM written"),
    )


def _rows(index: DiskIndex, sql: str) -> TableRows:
    with suppress(*TROUBLE):
        return index.query(sql)
    return []
