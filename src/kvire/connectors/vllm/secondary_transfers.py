"""Background jobs that move blocks between rows of vLLM's CPU tier and the store.

vLLM reuses a row only after the end of its job, so every copy to or from a row happens before that.
A load arrives in our own memory first: it can be given up in any state of a disk or server, and a
row holds either a whole verified block or its old content.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from math import inf
from time import monotonic, perf_counter
from typing import TypeVar

import numpy as np

from kvire.connectors.vllm import fetch
from kvire.connectors.vllm.fetch import Fetcher
from kvire.connectors.vllm.messages import Move
from kvire.connectors.vllm.pages import Rows
from kvire.store.tiered import TieredStore

log = logging.getLogger(__name__)

T = TypeVar("T")

SAVE_THREADS, LOAD_THREADS = 1, 2
JOIN_S = 5.0  # close's wait for busy threads


@dataclass(slots=True, eq=False)
class Job:
    """Blocks that move one way, between the store and rows of vLLM's CPU tier.

    patience_s: the longest wait for a load.
    done: whether each block moved, by number.
    seconds: of a thread's work.
    """

    number: int
    moves: Sequence[Move]
    patience_s: float = inf
    done: list[bool] = field(init=False)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.done = [False] * len(self.moves)


class Primary:
    """vLLM's CPU tier, [chunks, row_bytes], until vLLM removes it.

    vLLM cannot do so while a reference is held.
    """

    def __init__(self, view: memoryview) -> None:
        self._rows: Rows | None = np.asarray(view).view(np.uint8)
        self.row_bytes: int = self._rows.shape[1]
        self._condition = threading.Condition()
        self._users = 0

    def use(self, copy: Callable[[Rows], T]) -> T | None:
        """Call `copy` with the rows, which it may not keep; None, and no call, after
        their removal.
        """
        with self._condition:
            rows = self._rows
            self._users += rows is not None
        if rows is None:
            return None
        try:
            return copy(rows)
        finally:
            del rows
            with self._condition:
                self._users -= 1
                self._condition.notify_all()

    def close(self) -> None:
        """Wait for copies under way; from then on no row is read or written. Idempotent."""
        with self._condition:
            self._rows = None
            self._condition.wait_for(lambda: self._users == 0)


class Transfers:
    """Moves blocks by threads.

    Its methods are called by vLLM's scheduler thread, and only drain and close wait.
    """

    def __init__(self, store: TieredStore, primary: Primary) -> None:
        self._store = store
        self._primary = primary
        self._save_threads = ThreadPoolExecutor(SAVE_THREADS, "kvire tier save")
        self._load_threads = ThreadPoolExecutor(LOAD_THREADS, "kvire tier load")
        self._fetcher = Fetcher(store)
        self._running: list[tuple[Job, Future[None]]] = []
        self._given_up = threading.Event()  # replaced by each drain

    def save(self, job: Job) -> None:
        """Begin to bring rows into the store.

        Blocks that the store has, or has no buffer for, are skipped.
        """
        self._submit(self._save_threads, self._save, job)

    def load(self, job: Job) -> None:
        """Begin to bring blocks into rows."""
        self._submit(self._load_threads, self._load, job)

    def finished(self) -> list[Job]:
        """Jobs that ended since the last call: their rows are free."""
        ended: list[tuple[Job, Future[None]]] = []
        running: list[tuple[Job, Future[None]]] = []
        for pair in self._running:  # asked once: between two questions it may end
            (ended if pair[1].done() else running).append(pair)
        self._running = running
        for _, future in ended:
            if not future.cancelled() and future.exception() is not None:  # after any error, the rest is a miss
                log.error("a transfer failed", exc_info=future.exception())
        return [job for job, _ in ended]

    def drain(self) -> None:
        """Wait until every job has ended: running copies finish, the others are given up."""
        self._given_up.set()
        wait([future for _, future in self._running])
        self._given_up = threading.Event()

    def take_counts(self) -> Counter[tuple[str, str]]:
        """(counter, label) counted since the last call."""
        return self._fetcher.take_counts()

    def close(self) -> None:
        """Give up running jobs; no row is touched afterwards.

        Waits JOIN_S at most for tiers. Idempotent.
        """
        self._given_up.set()
        for threads in (self._save_threads, self._load_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        self._primary.close()
        # one that was cancelled here is never reported to `wait`
        wait([future for _, future in self._running if not future.cancelled()], JOIN_S)

    def _submit(self, threads: ThreadPoolExecutor, call: Callable[[Job, threading.Event], None], job: Job) -> None:
        self._running.append((job, threads.submit(self._timed, call, job, self._given_up)))

    def _timed(self, call: Callable[[Job, threading.Event], None], job: Job, given_up: threading.Event) -> None:
        began = perf_counter()
        try:
            call(job, given_up)
        finally:
            job.seconds = perf_counter() - began

    def _save(self, job: Job, given_up: threading.Event) -> None:
        held = self._store.held([move.record.id for move in job.moves])
        for i, (move, name) in enumerate(zip(job.moves, held, strict=True)):
            if name is not None:
                job.done[i] = True
                continue
            if given_up.is_set():
                return
            job.done[i] = bool(self._primary.use(partial(self._save_row, move)))
            self._fetcher.count("saved_blocks" if job.done[i] else "dropped_blocks", "", 1)
            self._fetcher.count("saved_bytes", "", self._primary.row_bytes * job.done[i])

    def _save_row(self, move: Move, rows: Rows) -> bool:
        return self._store.save(move.record, rows[move.place].data)

    def _load(self, job: Job, given_up: threading.Event) -> None:
        deadline = monotonic() + job.patience_s
        at_once = max(1, fetch.PIECE_BYTES // self._primary.row_bytes)
        for start in range(0, len(job.moves), at_once):
            if given_up.is_set():
                return
            piece = job.moves[start : start + at_once]
            is_over, job.done[start : start + len(piece)] = self._load_piece(piece, given_up, deadline)
            if not is_over:  # the rest would stall, too, each piece anew
                return

    def _load_piece(self, moves: Sequence[Move], given_up: threading.Event, deadline: float) -> tuple[bool, list[bool]]:
        """Whether the load was followed to its end, and which blocks are in their rows now."""
        began = perf_counter()
        fetched = self._fetcher.fetch([move.record for move in moves], given_up, deadline)
        if self._primary.use(partial(fill, moves, fetched.rows, fetched.arrived)) is None:
            return False, [False] * len(moves)
        self._fetcher.count("load_seconds", "", perf_counter() - began)
        return fetched.is_over, fetched.arrived


def fill(moves: Sequence[Move], arrived: Rows, done: Sequence[bool], rows: Rows) -> bool:
    """Copy arrived blocks into their rows."""
    for move, row, is_there in zip(moves, arrived, done, strict=True):
        if is_there:
            np.copyto(rows[move.place], row)
    return True
