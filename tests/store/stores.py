"""Stores for tests: real tiers, and one that can be made slow, dead or wrong at will."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from store.blocks import chain, kv_of, wanted

from kvire.codec.frame import Frames
from kvire.codec.seal import TenantKey
from kvire.core.config import StoreConfig
from kvire.core.errors import TierUnavailable
from kvire.core.record import BlockId, BlockRecord
from kvire.core.tier_kind import TierKind
from kvire.store import loader
from kvire.store.keyring import Keyring
from kvire.store.memory.tier import MemoryTier
from kvire.store.ticket import LoadState, Ticket
from kvire.store.tier import Buffer, Entry, Tier, TierStats
from kvire.store.tiered import TieredStore

MIB = 1 << 20


class BentTier:
    """A memory tier that passes for another kind. slow_s: per read. gate: writes and reads wait for it. dead: calls
    raise. bend: gets what a read left in the buffers, and its length, and returns the length to tell.
    """

    def __init__(self, kind: TierKind = TierKind.DISK, name: str = "bent", capacity_bytes: int = 64 * MIB) -> None:
        self.inner = MemoryTier(capacity_bytes, name=name)
        self.name, self.kind, self.local = name, kind, kind is not TierKind.REMOTE
        self.slow_s = 0.0
        self.gate = threading.Event()
        self.gate.set()
        self.dead = False
        self.bend: Callable[[BlockId, Sequence[Buffer], int], int] | None = None
        self.log: list[BlockId] = []  # reads, in the order in which they began
        self.writes: Counter[BlockId] = Counter()
        self.touched: list[Sequence[BlockId]] = []
        self.waiting = threading.Event()  # somebody stands at the closed gate

    def _pass(self) -> None:
        if not self.gate.is_set():
            self.waiting.set()
            self.gate.wait(20)
        if self.dead:
            raise TierUnavailable(f"{self.name} is dead")

    def held(self, ids: Sequence[BlockId], timeout_s: float | None = None) -> list[bool]:
        if self.dead:
            raise TierUnavailable(f"{self.name} is dead")
        return self.inner.held(ids, timeout_s)

    def read(self, block_id: BlockId, buffers: Sequence[Buffer], timeout_s: float | None = None) -> int:
        self.log.append(block_id)
        self._pass()
        time.sleep(self.slow_s)
        length = self.inner.read(block_id, buffers, timeout_s)
        return length if self.bend is None else self.bend(block_id, buffers, length)

    def write(self, record: BlockRecord, frame: Buffer, tenant_tag: bytes, *, ttl_s: float | None = None) -> bool:
        self._pass()
        self.writes[record.id] += 1
        return self.inner.write(record, frame, tenant_tag, ttl_s=ttl_s)

    def touch(self, ids: Sequence[BlockId]) -> None:
        self.touched.append(tuple(ids))
        self.inner.touch(ids)

    def delete(self, ids: Sequence[BlockId], reason: str) -> int:
        return self.inner.delete(ids, reason)

    def delete_tenant(self, tenant_tag: bytes) -> int:
        return self.inner.delete_tenant(tenant_tag)

    def clear(self) -> int:
        return self.inner.clear()

    def pin(self, ids: Sequence[BlockId], *, pinned: bool) -> int:
        return self.inner.pin(ids, pinned=pinned)

    def entries(self) -> Iterator[Entry]:
        return self.inner.entries()

    def stats(self) -> TierStats:
        return self.inner.stats()

    def close(self) -> None:
        self.gate.set()
        self.inner.close()

    def spoil(self, record: BlockRecord, at: int = -100) -> None:
        """Flip a bit of the stored frame."""
        frame = bytearray(self.frame(record))
        frame[at] ^= 1
        self.put(record, frame)

    def frame(self, record: BlockRecord) -> bytes:
        out = bytearray(10 * record.kv_bytes + 1_000)
        return bytes(out[: self.inner.read(record.id, [memoryview(out)])])

    def put(self, record: BlockRecord, frame: bytes | bytearray) -> None:
        """Lay these bytes under the record's id."""
        tag = next(entry.tenant_tag for entry in self.inner.entries() if entry.id == record.id)
        self.inner.write(record, memoryview(frame), tag)


def open_store(
    path: Path,
    *tiers: Tier,
    encrypt: bool = False,
    buffer_bytes: int = 8 * MIB,
    readers: int = loader.LOCAL_THREADS,
    **options,
) -> TieredStore:
    """A store over these tiers, to be used as a context. The keys lie in `path`; options are StoreConfig's. readers:
    threads of local tiers; with one, blocks are read strictly one after another.
    """
    keyring = Keyring(path / "keys" / "keyring.json", encrypt=encrypt)

    def unsealed(name: str) -> TenantKey:
        return replace(keyring.tenant(name), secret=None)

    pairs = [(tier, Frames(unsealed if tier.kind is TierKind.MEMORY else keyring.tenant)) for tier in tiers]
    with patch.object(loader, "LOCAL_THREADS", readers):
        return TieredStore(pairs, keyring, StoreConfig(**options), buffer_bytes=buffer_bytes)


def blocks(store: TieredStore, count: int, seed: int = 0, tenant: str = "", **options) -> list[BlockRecord]:
    """A chain of a tenant of this store."""
    return chain(count, seed, tenant=tenant, salt=store.tenant(tenant).salt, **options)


def save_all(store: TieredStore, records: Sequence[BlockRecord], version: int = 0) -> None:
    for record in records:
        assert store.save(record, kv_of(record, version))
    assert store.flush(10)


def load_all(store: TieredStore, records: Sequence[BlockRecord], **options) -> Ticket:
    """The finished ticket of a load; what it calls ready is what was saved."""
    ticket = store.load(wanted(records), **options)
    assert ticket.wait(20)
    for i, record in enumerate(records):
        if ticket.state(i) is LoadState.READY:
            assert ticket.wanted[i].out == kv_of(record), "not the block that was asked for"
    return ticket


def ready(ticket: Ticket) -> list[bool]:
    return [state is LoadState.READY for state in ticket.states()]
