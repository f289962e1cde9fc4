"""Pending writes of one tier, and the thread that makes them.

All queues of a store share one lock and one buffer.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from kvire.codec.buffers import aligned_buffer
from kvire.core.errors import StoreError, TierUnavailable
from kvire.core.record import BlockId, BlockRecord
from kvire.store.generations import Generation
from kvire.store.handle import TierHandle
from kvire.store.tier import Buffer

LEAST_BLOCKS = 8  # room in each share, however large the blocks are
BATCH_BLOCKS = 32  # written after one lookup in the tier
QUEUED_CALLS = 1024
# Blocks are written within a second all the same. Beside a load, each would cost it about 0.4 ms:
# two threads that take the interpreter from each other (docs/adr/0015-tiered-store.md).
LOADS_FIRST_S = 0.3

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class PendingWrite:
    """A block in the buffer.

    generation: the one in which its write began, see Generations.
    why: names the counter.
    queues: how many still need it.
    """

    record: BlockRecord
    kv: Buffer
    generation: Generation
    why: str
    queues: int = 0


class Buffers:
    """Memory for KV, at most limit_bytes besides the memory in use. Not thread-safe.

    Reused, since fresh pages are filled several times slower.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._free: dict[int, list[Buffer]] = {}
        self._made_bytes = 0  # free or in use

    def take(self, size_bytes: int) -> Buffer:
        """Memory of exactly that size, uninitialised."""
        if free := self._free.get(size_bytes):
            return free.pop()
        if self._made_bytes + size_bytes > self._limit_bytes:  # the sizes have changed
            self._made_bytes -= sum(size * len(buffers) for size, buffers in self._free.items())
            self._free.clear()
        self._made_bytes += size_bytes
        return aligned_buffer(size_bytes)

    def give_back(self, buffer: Buffer) -> None:
        """Return memory for reuse."""
        self._free.setdefault(len(buffer), []).append(buffer)


class WriteQueue:
    """Pending writes of one tier, in order.

    condition: its lock guards everything here but `run`.
    share_bytes: limit of the queue, unless LEAST_BLOCKS are more.
    may_store: asked before and after each write; a block that may no longer be stored is deleted
        again.
    stored: called with each block that the tier keeps.
    no_loads: waited for briefly before each batch, since loads come first.
    """

    def __init__(
        self, handle: TierHandle, condition: threading.Condition, buffers: Buffers, share_bytes: int,
        *, may_store: Callable[[PendingWrite], bool], stored: Callable[[BlockRecord], None], no_loads: threading.Event,
    ) -> None:  # fmt: skip
        self.handle = handle
        self.waiting: deque[PendingWrite] = deque()
        self.writing: list[PendingWrite] = []
        self.ids: set[BlockId] = set()  # of waiting and writing
        self.bytes = 0  # of them
        # Small calls for the tier. If there are too many the oldest are dropped, which costs
        # recency only.
        self._calls: deque[Callable[[], object]] = deque(maxlen=QUEUED_CALLS)
        self._musts: list[Callable[[], object]] = []  # calls that are never dropped
        self._condition = condition
        self._buffers = buffers
        self._share_bytes = share_bytes
        self._may_store = may_store
        self._stored = stored
        self._no_loads = no_loads
        self._busy = False
        self._running = True

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing left to do."""
        return not (self.waiting or self._calls or self._musts or self._busy)

    def has_room(self, size_bytes: int) -> bool:
        """Whether one more block may wait."""
        return self.bytes + size_bytes <= max(self._share_bytes, LEAST_BLOCKS * size_bytes)

    def reserve(self, pending: PendingWrite) -> None:
        """Take the place of a pending write that will be put in."""
        self.ids.add(pending.record.id)
        self.bytes += pending.record.kv_bytes
        pending.queues += 1

    def put(self, pending: PendingWrite) -> None:
        """Queue a pending write that was reserved for."""
        self.waiting.append(pending)
        self._condition.notify_all()

    def tell(self, call: Callable[[], object], *, must: bool = False) -> None:
        """Have the thread make a call, which may raise TierUnavailable.

        must: queue it however many calls are waiting.
        """
        (self._musts if must else self._calls).append(call)
        self._condition.notify_all()

    def done(self, pending: PendingWrite) -> None:
        """This queue needs the pending write no more."""
        self.ids.discard(pending.record.id)
        self.bytes -= pending.record.kv_bytes
        pending.queues -= 1
        if pending.queues == 0:
            self._buffers.give_back(pending.kv)
        self._condition.notify_all()

    def drop(self, which: Callable[[PendingWrite], bool]) -> int:
        """Remove pending writes that have not begun; returns how many."""
        dropped = [pending for pending in self.waiting if which(pending)]
        for pending in dropped:
            self.waiting.remove(pending)
            self.done(pending)
        return len(dropped)

    def stop(self) -> None:
        """End the thread after its current work; waiting writes are dropped and counted."""
        self._running = False
        self.handle.count(dropped=self.drop(lambda _: True))
        self._calls.clear()
        self._condition.notify_all()

    def run(self) -> None:
        """Main loop of the thread."""
        scratch = aligned_buffer(0)
        while (calls := self._next()) is not None:
            self._no_loads.wait(LOADS_FIRST_S)
            longest = max((self.handle.frames.frame_bytes(pending.record) for pending in self.writing), default=0)
            if len(scratch) < longest:
                scratch = aligned_buffer(longest)
            try:
                self._write_batch(scratch)
                for call in calls:
                    with suppress(TierUnavailable), self.handle.answers():
                        call()
            except Exception:  # a bug of a tier must not end the thread: nothing would be written any more
                log.exception("writing to %s failed", self.handle.name)
                self.handle.count(unavailable=1)
            finally:
                for pending in list(self.writing):
                    self._written(pending)
                with self._condition:
                    self._busy = False
                    self._condition.notify_all()

    def _next(self) -> list[Callable[[], object]] | None:
        """Wait for work; moves a batch to `writing`, returns the calls. None at the end."""
        with self._condition:
            while self._running and not self.waiting and not self._calls and not self._musts:
                self._condition.wait()
            if not self._running:
                return None
            self.writing = [self.waiting.popleft() for _ in range(min(BATCH_BLOCKS, len(self.waiting)))]
            calls = [*self._musts, *self._calls]
            self._musts.clear()
            self._calls.clear()
            self._busy = True
            return calls

    def _write_batch(self, scratch: Buffer) -> None:
        batch = list(self.writing)
        try:
            needed = self.handle.needs([pending.record.id for pending in batch]) if batch else []
        except TierUnavailable:
            self.handle.count(dropped=len(batch))
            return
        known = [pending.record.id for pending, is_needed in zip(batch, needed, strict=True) if not is_needed]
        self.handle.count(known=len(known))
        for pending, is_needed in zip(batch, needed, strict=True):
            if is_needed:
                self._write(pending, scratch)
            self._written(pending)
        if known:
            self.handle.tier.touch(known)

    def _write(self, pending: PendingWrite, scratch: Buffer) -> None:
        record = pending.record
        try:
            kept = self.handle.store(
                record, pending.kv, scratch, pending.generation.tag, lambda: self._may_store(pending)
            )
            if not self._may_store(pending):
                self.handle.count(stale=1)
                self.handle.tier.delete([record.id], "forgotten")
                return
        except (TierUnavailable, StoreError):
            self.handle.count(dropped=1)
            return
        if kept:
            self._stored(record)
            if pending.why != "saved":
                self.handle.count(**{pending.why: 1})

    def _written(self, pending: PendingWrite) -> None:
        with self._condition:
            self.writing.remove(pending)
            self.done(pending)
