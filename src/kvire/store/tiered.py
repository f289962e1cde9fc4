"""The store that an engine uses: tiers, fastest first; loads are polled, saves never wait.

Read ticket.py for the promises of a load; loader.py and write_behind.py have the threads. Nothing
here raises because a block is not available: a miss, a damaged block and a tier that is down only
make a hit shorter.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

import numpy as np

from kvire.codec.frame import Frames
from kvire.codec.seal import TenantKey
from kvire.core.config import StoreConfig
from kvire.core.errors import StoreError, TierUnavailable
from kvire.core.keys import BlockKey
from kvire.core.record import BlockId, BlockRecord
from kvire.core.tier_kind import TierKind
from kvire.plan.cost import Speed
from kvire.store.explain import Explainer, KeepsNotes, MissAnswer, MissQuery
from kvire.store.generations import Generation, Generations
from kvire.store.handle import HandleCounts, TierHandle
from kvire.store.keyring import Keyring
from kvire.store.loader import Loader
from kvire.store.memory.tier import Evicting, Fill
from kvire.store.threads import AnswerLate, LookupThread
from kvire.store.ticket import Ticket, Wanted
from kvire.store.tier import Buffer, Tier, TierStats
from kvire.store.write_behind import DEFAULT_BUFFER_BYTES, WriteBehind

T = TypeVar("T")

FLUSH_S = 2.0  # of close, for queued blocks
JOIN_S = 5.0  # and then to threads that are in the middle of something
STALE_S = 2.0  # that forget and clear wait for writers in the middle of a block


@dataclass(frozen=True, slots=True)
class HandleStats:
    """One tier: its own counters, the store's counters, its queue, and its speed.

    late: message of its last answer, if that was late; empty while answers come in time.
    """

    kind: TierKind
    tier: TierStats
    counts: HandleCounts
    queued_blocks: int
    queued_bytes: int
    speed: Speed
    late: str = ""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters of a store.

    handles: by tier name.
    saves: offered by the engine.
    dropped_saves: of those, taken for no tier.
    unadmitted: dropped because their turn did not end in time.
    shared_reads: blocks that a load got from another load's read.
    """

    handles: dict[str, HandleStats]
    saves: int
    dropped_saves: int
    unadmitted: int
    shared_reads: int


class TieredStore:
    """A store over tiers, fastest first, each with its way of writing frames.

    It owns the tiers: close closes them. Constructing it starts nothing: `with store:` or open()
    starts the threads, close() ends them. Before and after that loads fail and saves are dropped.

    buffer_bytes: for blocks on their way into the tiers.
    """

    def __init__(
        self, tiers: Sequence[tuple[Tier, Frames]], keyring: Keyring, config: StoreConfig,
        *, buffer_bytes: int = DEFAULT_BUFFER_BYTES,
    ) -> None:  # fmt: skip
        self._handles = [TierHandle(tier, frames, config.ttl_s) for tier, frames in tiers]
        self._by_name = {handle.name: handle for handle in self._handles}
        if len(self._by_name) < len(self._handles):
            raise StoreError(f"two tiers have the same name: {', '.join(handle.name for handle in self._handles)}")
        self._keyring = keyring
        self._generations = Generations(keyring.tenant)
        self._explainer = Explainer(self._handles)
        self._loader = Loader(
            self._handles, self._promote, self._explainer.note_damaged, timeout_s=config.load_timeout_s
        )
        self._writer = WriteBehind(
            self._handles, self._generations, self._loader.idle, admission=config.admission, buffer_bytes=buffer_bytes,
            stored=self._explainer.note_stored,
        )  # fmt: skip
        self._lookup_threads = {
            handle.name: LookupThread(handle.name)
            for handle in self._handles
            if handle.local and not handle.kind.is_in_process
        }
        self._tier_stats: dict[str, TierStats] = {}  # as last known, of tiers that are asked beside
        self._saves = self._dropped_saves = 0
        self._opened = False
        for handle in self._handles:
            if isinstance(handle.tier, Evicting):
                handle.tier.on_evict = partial(self._demote, handle)

    def remote_speed(self) -> Speed | None:
        """Of the first remote tier; None if there is none."""
        return next((handle.meter.speed() for handle in self._handles if not handle.local), None)

    def discard(self, ids: Sequence[BlockId]) -> None:
        """Remove blocks that must not be found again, from every tier and queue.

        Queued behind writes in progress.
        """
        self._writer.discard(ids)

    def open(self) -> None:
        """Start the threads. No change if the store is open; a closed one is not opened again."""
        if self._opened:
            return
        self._opened = True
        self._writer.start()
        self._loader.start()
        self._explainer.start()
        for thread in self._lookup_threads.values():
            thread.start()

    def close(self) -> None:
        """Write queued blocks within FLUSH_S, end all threads, close all tiers. Idempotent.

        Waits for reads in progress inside a tier: see Ticket.active.
        """
        self._loader.stop(JOIN_S)
        self._writer.stop(FLUSH_S, JOIN_S)
        self._explainer.stop(JOIN_S)
        for thread in self._lookup_threads.values():
            thread.stop(JOIN_S)
        for handle in self._handles:
            handle.tier.close()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def tenant(self, name: str) -> TenantKey:
        """The tenant's key, made at first use; its salt joins Namespace.salt. Raises StoreError."""
        return self._keyring.tenant(name)

    def held(self, ids: Sequence[BlockId]) -> list[str | None]:
        """Name of the fastest local tier that has each block. Changes nothing, asks no remote tier.

        Waits ANSWER_S for a tier on a disk; a tier that does not answer by then counts as empty.
        """
        fastest: list[str | None] = [None] * len(ids)
        for handle in reversed(self._handles):
            if handle.local and ids:
                try:
                    held = self._asked(handle, partial(handle.promises, ids))
                except AnswerLate:
                    handle.count(unavailable=1)
                    continue
                except TierUnavailable:  # counted by the handle
                    continue
                fastest = [handle.name if here else name for here, name in zip(held, fastest, strict=True)]
        return fastest

    def held_remotely(self, ids: Sequence[BlockId], timeout_s: float) -> list[str | None]:
        """As `held`, of remote tiers, up to timeout_s for each; one without an answer counts as
        empty.
        """
        nearest: list[str | None] = [None] * len(ids)
        for handle in reversed(self._handles):
            if not handle.local and ids:
                with suppress(TierUnavailable):
                    held = handle.promises(ids, timeout_s)
                    nearest = [handle.name if here else name for here, name in zip(held, nearest, strict=True)]
        return nearest

    def load(self, wanted: Sequence[Wanted], *, from_the_back: bool = False) -> Ticket:
        """Begin to fetch blocks, in the order given or the reverse; returns at once. See Ticket."""
        generations: dict[str, Generation] = {}
        with suppress(StoreError):  # a key file that cannot be read: the reads will say so
            tenants = {item.record.tenant for item in wanted}
            generations = {tenant: self._generations.now(tenant) for tenant in tenants}
        return self._loader.load(wanted, from_the_back=from_the_back, generations=generations)

    def save(self, record: BlockRecord, kv: Buffer) -> bool:
        """Keep a block: copies its KV and returns; written in the background.

        False: dropped, and counted.
        """
        assert len(kv) == record.kv_bytes
        kept = self._writer.save(record, kv)
        self._saves += 1
        self._dropped_saves += not kept
        return kept

    def touch(self, ids: Sequence[BlockId]) -> None:
        """The blocks were used, in order of their sequence. Queued; never waits."""
        self._writer.touch(tuple(ids))

    def end_of_turn(self, ids: Sequence[BlockId]) -> None:
        """The request of these blocks is finished.

        With admission "turn" they are kept from now on.
        """
        self._writer.end_of_turn(ids)

    def explain(self, query: MissQuery) -> MissAnswer:
        """Why a block was missed, worked out in the background."""
        return self._explainer.ask(query)

    def speed(self, tier_name: str) -> Speed:
        """Recent speed of a tier."""
        return self._by_name[tier_name].meter.speed()

    def note_namespace(self, root: BlockKey, fields: Mapping[str, str]) -> None:
        """Remember a namespace without its salt, so that explain can name differences."""
        shown = self._explainer.note_namespace(root, fields)
        for handle in self._handles:
            if isinstance(handle.tier, KeepsNotes):
                self._writer.tell(handle, partial(handle.tier.note_namespace, root, shown))

    def stats(self) -> StoreStats:
        """Counters at this moment.

        Of a tier that does not answer soon, the last known ones.
        """
        handles = {
            handle.name: HandleStats(
                handle.kind, self._stats_of(handle), handle.counts, *self._writer.queued(handle), handle.meter.speed(),
                thread.error if (thread := self._lookup_threads.get(handle.name)) else "",
            )
            for handle in self._handles
        }  # fmt: skip
        return StoreStats(handles, self._saves, self._dropped_saves, self._writer.unadmitted, self._loader.shared_reads)

    def clear(self) -> int:
        """Remove every block from every tier; returns how many, counted once per tier.

        Queued blocks are dropped. Raises TierUnavailable if a tier could not be cleared; the others
        are.
        """
        self._generations.end(None)
        self._writer.drop_stale(STALE_S)
        self._explainer.forget(None)
        return sum(self._everywhere(lambda tier: tier.clear(), "not cleared"))

    def forget(self, tenant: str) -> int:
        """Destroy the tenant's keys, and remove its blocks from every tier.

        Returns how many, counted once per tier. Raises TierUnavailable if a tier could not remove
        them; in a sealed store they are unreadable all the same.
        """
        if tenant not in self._keyring.tenants():
            return 0
        tag = self._keyring.tenant(tenant).tag
        self._generations.end(tenant)
        self._keyring.forget(tenant)
        self._writer.drop_stale(STALE_S)
        self._explainer.forget(tenant)
        return sum(self._everywhere(lambda tier: tier.delete_tenant(tag), "still has blocks of the tenant"))

    def pin(self, ids: Sequence[BlockId], *, pinned: bool) -> int:
        """Exempt blocks from eviction and expiry, or end that.

        Returns the largest number of them present in one tier. Raises TierUnavailable if a tier
        could not do it; the others did.
        """
        return max(self._everywhere(lambda tier: tier.pin(ids, pinned=pinned), "not pinned"), default=0)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all saved blocks are written or given up; False if that takes longer."""
        return self._writer.flush(timeout_s)

    def _asked(self, handle: TierHandle, call: Callable[[], T]) -> T:
        """A tier's answer, if it comes soon. Raises TierUnavailable."""
        thread = self._lookup_threads.get(handle.name)
        return call() if thread is None else thread.ask(call)

    def _stats_of(self, handle: TierHandle) -> TierStats:
        try:
            self._tier_stats[handle.name] = self._asked(handle, handle.stats)
        except TierUnavailable:
            self._tier_stats.setdefault(handle.name, TierStats())
        return self._tier_stats[handle.name]

    def _everywhere(self, call: Callable[[Tier], int], trouble: str) -> list[int]:
        counts, failures = [], []
        for handle in self._handles:
            try:
                with handle.answers():
                    counts.append(call(handle.tier))
            except TierUnavailable as error:
                failures.append(f"{handle.name}: {trouble}: {error}")
        if failures:
            raise TierUnavailable("; ".join(failures))
        return counts

    def _promote(
        self, record: BlockRecord, kv: Buffer, source: TierHandle, generations: Mapping[str, Generation]
    ) -> None:
        """Offer a block that was read to the handles before the one that gave it."""
        if not source.kind.is_in_process:  # else it was noted when it came
            self._explainer.note_stored(record)
        faster = self._handles[: self._handles.index(source)]
        if faster and (generation := generations.get(record.tenant)):
            self._writer.offer(
                record,
                lambda out: np.copyto(np.asarray(out), np.asarray(kv)),
                faster,
                generation=generation,
                why="promoted",
            )

    def _demote(self, handle: TierHandle, record: BlockRecord, fill: Fill) -> None:
        """Offer evicted blocks of a handle to the next local one below, unless one below has
        them.
        """
        below = [lower for lower in self._handles[self._handles.index(handle) + 1 :] if lower.local]
        try:
            if not below or any(lower.held([record.id])[0] for lower in below):
                return
            generation = self._writer.generation_of(handle, record.tenant)
        except (TierUnavailable, StoreError):
            return
        self._writer.offer(
            record, partial(handle.decode, record, fill), below[:1], generation=generation, why="demoted"
        )
