"""A tier on another machine: the part common to the backends (remote/redis.py, remote/objects.py).

Each block is one value, a short stamp and the whole frame, under a name that depends on its BlockId
alone; there is no other data that could be lost separately (docs/adr/0014-remote-tiers.md). Names
are digests: they reveal nothing about prompts.
"""

import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice

from kvire.codec.frame import Header
from kvire.core.errors import FrameDamaged, FrameForeign, TierUnavailable
from kvire.core.keys import BlockKey
from kvire.core.record import BlockId, BlockRecord
from kvire.core.tier_kind import TierKind
from kvire.store.health import PROBE_AFTER_S, CircuitBreaker, Health
from kvire.store.remote.backend import BATCH, BLOCKS, PINS, STAMP_BYTES, Backend, StoredObject, stamp, stamped
from kvire.store.remote.deadline import Deadline
from kvire.store.tier import Buffer, Entry, TierStats

DEFAULT_TIMEOUT_S = 0.5
_BLOCK_NAME = re.compile(r"[0-9a-f]{2}/([0-9a-f]{64})-(0|[1-9][0-9]{0,4})")


class RemoteTier:
    """The Tier over a Backend, behind a circuit breaker. Opens nothing before the first call.

    timeout_s: default of calls.
    ttl_s: how long a block lives after `touch` and after the end of a pin; blocks written with
        another ttl keep it until then.
    """

    kind = TierKind.REMOTE
    local = False

    def __init__(
        self,
        name: str,
        backend: Backend,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        ttl_s: float | None = None,
        probe_after_s: float = PROBE_AFTER_S,
    ) -> None:
        self.name = name
        self._backend = backend
        self._timeout_s = timeout_s
        self._ttl_s = ttl_s
        self._breaker = CircuitBreaker(name, self._probe, probe_after_s=probe_after_s)
        self._stats = TierStats()
        self._lock = threading.Lock()

    @property
    def health(self) -> Health:
        """Whether calls go through, and the failures in a row."""
        return self._breaker.health

    def held(self, ids: Sequence[BlockId], timeout_s: float | None = None) -> list[bool]:
        """As Tier says."""
        deadline = self._deadline(timeout_s)
        found: list[bool] = []
        with self._guarded("held"):
            for names in _batches(map(block_name, ids)):
                found += self._backend.exists(names, deadline)
        return found

    def read(self, block_id: BlockId, buffers: Sequence[Buffer], timeout_s: float | None = None) -> int:
        """As Tier says; FrameDamaged("type") if another program's value has the block's name."""
        with self._guarded("read"):
            before = memoryview(bytearray(STAMP_BYTES))
            length = self._backend.get(block_name(block_id), [before, *buffers], self._deadline(timeout_s))
        length = max(0, length - STAMP_BYTES)
        with self._lock:
            self._stats.reads += 1
            self._stats.read_bytes += length
        return length

    def write(self, record: BlockRecord, frame: Buffer, tenant_tag: bytes, *, ttl_s: float | None = None) -> bool:
        """As Tier says, but the server evicts by its own rules."""
        del tenant_tag  # the frame's header holds it
        with self._guarded("write"):
            value = (stamp(ttl_s), frame)
            refused = self._backend.put(block_name(record.id), value, ttl_s, self._deadline(None))
        with self._lock:
            if refused is not None:
                self._stats.refused[refused] = self._stats.refused.get(refused, 0) + 1
                return False
            self._stats.writes += 1
            self._stats.written_bytes += len(frame)
        return True

    def touch(self, ids: Sequence[BlockId]) -> None:
        """As Tier says: the first block of the sequence is the last one used."""
        deadline = self._deadline(None)
        try:
            with self._guarded("touch"):
                for names in _batches(map(block_name, reversed(ids))):
                    self._backend.touch(names, self._ttl_s, deadline)
        except TierUnavailable:
            pass  # counted; an untouched block is only evicted earlier

    def delete(self, ids: Sequence[BlockId], reason: str) -> int:
        """As Tier says."""
        count = 0
        with self._guarded("delete"):
            for names in _batches(map(block_name, ids)):
                deadline = self._deadline(None)
                there = [value.name for value in self._backend.describe(names, deadline)]
                count += self._remove(there, reason, deadline)
        return count

    def delete_tenant(self, tenant_tag: bytes) -> int:
        """As Tier says, by the headers of all frames.

        Their number decides how long it takes, not the timeout.
        """
        count = 0
        with self._guarded("delete_tenant"):
            for names in self._backend.names(BLOCKS, self._timeout_s):
                deadline = self._deadline(None)
                stored = self._backend.describe(names, deadline)
                theirs = [value.name for value in stored if _tenant_tag(value) == tenant_tag]
                count += self._remove(theirs, "forgotten", deadline)
        return count

    def clear(self) -> int:
        """As Tier says; other programs' values stay."""
        count = 0
        with self._guarded("clear"):
            for names in self._backend.names(BLOCKS, self._timeout_s):
                count += self._remove(names, "cleared", self._deadline(None))
        return count

    def pin(self, ids: Sequence[BlockId], *, pinned: bool) -> int:
        """As Tier says for expiry. The server's own settings decide about eviction."""
        with self._guarded("pin"):
            count = 0
            for names in _batches(map(block_name, ids)):
                found = self._backend.exists(names, self._deadline(None))
                here = [name for name, is_here in zip(names, found, strict=True) if is_here]
                if pinned:  # marked first: no value is without expiry and without a mark
                    for name in here:
                        self._backend.put(_pin_name(name), (), None, self._deadline(None))
                    self._backend.keep(here, None, self._deadline(None))
                else:
                    self._backend.remove([_pin_name(name) for name in here], self._deadline(None))
                    self._backend.keep(here, self._ttl_s, self._deadline(None))
                count += len(here)
            return count

    def entries(self) -> Iterator[Entry]:
        """As Tier says, but the last use is not known: `used` is the time of the write.

        A value that cannot be a frame is listed with an empty parent, root and tag; an object past
        its time, with an expiry in the past.
        """
        with self._guarded("entries"):
            pins = {name for names in self._backend.names(PINS, self._timeout_s) for name in names}
        batches = self._backend.names(BLOCKS, self._timeout_s)
        while True:
            with self._guarded("entries"):
                names = next(batches, None)
                stored = self._backend.describe(names, self._deadline(None)) if names else []
            if names is None:
                return
            for value in stored:
                if block_id := block_of(value.name):
                    yield _entry(block_id, value, pinned=_pin_name(value.name) in pins)

    def stats(self) -> TierStats:
        """As Tier says. used_bytes and blocks stay 0: only a listing would tell."""
        with self._lock:
            stats = self._stats
            return replace(stats, evictions=dict(stats.evictions), refused=dict(stats.refused))

    def close(self) -> None:
        """As Tier says."""
        self._breaker.close()
        self._backend.close()

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline(self._timeout_s if timeout_s is None else timeout_s)

    @contextmanager
    def _guarded(self, kind: str) -> Iterator[None]:
        """One call: refused while the breaker is open; its outcome is reported to the breaker."""
        try:
            self._breaker.check()
        except TierUnavailable:
            self._count_unavailable()
            raise
        try:
            yield
        except TierUnavailable as error:
            self._breaker.failed(kind, error)
            self._count_unavailable()
            raise
        except Exception:
            self._breaker.succeeded(kind)  # missing or damaged: the tier did answer
            raise
        self._breaker.succeeded(kind)

    def _count_unavailable(self) -> None:
        with self._lock:
            self._stats.unavailable += 1

    def _probe(self) -> None:
        self._backend.exists([BLOCKS + "probe"], Deadline(self._timeout_s))

    def _remove(self, names: Sequence[str], reason: str, deadline: Deadline) -> int:
        """Remove present blocks, and their pins; returns how many blocks."""
        if names:
            self._backend.remove(names, deadline)
            self._backend.remove([_pin_name(name) for name in names], deadline)
            with self._lock:
                self._stats.evictions[reason] = self._stats.evictions.get(reason, 0) + len(names)
        return len(names)


def block_name(block_id: BlockId) -> str:
    """Name of a block's value: two hex digits first, so that no folder of files holds all of
    them.
    """
    digits = block_id.key.hex()
    return f"{BLOCKS}{digits[:2]}/{digits}-{block_id.group}"


def block_of(name: str) -> BlockId | None:
    """The block of that name; None for any other name."""
    match = _BLOCK_NAME.fullmatch(name.removeprefix(BLOCKS))
    if match is None or block_name(block_id := BlockId(BlockKey(bytes.fromhex(match[1])), int(match[2]))) != name:
        return None
    return block_id


def _pin_name(name: str) -> str:
    return PINS + name.removeprefix(BLOCKS)


def _header(value: StoredObject) -> Header | None:
    """Unchecked header: reading the frame verifies it.

    None for a value that cannot be a frame of ours.
    """
    try:
        return Header.parse(value.head[STAMP_BYTES:])
    except (FrameDamaged, FrameForeign):
        return None


def _tenant_tag(value: StoredObject) -> bytes | None:
    header = _header(value)
    return None if header is None else header.tenant_tag


def _entry(block_id: BlockId, value: StoredObject, *, pinned: bool) -> Entry:
    header = _header(value)
    written, _ = stamped(value.head)
    return Entry(
        id=block_id,
        parent=header.parent if header else b"",
        root=header.root if header else b"",
        tenant_tag=header.tenant_tag if header else b"",
        index=header.index if header else 0,
        frame_bytes=max(0, value.size_bytes - STAMP_BYTES),
        created=written,
        used=written,
        expires=None if pinned else value.expires,
        pinned=pinned,
    )


def _batches(names: Iterable[str]) -> Iterator[list[str]]:
    names = iter(names)
    while batch := list(islice(names, BATCH)):
        yield batch
