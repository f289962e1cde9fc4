"""What processes that ended in the middle of a write left behind in a disk tier's folder."""

from kvire.store.disk.access import DiskAccess
from kvire.store.disk.allocator import Evicted
from kvire.store.disk.rows import MAKING
from kvire.store.disk.upkeep import reclaim


def leftovers(access: DiskAccess, evicted: Evicted, *, free: bool) -> int:
    """Bytes that ended processes had claimed and that no block lies in. free: give them back now.

    Whoever has the folder open frees them by and by; this is for those who want to know. Raises TierUnavailable.
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
