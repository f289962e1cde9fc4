"""Threads that fill tickets: one locates blocks, two read local tiers, several each remote tier.

A block is read once for all loads that want it at the same time: the first reads, the others get
copies before the first one's memory may be touched. Local reads go straight into the caller's
memory. Remote ones go into the loader's own memory and are copied once complete and verified: so a
load can be given up at any moment, whatever a remote tier does.

`Loader._lock` guards the reads in flight and their waiters; a ticket's own lock guards that ticket.
The order is always Loader._lock, then Ticket._lock; tiers are never called with either held.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvire.codec.buffers import aligned_buffer
from kvire.core.errors import BlockMissing, FrameDamaged, FrameForeign, TierUnavailable
from kvire.core.record import BlockId, BlockRecord
from kvire.store.generations import Generation
from kvire.store.handle import TierHandle
from kvire.store.threads import WorkerThreads
from kvire.store.ticket import FailureReason, LoadFailure, LoadState, Ticket, Wanted
from kvire.store.tier import Buffer, Prefetching

LOCAL_THREADS = 2  # a third only waits for the interpreter: docs/adr/0015-tiered-store.md
REMOTE_THREADS = 4
RUN_S, MOST_IN_RUN = 4e-3, 16  # duration and blocks of one run of local reads, at most
LEAST_TIMEOUT_S = 1e-3

log = logging.getLogger(__name__)

# Where a block is read: the number of a remote tier, or None for the local ones, which are read
# together.
ReadPlace = int | None

# A block that was read, its KV, where it came from, and the generations of the load's tenants.
Promote = Callable[[BlockRecord, Buffer, TierHandle, Mapping[str, Generation]], None]


@dataclass(slots=True, eq=False)
class _Load:
    """One ticket with the context of its reads.

    generations: of its tenants.
    first: names of the handles that gave it a block.
    """

    ticket: Ticket
    order: Sequence[int]
    generations: Mapping[str, Generation]
    started: float = field(default_factory=time.perf_counter)
    first: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _InflightRead:
    """One read of one block, for all loads that want it by then. Guarded by Loader._lock.

    number: the first handle asked, among the local ones or the remote ones.
    queued: the loads that asked before the read began.
    waiters: the loads whose block is READING; the first one's memory is read into.
    """

    record: BlockRecord
    number: int
    queued: list[tuple[_Load, int]]
    waiters: list[tuple[_Load, int]] = field(default_factory=list)


class Loader:
    """Loads blocks from `handles`, fastest first.

    promote: called with each block that was read, while its KV is there.
    damaged: called with each block found damaged.
    timeout_s: how long remote tiers may take until the first block, and between blocks.
    """

    def __init__(
        self,
        handles: Sequence[TierHandle],
        promote: Promote,
        damaged: Callable[[BlockRecord], None],
        *,
        timeout_s: float,
    ) -> None:
        self._local = [handle for handle in handles if handle.local]
        self._remote = [handle for handle in handles if not handle.local]
        self._promote = promote
        self._damaged = damaged
        self._timeout_s = timeout_s
        # Guards _inflight and its reads, _tickets, _running, _local_reads (and `idle` with it) and
        # shared_reads. Held for bookkeeping only, never during a read, a copy or a call of a tier.
        self._lock = threading.Lock()
        self._inflight: dict[tuple[BlockId, ReadPlace], _InflightRead] = {}  # by block and place
        self._tickets: set[Ticket] = set()
        self._planner = WorkerThreads("plan", 1 if self._local else 0)  # goes on while a local tier is slow
        self._local_workers = WorkerThreads("local", LOCAL_THREADS if self._local else 0)
        self._remote_workers = [WorkerThreads(handle.name, REMOTE_THREADS) for handle in self._remote]
        self._running = False
        self._local_reads = 0  # in flight
        self.idle = threading.Event()  # no local read is pending: other threads may take the interpreter
        self.idle.set()
        self.shared_reads = 0  # blocks that a load got from another load's read

    def start(self) -> None:
        """Start the threads."""
        self._running = True
        for workers in (self._planner, self._local_workers, *self._remote_workers):
            workers.start()

    def load(self, wanted: Sequence[Wanted], *, from_the_back: bool, generations: Mapping[str, Generation]) -> Ticket:
        """Begin to load; the ticket has the progress.

        generations: of the records' tenants; blocks of others are not promoted.
        """
        ticket = Ticket(wanted, timeout_s=self._timeout_s)
        order = range(len(wanted))
        load = _Load(ticket, order[::-1] if from_the_back else order, generations)
        with self._lock:
            running = self._running
            if running:
                self._tickets = {other for other in self._tickets if not other.finished} | {ticket}
        if not running:
            ticket.give_up(LoadFailure(FailureReason.UNAVAILABLE, "the store is not open"))
        elif self._local:
            self._planner.plan(partial(self._plan, load))
        else:
            self._ask_remote(load, load.order, 0)
        return ticket

    def stop(self, join_s: float) -> None:
        """Begin no further read, fail waiting blocks, and end all threads."""
        with self._lock:
            self._running = False
            tickets, self._tickets = self._tickets, set()
        everybody = (self._planner, self._local_workers, *self._remote_workers)
        for workers in everybody:
            workers.stop()
        self.idle.set()
        for ticket in tickets:
            ticket.give_up(LoadFailure(FailureReason.UNAVAILABLE, "the store was closed"))
        end = time.monotonic() + join_s
        for workers in everybody:
            workers.join(end)

    # Local tiers

    def _plan(self, load: _Load) -> None:
        """Locate each block; read local ones, and ask the remote tiers for the rest."""
        ids = [load.ticket.wanted[i].record.id for i in load.order]
        fastest: dict[int, int] = {}
        failure = None
        for number in range(len(self._local) - 1, -1, -1):
            try:
                held = self._local[number].locate(ids)
            except TierUnavailable as error:
                failure = LoadFailure(FailureReason.UNAVAILABLE, str(error))
                continue
            fastest |= {i: number for i, here in zip(load.order, held, strict=True) if here}
        for number, handle in enumerate(self._local):
            here = [block_id for i, block_id in zip(load.order, ids, strict=True) if fastest.get(i) == number]
            if here and isinstance(handle.tier, Prefetching):
                handle.tier.prefetch(here)
        reads = self._reads_for(load, {i: fastest[i] for i in load.order if i in fastest}, None)
        self._local_workers.add(partial(self._read_local, run) for run in self._runs(reads))
        self._ask_remote(load, [i for i in load.order if i not in fastest], 0, failure)

    def _runs(self, reads: Sequence[_InflightRead]) -> Iterator[list[_InflightRead]]:
        """Group reads of one handle, each group taking about RUN_S by the measured speed."""
        begin = 0
        while begin < len(reads):
            handle = self._local[reads[begin].number]
            left_bytes = handle.meter.speed().bytes_per_s * RUN_S if handle.reads_runs else 0
            run = [reads[begin]]
            for inflight in reads[begin + 1 : begin + MOST_IN_RUN]:
                left_bytes -= run[-1].record.kv_bytes
                if left_bytes <= 0 or inflight.number != run[0].number:
                    break
                run.append(inflight)
            yield run
            begin += len(run)

    def _read_local(self, run: Sequence[_InflightRead]) -> None:
        """Read blocks expected in one handle, each into the memory of its first waiter."""
        wanted = self._begin(run, None)
        begun = [(inflight, first) for inflight, first in zip(run, wanted, strict=True) if first is not None]
        handle = self._local[run[0].number]
        try:
            done = handle.fetch_run([(inflight.record, first.out) for inflight, first in begun])
        except Exception:  # any error of a tier ends the load, not the thread
            log.exception("reading from %s failed", handle.name)
            done = [False] * len(begun)
        read = [(inflight, first.out) for (inflight, first), is_done in zip(begun, done, strict=True) if is_done]
        self._deliver(read, None, handle)
        for (inflight, first), is_done in zip(begun, done, strict=True):
            if not is_done:
                self._read_alone(inflight, first)

    def _read_alone(self, inflight: _InflightRead, first: Wanted) -> None:
        """Read a block from the fastest handle with an intact copy."""
        failures = []
        for handle in self._local[inflight.number :]:
            if (failure := self._fetch(handle, inflight.record, first.out, None)) is None:
                self._deliver([(inflight, first.out)], None, handle)
                return
            failures.append(failure)
        told = [failure for failure in failures if failure.reason is not FailureReason.MISSING]
        self._ask_next(inflight, None, (told or failures)[0])

    # Remote tiers

    def _ask_remote(self, load: _Load, numbers: Sequence[int], place: int, failure: LoadFailure | None = None) -> None:
        """Ask the remote tiers for blocks, starting with tier `place`.

        failure: of the tier asked before.
        """
        if not numbers:
            return
        if place == len(self._remote):
            for i in numbers:
                load.ticket.fail(i, failure or LoadFailure(FailureReason.MISSING, "no tier has the block"))
            return
        load.ticket.ask_remotely(numbers)
        self._remote_workers[place].plan(partial(self._plan_remote, load, numbers, place, failure))

    def _plan_remote(self, load: _Load, numbers: Sequence[int], place: int, failure: LoadFailure | None) -> None:
        handle, ticket = self._remote[place], load.ticket
        numbers = [i for i in numbers if ticket.state(i) is LoadState.WAITING]
        if not numbers:
            return
        ids = [ticket.wanted[i].record.id for i in numbers]
        try:
            held = handle.held(ids, max(ticket.left_s(), LEAST_TIMEOUT_S))
        except TierUnavailable as error:
            self._ask_remote(load, numbers, place + 1, LoadFailure(FailureReason.UNAVAILABLE, str(error)))
            return
        here = {i: place for i, is_here in zip(numbers, held, strict=True) if is_here}
        ticket.expect(list(here))
        reads = self._reads_for(load, here, place)
        self._remote_workers[place].add(partial(self._read_remote, inflight) for inflight in reads)
        self._ask_remote(load, [i for i in numbers if i not in here], place + 1, failure)

    def _read_remote(self, inflight: _InflightRead) -> None:
        """Read a block into memory of the loader."""
        if self._begin([inflight], inflight.number) == [None]:
            return
        handle = self._remote[inflight.number]
        kv = aligned_buffer(inflight.record.kv_bytes)
        left_s = max(load.ticket.left_s() for load, _ in inflight.waiters)
        failure = self._fetch(handle, inflight.record, kv, max(left_s, LEAST_TIMEOUT_S))
        if failure is None:
            self._deliver([(inflight, kv)], inflight.number, handle)
        else:
            self._ask_next(inflight, inflight.number, failure)

    # One read for all

    def _reads_for(self, load: _Load, numbers: Mapping[int, int], place: ReadPlace) -> list[_InflightRead]:
        """New reads for those blocks that no other load is reading already.

        numbers: by block, the handle to ask first.
        """
        reads = []
        with self._lock:
            for i, number in numbers.items():
                record = load.ticket.wanted[i].record
                inflight = self._inflight.get((record.id, place))
                if inflight is None or inflight.record != record:
                    inflight = _InflightRead(record, number, [(load, i)])
                    self._inflight.setdefault((record.id, place), inflight)
                    reads.append(inflight)
                    self._count_local(place, 1)
                    continue
                self.shared_reads += 1
                if not inflight.waiters:
                    inflight.queued.append((load, i))
                elif load.ticket.begin(i, attached=False):
                    inflight.waiters.append((load, i))
        return reads

    def _begin(self, reads: Sequence[_InflightRead], place: ReadPlace) -> list[Wanted | None]:
        """Begin to read, for all loads that still want the blocks.

        Returns each block's first waiter, or None; a local read goes into that waiter's memory.
        """
        # Under the lock a read passes from queued to begun in one step: a load that joins in
        # `_reads_for` finds it before or after, and is not lost in between.
        with self._lock:
            return [self._begin_one(inflight, place) for inflight in reads]

    # Called with the lock held: _begin_one, _close, _count_local

    def _begin_one(self, inflight: _InflightRead, place: ReadPlace) -> Wanted | None:
        for load, i in inflight.queued:
            if load.ticket.begin(i, attached=place is None and not inflight.waiters):
                inflight.waiters.append((load, i))
        inflight.queued.clear()
        if not inflight.waiters:
            self._close(inflight, place)
            return None
        load, i = inflight.waiters[0]
        return load.ticket.wanted[i]

    def _end(self, reads: Sequence[_InflightRead], place: ReadPlace) -> list[list[tuple[_Load, int]]]:
        """End the reads: no load joins any more. Returns the waiters of each read.

        The first waiter comes last: copies are made from its memory.
        """
        # Closing under the lock makes the waiters final: copies are then made outside it.
        with self._lock:
            for inflight in reads:
                self._close(inflight, place)
            return [inflight.waiters[::-1] for inflight in reads]

    def _close(self, inflight: _InflightRead, place: ReadPlace) -> None:
        if self._inflight.get((inflight.record.id, place)) is inflight:
            del self._inflight[inflight.record.id, place]
        self._count_local(place, -1)

    def _count_local(self, place: ReadPlace, change: int) -> None:
        if place is not None:
            return
        before, self._local_reads = self._local_reads, self._local_reads + change
        if not self._local_reads:
            self.idle.set()
        elif not before:
            self.idle.clear()

    def _deliver(self, read: Sequence[tuple[_InflightRead, Buffer]], place: ReadPlace, handle: TierHandle) -> None:
        """Hand the blocks, verified and each in its buffer, to all waiters."""
        # Without the lock: other loads may still join, but the first waiter stays the first.
        for inflight, kv in read:
            self._promote(inflight.record, kv, handle, inflight.waiters[0][0].generations)
        waiters = self._end([inflight for inflight, _ in read], place)
        for (_, kv), loads in zip(read, waiters, strict=True):
            for load, i in loads:
                out = load.ticket.wanted[i].out
                if out is not kv:
                    if not load.ticket.attach(i):
                        continue
                    np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(kv, np.uint8))
                load.ticket.ready(i, handle.kind)
                if handle.name not in load.first:
                    load.first.add(handle.name)
                    handle.meter.first_block(time.perf_counter() - load.started, len(kv))

    def _ask_next(self, inflight: _InflightRead, place: ReadPlace, failure: LoadFailure) -> None:
        """No tier asked so far has the block: each load asks the next remote tier by itself."""
        for load, i in self._end([inflight], place)[0]:
            load.ticket.wait_again(i)
            self._ask_remote(load, [i], 0 if place is None else place + 1, failure)

    def _fetch(
        self, handle: TierHandle, record: BlockRecord, kv: Buffer, timeout_s: float | None
    ) -> LoadFailure | None:
        """Read and verify; None if `kv` holds the block now."""
        try:
            handle.fetch(record, kv, timeout_s)
        except BlockMissing:
            return LoadFailure(FailureReason.MISSING, f"{handle.name} does not have the block any more")
        except TierUnavailable as error:
            return LoadFailure(FailureReason.UNAVAILABLE, str(error))
        except FrameDamaged as error:
            self._damaged(record)
            return LoadFailure(FailureReason.DAMAGED, f"{handle.name}: {error}")
        except FrameForeign as error:
            return LoadFailure(FailureReason.FOREIGN, f"{handle.name}: {error}")
        except Exception as error:  # any error of a tier is a miss, and the load ends
            log.exception("reading from %s failed", handle.name)
            handle.count(unavailable=1)
            return LoadFailure(FailureReason.UNAVAILABLE, f"{handle.name}: {type(error).__name__}")
        return None
