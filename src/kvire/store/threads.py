"""Threads that read for the store: WorkerThreads for loads, LookupThread for lookups.

Engines look into the store between two steps, while answers are in progress: a stalled disk delays
them briefly, and a lookup returns in any case.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

from kvire.core.errors import TierUnavailable
from kvire.store.health import Outage

# An index in the page cache answers for 256 blocks in 1 ms, a cold one on a slow disk in tens. More
# than this is longer than a step of a batch, and would show in the answers under way.
ANSWER_S = 0.1

T = TypeVar("T")
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


class AnswerLate(TierUnavailable):
    """The tier did not answer in time, or is not asked because it was late too often."""


class _Question:
    """One call for the thread; its answer is (result, None) or (None, error)."""

    __slots__ = ("answer", "call", "given_up")

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call
        self.answer: SimpleQueue[tuple[Any, Exception | None]] = SimpleQueue()
        self.given_up = False


class LookupThread:
    """One thread for calls to the tier of that name, in order. Thread-safe.

    Late answers are discarded. After a few in a row the tier is not asked for a moment, and then
    tried again.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._outage = Outage(f"asking {name} what it has", time.monotonic)
        self._questions: SimpleQueue[_Question | None] = SimpleQueue()
        self._asked: _Question | None = None  # by the thread, now
        self._thread: threading.Thread | None = None

    @property
    def error(self) -> str:
        """Why the last answer did not come; empty once one came in time."""
        return self._outage.error

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name=f"kvire look {self._name}", daemon=True)
        self._thread.start()

    def stop(self, join_s: float) -> None:
        """End the thread, after all earlier calls.

        From then on callers make their calls themselves. Idempotent.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            self._questions.put(None)
            thread.join(join_s)

    def ask(self, call: Callable[[], T]) -> T:
        """The call's result or error, if it comes within ANSWER_S; else raises AnswerLate."""
        if self._thread is None:
            return call()
        try:
            self._outage.check()
        except TierUnavailable as error:
            raise AnswerLate(str(error)) from None
        question = _Question(call)
        asked = self._asked
        if asked is not None and asked.given_up:  # the thread still waits for an answer that was late
            raise self._late()
        self._questions.put(question)
        try:
            result, failure = question.answer.get(timeout=ANSWER_S)
        except Empty:
            question.given_up = True
            raise self._late() from None
        self._outage.passed()
        if failure is not None:
            raise failure
        return cast("T", result)

    def _late(self) -> AnswerLate:
        error = AnswerLate(f"{self._name} gave no answer within {ANSWER_S:g} s")
        self._outage.failed(error)
        return error

    def _run(self) -> None:
        while (question := self._questions.get()) is not None:
            if question.given_up:
                continue
            self._asked = question
            try:
                question.answer.put((question.call(), None))
            except TierUnavailable as error:
                question.answer.put((None, error))
            except Exception as error:  # a bug in a tier is a miss, and must not end the thread
                log.exception("asking %s failed", self._name)
                question.answer.put((None, TierUnavailable(f"{self._name}: {error}")))
            finally:
                self._asked = None
