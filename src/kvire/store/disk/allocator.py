"""Slot allocation and eviction. Everything here runs inside one transaction of the index.

The limit holds by construction: a segment is entered in the index, where every process counts it,
before its file is made, and it leaves the index after its file. The size of all segments, the
largest index for them, and the journal is at most the limit.

Eviction takes the least recently used block, the later one in its sequence first. No parent is
evicted before its child: a block that is written takes over its parent's time, which was brought up
to now before if it was old or next to be evicted (disk/writer.py), and blocks touched together get
one time. A prompt that fills the tier keeps its beginning. With several tenants, blocks are taken
from tenants above an equal share. A slot size without room takes whole segments from another size,
if those were not used since the oldest block of its own.
"""
# ruff: noqa: S608 - nothing but numbers and names of ours is put into a statement's text

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property

from kvire.core.keys import BlockKey
from kvire.store.disk.index import (
    BASE_INDEX_BYTES,
    SHARED_MEMORY_BYTES,
    SLOT_INDEX_BYTES,
    Run,
)
from kvire.store.disk.rows import GONE, LAST_S, MAKING, MOST_COUNT, READY, SCANNING
from kvire.store.disk.segments import (
    MOST_SEGMENT,
    MOST_SLOTS,
    SLOT_BITS,
    IndexDamagedError,
    SlotHeader,
    place_of,
    segment_of,
    slots_of,
)

KIB, MIB = 1024, 1024 * 1024
MIN_CAPACITY_BYTES = 4 * MIB
MOST_SEGMENTS = 4096  # one folder holds them all
SEGMENT_BYTES = 64 * MIB
PER_SEGMENT_BYTES = 16 * KIB  # metadata of a file system for a file's parts; counted by du
COMPETITORS = 64  # tenants with the most bytes, of whom one has to give way
CHECK = "capacity_check"  # a setting from which the limit follows; older folders lack it
CANDIDATES = 8  # segments unused longest, of which one may change its size


def segment_bytes_for(capacity_bytes: int) -> int:
    """Size of a segment, unless one slot is larger."""
    return max(min(SEGMENT_BYTES, capacity_bytes // 16), capacity_bytes // MOST_SEGMENTS)


def journal_bytes_for(capacity_bytes: int) -> int:
    """Size limit of the index's journal."""
    return min(16 * MIB, max(MIB, capacity_bytes // 16))


def taken_bytes(capacity_bytes: int, segment_bytes: int, segments: int, slots: int) -> int:
    """Upper limit of a folder's size with these segments, everything counted."""
    index = BASE_INDEX_BYTES + SHARED_MEMORY_BYTES + journal_bytes_for(capacity_bytes) + slots * SLOT_INDEX_BYTES
    return index + segment_bytes + segments * PER_SEGMENT_BYTES


def capacity_for(segment_bytes: int, segments: int, slots: int) -> int:
    """The smallest limit under which all of these segments may stay."""
    without_journal = taken_bytes(0, segment_bytes, segments, slots)
    return max(MIN_CAPACITY_BYTES, without_journal * 16 // 15 + KIB)


def noted_capacity(run: Run) -> int | None:
    """The folder's limit in bytes, None if it was never set. Raises IndexDamagedError."""
    settings: dict[str, int] = dict(run("SELECT name, value FROM settings"))
    capacity_bytes = settings.get("capacity_bytes")
    if capacity_bytes is None:
        if settings or run("SELECT 1 FROM segments LIMIT 1"):
            raise IndexDamagedError("it has blocks, and no limit")
        return None
    if settings.get(CHECK, _opposite(capacity_bytes)) != _opposite(capacity_bytes):
        raise IndexDamagedError("it contradicts itself about the limit")
    return capacity_bytes


def note_capacity(run: Run, capacity_bytes: int) -> None:
    """Set the folder's limit; stored twice, since blocks above it are evicted."""
    for name, value in (("capacity_bytes", capacity_bytes), (CHECK, _opposite(capacity_bytes))):
        run("INSERT OR REPLACE INTO settings VALUES (?, ?)", name, value)


def _opposite(capacity_bytes: int) -> int:
    return capacity_bytes ^ (MOST_COUNT - 1)


def capacity_of(run: Run) -> int:
    """The folder's limit in bytes. Raises IndexDamagedError."""
    if (capacity_bytes := noted_capacity(run)) is None:
        raise IndexDamagedError("it has no limit")
    return capacity_bytes


def spare_bytes(run: Run) -> int:
    """The limit less the space in use; negative if the limit was lowered."""
    capacity_bytes = capacity_of(run)
    [(segment_bytes, segments, slots)] = run(
        "SELECT ifnull(sum(slots * slot_bytes), 0) AS bytes, count(*) AS segments, ifnull(sum(slots), 0) AS blocks "
        "FROM segments WHERE state != ?",
        GONE,
    )
    return capacity_bytes - taken_bytes(capacity_bytes, segment_bytes, segments, slots)


@dataclass(slots=True)
class Evicted:
    """Evicted blocks: number per reason and per tenant."""

    reasons: Counter[str] = field(default_factory=Counter)
    tenants: Counter[bytes] = field(default_factory=Counter)

    def add(self, reason: str, tenant: bytes, count: int = 1) -> None:
        """Count evicted blocks."""
        self.reasons[reason] += count
        self.tenants[tenant] += count


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment of the index."""

    id: int
    slot_bytes: int
    slots: int


@dataclass(frozen=True, slots=True)
class SlotRef:
    """A slot and its size."""

    slot: int
    slot_bytes: int


class OwnPrompt(Enum):
    """Why there is no slot: the next block to evict is one that the new block continues."""

    NEXT = auto()


@dataclass(frozen=True, slots=True)
class _Victim:
    slot: int
    key: BlockKey
    used: float
    tenant: bytes
    reason: str


class SlotAllocator:
    """Slot allocation within one transaction.

    may_grow: False while the file system is known to be full.
    remove: removes a segment's file; it runs before the segment leaves the index, so that no file
        is ever forgotten.
    wipe: makes a slot's head invalid.
    """

    def __init__(
        self,
        run: Run,
        owner: int,
        *,
        may_grow: bool,
        evicted: Evicted,
        remove: Callable[[Segment], None],
        wipe: Callable[[int, int], None],
    ) -> None:
        self.run = run
        self._owner = owner
        self._may_grow = may_grow
        self.evicted = evicted
        self._remove = remove
        self.wipe = wipe

    def claim(  # noqa: PLR0911  (each is another outcome)
        self, slot_bytes: int, tenant: bytes, now: float, parent: BlockKey
    ) -> int | Segment | OwnPrompt | str:
        """Claim a slot for the caller.

        Returns the slot, a segment whose file the caller must make before it asks again, or the
        reason for refusal.

        parent: of the block to be written; it is not evicted for it, in any group (OwnPrompt).
        """
        if taken_bytes(self._capacity, slot_bytes, 1, 1) > self._capacity:
            return "full"
        if (slot := self._unused(slot_bytes)) is not None:
            return self._take(slot, slot_bytes)
        if self._may_grow and (segment := self._new_segment(slot_bytes, now)) is not None:
            return segment
        while (oldest := self._oldest(slot_bytes, tenant)) is not None:
            if self._convert(slot_bytes, tenant, before=oldest.used):
                break
            if oldest.key == parent:
                return OwnPrompt.NEXT
            self._evict(oldest)
            if (slot := self._unused(slot_bytes)) is not None:  # else its segment was removed
                return self._take(slot, slot_bytes)
        while (segment := self._new_segment(slot_bytes, now)) is None:
            if not self._convert(slot_bytes, tenant, before=float("inf")):
                return self._why_not(slot_bytes)
        return segment

    def keep(self, slot: int, slot_bytes: int, head: SlotHeader) -> list[SlotRef] | None:
        """Enter the block in the claimed slot. Its earlier slots become claimed instead: free them.

        None if the slot was lost meanwhile: with its segment, or because another process considered
        this one dead.
        """
        run = self.run
        if not self._mine(slot):
            return None
        run("DELETE FROM claims WHERE slot = ?", slot)
        old = [SlotRef(*row) for row in run("SELECT slot, slot_bytes FROM blocks WHERE key = ? AND grp = ?", *head.id)]
        pinned = bool(run("SELECT 1 FROM blocks WHERE key = ? AND grp = ? AND pinned", *head.id))
        for each in old:
            run("DELETE FROM blocks WHERE slot = ?", each.slot)
        old = [each for each in old if run("SELECT 1 FROM free WHERE slot = ?", each.slot)]  # not in a removed one
        for each in old:
            run("DELETE FROM free WHERE slot = ?", each.slot)
            self._take(each.slot, each.slot_bytes)
        self.enter(slot, slot_bytes, head, used=head.created, pinned=pinned)
        return old

    def enter(self, slot: int, slot_bytes: int, head: SlotHeader, used: float, *, pinned: bool = False) -> None:
        """Enter a block that has no slot in an unclaimed one."""
        expires = None if head.ttl_s is None else min(used + head.ttl_s, LAST_S)
        [(parent_used,)] = self.run("SELECT min(used) AS least_used FROM blocks WHERE key = ?", head.parent)
        used = used if parent_used is None else min(used, parent_used)
        self.run(
            "INSERT INTO blocks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            slot, slot_bytes, head.key, head.group, head.parent, head.root, head.tenant_tag, head.index,
            head.frame_bytes, head.content, head.created, used, head.ttl_s, expires, pinned,
        )  # fmt: skip
        self.run("UPDATE segments SET used = max(used, ?), unsynced = 1 WHERE id = ?", used, segment_of(slot))

    def free(self, slot: int, slot_bytes: int, owner: int | None = None) -> None:
        """Release a slot claimed by this process or `owner`.

        A free slot has no valid head: wiped first.
        """
        if self._mine(slot, owner):
            self.wipe(slot, slot_bytes)
            self.run("DELETE FROM claims WHERE slot = ?", slot)
            self.run("INSERT INTO free VALUES (?, ?)", slot, slot_bytes)

    def drop(self, segment: Segment) -> None:
        """Remove a segment's file, and with it its blocks; `sweep` removes them from the index."""
        low, high = slots_of(segment.id)
        self._remove(segment)
        self.run("UPDATE segments SET state = ? WHERE id = ?", GONE, segment.id)
        if self.run("SELECT 1 FROM segments WHERE id = ? AND state != ?", segment.id, GONE):
            raise IndexDamagedError("a segment's state cannot be set")
        self.run("DELETE FROM free WHERE slot BETWEEN ? AND ?", low, high)
        self.run("DELETE FROM claims WHERE slot BETWEEN ? AND ?", low, high)

    def sweep(self, segment: int, reason: str, most: int) -> bool:
        """Remove up to `most` blocks of a dropped segment from the index; True once it is done."""
        low, high = slots_of(segment)
        rows = self.run("SELECT slot, tenant FROM blocks WHERE slot BETWEEN ? AND ? LIMIT ?", low, high, most)
        for slot, tenant in rows:
            self.run("DELETE FROM blocks WHERE slot = ?", slot)
            self.evicted.add(reason, tenant)
        if rows and self.run("SELECT 1 FROM blocks WHERE slot = ?", rows[0][0]):
            raise IndexDamagedError("a removed block is still there")
        if len(rows) == most:
            return False
        self.run("DELETE FROM segments WHERE id = ?", segment)
        if self.run("SELECT 1 FROM segments WHERE id = ?", segment):
            raise IndexDamagedError("a removed segment is still there")
        return True

    def coldest(self, other_than: int | None, before: float) -> list[Segment]:
        """Least recently used segments of another slot size.

        Last used `before`, without pins or writers.
        """
        rows = self.run(
            "SELECT id, slot_bytes, slots FROM segments s WHERE state = ? AND slot_bytes IS NOT ? "
            f"AND NOT EXISTS (SELECT 1 FROM claims WHERE slot >> {SLOT_BITS} = s.id) "
            "AND (used < ? OR NOT EXISTS (SELECT 1 FROM blocks WHERE slot BETWEEN "
            f"s.id << {SLOT_BITS} AND ((s.id + 1) << {SLOT_BITS}) - 1)) ORDER BY used LIMIT ?",
            READY, other_than, before, CANDIDATES,
        )  # fmt: skip
        return [segment for segment in (Segment(*row) for row in rows) if not self._holds_pinned(segment)]

    def _unused(self, slot_bytes: int) -> int | None:
        run = self.run
        if rows := run("SELECT slot FROM free WHERE slot_bytes = ? LIMIT 1", slot_bytes):
            [(slot,)] = rows
            self._must_be_nobodys(slot, slot_bytes)
            run("DELETE FROM free WHERE slot = ?", slot)
            return int(slot)
        rows = run(
            "SELECT id, fresh FROM segments WHERE slot_bytes = ? AND state = ? AND fresh < slots ORDER BY id LIMIT 1",
            slot_bytes, READY,
        )  # fmt: skip
        if not rows:
            return None
        segment, place = rows[0]
        run("UPDATE segments SET fresh = fresh + 1 WHERE id = ?", segment)
        slot = int(segment << SLOT_BITS | place)
        self._must_be_nobodys(slot, slot_bytes)
        return slot

    def _must_be_nobodys(self, slot: int, slot_bytes: int) -> None:
        """Raises IndexDamagedError if a slot the index calls free holds a block, to prevent
        overwriting it.
        """
        rows = self.run(
            "SELECT state, slot_bytes, fresh FROM segments WHERE id = ?1 >> 20 "
            "AND NOT EXISTS (SELECT 1 FROM blocks WHERE slot = ?1)",
            slot,
        )
        for state, size, fresh in rows:
            place = place_of(slot)  # a damaged number must not make a file longer than the folder may be
            within = place < fresh and (place + 1) * slot_bytes <= self._capacity
            if state in (READY, SCANNING) and size == slot_bytes and within:
                return
        raise IndexDamagedError("it gives away what is not free")

    def _mine(self, slot: int, owner: int | None = None) -> bool:
        """Whether the slot is still claimed; dropping a segment drops its claims."""
        return bool(self.run("SELECT 1 FROM claims WHERE slot = ? AND owner = ?", slot, owner or self._owner))

    def _take(self, slot: int, slot_bytes: int) -> int:
        self.run("INSERT INTO claims VALUES (?, ?, ?)", slot, slot_bytes, self._owner)
        return slot

    def _new_segment(self, slot_bytes: int, now: float) -> Segment | None:
        wanted = min(MOST_SLOTS, max(1, segment_bytes_for(self._capacity) // slot_bytes))
        slots = min(wanted, (spare_bytes(self.run) - PER_SEGMENT_BYTES) // (slot_bytes + SLOT_INDEX_BYTES))
        if slots <= 0:
            return None
        [(newest,)] = self.run("SELECT max(seq) AS newest FROM sqlite_sequence")
        if newest is not None and newest >= MOST_SEGMENT - 1:
            raise IndexDamagedError("it counts segments that never were")
        self.run(
            "INSERT INTO segments (slot_bytes, slots, state, owner, fresh, scanned, used) VALUES (?, ?, ?, ?, 0, 0, ?)",
            slot_bytes, slots, MAKING, self._owner, now,
        )  # fmt: skip
        [(segment,)] = self.run("SELECT last_insert_rowid() AS id")
        return Segment(segment, slot_bytes, slots)

    def _oldest(self, slot_bytes: int, tenant: bytes) -> _Victim | None:
        """The next block to evict."""
        rows = self.run("SELECT tag, bytes FROM tenants ORDER BY bytes DESC LIMIT ?", COMPETITORS)
        alone = all(tag == tenant for tag, _ in rows)
        for tag in self._over_share(rows, tenant):
            found = self.run(
                "SELECT slot, key, used FROM blocks WHERE slot_bytes = ? AND tenant = ? AND pinned = 0 "
                "ORDER BY used, place DESC LIMIT 1",
                slot_bytes, tag,
            )  # fmt: skip
            if found:
                slot, key, used = found[0]
                return _Victim(slot, BlockKey(key), used, tag, "room" if alone else "quota")
        return None

    @staticmethod
    def _over_share(tenants: list[tuple[bytes, int]], writer: bytes) -> list[bytes]:
        """Tenants that may lose blocks to the writer.

        Those above an equal share, largest first, and the writer's own.
        """
        competing = len(tenants) + all(tag != writer for tag, _ in tenants)
        share = sum(count for _, count in tenants) / max(1, competing)
        return [tag for tag, count in tenants if count > share or tag == writer]

    def _convert(self, slot_bytes: int, tenant: bytes, before: float) -> bool:
        """Remove a segment of another size unused since `before`.

        Segments with blocks of tenants below their share are kept.
        """
        rows = self.run("SELECT tag, bytes FROM tenants ORDER BY bytes DESC LIMIT ?", COMPETITORS)
        giving = set(self._over_share(rows, tenant))
        for segment in self.coldest(slot_bytes, before):
            tags = self.run("SELECT DISTINCT tenant FROM blocks WHERE slot BETWEEN ? AND ?", *slots_of(segment.id))
            if all(tag in giving for (tag,) in tags):
                self.drop(segment)
                return True
        return False

    def _evict(self, victim: _Victim) -> None:
        self.run("DELETE FROM blocks WHERE slot = ?", victim.slot)
        if self.run("SELECT 1 FROM blocks WHERE slot = ?", victim.slot):
            raise IndexDamagedError("an evicted block is still there")
        self.evicted.add(victim.reason, victim.tenant)

    def _why_not(self, slot_bytes: int) -> str:
        if self.run("SELECT 1 FROM blocks WHERE slot_bytes = ? AND pinned LIMIT 1", slot_bytes):
            return "pinned"
        return "quota" if self.run("SELECT 1 FROM blocks WHERE slot_bytes = ? LIMIT 1", slot_bytes) else "full"

    def _holds_pinned(self, segment: Segment) -> bool:
        low, high = slots_of(segment.id)
        return bool(self.run("SELECT 1 FROM blocks WHERE slot BETWEEN ? AND ? AND pinned LIMIT 1", low, high))

    @cached_property
    def _capacity(self) -> int:
        return capacity_of(self.run)
