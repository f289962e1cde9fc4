"""KvireStorage: the interface that SGLang calls. It loads the class by name; see docs/sglang.md.

No call raises for a missing page, nor returns None: either would end SGLang's calling thread.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult
from torch import Tensor

from kvire.connectors.sglang.facts import SglangServer
from kvire.connectors.sglang.options import Options
from kvire.connectors.sglang.pages import Moved, PagePool
from kvire.connectors.sglang.prefill import Misses, QuickPrefill
from kvire.core.errors import KvireError
from kvire.plan.cost import PrefillSpeed
from kvire.store.open import open_store

CLOSE_S = 10.0  # for pages still being written at close
MOST_SAMPLES = 1000  # of calls, kept until SGLang asks for them
NOT_GENERIC = 'KvireStorage is called through interface v1: add "interface_v1": 1 to its extra config'

log = logging.getLogger(__name__)


class KvireStorage(HiCacheStorage):
    """The store as a third level below SGLang's device and host pools.

    One per scheduler process; thread-safe.
    """

    def __init__(self, storage_config: Any, _kwargs: Any = None) -> None:
        """Open the store that SGLang's options name.

        storage_config: SGLang's HiCacheStorageConfig.

        Raises KvireError, which fails the attachment.
        """
        self._options = Options.of(storage_config.extra_config or {})
        self._server = SglangServer.of(storage_config)
        self._store = open_store(self._options.config)
        self._pools: dict[str, PagePool] = {}
        said = self._options.prefill_tokens_per_s
        self._prefill = QuickPrefill() if said is None else PrefillSpeed(1 / said)
        self._misses: Misses | None = None  # if that is to be measured
        self._lock = threading.Lock()
        self._read: list[tuple[int, float]] = []  # pages, GB/s
        self._written: list[tuple[int, float]] = []

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool of KV itself."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(mem_pool_host, str(PoolName.KV))
        if isinstance(self._prefill, QuickPrefill):
            self._misses = Misses(self._prefill, mem_pool_host.page_size)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Another pool, whose pages accompany the KV pages."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(host_pool, str(host_pool_name))

    def exists(self, key: str) -> bool:
        """Whether a page of KV is stored."""
        return self._held(PoolName.KV, [key]) == [True]

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:  # noqa: ARG002 - SGLang's signature
        """How many pages of KV to load: the leading stored ones, or none if computing is faster."""
        try:
            count = self._pools[str(PoolName.KV)].worth_loading(keys, self._options.config.load_timeout_s)
        except Exception:  # whatever it is, SGLang computes; an exception would cost it a thread
            log.exception("asking for pages failed")
            count = 0
        if self._misses is not None and count < len(keys):
            self._misses.told(keys[count])
        return count

    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Sequence[Any] | None = None, extra_info: Any = None
    ) -> Any:
        """The longest prefix that can be restored: its KV, and the needed pages of every other
        pool.
        """
        kv_pages = self.batch_exists(keys, extra_info)
        pools: dict[Any, int] = {PoolName.KV: kv_pages} if kv_pages else {}
        restorable = range(1, kv_pages + 1)
        legal = set(restorable)
        for transfer in pool_transfers or ():
            held = self._held(transfer.name, keys[:kv_pages])
            ends = _restorable(held, transfer)
            if ends:
                pools[transfer.name] = max(ends)
            legal &= ends
        ends_of_all = [pages for pages in restorable if pages in legal]
        return PoolTransferResult(ends_of_all[-1] if ends_of_all else 0, pools, ends_of_all)

    def batch_get_v1(self, keys: Sequence[str], host_indices: Tensor, extra_info: Any = None) -> list[bool]:  # noqa: ARG002
        """Load pages of KV into the host pool.

        host_indices: of every token, page by page.
        """
        return self._move(PoolName.KV, keys, host_indices, PagePool.read, self._read)

    def batch_set_v1(self, keys: Sequence[str], host_indices: Tensor, extra_info: Any = None) -> list[bool]:  # noqa: ARG002
        """Store pages of KV from the host pool."""
        self._note_written(keys)
        return self._move(PoolName.KV, keys, host_indices, PagePool.write, self._written)

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:  # noqa: ARG002
        """As batch_get_v1, for several pools."""
        return {
            transfer.name: self._move(
                transfer.name, transfer.keys or (), transfer.host_indices, PagePool.read, self._read
            )
            for transfer in transfers
        }

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:  # noqa: ARG002
        """As batch_set_v1, for several pools."""
        for transfer in transfers:
            if transfer.name == PoolName.KV:
                self._note_written(transfer.keys or ())
        return {
            transfer.name: self._move(
                transfer.name, transfer.keys or (), transfer.host_indices, PagePool.write, self._written
            )
            for transfer in transfers
        }

    def clear(self) -> bool:
        """Forget the tenant of SGLang's pages and its keys.

        This affects every server that uses this store as this tenant.
        """
        try:
            self._store.forget(self._options.tenant)
        except KvireError:
            log.exception("the storage was not cleared")
            return False
        return True

    def get_stats(self) -> Any:
        """Pages and GB/s of every call since the last time, as SGLang's StorageMetrics."""
        metrics = import_module("sglang.srt.observability.metrics_collector").StorageMetrics()
        with self._lock:
            for pages, gb_per_s in self._read:
                metrics.prefetch_pgs.append(pages)
                metrics.prefetch_bandwidth.append(gb_per_s)
            for pages, gb_per_s in self._written:
                metrics.backup_pgs.append(pages)
                metrics.backup_bandwidth.append(gb_per_s)
            self._read.clear()
            self._written.clear()
        return metrics

    def close(self) -> None:
        """Finish pending writes, and end all threads."""
        self._store.flush(CLOSE_S)
        self._store.close()

    # SGLang's older, generic path: with options.py's interface_v1 they are never called.

    def get(self, *_: Any, **__: Any) -> Any:
        """Refused."""
        raise NotImplementedError(NOT_GENERIC)

    batch_get = set = batch_set = get

    def _register(self, pool: Any, name: str) -> None:
        self._pools[name] = PagePool(
            pool, self._server.namespace(pool, name), self._store, self._options.tenant, self._prefill
        )

    def _note_written(self, keys: Sequence[str]) -> None:
        if self._misses is not None:
            self._misses.written(keys)

    def _held(self, name: Any, keys: Sequence[str]) -> list[bool]:
        try:
            return self._pools[str(name)].held(keys, self._options.config.load_timeout_s)
        except Exception:  # whatever it is, SGLang computes; an exception would cost it a thread
            log.exception("asking for pages of %s failed", name)
            return [False] * len(keys)

    def _move(
        self,
        name: Any,
        keys: Sequence[str],
        host_indices: Tensor | None,
        call: Callable[[PagePool, Sequence[str], Sequence[int]], Moved],
        moved: list[tuple[int, float]],
    ) -> list[bool]:
        """Whether each page was moved."""
        try:
            pool = self._pools[str(name)]
            slots = [] if host_indices is None else host_indices.tolist()[:: pool.page_tokens]
            if len(slots) != len(keys):
                raise ValueError(f"{len(keys)} pages and room for {len(slots)}")
            done = call(pool, keys, slots)
        except Exception:  # as above
            log.exception("moving %d pages of %s failed", len(keys), name)
            return [False] * len(keys)
        if done.size_bytes:
            with self._lock:
                moved.append((sum(done.ok), done.size_bytes / done.seconds / 1e9))
                del moved[:-MOST_SAMPLES]
        return done.ok


def _leading(found: Sequence[bool]) -> int:
    """How many are True before the first that is not."""
    return next((i for i, here in enumerate(found) if not here), len(found))


def _restorable(held: Sequence[bool], transfer: Any) -> set[int]:
    """Lengths of prefixes for which a pool has all pages that its policy needs."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return set(range(1, _leading(held) + 1))
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        trailing = max(1, len(transfer.keys or ()))
        return {stop for stop in range(1, len(held) + 1) if all(held[max(0, stop - trailing) : stop])}
    log.warning("pool %s asks for %s, which is not supported: nothing is loaded", transfer.name, transfer.hit_policy)
    return set()
