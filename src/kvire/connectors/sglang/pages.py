"""One host pool's pages as blocks of the store.

SGLang names a page by a hash over its tokens and all before them, the request's salt and adapter among them; token ids
it does not tell. So a page's block has, in place of token ids, eight words of a digest of that hash: a reader compares
them as it compares tokens elsewhere. What was before a page is in its hash, too, but not known to be the same page at
every call: each block stands alone, a first one.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvire.core.keys import BlockKey, Namespace, field
from kvire.core.record import CONTENT_BYTES, BlockId, BlockRecord
from kvire.store.ticket import LoadState, Wanted
from kvire.store.tiered import TieredStore

STAGED_BYTES = 64 << 20  # of pages that are read at once, before they go to the pool
READ_S = 20.0  # that one such load may take; remote tiers are given up sooner (load_timeout)
ROOM_S = 10.0  # that a write waits for room in the buffer of what is being written

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Moved:
    """ok: per page. seconds, size_bytes: of those that were."""

    ok: list[bool]
    seconds: float
    size_bytes: int


class PagePool:
    """A host pool's pages in a store. pool: SGLang's. namespace: without a salt, which is the tenant's at each call."""

    def __init__(self, pool: Any, namespace: Namespace, store: TieredStore, tenant: str) -> None:
        self._pool = pool
        self._namespace = namespace
        self._store = store
        self._tenant = tenant
        self._salted: Namespace | None = None
        blank = pool.get_dummy_flat_data_page()
        self._dtype: torch.dtype = blank.dtype
        self.page_bytes: int = blank.numel() * blank.element_size()
        self.page_tokens: int = pool.page_size

    def held(self, keys: Sequence[str], timeout_s: float) -> list[bool]:
        """Which pages are stored somewhere. Asks remote tiers for those that no local one has."""
        ids = [record.id for record in self._records(keys)]
        found = [name is not None for name in self._store.held(ids)]
        absent = [i for i, here in enumerate(found) if not here]
        if absent and self._store.remote_speed() is not None:
            for i, name in zip(absent, self._store.held_remotely([ids[i] for i in absent], timeout_s), strict=True):
                found[i] = name is not None
        return found

    def read(self, keys: Sequence[str], slots: Sequence[int]) -> Moved:
        """Load pages into the pool, each at its slot (token index of its first token). A page that is missing,
        damaged or late leaves its slot as it was.

        Reads go to memory of our own first: the pool's may be another request's once this call has ended, and a tier
        that answers late must not write there.
        """
        begin, moved = time.perf_counter(), 0
        ok = [False] * len(keys)
        records = self._records(keys)
        step = max(1, STAGED_BYTES // self.page_bytes)
        for start in range(0, len(keys), step):
            part = range(start, min(start + step, len(keys)))
            staged = np.empty((len(part), self.page_bytes), np.uint8)
            ticket = self._store.load([Wanted(records[i], staged[i - start].data) for i in part])
            stalled = not ticket.wait(READ_S)
            if stalled:
                ticket.cancel()
            for i, state in zip(part, ticket.states(), strict=True):
                if state is LoadState.READY:
                    page = torch.from_numpy(staged[i - start]).view(self._dtype)
                    self._pool.set_from_flat_data_page(slots[i], page)
                    ok[i] = True
                    moved += self.page_bytes
            if stalled:  # the next part would wait as long
                break
        self._store.touch([record.id for record, here in zip(records, ok, strict=True) if here])
        return Moved(ok, time.perf_counter() - begin, moved)

    def write(self, keys: Sequence[str], slots: Sequence[int]) -> Moved:
        """Store pages of the pool. False for a page that found no room in time."""
        pages = [self._pool.get_data_page(slot, flat=True) for slot in slots]
        return self.put(keys, pages)

    def put(self, keys: Sequence[str], pages: Sequence[Tensor]) -> Moved:
        """Store pages given as flat tensors."""
        begin, moved, ok = time.perf_counter(), 0, []
        records = self._records(keys)
        names = self._store.held([record.id for record in records])
        for record, page, name in zip(records, pages, names, strict=True):
            content = page.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            if content.nbytes != self.page_bytes:
                log.error("a page has %d bytes, not %d: not stored", content.nbytes, self.page_bytes)
                ok.append(False)
                continue
            here = name is not None
            if not here and self._save(record, content.data):
                here, moved = True, moved + self.page_bytes
            ok.append(here)
        self._store.touch([record.id for record in records])
        return Moved(ok, time.perf_counter() - begin, moved)

    def _save(self, record: BlockRecord, content: memoryview) -> bool:
        return self._store.save(record, content) or (self._store.flush(ROOM_S) and self._store.save(record, content))

    def _records(self, keys: Sequence[str]) -> list[BlockRecord]:
        salt = self._store.tenant(self._tenant).salt  # a forgotten tenant has a new one
        if self._salted is None or self._salted.salt != salt:
            self._salted = self._namespace.with_salt(salt)
            self._store.note_namespace(self._salted.root, self._salted.public_fields())
        root = self._salted.root
        return [self._record(root, salt, key.encode("utf-8")) for key in keys]

    def _record(self, root: BlockKey, salt: str, page: bytes) -> BlockRecord:
        words = np.frombuffer(sha256(field("sglang page", page)).digest(), "<i4")
        content = sha256(field("kvire", b"sglang content") + field("salt", salt.encode()) + field("page", page))
        return BlockRecord(
            id=BlockId(BlockKey(sha256(field("parent", root) + field("page", page)).digest()), 0),
            parent=root,
            root=root,
            index=0,
            token_ids=tuple(words.tolist()),
            kv_bytes=self.page_bytes,
            content=content.digest()[:CONTENT_BYTES],
            tenant=self._tenant,
        )
