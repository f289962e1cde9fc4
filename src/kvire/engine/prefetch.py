"""Blocks from the store for the scheduler's sequences: what to load, when to wait for it, what to compute instead."""

from dataclasses import dataclass, replace
from time import monotonic

from kvire.cache.grouped import GroupedLease, GroupedPool
from kvire.core.keys import BlockKey
from kvire.core.report import MissReason
from kvire.engine.loading import EVERYTHING, Load
from kvire.engine.sequence import Sequence
from kvire.engine.store_link import Stored, StoreLink
from kvire.plan.cost import PrefillSpeed, Way
from kvire.store.ticket import Ticket

# How long the engine sleeps while all it has to do is wait for loads; it wakes when a block arrives.
NAP_S = 0.002
# A sequence that must give up its memory waits so long for the reads that are still under way.
QUIET_S = 0.005
# How long a look into the tiers' indexes holds.
FRESH_S = 0.25
# Tiers that were too slow to load from are tried again after so long without a load.
TRY_AGAIN_S = 30.0

_FAILURES = {"damaged": MissReason.DAMAGED, "unavailable": MissReason.UNAVAILABLE}


@dataclass(frozen=True, slots=True)
class Plan:
    """way: LOAD or BOTH."""

    stored: Stored
    way: Way

    def without(self, index: int) -> "Plan":
        """Leave block `index` to somebody else."""
        return replace(self, stored=replace(self.stored, blocks=[b for b in self.stored.blocks if b[0] != index]))


class Prefetcher:
    """Belongs to the scheduler and its thread. prefill: as the engine measures it."""

    def __init__(self, link: StoreLink, pool: GroupedPool, prefill: PrefillSpeed) -> None:
        self.link = link
        self.pool = pool
        self.prefill = prefill
        self.draining: list[tuple[GroupedLease, Ticket]] = []  # memory that a read may still write into
        self._loaded_s = monotonic()
        self.met = 0  # loads of which part was loaded and part computed: from both ends, or because a tier was slow

    def plan(self, seq: Sequence, keys: list[BlockKey], matched: int) -> Plan | None:
        """What to load of the blocks with `keys` beyond those the device has; None to compute them all."""
        seq.passed_over = False
        if not seq.loads or matched == len(keys):
            return None
        stored = self._stored(seq, keys, matched)
        if stored is None:
            return None
        way = self.link.choice(stored, self.prefill, matched * self.pool.block_size).way
        if way is Way.COMPUTE and monotonic() - self._loaded_s > TRY_AGAIN_S:
            way = Way.BOTH  # it costs next to nothing, and shows whether the tiers are still so slow
        if way is Way.LOAD or (way is Way.BOTH and not self.pool.has_windows):
            return Plan(stored, way)
        seq.passed_over = stored.known > matched
        return None

    def _stored(self, seq: Sequence, keys: list[BlockKey], matched: int) -> Stored | None:
        """What the store says, looked up again only after a while: who waits for a seat asks at every step."""
        now = monotonic()
        if seq.looked_up is None or seq.looked_up[0] != matched or now - seq.looked_up[1] > FRESH_S:
            seq.looked_up = (matched, now, self.link.stored(keys, matched))
        return seq.looked_up[2]

    def start(self, seq: Sequence, plan: Plan | None, copies: list[tuple[int, int, int]]) -> None:
        """Begin to load for a sequence that has its blocks; and ask why what is stored nowhere is not.

        copies: that are due before the next step. A load may write into what they copy, so they are made first.
        """
        assert seq.lease is not None
        seq.looked_up = None
        if seq.passed_over:
            self._note_miss(seq, seq.num_published, MissReason.SLOWER)
        if plan is not None:
            self._loaded_s = monotonic()
            self.link.copy(copies)
            seq.load = self.link.start(seq, seq.lease, plan.stored, plan.way)
        if seq.miss_token is not None and seq.explanation is None and seq.num_answer == 0:
            index = plan.stored.known if plan else seq.num_published
            if index * self.pool.block_size < seq.num_prompt - 1:
                seq.explanation, seq.explained = self.link.explain(seq, index), index

    def take_over(self, seq: Sequence) -> bool:
        """Let the front of a sequence jump over loaded blocks; whether it did."""
        load, block_size = seq.load, self.pool.block_size
        assert load is not None
        if seq.num_computed % block_size:
            return False
        front = seq.num_computed // block_size
        reached = load.frontier(front)
        if reached == front:
            return False
        seq.reused_spans.append((max(front * block_size, seq.most_computed), reached * block_size))
        for index in range(front, reached):
            start = max(index * block_size, seq.most_computed)
            seq.loaded_tokens[load.source(index)] += max(0, (index + 1) * block_size - start)
        seq.jump(reached * block_size)
        load.jumped = True
        if reached >= load.stop:
            self._end(seq)
        return True

    def limit(self, seq: Sequence) -> int:
        """How many tokens to compute now; 0 to wait."""
        load = seq.load
        if load is None:
            return EVERYTHING
        limit = load.chunk_tokens(seq.num_computed, self.pool.block_size, self.prefill)
        load.note_waiting(waits=not limit)
        if limit and load.all_or_nothing:
            load.is_lost, seq.loads = True, False
            failed = load.first_failure()
            self._note_miss(seq, seq.num_published, _why(load, *failed) if failed else MissReason.SLOWER)
        return limit

    def claim(self, seq: Sequence, count: int) -> int:
        """Take the blocks of the next `count` tokens from the load; how many tokens can be computed. 0: not now."""
        load, block_size = seq.load, self.pool.block_size
        assert load is not None and seq.lease is not None
        front, aside = divmod(seq.num_computed, block_size)
        first = front + 1 if aside else front  # a block that was begun is ours
        wanted = -(-(seq.num_computed + count) // block_size)
        stop = load.claim(first, wanted)
        if stop == front:
            if not load.is_reading(front) or (olds := self.pool.swap(seq.lease, front)) is None:
                return 0
            self.draining.append((olds, load.ticket))
            load.give_up(front)
            stop = load.claim(front, wanted)
        load.claimed = load.claimed or stop > first
        for index in range(first, min(stop, load.stop)):
            failure = load.failure(index)
            self._note_miss(seq, index, _why(load, index, failure))
            if failure is None and not load.is_stored(index) and load.unsure is None:
                load.unsure = index
        if stop >= load.stop:
            self._end(seq)
        return min(count, stop * block_size - seq.num_computed)

    def release(self, seq: Sequence, lease: GroupedLease) -> None:
        """A sequence gives its blocks back: now, or once nothing is read into them any more."""
        self.link.used(seq, finished=seq.finish_reason is not None)
        load = seq.load
        if load is not None:
            self._end(seq)
            if not load.is_quiet(QUIET_S):
                self.draining.append((lease, load.ticket))
                return
        lease.release()

    def poll(self) -> None:
        """Give memory back that nothing will be read into any more.

        No read under way is not enough: a block that others wait for too, or that a remote tier has, is read into the
        loader's own memory first and copied then.
        """
        for lease, ticket in self.draining:
            if ticket.finished:
                lease.release()
        self.draining = [(lease, ticket) for lease, ticket in self.draining if not lease.released]

    def nap(self, running: list[Sequence]) -> None:
        """Sleep until a block of some running sequence arrives, or memory comes back, but not for long."""
        tickets = [seq.load.ticket for seq in running if seq.load is not None]
        tickets += [ticket for _, ticket in self.draining]
        if tickets:
            tickets[0].wait(NAP_S, seen=tickets[0].changed)

    def _end(self, seq: Sequence) -> None:
        load = seq.load
        assert load is not None
        load.ticket.cancel()
        self.met += load.jumped and load.claimed
        if load.jumped and load.unsure is not None:  # a remote tier had the prompt, but was too slow to say so
            self._note_miss(seq, load.unsure, MissReason.SLOWER)
        load.note_waiting(waits=False)
        seq.load_wait_s += load.waited_s
        seq.load = None

    def _note_miss(self, seq: Sequence, index: int, reason: MissReason | None) -> None:
        if reason is not None and seq.load_miss is None and seq.most_computed < seq.num_prompt:
            seq.load_miss = (reason, index * self.pool.block_size)


def _why(load: Load, index: int, failure: str | None) -> MissReason | None:
    """Why block `index` of a load was computed; None if, as far as is known, nobody has it."""
    if failure is None:
        return MissReason.SLOWER if load.is_stored(index) else None
    gone = MissReason.EVICTED if index < load.known else None
    return _FAILURES.get(failure, gone)
