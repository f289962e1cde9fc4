"""Threads that fill tickets: one that sees where blocks are, one that reads all local tiers, some for each remote one.

A block is read once however many loads want it at the same time: the first reads, the others get copies before
anybody may touch the first one's memory. Local reads go straight into the caller's memory. Remote ones go into memory
of the loader's own and are copied when they are complete and verified: so a load can be given up at any moment,
whatever a remote tier does.
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
from kvire.store.epochs import Generation
from kvire.store.handle import TierHandle
from kvire.store.ticket import FailureReason, LoadFailure, LoadState, Ticket, Wanted
from kvire.store.tier import Buffer, Prefetching
from kvire.store.workers import WorkerThreads

LOCAL_THREADS = 2  # a third only waits for the interpreter: docs/adr/0015-tiered-store.md
REMOTE_THREADS = 4
RUN_S, MOST_IN_RUN = 4e-3, 16  # blocks of local tiers are read together for so long, and at most so many
LEAST_TIMEOUT_S = 1e-3

log = logging.getLogger(__name__)

# Where a block is read: the number of a remote tier, or None for the local ones, which are read together.
Place = int | None

# A block that was read, its KV, where it came from, and the marks of the load's tenants.
Promote = Callable[[BlockRecord, Buffer, TierHandle, Mapping[str, Generation]], None]


@dataclass(slots=True, eq=False)
class _Load:
    """One ticket with what its reads need. marks: of its tenants. first: names of handles that gave it a block."""

    ticket: Ticket
    order: Sequence[int]
    marks: Mapping[str, Generation]
    started: float = field(default_factory=time.perf_counter)
    first: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _InflightRead:
    """One read of one block, for all loads that want it by then. number: the first handle asked, among the local ones
    or the remote ones. boarded: the loads whose block is READING, the one whose memory is read into first.
    """

    record: BlockRecord
    number: int
    waiting: list[tuple[_Load, int]]
    boarded: list[tuple[_Load, int]] = field(default_factory=list)


class Loader:
    """Loads blocks from `handles`, fastest first. promote: called with each block that was read, while its KV is there;
    damaged: with each that turned out to be.

    timeout_s: how long remote tiers may take until the first block, and from each to the next.
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
        self._lock = threading.Lock()
        self._flights: dict[tuple[BlockId, Place], _InflightRead] = {}  # by block and place
        self._tickets: set[Ticket] = set()
        self._planner = WorkerThreads("plan", 1 if self._local else 0)  # goes on while a local tier is slow
        self._local_workers = WorkerThreads("local", LOCAL_THREADS if self._local else 0)
        self._remote_workers = [WorkerThreads(handle.name, REMOTE_THREADS) for handle in self._remote]
        self._running = False
        self._flying = 0  # local flights
        self.idle = threading.Event()  # no local read is to be done: others may take the interpreter
        self.idle.set()
        self.shared_reads = 0  # blocks that a load got from another one's read

    def start(self) -> None:
        """Start the threads."""
        self._running = True
        for workers in (self._planner, self._local_workers, *self._remote_workers):
            workers.start()

    def load(self, wanted: Sequence[Wanted], *, from_the_back: bool, marks: Mapping[str, Generation]) -> Ticket:
        """Begin to load; the ticket says how it goes. marks: of the records' tenants; others are not promoted."""
        ticket = Ticket(wanted, timeout_s=self._timeout_s)
        order = range(len(wanted))
        load = _Load(ticket, order[::-1] if from_the_back else order, marks)
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
        """Begin no read any more, fail what waits, and end all threads."""
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
        """See where each block is; read what is here, and ask the remote tiers for the rest."""
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
        flights = self._flights_for(load, {i: fastest[i] for i in load.order if i in fastest}, None)
        self._local_workers.add(partial(self._read_local, run) for run in self._runs(flights))
        self._ask_remote(load, [i for i in load.order if i not in fastest], 0, failure)

    def _runs(self, flights: Sequence[_InflightRead]) -> Iterator[list[_InflightRead]]:
        """Flights of one handle that are read together: as many as take RUN_S by what was measured so far."""
        begin = 0
        while begin < len(flights):
            handle = self._local[flights[begin].number]
            left_bytes = handle.meter.speed().bytes_per_s * RUN_S if handle.reads_runs else 0
            run = [flights[begin]]
            for flight in flights[begin + 1 : begin + MOST_IN_RUN]:
                left_bytes -= run[-1].record.kv_bytes
                if left_bytes <= 0 or flight.number != run[0].number:
                    break
                run.append(flight)
            yield run
            begin += len(run)

    def _read_local(self, run: Sequence[_InflightRead]) -> None:
        """Read blocks that one handle should have into the memory of the first who want them."""
        boarded = [(f, first) for f, first in zip(run, self._board(run, None), strict=True) if first is not None]
        handle = self._local[run[0].number]
        try:
            done = handle.fetch_run([(flight.record, first.out) for flight, first in boarded])
        except Exception:  # whatever a tier does, the load ends
            log.exception("reading from %s failed", handle.name)
            done = [False] * len(boarded)
        read = [(f, first.out) for (f, first), is_done in zip(boarded, done, strict=True) if is_done]
        self._land(read, None, handle)
        for (flight, first), is_done in zip(boarded, done, strict=True):
            if not is_done:
                self._read_alone(flight, first)

    def _read_alone(self, flight: _InflightRead, first: Wanted) -> None:
        """Read a block from the fastest handle that has it sound."""
        failures = []
        for handle in self._local[flight.number :]:
            if (failure := self._fetch(handle, flight.record, first.out, None)) is None:
                self._land([(flight, first.out)], None, handle)
                return
            failures.append(failure)
        told = [failure for failure in failures if failure.reason is not FailureReason.MISSING]
        self._divert(flight, None, (told or failures)[0])

    # Remote tiers

    def _ask_remote(self, load: _Load, numbers: Sequence[int], place: int, failure: LoadFailure | None = None) -> None:
        """Ask the remote tiers for blocks, from that place in the row of them on. failure: what the last one said."""
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
        flights = self._flights_for(load, here, place)
        self._remote_workers[place].add(partial(self._read_remote, flight) for flight in flights)
        self._ask_remote(load, [i for i in numbers if i not in here], place + 1, failure)

    def _read_remote(self, flight: _InflightRead) -> None:
        """Read a block into memory of our own."""
        if self._board([flight], flight.number) == [None]:
            return
        handle = self._remote[flight.number]
        kv = aligned_buffer(flight.record.kv_bytes)
        left_s = max(load.ticket.left_s() for load, _ in flight.boarded)
        failure = self._fetch(handle, flight.record, kv, max(left_s, LEAST_TIMEOUT_S))
        if failure is None:
            self._land([(flight, kv)], flight.number, handle)
        else:
            self._divert(flight, flight.number, failure)

    # One read for all

    def _flights_for(self, load: _Load, numbers: Mapping[int, int], place: Place) -> list[_InflightRead]:
        """New flights for those blocks (with the handle to ask first) that no other load's flight brings already."""
        flights = []
        with self._lock:
            for i, number in numbers.items():
                record = load.ticket.wanted[i].record
                flight = self._flights.get((record.id, place))
                if flight is None or flight.record != record:
                    flight = _InflightRead(record, number, [(load, i)])
                    self._flights.setdefault((record.id, place), flight)
                    flights.append(flight)
                    self._count_local(place, 1)
                    continue
                self.shared_reads += 1
                if not flight.boarded:
                    flight.waiting.append((load, i))
                elif load.ticket.begin(i, attached=False):
                    flight.boarded.append((load, i))
        return flights

    def _board(self, flights: Sequence[_InflightRead], place: Place) -> list[Wanted | None]:
        """Begin to read for all who still want the blocks; of each block the first of them, or None. Locally: into its
        memory.
        """
        with self._lock:
            return [self._first_aboard(flight, place) for flight in flights]

    def _first_aboard(self, flight: _InflightRead, place: Place) -> Wanted | None:
        for load, i in flight.waiting:
            if load.ticket.begin(i, attached=place is None and not flight.boarded):
                flight.boarded.append((load, i))
        flight.waiting.clear()
        if not flight.boarded:
            self._close(flight, place)
            return None
        load, i = flight.boarded[0]
        return load.ticket.wanted[i]

    def _end(self, flights: Sequence[_InflightRead], place: Place) -> list[list[tuple[_Load, int]]]:
        """Nobody joins any more; of each flight everybody who did, the first last: copies are made from its memory."""
        with self._lock:
            for flight in flights:
                self._close(flight, place)
            return [flight.boarded[::-1] for flight in flights]

    def _close(self, flight: _InflightRead, place: Place) -> None:
        if self._flights.get((flight.record.id, place)) is flight:
            del self._flights[flight.record.id, place]
        self._count_local(place, -1)

    def _count_local(self, place: Place, change: int) -> None:
        if place is not None:
            return
        before, self._flying = self._flying, self._flying + change
        if not self._flying:
            self.idle.set()
        elif not before:
            self.idle.clear()

    def _land(self, read: Sequence[tuple[_InflightRead, Buffer]], place: Place, handle: TierHandle) -> None:
        """The blocks are there, verified, each in its buffer: hand them to all."""
        for flight, kv in read:
            self._promote(flight.record, kv, handle, flight.boarded[0][0].marks)
        boarded = self._end([flight for flight, _ in read], place)
        for (_, kv), loads in zip(read, boarded, strict=True):
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

    def _divert(self, flight: _InflightRead, place: Place, failure: LoadFailure) -> None:
        """Nobody asked so far has it: go on with the next remote tier, everybody for themselves."""
        for load, i in self._end([flight], place)[0]:
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
        except Exception as error:  # whatever a tier does, the load ends, as a miss
            log.exception("reading from %s failed", handle.name)
            handle.count(unavailable=1)
            return LoadFailure(FailureReason.UNAVAILABLE, f"{handle.name}: {type(error).__name__}")
        return None
