"""A load in progress: the request, its progress, and the ownership of each buffer.

The caller polls; the loader's threads fill. Every block's `out` belongs to the loader alone from
the request until the block is READY, FAILED or CLAIMED. A read that may write into `out` counts as
active; one into the loader's own memory does not, and can be given up at any time.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvire.core.record import BlockRecord
from kvire.core.tier_kind import TierKind
from kvire.store.tier import Buffer


class LoadState(StrEnum):
    """State of one block of a load.

    READY: verified, and in its `out`.
    CLAIMED: the caller computes it instead.
    """

    WAITING = "waiting"
    READING = "reading"
    READY = "ready"
    FAILED = "failed"
    CLAIMED = "claimed"


class FailureReason(StrEnum):
    """Why a block could not be loaded.

    FOREIGN: intact, but not the requested block; it stays in its tier.
    """

    MISSING = "missing"
    DAMAGED = "damaged"
    UNAVAILABLE = "unavailable"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """Why a block is not there.

    detail: for people; names tiers and causes, never content.
    """

    reason: FailureReason
    detail: str


@dataclass(slots=True, eq=False)
class Wanted:
    """A block to load.

    out: writable, record.kv_bytes long; no other thread may read or write it before the block is
        READY, or while Ticket.active is above 0.
    """

    record: BlockRecord
    out: Buffer

    def __post_init__(self) -> None:
        assert len(self.out) == self.record.kv_bytes and not self.out.readonly


@dataclass(slots=True)
class _Part:
    """Progress of one block. Guarded by Ticket._lock.

    attached: its READING writes into `out`.
    remote: only remote tiers may have it.
    expected: a remote tier reported that it has it.
    """

    state: LoadState = LoadState.WAITING
    attached: bool = False
    remote: bool = False
    expected: bool = False
    source: TierKind | None = None
    failure: LoadFailure | None = None


_PENDING = (LoadState.WAITING, LoadState.READING)


class Ticket:
    """Progress of one load; thread-safe. Blocks have the numbers that they had in the request."""

    def __init__(
        self, wanted: Sequence[Wanted], *, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.wanted = tuple(wanted)
        self._parts = [_Part() for _ in self.wanted]
        # Guards every field below and every _Part. The condition shares it, so that `wait` misses
        # no change between its check and its sleep. No other lock is taken under it.
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._pending = len(self.wanted)
        self._active = 0
        self._changes = 0
        self._watchers = 0  # threads that wait for any change, not only for the end
        self._cancelled = False
        self._timeout_s = timeout_s
        self._clock = clock
        self._deadline: float | None = None  # set once remote tiers are asked; moved by each block from them
        self._late = False

    def __len__(self) -> int:
        return len(self.wanted)

    def state(self, i: int) -> LoadState:
        """State of block i, now."""
        with self._lock:
            self._give_up_what_is_late()
            return self._parts[i].state

    def states(self) -> list[LoadState]:
        """States of all blocks, at one moment."""
        with self._lock:
            self._give_up_what_is_late()
            return [part.state for part in self._parts]

    def claim(self, i: int) -> bool:
        """Take a block that is WAITING or FAILED: it is no longer read, and its `out` is the
        caller's again.

        False, and no change, if it is READING or READY.
        """
        with self._lock:
            part = self._parts[i]
            if part.state in {LoadState.READING, LoadState.READY}:
                return False
            self._settle(part, LoadState.CLAIMED)
            return True

    def cancel(self) -> None:
        """Begin no further read.

        Reads in progress into `out` go on to their end: see `active`.
        """
        with self._lock:
            self._cancelled = True
            for part in self._parts:
                if part.state is LoadState.WAITING or (part.state is LoadState.READING and not part.attached):
                    self._settle(part, LoadState.CLAIMED)

    @property
    def active(self) -> int:
        """Reads in progress that may still write into their `out`."""
        with self._lock:
            return self._active

    @property
    def finished(self) -> bool:
        """Whether no block is WAITING or READING: nothing changes any more."""
        with self._lock:
            self._give_up_what_is_late()
            return self._pending == 0

    @property
    def changed(self) -> int:
        """Grows whenever the state of a block changes."""
        with self._lock:
            self._give_up_what_is_late()
            return self._changes

    @property
    def probing(self) -> bool:
        """Whether some block waits for a remote tier's lookup."""
        with self._lock:
            self._give_up_what_is_late()
            return any(part.remote and not part.expected and part.state is LoadState.WAITING for part in self._parts)

    def source(self, i: int) -> TierKind | None:
        """Kind of tier that gave a READY block."""
        with self._lock:
            return self._parts[i].source

    def failure(self, i: int) -> LoadFailure | None:
        """Why a block could not be loaded, also once it is claimed."""
        with self._lock:
            return self._parts[i].failure

    def wait(self, timeout_s: float, *, seen: int | None = None) -> bool:
        """Wait until the load is finished, or `changed` is no longer `seen`.

        False if neither happened in time.
        """
        end = self._clock() + timeout_s
        with self._lock:
            self._watchers += seen is not None
            try:
                while True:
                    self._give_up_what_is_late()
                    if self._pending == 0 or (seen is not None and self._changes != seen):
                        return True
                    if (left_s := end - self._clock()) <= 0:
                        return False
                    if self._deadline is not None and not self._late:
                        left_s = min(left_s, max(self._deadline - self._clock(), 0.001))
                    self._condition.wait(left_s)
            finally:
                self._watchers -= seen is not None

    # From here on: for the loader only. It may hold its own lock, which comes before this one.

    def begin(self, i: int, *, attached: bool) -> bool:
        """Start reading a WAITING block, into its `out` if attached.

        False if it is no longer wanted.
        """
        with self._lock:
            self._give_up_what_is_late()
            part = self._parts[i]
            if part.state is not LoadState.WAITING or self._cancelled:
                return False
            part.attached = attached
            self._active += attached
            self._set(part, LoadState.READING)
            return True

    def attach(self, i: int) -> bool:
        """From now on the read of block i writes into its `out`; False if it was given up."""
        with self._lock:
            part = self._parts[i]
            if part.state is not LoadState.READING:
                return False
            if not part.attached:
                part.attached = True
                self._active += 1
            return True

    def wait_again(self, i: int) -> None:
        """The read ended without a result; another tier will be tried."""
        with self._lock:
            part = self._parts[i]
            if part.state is not LoadState.READING:
                return
            if self._cancelled:
                self._settle(part, LoadState.CLAIMED)
            else:
                self._detach(part)
                self._set(part, LoadState.WAITING)

    def ready(self, i: int, source: TierKind) -> None:
        """Block i is in its `out`, verified; no thread writes there any more."""
        with self._lock:
            part = self._parts[i]
            assert part.state is LoadState.READING and part.attached
            part.source = source
            self._settle(part, LoadState.READY)
            if self._deadline is not None and source is TierKind.REMOTE:
                self._deadline = self._clock() + self._timeout_s

    def fail(self, i: int, failure: LoadFailure) -> None:
        """No tier has block i. No change if it was given up before."""
        with self._lock:
            part = self._parts[i]
            if part.state in _PENDING:
                part.failure = failure
                self._settle(part, LoadState.FAILED)

    def give_up(self, failure: LoadFailure) -> None:
        """The loader ends: begin no further read, fail waiting blocks."""
        with self._lock:
            self._cancelled = True
            self._fail_unattached(failure, lambda _: True)

    def ask_remotely(self, numbers: Sequence[int]) -> None:
        """Only remote tiers may have these blocks.

        They have timeout_s until the first block, and between blocks.
        """
        with self._lock:
            if self._deadline is None:
                self._deadline = self._clock() + self._timeout_s
            for i in numbers:
                self._parts[i].remote = True
            self._late = False
            self._give_up_what_is_late()
            self._condition.notify_all()  # waiting threads sleep until the deadline at most: there is one now

    def expect(self, numbers: Sequence[int]) -> None:
        """A remote tier has these blocks, and will be read."""
        with self._lock:
            for i in numbers:
                self._parts[i].expected = True
            self._changes += 1
            self._condition.notify_all()

    def left_s(self) -> float:
        """Seconds left for remote tiers; 0 or less: none."""
        with self._lock:
            return self._timeout_s if self._deadline is None else self._deadline - self._clock()

    # From here on: called with the lock held

    def _settle(self, part: _Part, state: LoadState) -> None:
        if part.state in _PENDING:
            self._pending -= 1
        self._detach(part)
        self._set(part, state)

    def _detach(self, part: _Part) -> None:
        self._active -= part.attached
        part.attached = False

    def _set(self, part: _Part, state: LoadState) -> None:
        part.state = state
        self._changes += 1
        if self._watchers or self._pending == 0:  # waking a thread costs the loader as much as a small block
            self._condition.notify_all()

    def _give_up_what_is_late(self) -> None:
        """Fail the blocks of remote tiers past the deadline. Called with the lock held."""
        if self._late or self._deadline is None or self._clock() < self._deadline:
            return
        self._late = True
        failure = LoadFailure(FailureReason.UNAVAILABLE, f"no block from a remote tier within {self._timeout_s:g} s")
        self._fail_unattached(failure, lambda part: part.remote)

    def _fail_unattached(self, failure: LoadFailure, which: Callable[[_Part], bool]) -> None:
        for part in self._parts:
            if part.state in _PENDING and not part.attached and which(part):
                part.failure = part.failure or failure
                self._settle(part, LoadState.FAILED)
