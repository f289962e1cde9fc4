"""One tier of a store with its way of writing frames: whole blocks in and out, all counted."""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from kvire.codec.frame import Frames, finish_all
from kvire.core.errors import BlockMissing, FrameDamaged, FrameForeign, StoreError, TierUnavailable
from kvire.core.record import BlockId, BlockRecord
from kvire.plan.cost import Speed
from kvire.store.health import SpeedMeter
from kvire.store.memory.tier import Fill
from kvire.store.tier import Buffer, LendsFrames, Prefetching, ReadsRuns, Tier, TierStats

log = logging.getLogger(__name__)

REMEMBERED_FOREIGN = 4096


@dataclass(slots=True)
class HandleCounts:
    """The store's counters of one tier; they only grow.

    loaded_blocks, loaded_bytes: blocks read and verified, and their KV.
    load_s: seconds that reads took, added up over threads.
    missing, damaged, foreign, unavailable: reads (and writes) that ended so.
    saved_blocks, saved_bytes: written, promoted and demoted ones among them.
    known: writes that found the block there.
    dropped: blocks not written: no buffer, no answer, or no time when the store closed.
    refused: writes that the tier did not keep.
    stale: writes given up because of a forget or clear.
    """

    loaded_blocks: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    missing: int = 0
    damaged: int = 0
    foreign: int = 0
    unavailable: int = 0
    saved_blocks: int = 0
    saved_bytes: int = 0
    promoted: int = 0
    demoted: int = 0
    known: int = 0
    dropped: int = 0
    refused: int = 0
    stale: int = 0


class TierHandle:
    """A tier and its Frames. Thread-safe.

    ttl_s: how long blocks are kept unused.
    """

    def __init__(self, tier: Tier, frames: Frames, ttl_s: float | None = None) -> None:
        self.tier = tier
        self.frames = frames
        self.name, self.kind, self.local = tier.name, tier.kind, tier.local
        self._lends = tier if isinstance(tier, LendsFrames) else None
        self._runs = tier if isinstance(tier, ReadsRuns) else None
        self.meter = SpeedMeter(Speed(tier.kind.latency_s, tier.kind.bytes_per_s))
        self._ttl_s = ttl_s
        self._lock = threading.Lock()
        self._counts = HandleCounts()
        self._told: set[type[Exception]] = set()
        self._foreign: OrderedDict[BlockId, str] = OrderedDict()  # ids under which another frame is stored, and why

    @property
    def counts(self) -> HandleCounts:
        """Counters at this moment."""
        with self._lock:
            return replace(self._counts)

    def count(self, **added: int) -> None:
        """Add to counters by name."""
        with self._lock:
            for name, amount in added.items():
                setattr(self._counts, name, getattr(self._counts, name) + amount)

    def held(self, ids: Sequence[BlockId], timeout_s: float | None = None) -> list[bool]:
        """As the tier's `held`. Raises TierUnavailable."""
        with self.answers():
            return self.tier.held(ids, timeout_s)

    def locate(self, ids: Sequence[BlockId]) -> list[bool]:
        """As held, for a load that reads the blocks next."""
        if not isinstance(self.tier, Prefetching):
            return self.held(ids)
        with self.answers():
            return self.tier.locate(ids)

    def promises(self, ids: Sequence[BlockId], timeout_s: float | None = None) -> list[bool]:
        """Which blocks a load may expect here; ids under which another frame was found are
        excluded.

        Raises TierUnavailable.
        """
        held = self.held(ids, timeout_s)
        with self._lock:
            return [here and block_id not in self._foreign for here, block_id in zip(held, ids, strict=True)]

    def fetch(self, record: BlockRecord, out: Buffer, timeout_s: float | None = None) -> None:
        """Leave the block's KV in `out`, verified.

        A failed block may have been replaced meanwhile, so it is read once more; a block damaged
        the second time is deleted. Raises BlockMissing, TierUnavailable, FrameDamaged,
        FrameForeign.
        """
        started = time.perf_counter()
        self.meter.begin()
        read_bytes = 0
        try:
            self._fetch(record, out, timeout_s, started)
            read_bytes = record.kv_bytes
        finally:
            self.meter.end(read_bytes)
            with self._lock:
                self._counts.loaded_blocks += read_bytes > 0
                self._counts.loaded_bytes += read_bytes
                self._counts.load_s += time.perf_counter() - started
                if read_bytes:
                    self._foreign.pop(record.id, None)

    @property
    def reads_runs(self) -> bool:
        """Whether reading several blocks together pays."""
        return self._runs is not None or self._lends is not None

    def fetch_run(self, wanted: Sequence[tuple[BlockRecord, Buffer]]) -> list[bool]:
        """Try to leave several blocks' KV in their buffers, verified; returns which succeeded.

        For the others, `fetch` gives the reason, or still succeeds.
        """
        if not wanted or not self.reads_runs:
            return [False] * len(wanted)
        started = time.perf_counter()
        self.meter.begin()
        loaded: list[BlockRecord] = []
        done: list[bool] = []
        try:
            done = self._read_run(wanted)
            loaded = [record for (record, _), is_done in zip(wanted, done, strict=True) if is_done]
        finally:
            loaded_bytes = sum(record.kv_bytes for record in loaded)
            self.meter.end(loaded_bytes, len(loaded))
            with self._lock:
                self._counts.loaded_blocks += len(loaded)
                self._counts.loaded_bytes += loaded_bytes
                self._counts.load_s += time.perf_counter() - started
                for record in loaded if self._foreign else ():
                    self._foreign.pop(record.id, None)
        return done

    def store(self, record: BlockRecord, kv: Buffer, scratch: Buffer, tag: bytes, allowed: Callable[[], bool]) -> bool:
        """Write the block; False if the tier did not keep it.

        scratch: at least frames.frame_bytes(record) long.
        tag: of the tenant's key.
        allowed: asked before the frame is made, and after: a key made since a forget must not
            protect blocks stored before.

        Raises TierUnavailable.
        """
        with self.answers():
            if not allowed():
                return False
            frame = scratch[: self.frames.encode(record, kv, scratch)]
            if not allowed():
                return False
            kept = self.tier.write(record, frame, tag, ttl_s=self._ttl_s)
        with self._lock:
            self._counts.saved_blocks += kept
            self._counts.saved_bytes += len(frame) if kept else 0
            self._counts.refused += not kept
            self._foreign.pop(record.id, None)
        return kept

    def needs(self, ids: Sequence[BlockId]) -> list[bool]:
        """Which blocks a write should bring: missing ones, and ids under which another frame is
        stored.

        Frames of a newer version are left alone. Raises TierUnavailable.
        """
        held = self.held(ids)
        with self._lock:
            return [
                self._foreign.get(block_id, "version") != "version" if here else True
                for here, block_id in zip(held, ids, strict=True)
            ]

    def decode(self, record: BlockRecord, fill: Fill, out: Buffer) -> None:
        """As fetch, of a frame that this tier lends.

        Raises FrameDamaged, FrameForeign.
        """
        reading = self.frames.reading(record, out)
        reading.finish(fill(reading.buffers))

    @contextmanager
    def answers(self) -> Iterator[None]:
        """Count unavailability.

        A key file that cannot be read counts, too, and a tier's call that ends with an error no
        tier may raise. Neither may end the engine that asked.
        """
        try:
            yield
        except (BlockMissing, FrameDamaged, FrameForeign):
            raise
        except TierUnavailable:
            self.count(unavailable=1)
            raise
        except StoreError as error:
            self.count(unavailable=1)
            raise TierUnavailable(str(error)) from error
        except Exception as error:
            self.count(unavailable=1)
            self._tell_once(error)
            raise TierUnavailable(f"{self.name}: {type(error).__name__}: {error}") from error

    def stats(self) -> TierStats:
        """The tier's own counters. Never raises."""
        try:
            return self.tier.stats()
        except Exception as error:  # noqa: BLE001 - as in `answers`
            self._tell_once(error)
            return TierStats()

    def _tell_once(self, error: Exception) -> None:
        """Log the first error of each kind that no tier may raise, with its traceback."""
        if type(error) not in self._told:
            self._told.add(type(error))
            log.error("%s failed as no tier may", self.name, exc_info=error)

    def _fetch(self, record: BlockRecord, out: Buffer, timeout_s: float | None, started: float) -> None:
        try:
            self._read(record, out, timeout_s)
        except (FrameDamaged, FrameForeign):
            left_s = None if timeout_s is None else timeout_s - (time.perf_counter() - started)
            self._read_again(record, out, left_s)
        except BlockMissing:
            self.count(missing=1)
            raise

    def _read(self, record: BlockRecord, out: Buffer, timeout_s: float | None) -> None:
        with self.answers():
            reading = self.frames.reading(record, out)
            reading.finish(self.tier.read(record.id, reading.buffers, timeout_s))

    def _read_run(self, wanted: Sequence[tuple[BlockRecord, Buffer]]) -> list[bool]:
        ids = [record.id for record, _ in wanted]
        try:
            if self._lends is not None:
                with self._lends.lent(ids) as frames:
                    return self.frames.copy_out(wanted, frames)
            readings = self.frames.readings(wanted)
        except StoreError:
            return [False] * len(wanted)
        assert self._runs is not None
        outcomes = self._runs.read_run(ids, [reading.buffers for reading in readings])
        return finish_all(readings, [outcome if isinstance(outcome, int) else None for outcome in outcomes])

    def _read_again(self, record: BlockRecord, out: Buffer, timeout_s: float | None) -> None:
        if timeout_s is not None and timeout_s <= 0:
            self.count(unavailable=1)
            raise TierUnavailable(f"{self.name}: no time left to read the block a second time")
        try:
            self._read(record, out, timeout_s)
        except FrameDamaged:
            self.count(damaged=1)
            with suppress(TierUnavailable), self.answers():  # else the next reader finds it again
                self.tier.delete([record.id], "damaged")
            raise
        except FrameForeign as error:
            self.count(foreign=1)
            with self._lock:
                self._foreign[record.id] = error.cause
                if len(self._foreign) > REMEMBERED_FOREIGN:
                    self._foreign.popitem(last=False)
            raise
        except BlockMissing:
            self.count(missing=1)
            raise
