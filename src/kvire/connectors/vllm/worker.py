"""The worker's side: KV between vLLM's blocks and the store, as the scheduler's side planned.

Saves are copied out within the step that computed them, so vLLM may do what it likes with the blocks afterwards.
Loads arrive in memory of ours first, and are copied in by a thread, block by block in order, while vLLM computes for
others. vLLM gives nobody a block that is being loaded before it was told that the load is over, so a request that is
cancelled meanwhile costs nothing but time.
"""

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from time import monotonic, perf_counter

import numpy as np

from kvire.connectors.vllm.messages import Load, Move, Outcome, Plan
from kvire.connectors.vllm.pages import DevicePages, HostPages, Rows
from kvire.core.keys import BlockKey
from kvire.core.record import BlockId
from kvire.plan.cost import Speed
from kvire.store.ticket import LoadState, Ticket, Wanted
from kvire.store.tiered import TieredStore

log = logging.getLogger(__name__)

LOAD_THREADS = 2
PIECE_BYTES = 64 << 20  # of a load that are in memory of ours at once; at least one block
STALLED_S = 5.0  # a load in which nothing moved for so long is given up
TIERS_EVERY_S = 1.0  # their counters are looked at
IDLE_WAIT_S = 0.002  # that a step with nothing to compute waits for a load: else vLLM asks thousands of times a second


@dataclass(eq=False)
class Loading:
    """A load under way. failed: its first move that could not be made; None if all were."""

    load: Load
    cancelled: threading.Event = field(default_factory=threading.Event)
    failed: int | None = None


class WorkerSide:
    """One worker. pages: its cache, by group. part: which share of each block it has, among all workers."""

    def __init__(self, store: TieredStore, pages: Sequence[HostPages | DevicePages], part: int = 0) -> None:
        self.store = store
        self._counts: Counter[tuple[str, str]] = Counter()  # (what, label)
        self._pages = pages
        self._first_part = part * len(pages)
        self._threads = ThreadPoolExecutor(LOAD_THREADS, "kvire load")
        self._memory = threading.local()
        self._lock = threading.Lock()
        self._loading: dict[str, tuple[Loading, Future[None]]] = {}
        self._outcome = Outcome()
        self._tiers_before: Counter[tuple[str, str]] = Counter()
        self._tiers_due = 0.0
        self._save_rows: Rows = np.empty((0, 0), np.uint8)

    def begin(self, plan: Plan) -> None:
        """Start the loads of a step, and say which blocks were used."""
        for load in plan.loads:
            loading = Loading(load)
            self._loading[load.request_id] = loading, self._threads.submit(self._run, loading)
        if plan.used:
            self.store.touch(list(self._ids(plan.used)))
        if plan.idle:
            self._wait(IDLE_WAIT_S)

    def save(self, moves: Sequence[Move]) -> None:
        """Hand blocks to the store, which copies them and writes later. To be called once they are computed."""
        if not moves:
            return
        began = perf_counter()
        saved: dict[BlockKey, bool] = {}
        for group, pages in enumerate(self._pages):
            mine = [move for move in moves if move.group == group]
            at_once = max(1, PIECE_BYTES // pages.row_bytes)
            for start in range(0, len(mine), at_once):
                piece = mine[start : start + at_once]
                for move, kept in zip(piece, self._save_piece(pages, piece), strict=True):
                    saved[move.block.key] = kept and saved.get(move.block.key, True)
        self._count(("save_seconds", ""), perf_counter() - began)
        with self._lock:
            self._outcome.saved += [key for key, kept in saved.items() if kept]

    def finished_loads(self, over: Iterable[str]) -> tuple[set[str], set[str]]:
        """Requests whose loads ended since the last call; and those of them for which something is missing.

        over: requests that ended meanwhile.
        """
        for request_id in over:
            if request_id in self._loading:
                self._loading[request_id][0].cancelled.set()
        failed = set()
        ended = {request_id: pair for request_id, pair in self._loading.items() if pair[1].done()}
        for request_id, (loading, future) in ended.items():
            del self._loading[request_id]
            if future.exception() is not None:  # whatever it was: the request is computed instead
                log.error("a load failed", exc_info=future.exception())
                loading.failed = 0
            if loading.failed is not None:
                failed.add(request_id)
                with self._lock:
                    self._outcome.failed[request_id] = loading.load.moves[loading.failed].block.index
        return set(ended), failed

    def take_outcome(self) -> Outcome | None:
        """For the scheduler's side, since the last call; None for nothing."""
        with self._lock:
            outcome, self._outcome = self._outcome, Outcome()
        return outcome if outcome.failed or outcome.saved or outcome.speeds else None

    def take_counts(self) -> Counter[tuple[str, str]]:
        """(what, label) counted since the last call."""
        self._count_tiers()
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return counts

    def close(self) -> None:
        """Give up what is being loaded, and wait for the threads."""
        for loading, _ in self._loading.values():
            loading.cancelled.set()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _count(self, what: tuple[str, str], amount: float) -> None:
        with self._lock:
            self._counts[what] += amount  # type: ignore[assignment]  # seconds are no whole numbers

    def _ids(self, keys: Iterable[BlockKey]) -> Iterable[BlockId]:
        return (BlockId(key, self._first_part + group) for key in keys for group in range(len(self._pages)))

    def _save_piece(self, pages: HostPages | DevicePages, moves: Sequence[Move]) -> list[bool]:
        if self._save_rows.size < len(moves) * pages.row_bytes:
            self._save_rows = np.empty(len(moves) * pages.row_bytes, np.uint8)
        rows = self._save_rows.reshape(-1)[: len(moves) * pages.row_bytes].reshape(len(moves), -1)
        pages.gather([move.block_id for move in moves], rows)
        kept = [
            self.store.save(move.block.record(self._first_part + move.group, pages.row_bytes), row.data)
            for move, row in zip(moves, rows, strict=True)
        ]
        self._count(("saved_blocks", ""), sum(kept))
        self._count(("saved_bytes", ""), pages.row_bytes * sum(kept))
        self._count(("dropped_blocks", ""), len(kept) - sum(kept))
        return kept

    def _wait(self, timeout_s: float) -> None:
        """For any load to end."""
        end = monotonic() + timeout_s
        for _, future in self._loading.values():
            if future.done() or (left_s := end - monotonic()) <= 0:
                return
            try:
                future.exception(left_s)
            except TimeoutError:
                return

    def _run(self, loading: Loading) -> None:
        done = 0
        for group, moves in groupby(loading.load.moves, key=lambda move: move.group):
            run = list(moves)
            at_once = max(1, PIECE_BYTES // self._pages[group].row_bytes)
            for start in range(0, len(run), at_once):
                piece = run[start : start + at_once]
                loaded = self._load_piece(self._pages[group], piece, loading.cancelled)
                done += loaded
                if loaded < len(piece):
                    loading.failed = done
                    return

    def _load_piece(self, pages: HostPages | DevicePages, moves: Sequence[Move], cancelled: threading.Event) -> int:
        """Load blocks up to the first that cannot be had; how many."""
        rows = self._rows(len(moves), pages.row_bytes)
        wanted = [
            Wanted(move.block.record(self._first_part + move.group, pages.row_bytes), row.data)
            for move, row in zip(moves, rows, strict=True)
        ]
        began = perf_counter()
        ticket = self.store.load(wanted)
        self._follow(ticket, cancelled)
        states = ticket.states()
        loaded = next((i for i, state in enumerate(states) if state is not LoadState.READY), len(states))
        if not ticket.finished or ticket.active:
            self._memory.rows = None  # somebody may still write there
        pages.scatter([move.block_id for move in moves[:loaded]], rows[:loaded])
        self._note(ticket, loaded, pages.row_bytes, perf_counter() - began)
        return loaded

    def _rows(self, count: int, row_bytes: int) -> Rows:
        """Memory of this thread's own, kept for the next piece: fresh memory costs more than what is copied into it."""
        memory: Rows | None = getattr(self._memory, "rows", None)
        if memory is None or memory.size < count * row_bytes:
            memory = self._memory.rows = np.empty(count * row_bytes, np.uint8)
        return memory[: count * row_bytes].reshape(count, row_bytes)

    def _follow(self, ticket: Ticket, cancelled: threading.Event) -> None:
        """Until everything before the first block that cannot be had is there, or nobody wants or brings it."""
        moved_at = monotonic()
        while not ticket.finished:
            seen = ticket.changed
            ticket.wait(0.1, seen=seen)
            if ticket.changed != seen:
                moved_at = monotonic()
            states = ticket.states()
            if LoadState.FAILED in states:
                first = states.index(LoadState.FAILED)
                for later in range(first + 1, len(states)):
                    ticket.claim(later)
                if all(state is LoadState.READY for state in states[:first]):
                    ticket.cancel()
            if cancelled.is_set() or monotonic() - moved_at > STALLED_S:
                ticket.cancel()
                return

    def _note(self, ticket: Ticket, loaded: int, row_bytes: int, seconds: float) -> None:
        self._count(("load_seconds", ""), seconds)
        for i in range(len(ticket)):
            source, failure = ticket.source(i), ticket.failure(i)
            if i < loaded and source is not None:
                self._count(("loaded_blocks", str(source)), 1)
                self._count(("loaded_bytes", str(source)), row_bytes)
            elif failure is not None:
                self._count(("failed_blocks", str(failure.reason)), 1)
        with self._lock:
            for name, level in self.store.stats().levels.items():
                if level.speed.samples:
                    self._outcome.speeds[name] = Speed(*level.speed)

    def _count_tiers(self) -> None:
        """What tiers say of themselves, now and then."""
        if monotonic() < self._tiers_due:
            return
        self._tiers_due = monotonic() + TIERS_EVERY_S
        for name, level in self.store.stats().levels.items():
            now = {
                ("refused_writes", name): sum(level.tier.refused.values()),
                ("unavailable", name): level.counts.unavailable,
                ("damaged", name): level.counts.damaged,
            }
            for what, amount in now.items():
                self._count(what, amount - self._tiers_before[what])
                self._tiers_before[what] = amount
