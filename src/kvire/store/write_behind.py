"""Blocks on their way into the tiers: admission, a bounded buffer, a queue and thread per tier.

A caller never waits: a block without room is dropped and counted. Each tier may fill its share of
the buffer and no more, so that a slow or dead one delays no other. A block waits in memory of the
buffer's own, which is released once every queue is done with it.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from kvire.core.errors import FrameDamaged, FrameForeign, StoreError
from kvire.core.record import BlockId, BlockRecord
from kvire.store.generations import Generation, Generations
from kvire.store.handle import TierHandle
from kvire.store.tier import Buffer
from kvire.store.write_queue import LEAST_BLOCKS, Buffers, PendingWrite, WriteQueue

DEFAULT_BUFFER_BYTES = 64 << 20
REMEMBERED_IDS = 1 << 16  # of blocks seen once, for admission


class WriteBehind:
    """Writers for `handles`. Starts nothing before `start`; thread-safe.

    admission: "all", or "turn": a block waits until its turn ends or it is seen again, and the
        oldest waiting one makes room.
    buffer_bytes: for all waiting blocks, unless 8 blocks per tier are more.
    no_loads: see WriteQueue.
    stored: called with each block that a tier keeps.
    """

    def __init__(
        self, handles: Sequence[TierHandle], generations: Generations, no_loads: threading.Event,
        *, admission: str = "all", buffer_bytes: int = DEFAULT_BUFFER_BYTES,
        stored: Callable[[BlockRecord], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self._generations = generations
        self._by_turn = admission == "turn"
        self._share_bytes = buffer_bytes // max(1, len(handles) + self._by_turn)
        self._buffers = Buffers(buffer_bytes)
        self._condition = threading.Condition()
        self._queues = [
            WriteQueue(
                handle,
                self._condition,
                self._buffers,
                self._share_bytes,
                may_store=self._may_store,
                stored=stored,
                no_loads=no_loads,
            )
            for handle in handles
        ]
        self._waiting: OrderedDict[BlockId, PendingWrite] = OrderedDict()  # for the end of their turn
        self._waiting_bytes = 0
        self._seen: OrderedDict[BlockId, None] = OrderedDict()
        self._threads: list[threading.Thread] = []
        self._running = False
        self.unadmitted = 0  # blocks whose turn did not end before others needed the room

    def start(self) -> None:
        """Start one thread per tier."""
        self._running = True
        for queue in self._queues:
            self._threads.append(
                threading.Thread(target=queue.run, name=f"kvire write {queue.handle.name}", daemon=True)
            )
            self._threads[-1].start()

    def save(self, record: BlockRecord, kv: Buffer) -> bool:
        """Copy a block into the buffer, for every tier. Never waits for a tier.

        False if no tier takes it (counted).
        """
        handles = [queue.handle for queue in self._queues]
        if self._by_turn:
            with self._condition:
                if record.id in self._waiting:  # seen a second time
                    self._admit([record.id])
                    return True
                handles = handles if self._was_seen(record.id) else []
        return self.offer(record, lambda out: np.copyto(np.asarray(out), np.asarray(kv)), handles)

    def offer(
        self, record: BlockRecord, fill: Callable[[Buffer], None], handles: Sequence[TierHandle],
        *, generation: Generation | None = None, why: str = "saved",
    ) -> bool:  # fmt: skip
        """Queue a block for `handles`, or without any, until the end of its turn.

        fill: writes its KV; it may raise FrameDamaged or FrameForeign.
        generation: of the data that fill reads, if older than this call.

        False if there is no room for it.
        """
        try:
            generation = generation or self._generations.now(record.tenant)
        except StoreError:  # the key file cannot be read: nothing can be stored
            return False
        with self._condition:
            queues = [queue for queue in self._queues if queue.handle in handles and record.id not in queue.ids]
            if handles and not queues:
                return True  # on its way already
            taking = [queue for queue in queues if self._running and queue.has_room(record.kv_bytes)]
            for queue in queues:
                queue.handle.count(dropped=queue not in taking)
            if not self._running or not self._queues or (handles and not taking):
                return False
            pending = PendingWrite(record, self._buffers.take(record.kv_bytes), generation, why)
            for queue in taking:
                queue.reserve(pending)
        try:
            fill(pending.kv)
        except (FrameDamaged, FrameForeign):
            with self._condition:
                for queue in taking:
                    queue.done(pending)
            return False
        with self._condition:
            for queue in taking:
                queue.put(pending)
            if not handles:
                self._let_wait(pending)
        return True

    def touch(self, ids: Sequence[BlockId]) -> None:
        """The blocks were used: tell every tier, in its thread.

        Blocks that wait for their turn count as seen twice.
        """
        with self._condition:
            self._admit(ids)
            for queue in self._queues:
                queue.tell(partial(queue.handle.tier.touch, ids))

    def end_of_turn(self, ids: Sequence[BlockId]) -> None:
        """Admit these waiting blocks."""
        with self._condition:
            self._admit(ids)

    def discard(self, ids: Sequence[BlockId]) -> None:
        """Drop these blocks from the queues, and have every tier remove them after the write in
        progress.
        """
        unwanted = set(ids)
        with self._condition:
            for block_id in unwanted & self._waiting.keys():
                self._forget_waiting(block_id)
            for queue in self._queues:
                queue.drop(lambda pending: pending.record.id in unwanted)
                queue.tell(partial(queue.handle.tier.delete, tuple(ids), "discarded"), must=True)

    def tell(self, handle: TierHandle, call: Callable[[], object]) -> None:
        """Have a tier's thread make a call; a TierUnavailable is counted."""
        with self._condition:
            self._queue_of(handle).tell(call)

    def queued(self, handle: TierHandle) -> tuple[int, int]:
        """Blocks and bytes that wait for a tier or are being written to it."""
        with self._condition:
            queue = self._queue_of(handle)
            return len(queue.ids), queue.bytes

    def generation_of(self, handle: TierHandle, tenant: str) -> Generation:
        """Generation of data read by this tier's thread: not newer than any write in progress.

        Raises StoreError.
        """
        generation = self._generations.now(tenant)
        numbers = [pending.generation.number for pending in self._queue_of(handle).writing]
        return generation._replace(number=min([generation.number, *numbers]))

    def drop_stale(self, timeout_s: float) -> bool:
        """Drop the blocks that the last `Generations.end` made stale, and wait for writes of them
        to end.

        False if that takes longer. A write still in progress then deletes its block afterwards.
        """
        end = time.monotonic() + timeout_s
        with self._condition:
            for block_id in [i for i, pending in self._waiting.items() if not self._is_recent(pending)]:
                self._forget_waiting(block_id)
            for queue in self._queues:
                queue.handle.count(stale=queue.drop(lambda pending: not self._is_recent(pending)))
            return self._wait_until(
                lambda: all(self._is_recent(pending) for queue in self._queues for pending in queue.writing), end
            )

    def flush(self, timeout_s: float) -> bool:
        """Wait until every queued block is written or given up; False if that takes longer."""
        with self._condition:
            end = time.monotonic() + timeout_s
            return self._wait_until(lambda: all(queue.is_empty for queue in self._queues), end)

    def stop(self, timeout_s: float, join_s: float) -> None:
        """Flush within timeout_s, drop the rest (counted), and end all threads."""
        if self._running:
            self.flush(timeout_s)
        with self._condition:
            self._running = False
            for block_id in list(self._waiting):
                self._forget_waiting(block_id)
            for queue in self._queues:
                queue.stop()
        end = time.monotonic() + join_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        self._threads.clear()

    # Under the lock

    def _queue_of(self, handle: TierHandle) -> WriteQueue:
        return next(queue for queue in self._queues if queue.handle is handle)

    def _let_wait(self, pending: PendingWrite) -> None:
        """Until its turn ends."""
        size_bytes = pending.record.kv_bytes
        share_bytes = max(self._share_bytes, LEAST_BLOCKS * size_bytes)
        while self._waiting and self._waiting_bytes + size_bytes > share_bytes:
            self._forget_waiting(next(iter(self._waiting)))
            self.unadmitted += 1
        self._waiting[pending.record.id] = pending
        self._waiting_bytes += size_bytes

    def _was_seen(self, block_id: BlockId) -> bool:
        """Whether a block was handed in before; from now on it was."""
        seen = block_id in self._seen
        self._seen[block_id] = None
        if len(self._seen) > REMEMBERED_IDS:
            self._seen.popitem(last=False)
        return seen

    def _admit(self, ids: Sequence[BlockId]) -> None:
        for block_id in ids if self._waiting else ():
            if (pending := self._waiting.pop(block_id, None)) is None:
                continue
            self._waiting_bytes -= pending.record.kv_bytes
            queues = [queue for queue in self._queues if block_id not in queue.ids]
            taking = [queue for queue in queues if queue.has_room(pending.record.kv_bytes)]
            for queue in queues:
                queue.handle.count(dropped=queue not in taking)
            for queue in taking:
                queue.reserve(pending)
                queue.put(pending)
            if not taking:
                self._buffers.give_back(pending.kv)

    def _forget_waiting(self, block_id: BlockId) -> None:
        pending = self._waiting.pop(block_id)
        self._waiting_bytes -= pending.record.kv_bytes
        self._buffers.give_back(pending.kv)

    def _is_recent(self, pending: PendingWrite) -> bool:
        return self._generations.is_recent(pending.record.tenant, pending.generation)

    def _may_store(self, pending: PendingWrite) -> bool:
        return self._generations.is_current(pending.record.tenant, pending.generation)

    def _wait_until(self, done: Callable[[], bool], end: float) -> bool:
        while not done():
            if (left_s := end - time.monotonic()) <= 0 or not self._running:
                return False
            self._condition.wait(left_s)
        return True
