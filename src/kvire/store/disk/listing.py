"""Listings of a disk tier: its blocks one by one, its counters, and leftover claims."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from kvire.core.errors import TierUnavailable
from kvire.core.keys import BlockKey
from kvire.core.record import BlockId
from kvire.store.disk.access import DiskAccess
from kvire.store.disk.allocator import Evicted, capacity_of
from kvire.store.disk.folder import INDEX_FILES
from kvire.store.disk.rows import GONE, MAKING, ascending
from kvire.store.disk.upkeep import reclaim
from kvire.store.tier import Entry, TierStats


def leftovers(access: DiskAccess, evicted: Evicted, *, free: bool) -> int:
    """Bytes claimed by ended processes that hold no block.

    free: release them now.

    Any process with the folder open releases them sooner or later; this call is for reports. Raises
    TierUnavailable.
    """
    size_bytes = 0
    with access.changes() as folder:
        if folder is None:
            return 0
        claims = folder.index.query("SELECT owner, sum(slot_bytes) AS bytes FROM claims GROUP BY owner")
        unfinished = "SELECT owner, sum(slots * slot_bytes) AS bytes FROM segments WHERE state = ? GROUP BY owner"
        for owner, claimed_bytes in claims + folder.index.query(unfinished, MAKING):
            if not folder.alive(owner):
                size_bytes += claimed_bytes
                if free:
                    with folder.allocator(evicted) as allocator:
                        reclaim(allocator, owner)
    return size_bytes


AT_ONCE = 512  # entries read at a time, so that no reader holds up the journal for long


@dataclass(frozen=True, slots=True)
class TenantUse:
    """Space used by a tenant.

    evictions: of its blocks, by this process.
    """

    bytes: int
    blocks: int
    evictions: int


def entries(access: DiskAccess) -> Iterator[Entry]:
    """Every block, in undefined order."""
    after = -1
    while True:
        with access.reads() as folder:
            rows = [] if folder is None else folder.index.query(
                "SELECT slot, key, grp, parent, root, tenant, place, frame_bytes, created, used, expires, pinned "
                "FROM blocks WHERE slot > ? ORDER BY slot LIMIT ?",
                after, AT_ONCE,
            )  # fmt: skip
            if rows:
                ascending([row[0] for row in rows], after)
        for slot, key, group, parent, root, tenant, place, size, created, used, expires, pinned in rows:
            after = slot
            block_id = BlockId(BlockKey(key), group)
            yield Entry(block_id, parent, root, tenant, place, size, created, used, expires, bool(pinned))
        if len(rows) < AT_ONCE:
            return


def update_counts(access: DiskAccess, stats: TierStats, evicted: Evicted) -> None:
    """Update `stats` with the counts available without waiting."""
    stats.unavailable = access.unavailable
    stats.evictions = dict(evicted.reasons)
    with suppress(TierUnavailable), access.glance() as folder:
        if folder is not None:
            [(blocks,)] = folder.index.query("SELECT ifnull(sum(blocks), 0) AS blocks FROM tenants")
            [(segments,)] = folder.index.query(
                "SELECT ifnull(sum(slots * slot_bytes), 0) AS bytes FROM segments WHERE state != ?", GONE
            )
            limit = capacity_of(folder.index.query)
            stats.used_bytes = segments + sum(folder.files.size(folder.path / name) for name in INDEX_FILES)
            stats.blocks, stats.limit_bytes = blocks, limit
