"""The index of a disk tier: an SQLite file that maps blocks to slots, shared by several processes.

Readers never wait for writers (WAL). One transaction at a time writes, in all processes together;
each is small, so that waits are short and the journal stays within its share of the limit. SQLite's
own locks work on one machine only: a folder on a network file system cannot be shared between
machines.

Nothing that the file says is believed unchecked: disk/rows.py defines the valid values of each
column. An index that has invalid values, contradicts itself or keeps a statement busy for ever is
damaged (`is_damage`), and is rebuilt from the segments, which hold the truth.

No process checkpoints while another one commits (`writing`): SQLite before 3.51.3 may lose a commit
when both happen at one moment (sqlite.org/wal.html, "The WAL-Reset Bug").
"""
# ruff: noqa: S608 - nothing but numbers and names of ours is put into a statement's text

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import RLock, local
from typing import Any

from kvire.core.errors import StoreError
from kvire.core.keys import BlockKey
from kvire.core.record import BlockId
from kvire.store.disk.files import Files
from kvire.store.disk.rows import GONE, READY, Column, check_rows, column
from kvire.store.disk.segments import SLOT_BITS, IndexDamagedError

# Of the tables and of the slots; PRAGMA user_version. With a new one at least one statement of the
# schema is another, so that a damaged number is not taken for a newer version.
FORMAT = 1
PAGE_BYTES = 4096
# Size limit of the index per slot, and besides; measured: at most 520 bytes of a full tier
# (docs/adr/0013).
SLOT_INDEX_BYTES = 704
BASE_INDEX_BYTES = 320 * 1024
SHARED_MEMORY_BYTES = 64 * 1024  # index.db-shm for the largest journal
DIRTY_PAGES_PER_ROW = 4  # a block's row and its places in the indexes that are ordered by digests
MOST_NAMESPACES, MOST_NAMESPACE_BYTES = 32, 4096
BUSY_TIMEOUT_S = 5.0
MOST_ABOVE = 1 << 16  # blocks of one prompt; in a damaged index they may go in a circle
MOST_ASKED = 400  # ids in one query: SQLite of 2019 takes 999 values
# CPU time limit of a statement: a longer one loops in a damaged file, others take milliseconds.
STATEMENT_CPU_S = 1.0
LONG_CPU_S = 10.0  # for long reads that end by themselves: 0.5 s for 65,536 blocks of one prompt
INSTRUCTIONS_PER_LOOK = 20_000  # SQLite's, between two looks at the time
DAMAGE = frozenset({
    sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT, sqlite3.SQLITE_TOOBIG,
    sqlite3.SQLITE_ERROR, sqlite3.SQLITE_SCHEMA, sqlite3.SQLITE_MISMATCH,  # no statement of ours is at fault
    sqlite3.SQLITE_CONSTRAINT,  # two tables contradict each other
    sqlite3.SQLITE_INTERNAL, sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_INTERRUPT,  # see STATEMENT_CPU_S
})  # fmt: skip
WAL_VERSION = b"\2\2"  # bytes 18 and 19 of the file, its write and read format: SQLite refuses to write any other

SCHEMA = f"""
CREATE TABLE settings (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
-- fresh: first place that was never used; scanned: places looked at while SCANNING; used: of its newest block.
CREATE TABLE segments (id INTEGER PRIMARY KEY AUTOINCREMENT, slot_bytes INTEGER NOT NULL, slots INTEGER NOT NULL,
    state INTEGER NOT NULL, owner INTEGER NOT NULL, fresh INTEGER NOT NULL, scanned INTEGER NOT NULL,
    used REAL NOT NULL, unsynced INTEGER NOT NULL DEFAULT 0);
CREATE INDEX by_state ON segments (state) WHERE state != {READY};
-- Three tables share out the slots that were ever used: nobody's, somebody's who writes, and those with a block.
CREATE TABLE free (slot INTEGER PRIMARY KEY, slot_bytes INTEGER NOT NULL);
CREATE INDEX free_by_size ON free (slot_bytes);
CREATE TABLE claims (slot INTEGER PRIMARY KEY, slot_bytes INTEGER NOT NULL, owner INTEGER NOT NULL);
CREATE TABLE blocks (slot INTEGER PRIMARY KEY, slot_bytes INTEGER NOT NULL, key BLOB NOT NULL, grp INTEGER NOT NULL,
    parent BLOB NOT NULL, root BLOB NOT NULL, tenant BLOB NOT NULL, place INTEGER NOT NULL,
    frame_bytes INTEGER NOT NULL, content BLOB NOT NULL, created REAL NOT NULL, used REAL NOT NULL, ttl_s REAL,
    expires REAL, pinned INTEGER NOT NULL DEFAULT 0);
-- Columns of a lookup, so that it reads no row; entering a block removes the older one of its key.
CREATE INDEX by_key ON blocks (key, grp, slot_bytes, frame_bytes, expires, pinned);
CREATE INDEX by_parent ON blocks (parent, created);
CREATE INDEX by_content ON blocks (content);
CREATE INDEX by_age ON blocks (slot_bytes, tenant, pinned, used, place DESC);
CREATE INDEX by_expiry ON blocks (expires) WHERE expires IS NOT NULL;
CREATE TABLE tenants (tag BLOB PRIMARY KEY, bytes INTEGER NOT NULL, blocks INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE namespaces (root BLOB PRIMARY KEY, fields TEXT NOT NULL, noted REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE written (day INTEGER PRIMARY KEY, bytes INTEGER NOT NULL);
CREATE TRIGGER block_came AFTER INSERT ON blocks BEGIN
    INSERT INTO tenants VALUES (new.tenant, new.slot_bytes, 1)
        ON CONFLICT (tag) DO UPDATE SET bytes = bytes + new.slot_bytes, blocks = blocks + 1;
END;
CREATE TRIGGER block_went AFTER DELETE ON blocks BEGIN
    UPDATE tenants SET bytes = bytes - old.slot_bytes, blocks = blocks - 1 WHERE tag = old.tenant;
    DELETE FROM tenants WHERE tag = old.tenant AND blocks = 0;
    INSERT INTO free SELECT old.slot, old.slot_bytes
        WHERE EXISTS (SELECT 1 FROM segments WHERE id = old.slot >> 20 AND state != {GONE});
END;
PRAGMA user_version = {FORMAT};
"""

# Blocks that were pinned when the index was lost, until they are found again. Folders of before it
# came get it too.
PINS = """
CREATE TABLE pins (key BLOB NOT NULL, grp INTEGER NOT NULL, PRIMARY KEY (key, grp)) WITHOUT ROWID;
"""

Run = Callable[..., list[tuple[Any, ...]]]  # run(sql, *values) -> rows


class JournalFullError(Exception):
    """The journal has no room for another transaction: a long read is in progress, or the disk is
    full.
    """


@dataclass(frozen=True, slots=True)
class Location:
    """Location of a block."""

    slot: int
    slot_bytes: int
    frame_bytes: int

    def is_before(self, other: "Location") -> bool:
        """Whether the other slot begins where this one ends."""
        return other.slot == self.slot + 1 and other.slot_bytes == self.slot_bytes


def is_damage(error: Exception) -> bool:
    """Whether an error means that the file is damaged, rather than busy, full or out of reach."""
    if isinstance(error, IndexDamagedError):
        return True
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:  # Python's own: text that is none
        return isinstance(error, sqlite3.OperationalError)
    return code & 0xFF in DAMAGE or code == sqlite3.SQLITE_IOERR_SHORT_READ


class Watch(local):
    """CPU time limit of each thread's statement."""

    _cpu_s = float("inf")
    _end_s: float | None = None  # set at the first look, so that short statements need no clock

    def begin(self, cpu_s: float) -> None:
        """A statement begins."""
        self._cpu_s, self._end_s = cpu_s, None

    def is_late(self) -> bool:
        """Whether the statement exceeds its limit; SQLite asks now and then."""
        if self._end_s is None:
            self._end_s = time.thread_time() + self._cpu_s
        return time.thread_time() > self._end_s


class DiskIndex:
    """Connections to one index file: one that writes, and one per reading thread.

    journal_bytes: size limit of its journal.
    writing: excludes writes and checkpoints of all other processes.
    identity: of the file; another one may replace it later.
    """

    def __init__(
        self, files: Files, path: Path, journal_bytes: int, writing: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.path = path
        self.journal_bytes = journal_bytes
        self.rows_at_once = max(32, journal_bytes // 2 // (DIRTY_PAGES_PER_ROW * PAGE_BYTES))  # of one transaction
        self.identity = files.identity(path)
        self.lock = RLock()  # held by the thread of this process that writes
        self._files = files
        self._writing = writing
        self._watch = Watch()
        self._columns: dict[str, list[Column]] = {}  # of the statements so far
        self._journal = path.with_name(path.name + "-wal")
        self._idle: list[sqlite3.Connection] = []
        self._broken = False
        self._writer = self._connect()
        try:
            self._prepare()
        except BaseException:
            self._writer.close()
            raise

    def query(self, sql: str, *values: Any, cpu_s: float = STATEMENT_CPU_S) -> list[tuple[Any, ...]]:
        """Rows of one reading statement. Raises IndexDamagedError, sqlite3.Error."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connect()
        try:
            rows = self._execute(connection, sql, values, cpu_s)
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return rows

    @contextmanager
    def transaction(self) -> Iterator[Run]:
        """All statements or none. Raises JournalFullError before it begins."""
        with self.lock, self._writing():
            self._keep_journal_small()
            try:
                self._run("BEGIN IMMEDIATE")
                yield self._run
                self._run("COMMIT")
            except BaseException:
                self._abandon()
                raise

    def run_many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        """One statement for many rows, inside a transaction."""
        self._watch.begin(STATEMENT_CPU_S)
        try:
            self._files.execute_many(self._writer, sql, rows)
        except (UnicodeDecodeError, sqlite3.OperationalError) as error:
            self._must_be_sound(error)
            raise

    def checkpoint(self, *, truncate: bool = False) -> None:
        """Move the journal into the index, except for parts that a reader needs."""
        with self.lock, self._writing():
            self._checkpoint(truncate=truncate)

    def needs_checkpoint(self) -> bool:
        """Whether the journal has grown enough to be moved soon."""
        return self._files.size(self._journal) > self.journal_bytes // 4

    def current(self) -> bool:
        """Whether this index still is the one at its path, and writable as far as is known."""
        return not self._broken and self.is_in_place()

    def is_in_place(self) -> bool:
        """Whether this index still is the one at its path."""
        try:
            return self._files.identity(self.path) == self.identity
        except FileNotFoundError:
            return False

    def place(self, block_id: BlockId, now: float, run: Run | None = None) -> Location | None:
        """Location of a block.

        run: of the transaction in which to query.
        """
        rows = (run or self.query)(
            "SELECT slot, slot_bytes, frame_bytes FROM blocks WHERE key = ? AND grp = ? AND "
            "(expires IS NULL OR expires > ? OR pinned)",
            *block_id,
            now,
        )
        return Location(*rows[0]) if rows else None

    def places(self, ids: Sequence[BlockId], now: float) -> dict[BlockId, Location]:
        """Locations of the blocks that are present."""
        found: dict[BlockId, Location] = {}
        rows = self.query(f"SELECT id FROM segments WHERE state != {READY} AND state = {GONE}")
        gone = {segment for (segment,) in rows}
        for start in range(0, len(ids), MOST_ASKED):
            asked = ids[start : start + MOST_ASKED]
            wanted = set(asked)
            rows = self.query(
                "SELECT key, grp, slot, slot_bytes, frame_bytes FROM blocks "
                f"WHERE key IN ({', '.join('?' * len(asked))}) AND (expires IS NULL OR expires > ? OR pinned)",
                *(key for key, _ in asked),
                now,
            )
            for key, group, *place in rows:
                if (block_id := BlockId(key, group)) in wanted and place[0] >> SLOT_BITS not in gone:
                    found[block_id] = Location(*place)
        return found

    def unused_above(self, key: BlockKey, before: float, now: float) -> list[BlockId]:
        """The block and all before it in its prompt, of all groups, first one first.

        Only those unused since `before`. Expired ones stay expired.
        """
        rows = self.query(
            "WITH RECURSIVE above (key, parent, nth) AS ("
            "SELECT key, parent, 0 FROM blocks WHERE key = ?1 AND used < ?2 UNION "
            "SELECT b.key, b.parent, nth + 1 FROM above JOIN blocks b ON b.key = above.parent "
            f"WHERE b.used < ?2 LIMIT {MOST_ABOVE}) "
            "SELECT b.key, b.grp FROM above JOIN blocks b ON b.key = above.key "
            "WHERE b.expires IS NULL OR b.expires > ?3 OR b.pinned ORDER BY nth DESC",
            key,
            before,
            now,
            cpu_s=LONG_CPU_S,
        )
        return [BlockId(BlockKey(key), group) for key, group in rows]

    def warm(self) -> None:
        """Read the pages that lookups need, so that the first ones need not wait for the disk."""
        warming = "SELECT count(*) AS blocks FROM blocks INDEXED BY by_key WHERE key >= x''"
        self.query(warming, cpu_s=LONG_CPU_S)

    def retire(self) -> None:
        """Close every connection. The index must not be used any more."""
        while self._idle:
            self._idle.pop().close()
        self._writer.close()

    def _run(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        return self._execute(self._writer, sql, values)

    def _execute(
        self, connection: sqlite3.Connection, sql: str, values: Sequence[Any] = (), cpu_s: float = STATEMENT_CPU_S
    ) -> list[tuple[Any, ...]]:
        """The only way to any row, so that no row skips the checks."""
        self._watch.begin(cpu_s)
        try:
            description, rows = self._files.execute(connection, sql, values)
        except (UnicodeDecodeError, sqlite3.OperationalError) as error:
            self._must_be_sound(error)
            raise
        if rows:
            columns = self._columns.get(sql)
            if columns is None:
                columns = self._columns[sql] = [column(name) for name, *_ in description or ()]
            check_rows(columns, rows)
        return rows

    def _must_be_sound(self, error: Exception) -> None:
        """Raises IndexDamagedError if the file causes a statement's error, though SQLite does not
        say so.
        """
        if isinstance(error, UnicodeDecodeError):  # text of a damaged schema, in an error that SQLite wants to tell
            raise IndexDamagedError(str(error)) from error
        if self._is_no_longer_written(error):
            raise IndexDamagedError("its first page says that it cannot be written") from error

    def _is_no_longer_written(self, error: Exception) -> bool:
        """Whether the file itself forbids writing, as opposed to a read-only disk."""
        if getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_READONLY:
            return False
        return self._files.beginning(self.path, 20)[18:] != WAL_VERSION

    def _connect(self) -> sqlite3.Connection:
        connection = self._files.connect(self.path, BUSY_TIMEOUT_S)
        try:
            connection.set_progress_handler(self._watch.is_late, INSTRUCTIONS_PER_LOOK)
            for pragma in ("mmap_size = 0", "temp_store = MEMORY", "synchronous = NORMAL", "wal_autocheckpoint = 0"):
                self._execute(connection, f"PRAGMA {pragma}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self) -> None:
        """Make the tables in an empty file; refuse other formats.

        Raises StoreError, IndexDamagedError.
        """
        [(version,)] = self._run("PRAGMA user_version")
        found = dict(self._run("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"))
        if version == 0 and not found:
            self._run(f"PRAGMA page_size = {PAGE_BYTES}")
            self._run("PRAGMA journal_mode = WAL")
            self._make(SCHEMA + PINS)
            return
        is_ours = schema().items() <= found.items()
        if version != FORMAT and not is_ours:
            raise StoreError(
                f"{self.path} was written by another version of Kvire (format {version}, this one has {FORMAT}): "
                "choose another folder, or delete this one"
            )
        if version != FORMAT or not is_ours or self._run("PRAGMA journal_mode") != [("wal",)]:
            raise IndexDamagedError("it is not as it was made")
        if not schema(PINS).items() <= found.items():
            self._make("DROP TABLE IF EXISTS pins;\n" + PINS)

    def _make(self, script: str) -> None:
        with self.transaction() as run:
            for statement in statements(script):
                run(statement)

    def _checkpoint(self, *, truncate: bool) -> None:
        self._run(f"PRAGMA wal_checkpoint({'TRUNCATE' if truncate else 'PASSIVE'})")

    def _keep_journal_small(self) -> None:
        """Checkpoint so that half of the journal's limit is free for the next transaction."""
        deadline = time.monotonic() + BUSY_TIMEOUT_S
        while self._files.size(self._journal) > self.journal_bytes // 2:
            self._checkpoint(truncate=True)  # does nothing while another process is at it
            if self._files.size(self._journal) > self.journal_bytes // 2:
                if time.monotonic() > deadline:
                    raise JournalFullError(f"the journal of {self.path} cannot be emptied now")
                time.sleep(0.002)

    def _abandon(self) -> None:
        """After an error: end the transaction; close a connection that cannot."""
        try:
            if self._writer.in_transaction:
                self._run("ROLLBACK")
        except (sqlite3.Error, OSError, IndexDamagedError):
            self._broken = True
            with suppress(sqlite3.Error):
                self._writer.close()  # rolls back


@cache
def schema(script: str = SCHEMA) -> dict[str, str]:
    """The statement that made each table, index and trigger, by name, as SQLite keeps it."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(script)
        return dict(connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"))


def statements(script: str) -> Iterator[str]:
    """The statements of a script, one by one, so that all of them are in one transaction."""
    pending = ""
    for line in script.strip().splitlines():
        pending += line + "\n"
        if sqlite3.complete_statement(pending):
            yield pending
            pending = ""
