"""Threads over a queue of work that is handed out piece by piece."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

Work = Iterator[Callable[[], None]]

log = logging.getLogger(__name__)


class WorkerThreads:
    """Threads over a queue of work, oldest first.

    Each item hands out pieces, which may run side by side.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._plans: deque[Callable[[], None]] = deque()  # before all reads: they tell loads of each other
        self._work: deque[Work] = deque()
        self._running = False
        self._threads = [
            threading.Thread(target=self._run, name=f"kvire load {name}", daemon=True) for _ in range(threads)
        ]

    def start(self) -> None:
        """Start the threads."""
        self._running = True
        for thread in self._threads:
            thread.start()

    def plan(self, plan: Callable[[], None]) -> None:
        """Do this before all other work."""
        with self._lock:
            self._plans.append(plan)
            self._condition.notify()

    def add(self, work: Work) -> None:
        """Do these pieces after all earlier ones."""
        with self._lock:
            self._work.append(work)
            self._condition.notify()

    def stop(self) -> None:
        """Begin no further work."""
        with self._lock:
            self._running = False
            self._plans.clear()
            self._work.clear()
            self._condition.notify_all()

    def join(self, end: float) -> None:
        """Wait for the threads, until `end` of the monotonic clock at most."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, end - time.monotonic()))

    def _run(self) -> None:
        while (piece := self._next()) is not None:
            try:
                piece()
            except Exception:  # a bug in one piece must not end the thread: later loads would never end
                log.exception("a piece of a load failed")

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            while self._running:
                if (piece := self._piece()) is not None:
                    # A thread that has begun wakes the next: woken together, they may share one
                    # core for milliseconds.
                    self._condition.notify()
                    return piece
                self._condition.wait()
            return None

    def _piece(self) -> Callable[[], None] | None:
        if self._plans:
            return self._plans.popleft()
        while self._work:
            if (piece := next(self._work[0], None)) is not None:
                return piece
            self._work.popleft()
        return None
