"""The disk tier: frames in a folder that several processes share, within a limit at all times.

Read on: disk/reader.py, disk/allocator.py (slot allocation), disk/segments.py (slots),
disk/index.py (location of each block), disk/folder.py (one opened folder), disk/access.py (errors),
disk/upkeep.py (the background thread).

A write claims a slot in the index, fills it, and enters the block: at no moment does the index name
a slot that is not wholly written. A process that dies in between leaves a claim that others free.
Nothing is synced before a write returns: a loss of power may cost the last blocks, never give wrong
ones, since each frame carries its checksum.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from kvire.core.errors import ConfigError, TierUnavailable
from kvire.core.keys import BlockKey
from kvire.core.record import BlockId, BlockRecord
from kvire.core.tier_kind import TierKind
from kvire.store.disk.access import DiskAccess, since_boot
from kvire.store.disk.allocator import MIN_CAPACITY_BYTES, Evicted
from kvire.store.disk.files import Files
from kvire.store.disk.folder import DiskFolder
from kvire.store.disk.index import MOST_NAMESPACE_BYTES, MOST_NAMESPACES
from kvire.store.disk.listing import TenantUse, entries, leftovers, update_counts
from kvire.store.disk.reader import DiskReader, ReadAhead
from kvire.store.disk.segments import SlotHeader, slot_bytes_for
from kvire.store.disk.upkeep import Touches, Upkeep, overwrite_free, remove_rows
from kvire.store.disk.writer import DiskWriter
from kvire.store.tier import Buffer, Entry, ReadOutcome, TierStats

TAG_BYTES = 16
AT_ONCE = 32  # blocks changed in one transaction: fits into a small journal, and does not delay others
KEPT_WHEN_CLEARED = ("settings", "written", "namespaces")


class DiskTier:
    """Tier in the folder at `path`: the tier protocol, and queries for listings and explanations.

    capacity_bytes: limit of `du` of the folder, for all processes that share it: the last one that
        gives a limit sets it; None takes the folder's own. At least MIN_CAPACITY_BYTES.
    new_bytes: size, by path, of a folder without a limit; None: such a folder is refused.
    writes_per_day_bytes: of all processes; None: no limit.
    files, wall, elapsed: the system, replaced in tests.

    Nothing is opened before the first call.
    """

    kind = TierKind.DISK
    local = True

    def __init__(
        self,
        path: Path | str,
        capacity_bytes: int | None = None,
        *,
        name: str = "disk",
        new_bytes: Callable[[Path], int] | None = None,
        writes_per_day_bytes: int | None = None,
        files: Files | None = None,
        wall: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = since_boot,
    ) -> None:
        if capacity_bytes is not None and capacity_bytes < MIN_CAPACITY_BYTES:
            raise ConfigError(
                f"a disk tier of {capacity_bytes:,} bytes is too small: it takes at least {MIN_CAPACITY_BYTES:,}, "
                "of which the index and its journal need about a third"
            )
        self.name = name
        self._evicted = Evicted()
        self._touches = Touches()
        self._access = DiskAccess(Path(path), capacity_bytes, new_bytes, files or Files(), wall, elapsed)
        self._reader = DiskReader(self._access, self._evicted)
        self._prefetcher = ReadAhead(self._access)
        self._writer = DiskWriter(self._evicted, self._used, writes_per_day_bytes, elapsed)
        self._upkeep = Upkeep(self._access, self._touches, self._writer, self._evicted)
        self._stats = TierStats(limit_bytes=capacity_bytes)
        self._lock = threading.Lock()

    def open(self) -> Self:
        """Open the folder now, making missing parts.

        Raises StoreError if `path` cannot hold a store.
        """
        self._access.open()
        self._upkeep.start()
        return self

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def degraded(self) -> str:
        """Message of the last failed call, until a call of its kind succeeds; else empty."""
        return self._access.writing.error or self._access.reading.error

    def held(self, ids: Sequence[BlockId], timeout_s: float | None = None) -> list[bool]:  # noqa: ARG002
        """See Tier."""
        return self._reader.held(ids)

    def read(self, block_id: BlockId, buffers: Sequence[Buffer], timeout_s: float | None = None) -> int:  # noqa: ARG002
        """See Tier."""
        return self._reader.read(block_id, buffers)

    def read_run(self, ids: Sequence[BlockId], buffers: Sequence[Sequence[Buffer]]) -> list[ReadOutcome]:
        """See ReadsRuns."""
        return self._reader.read_run(ids, buffers)

    def peek(self, block_id: BlockId, buffer: Buffer) -> int:
        """Fill `buffer` with the first bytes of the block's frame; returns how many.

        Errors as in `read`.
        """
        return self._reader.read(block_id, [buffer], whole=False)

    def write(self, record: BlockRecord, frame: Buffer, tenant_tag: bytes, *, ttl_s: float | None = None) -> bool:
        """See Tier."""
        assert len(tenant_tag) == TAG_BYTES
        self._upkeep.start()
        slot_bytes = slot_bytes_for(len(frame))
        try:
            with self._access.writes() as folder:
                self._touches.flush(folder)
                head = SlotHeader(
                    record.id.key, record.id.group, record.parent, record.root, tenant_tag, record.content,
                    record.index, len(frame), self._access.now(), ttl_s,
                )  # fmt: skip
                refused = self._writer.write(folder, slot_bytes, head, frame)
                self._reader.forget(record.id)
        except TierUnavailable:
            self._refuse("unavailable")
            raise
        if refused is not None:
            self._refuse(refused)
            return False
        with self._lock:
            self._stats.writes += 1
            self._stats.written_bytes += len(frame)
        return True

    def _used(self, folder: DiskFolder, ids: Sequence[BlockId], now: float) -> None:
        """Note the use before another write evicts the block."""
        self._touches.add(ids, now)
        self._touches.flush(folder)

    def touch(self, ids: Sequence[BlockId]) -> None:
        """See Tier. Written within a second; a crash before that loses it."""
        self._upkeep.start()
        self._touches.add(ids, self._access.now())

    def locate(self, ids: Sequence[BlockId]) -> list[bool]:
        """See Prefetching."""
        return self._reader.locate(ids)

    def prefetch(self, ids: Sequence[BlockId]) -> None:
        """See Prefetching. The kernel fetches them in the background."""
        self._prefetcher.add(self._reader.found(ids))

    def delete(self, ids: Sequence[BlockId], reason: str) -> int:
        """See Tier. "Forgotten" blocks are also overwritten."""
        query = "SELECT slot, slot_bytes, frame_bytes, tenant FROM blocks WHERE key = ? AND grp = ?"
        count = 0
        with self._access.changes() as folder:
            for start in range(0, len(ids) if folder else 0, AT_ONCE):
                assert folder is not None
                with folder.allocator(self._evicted) as allocator:
                    for block_id in ids[start : start + AT_ONCE]:
                        count += remove_rows(folder, allocator, query, block_id, reason)
        return count

    def delete_tenant(self, tenant_tag: bytes) -> int:
        """See Tier. The blocks are overwritten."""
        query = "SELECT slot, slot_bytes, frame_bytes, tenant FROM blocks WHERE slot_bytes = ? AND tenant = ? LIMIT ?"
        count = 0
        with self._access.changes() as folder:
            if folder is None:
                return 0
            for (slot_bytes,) in folder.index.query("SELECT DISTINCT slot_bytes FROM segments"):
                removed = 1
                while removed:
                    with folder.allocator(self._evicted) as allocator:
                        removed = remove_rows(folder, allocator, query, (slot_bytes, tenant_tag, AT_ONCE), "forgotten")
                    count += removed
            overwrite_free(folder, AT_ONCE)
        return count

    def clear(self) -> int:
        """See Tier. Pins go too; the limit and the names of namespaces stay."""
        with self._access.changes() as folder:
            if folder is None:
                return 0
            rows = folder.index.query("SELECT tag, blocks FROM tenants")
            folder.clear(keep=KEPT_WHEN_CLEARED)
        for tag, blocks in rows:
            self._evicted.add("forgotten", tag, blocks)
        return sum(blocks for _, blocks in rows)

    def pin(self, ids: Sequence[BlockId], *, pinned: bool) -> int:
        """See Tier."""
        count = 0
        with self._access.changes() as folder:
            for start in range(0, len(ids) if folder else 0, AT_ONCE):
                assert folder is not None
                with folder.index.transaction() as run:
                    for block_id in ids[start : start + AT_ONCE]:
                        count += bool(run("SELECT 1 FROM blocks WHERE key = ? AND grp = ?", *block_id))
                        run("UPDATE blocks SET pinned = ? WHERE key = ? AND grp = ?", pinned, *block_id)
        return count

    def entries(self) -> Iterator[Entry]:
        """See Tier."""
        return entries(self._access)

    def children(self, parent: BlockKey, group: int, limit: int) -> list[BlockId]:
        """The newest blocks below `parent` (a block's key or a root). Raises TierUnavailable."""
        query = "SELECT key FROM blocks WHERE parent = ? AND grp = ? ORDER BY created DESC LIMIT ?"
        return [BlockId(BlockKey(key), group) for (key,) in self._ask(query, parent, group, limit)]

    def roots_of(self, content: bytes) -> list[BlockKey]:
        """Namespaces under which the same tokens are stored. Raises TierUnavailable."""
        return [BlockKey(root) for (root,) in self._ask("SELECT DISTINCT root FROM blocks WHERE content = ?", content)]

    def note_namespace(self, root: BlockKey, fields: Mapping[str, str]) -> None:
        """Remember the fields of a root; the last MOST_NAMESPACES are kept.

        Raises TierUnavailable.
        """
        text = json.dumps(dict(fields), sort_keys=True)
        if len(text) > MOST_NAMESPACE_BYTES:
            raise ValueError(f"the fields of a namespace take {len(text)} bytes, more than {MOST_NAMESPACE_BYTES}")
        with self._access.writes() as folder, folder.index.transaction() as run:
            run("INSERT OR REPLACE INTO namespaces VALUES (?, ?, ?)", root, text, self._access.now())
            run(
                "DELETE FROM namespaces WHERE root NOT IN (SELECT root FROM namespaces ORDER BY noted DESC LIMIT ?)",
                MOST_NAMESPACES,
            )

    def namespaces(self) -> dict[BlockKey, dict[str, str]]:
        """All notes. Raises TierUnavailable."""
        return {BlockKey(root): json.loads(text) for root, text in self._ask("SELECT root, fields FROM namespaces")}

    def tenants(self) -> dict[bytes, TenantUse]:
        """Space used by each tenant, by its tag.

        Evictions are those of this process. Raises TierUnavailable.
        """
        rows = self._ask("SELECT tag, bytes, blocks FROM tenants")
        evicted = self._evicted.tenants
        use = {tag: TenantUse(0, 0, count) for tag, count in evicted.items()}
        return use | {tag: TenantUse(size, blocks, evicted[tag]) for tag, size, blocks in rows}

    def leftovers(self, *, free: bool) -> int:
        """Bytes claimed by ended processes that hold no block.

        free: release them now.

        Raises TierUnavailable.
        """
        return leftovers(self._access, self._evicted, free=free)

    def stats(self) -> TierStats:
        """See Tier. Writes of other processes show within a second."""
        with self._lock:
            update_counts(self._access, self._stats, self._evicted)
            return replace(
                self._stats, reads=self._reader.reads, read_bytes=self._reader.read_bytes,
                refused=dict(self._stats.refused),
            )  # fmt: skip

    def close(self) -> None:
        """See Tier."""
        self._prefetcher.close()
        self._upkeep.close()
        self._access.close()

    def _ask(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        with self._access.reads() as folder:
            return [] if folder is None else folder.index.query(sql, *values)

    def _refuse(self, reason: str) -> None:
        with self._lock:
            self._stats.refused[reason] = self._stats.refused.get(reason, 0) + 1
