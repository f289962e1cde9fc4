"""The worker's side: KV between vLLM's blocks and the store, as the scheduler's side planned.

Saves are copied out within the step that computed them, so vLLM may change the blocks afterwards.
Loads arrive in our own memory first, and are copied in by a thread, block by block in order, while
vLLM computes for others. vLLM reuses a block that is being loaded only after the load's end, so a
request cancelled meanwhile costs only time.
"""

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import groupby
from time import monotonic, perf_counter

import numpy as np

from kvire.connectors.vllm import fetch
from kvire.connectors.vllm.fetch import Fetcher
from kvire.connectors.vllm.messages import LoadOrder, Move, Outcome, StepPlan
from kvire.connectors.vllm.pages import DevicePages, HostPages, Rows
from kvire.core.keys import BlockKey
from kvire.core.record import BlockId, BlockRecord
from kvire.store.tiered import TieredStore

log = logging.getLogger(__name__)

LOAD_THREADS = 2
IDLE_WAIT_S = 0.002  # an idle step's wait for a load: otherwise vLLM asks thousands of times a second


@dataclass(eq=False)
class Loading:
    """A load under way.

    failed: its first move that failed; None without failures.
    late: whether it was given up because it took longer than computing.
    """

    load: LoadOrder
    cancelled: threading.Event = field(default_factory=threading.Event)
    failed: int | None = None
    late: bool = False


class WorkerSide:
    """One worker.

    pages: its cache, by group.
    part: which share of each block it has, among all workers.
    """

    def __init__(self, store: TieredStore, pages: Sequence[HostPages | DevicePages], part: int = 0) -> None:
        self.store = store
        self._fetcher = Fetcher(store)
        self._pages = pages
        self._first_part = part * len(pages)
        self._threads = ThreadPoolExecutor(LOAD_THREADS, "kvire load")
        self._lock = threading.Lock()
        self._loading: dict[str, tuple[Loading, Future[None]]] = {}
        self._outcome = Outcome()
        self._save_rows: Rows = np.empty((0, 0), np.uint8)

    def begin(self, plan: StepPlan) -> None:
        """Start the loads of a step, and mark used blocks."""
        if plan.step is not None:
            with self._lock:
                self._outcome.step = plan.step
        for load in plan.loads:
            loading = Loading(load)
            self._loading[load.request_id] = loading, self._threads.submit(self._run, loading)
        if plan.used:
            self.store.touch(list(self._ids(plan.used)))
        if plan.idle:
            self._wait(IDLE_WAIT_S)

    def save(self, moves: Sequence[Move]) -> None:
        """Hand blocks to the store, which copies them and writes later.

        To be called once they are computed.
        """
        if not moves:
            return
        began = perf_counter()
        saved: dict[BlockKey, bool] = {}
        for group, pages in enumerate(self._pages):
            mine = [move for move in moves if move.record.id.group == group]
            at_once = max(1, fetch.PIECE_BYTES // pages.row_bytes)
            for start in range(0, len(mine), at_once):
                piece = mine[start : start + at_once]
                for move, kept in zip(piece, self._save_piece(pages, piece), strict=True):
                    key = move.record.id.key
                    saved[key] = kept and saved.get(key, True)
        self._fetcher.count("save_seconds", "", perf_counter() - began)
        with self._lock:
            self._outcome.saved += [key for key, kept in saved.items() if kept]

    def finished_loads(self, over: Iterable[str]) -> tuple[set[str], set[str]]:
        """Requests whose loads ended since the last call, and those with missing blocks.

        over: requests that ended meanwhile.
        """
        for request_id in over:
            if request_id in self._loading:
                self._loading[request_id][0].cancelled.set()
        failed = set()
        ended = {request_id: pair for request_id, pair in self._loading.items() if pair[1].done()}
        for request_id, (loading, future) in ended.items():
            del self._loading[request_id]
            if future.exception() is not None:  # after any error the request is computed
                log.error("a load failed", exc_info=future.exception())
                loading.failed = 0
            if loading.failed is not None:
                failed.add(request_id)
                with self._lock:
                    self._outcome.failed[request_id] = loading.load.moves[loading.failed].record.index
                    if loading.late:
                        self._outcome.late.add(request_id)
        return set(ended), failed

    def take_outcome(self) -> Outcome | None:
        """The outcome since the last call, for the scheduler's side; None if empty."""
        with self._lock:
            outcome, self._outcome = self._outcome, Outcome()
        return None if outcome.is_empty else outcome

    def take_counts(self) -> Counter[tuple[str, str]]:
        """(counter, label) counted since the last call."""
        return self._fetcher.take_counts()

    def close(self) -> None:
        """Give up running loads, and wait for the threads."""
        for loading, _ in self._loading.values():
            loading.cancelled.set()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _ids(self, keys: Iterable[BlockKey]) -> Iterable[BlockId]:
        return (BlockId(key, self._first_part + group) for key in keys for group in range(len(self._pages)))

    def _save_piece(self, pages: HostPages | DevicePages, moves: Sequence[Move]) -> list[bool]:
        if self._save_rows.size < len(moves) * pages.row_bytes:
            self._save_rows = np.empty(len(moves) * pages.row_bytes, np.uint8)
        rows = self._save_rows.reshape(-1)[: len(moves) * pages.row_bytes].reshape(len(moves), -1)
        pages.gather([move.place for move in moves], rows)
        kept = [self.store.save(self._mine(move), row.data) for move, row in zip(moves, rows, strict=True)]
        self._fetcher.count("saved_blocks", "", sum(kept))
        self._fetcher.count("saved_bytes", "", pages.row_bytes * sum(kept))
        self._fetcher.count("dropped_blocks", "", len(kept) - sum(kept))
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

    def _mine(self, move: Move) -> BlockRecord:
        """This worker's share of the moved blocks."""
        block, group = move.record.id
        part = BlockId(block, self._first_part + group)
        return replace(move.record, id=part, kv_bytes=self._pages[group].row_bytes)

    def _run(self, loading: Loading) -> None:
        done, deadline = 0, monotonic() + loading.load.patience_s
        for group, moves in groupby(loading.load.moves, key=lambda move: move.record.id.group):
            run = list(moves)
            at_once = max(1, fetch.PIECE_BYTES // self._pages[group].row_bytes)
            for start in range(0, len(run), at_once):
                piece = run[start : start + at_once]
                loaded = self._load_piece(self._pages[group], piece, loading.cancelled, deadline)
                done += loaded
                if loaded < len(piece):
                    loading.failed, loading.late = done, monotonic() >= deadline
                    return

    def _load_piece(
        self, pages: HostPages | DevicePages, moves: Sequence[Move], cancelled: threading.Event, deadline: float
    ) -> int:
        """Load blocks up to the first that is missing or late; their number."""
        began = perf_counter()
        fetched = self._fetcher.fetch([self._mine(move) for move in moves], cancelled, deadline, in_order=True)
        loaded = sum(fetched.arrived)
        pages.scatter([move.place for move in moves[:loaded]], fetched.rows[:loaded])
        self._fetcher.count("load_seconds", "", perf_counter() - began)
        with self._lock:
            for name, level in self.store.stats().handles.items():
                if level.speed.samples:
                    self._outcome.speeds[name] = level.speed
        return loaded
