"""A model whose generate() loads a prompt's longest stored prefix and stores new KV.

with StoredCache.open(model, store="kv") as stored:
    out = stored.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=64)
    print(stored.report)
"""

import logging
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from kvire.connectors.transformers import arguments
from kvire.connectors.transformers.blocks import CACHE, CacheLayout
from kvire.connectors.transformers.computed import Computed
from kvire.connectors.transformers.identity import ModelIdentity
from kvire.connectors.transformers.loading import load_prefix
from kvire.core.config import StoreConfig
from kvire.core.errors import ConfigError, UnsupportedModelError
from kvire.core.keys import BlockKey
from kvire.core.report import CacheReport, MissReason
from kvire.store.open import open_store
from kvire.store.reuse.chain import Chain
from kvire.store.reuse.look import parts_of_groups
from kvire.store.reuse.planner import Memory, Reuse
from kvire.store.tiered import TieredStore

CLOSE_S = 10.0  # for blocks still being written at close
SAVE_S = 10.0  # longest wait of a call for room in the write buffer

log = logging.getLogger(__name__)


class StoredCache:
    """A model and an open store.

    Made by open(); use as a context, or close() it. One call at a time.

    report: where the last prompt's KV came from; None before the first call.
    """

    def __init__(
        self, model: Any, reuse: Reuse, identity: ModelIdentity, layout: CacheLayout,
        *, tenant: str, cache_salt: str, owns_store: bool,
    ) -> None:  # fmt: skip
        self.model = model
        self.store = reuse.store
        self.report: CacheReport | None = None
        self._identity = identity
        self._layout = layout
        self._tenant = tenant
        self._cache_salt = cache_salt
        self._owns_store = owns_store
        self._reuse = reuse
        self._queued: frozenset[BlockKey] = frozenset()  # blocks of the last call

    @classmethod
    def open(
        cls, model: Any, store: str | Path | StoreConfig | TieredStore,
        *, block_size: int = 16, tenant: str = "", cache_salt: str = "",
    ) -> Self:  # fmt: skip
        """Open a cache for one model, over a store.

        model: a transformers causal language model, in memory.
        store: a folder, more of StoreConfig, or an open store, which stays open.
        block_size: tokens; reuse is in multiples of it.
        tenant: owner of the prompts; no other tenant finds their blocks.
        cache_salt: divides a tenant's blocks further; only the same salt finds them.

        Computes one token, and hashes the weights. Raises UnsupportedModelError, ConfigError or
        StoreError.
        """
        if not isinstance(block_size, int) or isinstance(block_size, bool) or not 0 < block_size <= 1024:
            raise ConfigError(f"block_size is in tokens and at most 1024, got {block_size!r}")
        identity = ModelIdentity(model)
        layout = CacheLayout.probe(model, block_size)
        namespace = identity.namespace(layout)  # hashed now, and not in the first call
        if isinstance(store, (str, Path)):
            store = StoreConfig(path=Path(store).expanduser())
        opened = store if isinstance(store, TieredStore) else open_store(store, layout.spec.dtype)
        reuse = Reuse(opened, namespace, parts_of_groups(layout.spec), block_size)
        return cls(model, reuse, identity, layout, tenant=tenant, cache_salt=cache_salt, owns_store=opened is not store)

    def generate(self, inputs: Tensor | None = None, **kwargs: Any) -> Any:
        """The same result as model.generate(), sooner.

        One prompt a call; input_ids: [1, tokens].

        Raises RequestError for unsupported arguments (docs/transformers.md), and
        UnsupportedModelError for a model that was changed into an unsupported one.
        """
        prompt = arguments.checked_call(self.model, inputs, kwargs)
        limit = self._identity.limit_tokens
        if limit is not None and len(prompt.token_ids) > limit:
            out = self.model.generate(**prompt.arguments)
            detail = f"positions change beyond {limit} tokens"
            self.report = CacheReport(0, len(prompt.token_ids), MissReason.OFF, miss_detail=detail)
            return out
        chain = self._chain(prompt.token_ids)
        used = self._layout.empty_cache(self.model.config)
        loaded = load_prefix(self._reuse, chain, self._queued)
        if loaded.stop:
            self._layout.fill(used, loaded.slabs, loaded.stop, self.model.device)
        with Computed(self.model, used, prompt.token_ids, loaded.stop * chain.block_size) as computed:
            out = self.model.generate(**prompt.arguments, **{CACHE: used})
        if (measured := computed.prefill()) is not None:
            self._reuse.prefill.measured(*measured)
        if chain.identity.kept:
            self._save(used, chain.fork(computed.token_ids(limit)), loaded.stop)
        self.report = loaded.report()
        return out

    def close(self) -> None:
        """Finish pending writes, and close the store if it was opened here."""
        if self._owns_store:
            self.store.flush(CLOSE_S)
            self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _chain(self, token_ids: list[int]) -> Chain:
        """Names of a prompt's blocks; new ones if the model was changed since the last call."""
        reuse, namespace = self._reuse, self._identity.namespace(self._layout)
        if namespace != reuse.names.namespace:
            reuse = self._reuse = Reuse(self.store, namespace, reuse.parts, reuse.block_size, prefill=reuse.prefill)
        chain = Chain(reuse.name(self._tenant, self._cache_salt), token_ids, reuse.block_size)
        chain.extend()
        return chain

    def _save(self, used: Any, chain: Chain, start: int) -> None:
        """Hand over the blocks from `start` on, and mark all as used."""
        stop = len(chain.extend())
        try:
            slabs = self._layout.take(used, start, stop) if stop > start else []
        except UnsupportedModelError as error:
            log.warning("nothing is stored: %s", error)
            return

        def memory(index: int, part: int) -> memoryview:
            return slabs[part][index - start].numpy().data

        for index in range(start, stop):
            if not self._put(chain, index, memory):  # later ones are of no use without this one
                stop = index
                break
        self._queued = frozenset(chain.keys[start:stop])
        self._reuse.finished(chain, stop, keep=True)

    def _put(self, chain: Chain, index: int, memory: Memory) -> bool:
        """Save a block; while the buffer is full, wait for room."""
        save = partial(self._reuse.save, chain, [index], memory)
        return save() or (self._reuse.flush(SAVE_S) and save())
