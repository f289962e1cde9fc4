"""Loads from the store for the scheduler's sequences: memory, waiting, and computing meanwhile.

The planner (store/reuse/planner.py) decides which blocks can be loaded and whether that is worth
it.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvire.cache.grouped import GroupedLease, GroupedPool
from kvire.core.report import MissReason
from kvire.engine.sequence import Sequence
from kvire.plan.cost import Choice, Way
from kvire.store.reuse.look import Found
from kvire.store.reuse.no_reuse import AnyReuse
from kvire.store.ticket import Ticket

# How long the engine sleeps if it can only wait for loads; the arrival of a block wakes it.
NAP_S = 0.002
# How long a preempted sequence waits for reads in progress into its memory.
QUIET_S = 0.005
# Sequences without a seat that may load their stored blocks already.
MAX_PREPARED = 4


class PrefetchPlan(NamedTuple):
    """Stored blocks of a prompt beyond the device, and the choice about them."""

    found: Found
    choice: Choice

    @property
    def loads(self) -> bool:
        """Whether there is something to load."""
        return self.choice.way is not Way.COMPUTE

    def without(self, index: int) -> "PrefetchPlan":
        """Leave block `index` out."""
        return self._replace(found=self.found.without(index))


class Prefetcher:
    """Loads for one scheduler; belongs to its thread.

    memory: of a block, by group and id.
    most_ahead: sequences without a seat whose blocks are loaded already, at most.
    met: loads of which part was loaded and part computed.
    """

    def __init__(self, reuse: AnyReuse, pool: GroupedPool, memory: Callable[[int, int], memoryview]) -> None:
        self.reuse = reuse
        self.pool = pool
        self.memory = memory
        self.most_ahead = MAX_PREPARED if reuse.keeps else 0
        self.met = 0
        self.draining: list[tuple[GroupedLease, Ticket]] = []  # memory that a read may still write into

    def plan(self, seq: Sequence, usable: int, matched: int) -> PrefetchPlan:
        """Choose the blocks to load of the first `usable` ones beyond those `matched` on the
        device.

        Changes nothing there.
        """
        found = Found.nothing(matched, usable)
        if seq.reuse.may_load and matched < usable:
            found = seq.reuse.seen(matched, lambda: self.reuse.hope(self.reuse.look(seq.chain, matched, usable)))
        return PrefetchPlan(found, self.reuse.worth(found))

    def start(self, seq: Sequence, plan: PrefetchPlan) -> None:
        """Begin to load for a sequence that has its blocks, and ask why further blocks are not
        stored.
        """
        reused, found = seq.reuse, plan.found
        reused.forget_look()
        self.reuse.decided(plan.choice)
        if plan.loads:
            reused.load = self.reuse.load(seq.chain, found, self._memory_of(seq), plan.choice.way)
        elif found.known > found.first:
            self._missed(seq, seq.num_published, MissReason.SLOWER)
        if reused.miss.token is not None and reused.answer is None and seq.num_answer == 0:
            index = found.known if plan.loads else seq.num_published
            if index * self.pool.block_size < seq.num_prompt - 1:
                reused.answer = self.reuse.why(seq.chain, index, seq.num_prompt)
                reused.asked_token = index * self.pool.block_size

    def save(self, seq: Sequence, indices: Iterable[int]) -> None:
        """Hand over computed blocks."""
        if seq.request.store:
            self.reuse.save(seq.chain, indices, self._memory_of(seq))

    def take_over(self, seq: Sequence) -> bool:
        """Let the front of a sequence jump over loaded blocks; returns whether it did."""
        load, block_size = seq.reuse.load, self.pool.block_size
        if load is None or seq.num_computed % block_size:
            return False
        front = seq.num_computed // block_size
        reached = load.frontier(front)
        if reached == front:
            return False
        seq.reuse.spans.append((max(front * block_size, seq.most_computed), reached * block_size))
        for index in range(front, reached):
            start = max(index * block_size, seq.most_computed)
            seq.reuse.take(load.source(index), max(0, (index + 1) * block_size - start))
        seq.jump(reached * block_size)
        load.jumped()
        if reached >= load.stop:
            self._end(seq)
        return True

    def limit(self, seq: Sequence, most_tokens: int) -> int:
        """How many of `most_tokens` to compute now: none to wait for loads in progress."""
        load = seq.reuse.load
        if load is None:
            return most_tokens
        tokens = load.chunk_tokens(seq.num_computed, self.pool.block_size, self.reuse.prefill, most_tokens)
        load.note_waiting(waits=not tokens)
        if load.lost:
            seq.reuse.may_load = False
            self._missed(seq, seq.num_published, load.why_lost())
        return tokens

    def claim(self, seq: Sequence, count: int) -> int:
        """Take the blocks of the next `count` tokens from the load.

        Returns how many of the tokens can be computed now.
        """
        load, block_size = seq.reuse.load, self.pool.block_size
        if load is None:
            return count
        assert seq.lease is not None
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
        if (missed := load.computed(first, stop)) is not None:
            self._missed(seq, *missed)
        if stop >= load.stop:
            self._end(seq)
        return min(count, stop * block_size - seq.num_computed)

    def release(self, seq: Sequence, lease: GroupedLease) -> None:
        """Release a sequence's blocks: now, or once no read into them is in progress.

        Only a finished sequence's blocks are worth keeping.
        """
        if seq.finish_reason is not None:
            self.reuse.finished(seq.chain, seq.num_published, keep=seq.request.store)
        load = seq.reuse.load
        if load is not None:
            self._end(seq)
            if not load.is_quiet(QUIET_S):
                self.draining.append((lease, load.ticket))
                return
        lease.release()

    def poll(self) -> None:
        """Release memory once no read will write into it.

        Having no active read is not enough: a block that other loads wait for too, or that a remote
        tier has, is read into the loader's own memory first and copied then.
        """
        for lease, ticket in self.draining:
            if ticket.finished:
                lease.release()
        self.draining = [(lease, ticket) for lease, ticket in self.draining if not lease.released]

    def nap(self, running: list[Sequence]) -> None:
        """Sleep briefly, until a block of some running sequence arrives or memory is released."""
        tickets = [seq.reuse.load.ticket for seq in running if seq.reuse.load is not None]
        tickets += [ticket for _, ticket in self.draining]
        if tickets:
            tickets[0].wait(NAP_S, seen=tickets[0].changed)

    def _end(self, seq: Sequence) -> None:
        assert seq.reuse.load is not None
        if (missed := seq.reuse.load.end()) is not None:
            self._missed(seq, *missed)
        self.met += seq.reuse.end_load().met

    def _missed(self, seq: Sequence, index: int, reason: MissReason | None) -> None:
        """Block `index` is computed, for that reason; None: no tier has it."""
        if reason is not None and seq.most_computed < seq.num_prompt:
            seq.reuse.missed(index * self.pool.block_size, reason)

    def _memory_of(self, seq: Sequence) -> Callable[[int, int], memoryview]:
        """Of a sequence's blocks, by index and group."""
        lease = seq.lease
        assert lease is not None

        def memory(index: int, group: int) -> memoryview:
            block = lease.leases[group].blocks[index]
            assert block is not None
            return self.memory(group, block.id)

        return memory
