"""Deliberately broken builds of the store above its tiers' files; tests/store must notice each.

As in mutants.py, a mutant patches one function of Kvire for the length of a test.
"""

import fcntl
import hmac
import os
import time
from contextlib import nullcontext
from functools import partial
from hashlib import sha256

import pytest
from obstore.store import LocalStore

from kvire.codec import frame
from kvire.codec.frame import Frames, Header
from kvire.codec.seal import Checksum
from kvire.core.errors import BlockMissing
from kvire.core.keys import Namespace, field
from kvire.sessions import session_file
from kvire.store import handle
from kvire.store.disk import index as disk_index
from kvire.store.disk.access import FollowingClock
from kvire.store.disk.allocator import SlotAllocator
from kvire.store.disk.files import Files
from kvire.store.disk.folder import DiskFolder
from kvire.store.disk.index import Watch
from kvire.store.disk.salvage import Salvaged
from kvire.store.disk.segments import HEAD_BYTES, SegmentFiles, place_of, segment_of
from kvire.store.disk.tier import DiskTier
from kvire.store.eviction.order import EvictionOrder
from kvire.store.explain import Explainer
from kvire.store.generations import Generations
from kvire.store.handle import TierHandle
from kvire.store.health import Outage
from kvire.store.keyring import Keyring
from kvire.store.loader import Loader, _InflightRead
from kvire.store.memory.tier import MemoryTier
from kvire.store.remote.objects import ObjectBackend
from kvire.store.survey import SpaceUse, Survey
from kvire.store.threads import LookupThread, WorkerThreads
from kvire.store.ticket import LoadState, Ticket
from kvire.store.write_behind import WriteBehind
from kvire.store.write_queue import WriteQueue


def published_before_the_load_ends(patch: pytest.MonkeyPatch) -> None:
    """A block is called ready when its reading begins."""
    state = Ticket.state

    def broken(self, i):
        return LoadState.READY if state(self, i) is LoadState.READING else state(self, i)

    patch.setattr(Ticket, "state", broken)


def what_names_no_build_is_current(patch: pytest.MonkeyPatch) -> None:
    """Blocks from before builds were noted count as those of a build without a name."""
    patch.setattr(SpaceUse, "build", property(lambda self: (self.fields or {}).get("build", "")))


def the_build_used_first_is_current(patch: pytest.MonkeyPatch) -> None:
    """Whichever build came first counts as the one in use."""
    patch.setattr(Survey, "spaces", property(lambda self: sorted(self._spaces.values(), key=lambda space: space.used)))


def claim_ignored(patch: pytest.MonkeyPatch) -> None:
    """A block that the caller computes is read all the same."""
    begin = Ticket.begin

    def broken(self, i, *, attached):
        part = self._parts[i]
        if part.state is LoadState.CLAIMED and not self._cancelled:
            part.state = LoadState.WAITING
            self._pending += 1
        return begin(self, i, attached=attached)

    patch.setattr(Ticket, "begin", broken)


def cancelled_loads_count_as_quiet(patch: pytest.MonkeyPatch) -> None:
    """Nobody counts the reads that may still write."""
    patch.setattr(Ticket, "active", property(lambda self: 0))


def remote_reads_into_the_callers_memory(patch: pytest.MonkeyPatch) -> None:
    """What arrives after the deadline lands where somebody else computes by then."""

    def broken(self, inflight):
        if (first := self._begin([inflight], inflight.number)[0]) is None:
            return
        handle = self._remote[inflight.number]
        if (failure := self._fetch(handle, inflight.record, first.out, None)) is None:
            self._deliver([(inflight, first.out)], inflight.number, handle)
        else:
            self._ask_next(inflight, inflight.number, failure)

    patch.setattr(Loader, "_read_remote", broken)


def everybody_reads_alone(patch: pytest.MonkeyPatch) -> None:
    """Loads of the same block do not know of each other."""

    def broken(self, load, numbers, place):
        return [_InflightRead(load.ticket.wanted[i].record, number, [(load, i)]) for i, number in numbers.items()]

    patch.setattr(Loader, "_reads_for", broken)


def the_first_reader_goes_first(patch: pytest.MonkeyPatch) -> None:
    """Copies for others are made from memory that was handed out already."""
    end = Loader._end
    patch.setattr(Loader, "_end", lambda self, reads, place: [one[::-1] for one in end(self, reads, place)])


def checksum_skipped(patch: pytest.MonkeyPatch) -> None:
    """Frames are taken at their word."""
    patch.setattr(Checksum, "check", lambda self, header, section, plain, tag: None)


def runs_are_taken_at_their_word(patch: pytest.MonkeyPatch) -> None:
    """What is read together is not verified."""
    patch.setattr(handle, "finish_all", lambda readings, lengths: [length is not None for length in lengths])

    def copied(self, wanted, frames):
        for (record, out), whole in zip(wanted, frames, strict=True):
            if whole is not None:
                start = frame.prefix_bytes(len(record.token_ids))
                out[:] = whole[start : start + record.kv_bytes]
        return [whole is not None for whole in frames]

    patch.setattr(Frames, "copy_out", copied)


def lent_frames_are_not_held(patch: pytest.MonkeyPatch) -> None:
    """Memory is given to others while somebody reads there."""
    patch.setattr(MemoryTier, "_hold", lambda self, ids: self._find(ids))
    patch.setattr(MemoryTier, "_release", lambda self, slots: None)


def damaged_blocks_stay(patch: pytest.MonkeyPatch) -> None:
    """Damage is a miss, again and again."""
    init = TierHandle.__init__

    class Keeping:
        def __init__(self, tier):
            self._tier = tier

        def __getattr__(self, name):
            return (lambda ids, reason: 0) if name == "delete" else getattr(self._tier, name)

    def broken(self, tier, *rest):
        init(self, tier, *rest)
        self.tier = Keeping(tier)

    patch.setattr(TierHandle, "__init__", broken)


def deleted_at_first_sight(patch: pytest.MonkeyPatch) -> None:
    """A block that is replaced while it is read counts as damaged."""
    read = TierHandle._read

    def broken(self, record, out, timeout_s):
        try:
            read(self, record, out, timeout_s)
        except BlockMissing:
            raise
        except Exception:
            self.tier.delete([record.id], "damaged")
            raise

    patch.setattr(TierHandle, "_read", broken)


def foreign_blocks_are_promised_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A lookup promises what no load can get."""
    patch.setattr(TierHandle, "promises", lambda self, ids: self.held(ids))


def address_is_enough(patch: pytest.MonkeyPatch) -> None:
    """Tokens, parent and place are not compared."""
    patch.setattr(Header, "stands_for", lambda self, record, tenant: self.key == record.id.key)
    patch.setattr(frame, "_token_ids", lambda header, whole, guard: _AnyIds())


def any_sound_frame_will_do(patch: pytest.MonkeyPatch) -> None:
    """What lies under an address is taken for what belongs there."""
    patch.setattr(Header, "stands_for", lambda self, record, tenant: True)
    patch.setattr(frame, "_token_ids", lambda header, whole, guard: _AnyIds())


class _AnyIds:
    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    __hash__ = None


def salt_dropped(patch: pytest.MonkeyPatch) -> None:
    """Tenants share names, and nobody compares whose a frame is."""

    def root(self):
        fields = ("weights", "config", "numerics", "kv_dtype", "spec", "block_size")
        return sha256(b"".join(field(name, str(getattr(self, name)).encode()) for name in fields)).digest()

    patch.setattr(Namespace, "root", property(root))
    patch.setattr(frame, "_guard", lambda header, tenant: frame._CHECKSUM)
    patch.setattr(Header, "stands_for", lambda self, record, tenant: self.key == record.id.key)


def drops_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    """What finds no room disappears in silence."""
    count = TierHandle.count
    patch.setattr(TierHandle, "count", lambda self, **added: count(self, **(added | {"dropped": 0})))


def queues_without_bounds(patch: pytest.MonkeyPatch) -> None:
    """A slow tier fills the memory."""
    patch.setattr(WriteQueue, "has_room", lambda self, size_bytes: True)


def saved_without_a_copy(patch: pytest.MonkeyPatch) -> None:
    """The buffer holds the pool's own memory."""
    save = WriteBehind.save

    def broken(self, record, kv):
        self._buffers.take = lambda size_bytes: kv
        return save(self, record, kv)

    patch.setattr(WriteBehind, "save", broken)


def forgotten_blocks_are_still_written(patch: pytest.MonkeyPatch) -> None:
    """A writer does not look whether its block was forgotten meanwhile."""
    patch.setattr(WriteBehind, "_may_store", lambda self, pending: True)


def clear_stops_at_the_tiers(patch: pytest.MonkeyPatch) -> None:
    """Clearing clears the tiers and not what is on its way to them; the writers do not
    look either.
    """
    patch.setattr(Generations, "is_recent", lambda self, tenant, mark: True)


def turns_do_not_matter(patch: pytest.MonkeyPatch) -> None:
    """Everything is admitted."""
    patch.setattr(WriteBehind, "_was_seen", lambda self, block_id: True)


def known_blocks_are_written_again(patch: pytest.MonkeyPatch) -> None:
    """Each tier is sent each block whenever it is seen."""
    patch.setattr(TierHandle, "needs", lambda self, ids: [True] * len(ids))


def stale_index_after_replace(patch: pytest.MonkeyPatch) -> None:
    """A block that is there already keeps its first frame."""
    write = MemoryTier.write

    def broken(self, record, *rest, **options):
        return True if self.held([record.id])[0] else write(self, record, *rest, **options)

    patch.setattr(MemoryTier, "write", broken)


def slots_reused_under_readers(patch: pytest.MonkeyPatch) -> None:
    """What is deleted is free at once, whoever reads it."""
    unindex = MemoryTier._unindex

    def broken(self, slot):
        extents, readers, slot.readers = list(slot.extents), slot.readers, 0
        unindex(self, slot)
        slot.readers = readers
        if readers:  # they go on reading there
            slot.extents = extents
            patch.setattr(self._arena, "give_back", _once(self._arena.give_back, extents))

    patch.setattr(MemoryTier, "_unindex", broken)


def _once(give_back, extents):
    """Ignore what was given back before."""
    return lambda more: None if more == extents else give_back(more)


def lookups_count_as_use(patch: pytest.MonkeyPatch) -> None:
    """Whatever is looked for stays."""
    held = MemoryTier.held

    def broken(self, ids, timeout_s=None):
        self.touch(ids)
        return held(self, ids, timeout_s)

    patch.setattr(MemoryTier, "held", broken)


def parents_go_first(patch: pytest.MonkeyPatch) -> None:
    """Eviction looks at age alone."""

    def broken(self, use):
        slots = [slot for slot in self.index.values() if slot.queued and not slot.readers]
        slots = [slot for slot in slots if self.tenants[slot.tenant_tag] is use]
        if not slots:
            return None
        oldest = min(slots, key=lambda slot: slot.order)
        oldest.queued = False
        return oldest

    patch.setattr(EvictionOrder, "_first", broken)


def one_tenant_may_evict_all(patch: pytest.MonkeyPatch) -> None:
    """Who takes how much does not matter."""
    victims = EvictionOrder.victims

    def broken(self, missing_bytes, tenant_tag, written, parent):
        used = {tag: use.used_bytes for tag, use in self.tenants.items()}
        for tag, use in self.tenants.items():
            use.used_bytes = 1 << 40 if tag != tenant_tag else 0
        try:
            return victims(self, missing_bytes, tenant_tag, written, parent)
        finally:
            for tag, use in self.tenants.items():
                use.used_bytes = used[tag]

    patch.setattr(EvictionOrder, "victims", broken)


def threads_stay(patch: pytest.MonkeyPatch) -> None:
    """Closing ends nothing."""
    patch.setattr(WorkerThreads, "stop", lambda self: None)
    patch.setattr(WorkerThreads, "join", lambda self, end: None)


def salts_are_noted(patch: pytest.MonkeyPatch) -> None:
    """What a namespace says is kept as it came."""
    note = Explainer.note_namespace
    patch.setattr(Explainer, "note_namespace", lambda self, root, fields: note(self, root, fields) | dict(fields))


def misses_are_never_evictions(patch: pytest.MonkeyPatch) -> None:
    """Nobody remembers what was stored."""
    patch.setattr(Explainer, "note_stored", partial(lambda self, record: None))


def lock_errors_get_out(patch: pytest.MonkeyPatch) -> None:
    """A key file that cannot be locked raises what the system says."""
    patch.setattr(Keyring, "_lock_folder", lambda self, folder: fcntl.flock(folder, fcntl.LOCK_EX))


def backups_are_wiped(patch: pytest.MonkeyPatch) -> None:
    """The old key file is overwritten, whoever else has a name for it."""
    patch.setattr(
        Keyring, "_wipe", lambda self, descriptor: os.pwrite(descriptor, bytes(os.fstat(descriptor).st_size), 0)
    )


def the_default_size_is_for_all(patch: pytest.MonkeyPatch) -> None:
    """A folder gets the default size whenever none is named."""
    init = DiskTier.__init__

    def broken(self, path, capacity_bytes=None, *, new_bytes=None, **options):
        if capacity_bytes is None and new_bytes is not None:
            capacity_bytes = new_bytes(path)
        init(self, path, capacity_bytes, new_bytes=new_bytes, **options)

    patch.setattr(DiskTier, "__init__", broken)


def a_damaged_index_takes_the_limit_along(patch: pytest.MonkeyPatch) -> None:
    """Whatever was damaged begins like a new store."""
    patch.setattr(DiskFolder, "_legible", lambda self: Salvaged())


def looks_wait_for_the_disk(patch: pytest.MonkeyPatch) -> None:
    """Whoever looks asks the index itself."""
    patch.setattr(LookupThread, "ask", lambda self, call: call())


def late_tiers_are_asked_on(patch: pytest.MonkeyPatch) -> None:
    """A tier that is late in a row is asked as often as ever."""
    patch.setattr(Outage, "check", lambda self: None)


def looks_are_remembered(patch: pytest.MonkeyPatch) -> None:
    """A look leaves behind where it found blocks, and starts what loads need."""

    def broken(self, ids, timeout_s=None):
        self._upkeep.start()
        return self._reader.locate(ids)

    patch.setattr(DiskTier, "held", broken)


def rows_are_not_checked(patch: pytest.MonkeyPatch) -> None:
    """What the index says is taken for what was written there."""
    patch.setattr(disk_index, "check_rows", lambda columns, rows: None)


def statements_have_no_end(patch: pytest.MonkeyPatch) -> None:
    """Nobody looks how long a statement takes."""
    patch.setattr(Watch, "is_late", lambda self: False)


def slots_are_given_away_unseen(patch: pytest.MonkeyPatch) -> None:
    """A slot that the index calls free is free."""
    patch.setattr(SlotAllocator, "_must_be_nobodys", lambda self, slot, slot_bytes: None)


def pins_go_with_the_index(patch: pytest.MonkeyPatch) -> None:
    """A new index begins with nothing."""
    patch.setattr(Salvaged, "enter", lambda self, index: None)


def what_a_tier_raises_gets_out(patch: pytest.MonkeyPatch) -> None:
    """Tiers are trusted to raise what they promise."""
    patch.setattr(TierHandle, "answers", lambda self: nullcontext())


def checkpoints_beside_commits(patch: pytest.MonkeyPatch) -> None:
    """SQLite's own locks are trusted."""
    patch.setattr(DiskFolder, "_writing", lambda self: nullcontext())


def everybody_else_is_dead(patch: pytest.MonkeyPatch) -> None:
    """Whatever another process has claimed is free."""
    patch.setattr(DiskFolder, "alive", lambda self, owner: owner == self.owner)


def heads_come_first(patch: pytest.MonkeyPatch) -> None:
    """A slot says whose frame it holds before it holds it."""

    def broken(self, slot, slot_bytes, head, frame):
        offset = place_of(slot) * slot_bytes
        with self._borrow(segment_of(slot), slot_bytes) as fd:
            self._files.write(fd, memoryview(head.encode()), offset)
            self._files.write(fd, frame, offset + HEAD_BYTES)

    patch.setattr(SegmentFiles, "write", broken)


def clocks_that_are_put_right_stay_wrong(patch: pytest.MonkeyPatch) -> None:
    """The clock of the start counts for ever."""
    patch.setattr("kvire.store.disk.access.FOLLOW_AT_MOST_S", 0.0)


def others_are_from_the_future(patch: pytest.MonkeyPatch) -> None:
    """Whatever is later than a clock that lags behind is pulled back."""
    patch.setattr(FollowingClock, "latest", FollowingClock.now)


def suspends_take_no_time(patch: pytest.MonkeyPatch) -> None:
    """The clock stands still while the machine is suspended."""
    patch.setitem(DiskTier.__init__.__kwdefaults__, "elapsed", time.monotonic)


def shared_folders_are_open_to_all(patch: pytest.MonkeyPatch) -> None:
    """Files of a folder are made as the umask says."""
    patch.setattr(
        "kvire.store.remote.objects.FolderBackend", lambda folder: ObjectBackend(LocalStore(folder, mkdir=True))
    )


def anybody_may_write_to_the_store(patch: pytest.MonkeyPatch) -> None:
    """Nobody looks who may change the folder."""
    patch.setattr(Files, "mode", lambda self, fd: 0o700)


def new_folders_are_not_synced(patch: pytest.MonkeyPatch) -> None:
    """The first session is synced, the folders above it are not."""
    patch.setattr("kvire.sessions.folder._sync_way_to", lambda store: None)


def session_salts_are_random_only(patch: pytest.MonkeyPatch) -> None:
    """What is drawn twice seals twice with one key and nonce."""
    patch.setattr(session_file, "hmac", _RandomOnly())


class _RandomOnly:
    """hmac, but for a message that begins with random bytes."""

    @staticmethod
    def new(secret, message, digest):
        return hmac.new(secret, message[:32] if message[:32] == bytes(32) else message, digest)


def namespaces_without_bounds(patch: pytest.MonkeyPatch) -> None:
    """Whatever a client makes up is remembered."""
    patch.setattr("kvire.store.explain.REMEMBERED_NAMESPACES", 1 << 60)
