"""One host pool's pages as blocks of the store, and the choice of pages to load.

SGLang names a page by a hash over its tokens and all before them, the request's salt and adapter
among them; it passes no token ids. So a page's block has, in place of token ids, eight words of a
digest of that hash: a reader compares them as it compares tokens elsewhere. The hash covers earlier
pages, too, but they are not known to be the same at every call: each block stands alone, as a first
one.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from time import monotonic, perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvire.core.keys import Namespace
from kvire.core.record import BlockId
from kvire.plan.cost import Choice, PrefillSpeed, Way
from kvire.store.reuse.chain import Pages
from kvire.store.reuse.look import Found, Part, Word
from kvire.store.reuse.planner import Reuse
from kvire.store.ticket import LoadState, Wanted
from kvire.store.tiered import TieredStore

STAGED_BYTES = 64 << 20  # of pages that are read at once, before they go to the pool
READ_S = 20.0  # longest such load; remote tiers are given up sooner (load_timeout)
ROOM_S = 10.0  # longest wait of a write for room in the write buffer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Moved:
    """Result of a transfer.

    ok: per page, whether it was moved.
    seconds, size_bytes: of the pages moved.
    """

    ok: list[bool]
    seconds: float
    size_bytes: int


class PagePool:
    """A host pool's pages in a store. Thread-safe.

    pool: SGLang's.
    namespace: without a salt, which is the tenant's at each call.
    prefill: how fast SGLang computes prompts.
    """

    def __init__(self, pool: Any, namespace: Namespace, store: TieredStore, tenant: str, prefill: PrefillSpeed) -> None:
        self._pool = pool
        self._store = store
        self._tenant = tenant
        blank = pool.get_dummy_flat_data_page()
        self._dtype: torch.dtype = blank.dtype
        self.page_bytes: int = blank.numel() * blank.element_size()
        self.page_tokens: int = pool.page_size
        self._lock = threading.Lock()
        self._reuse = Reuse(store, namespace, [Part(self.page_bytes)], self.page_tokens, prefill=prefill)

    def held(self, keys: Sequence[str], timeout_s: float) -> list[bool]:
        """Whether each page is stored. Asks remote tiers for pages missing in local ones."""
        pages = self._pages(keys)
        found = self._reuse.ask(pages, self._reuse.look(pages, 0), timeout_s)
        return [found.whole(index) for index in range(len(keys))]

    def worth_loading(self, keys: Sequence[str], timeout_s: float) -> int:
        """How many of the first stored pages to load: all, or none if computing is faster.

        SGLang acts on it at once. The first page's position is unknown, so computing is assumed to
        be as fast as at the beginning of a prompt.
        """
        pages = self._pages(keys)
        found = self._reuse.look(pages, 0)
        choice = self._worth(self._reuse.hope(found))
        if found.word is Word.OPEN:  # remote tiers are asked if a load of their possible blocks would be worth it
            asks = choice.way is not Way.COMPUTE
            found = self._reuse.ask(pages, found, timeout_s) if asks else self._reuse.heard(pages, found, {})
        if not found.is_empty:
            choice = self._worth(found)
        with self._lock:
            self._reuse.decided(choice)
        return 0 if choice.way is Way.COMPUTE else found.stop

    def read(self, keys: Sequence[str], slots: Sequence[int]) -> Moved:
        """Load pages into the pool, each at its slot (token index of its first token).

        A page that is missing, damaged, or slower than computing all pages, leaves its slot as it
        was.

        Reads first fill memory of our own: after this call the pool's slots may be another
        request's, and a late tier must not write there.
        """
        begin, moved = perf_counter(), 0
        prefill = self._reuse.prefill
        deadline = monotonic() + (prefill.seconds(0, len(keys) * self.page_tokens) if prefill.known else inf)
        ok = [False] * len(keys)
        pages = self._pages(keys)
        step = max(1, STAGED_BYTES // self.page_bytes)
        for start in range(0, len(keys), step):
            part = range(start, min(start + step, len(keys)))
            staged = np.empty((len(part), self.page_bytes), np.uint8)
            ticket = self._store.load(
                [Wanted(pages.record(i, 0, self.page_bytes), staged[i - start].data) for i in part]
            )
            stalled = not ticket.wait(min(READ_S, max(0.0, deadline - monotonic())))
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
        self._store.touch([BlockId(key, 0) for key, here in zip(pages.keys, ok, strict=True) if here])
        return Moved(ok, perf_counter() - begin, moved)

    def write(self, keys: Sequence[str], slots: Sequence[int]) -> Moved:
        """Store pages of the pool. False for a page without room in time."""
        return self.put(keys, [self._pool.get_data_page(slot, flat=True) for slot in slots])

    def put(self, keys: Sequence[str], tensors: Sequence[Tensor]) -> Moved:
        """Store pages given as flat tensors."""
        begin, moved, ok = perf_counter(), 0, []
        pages = self._pages(keys)
        found = self._reuse.look(pages, 0)
        for index, tensor in enumerate(tensors):
            content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            if content.nbytes != self.page_bytes:
                log.error("a page has %d bytes, not %d: not stored", content.nbytes, self.page_bytes)
                ok.append(False)
                continue
            here = found.whole(index)
            if not here and self._save(pages, index, content.data):
                here, moved = True, moved + self.page_bytes
            ok.append(here)
        self._store.touch([BlockId(key, 0) for key in pages.keys])
        return Moved(ok, perf_counter() - begin, moved)

    def _save(self, pages: Pages, index: int, content: memoryview) -> bool:
        if not pages.identity.kept:
            return False
        record = pages.record(index, 0, self.page_bytes)
        return self._store.save(record, content) or (self._store.flush(ROOM_S) and self._store.save(record, content))

    def _pages(self, keys: Sequence[str]) -> Pages:
        with self._lock:
            identity = self._reuse.name(self._tenant)  # a forgotten tenant has a new one
        return Pages(identity, [key.encode("utf-8") for key in keys])

    def _worth(self, found: Found) -> Choice:
        with self._lock:
            return self._reuse.worth(found, can_meet=False)
