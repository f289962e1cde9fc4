"""What the scheduler's side knows of one request: the names of its blocks, and what became of them."""

import logging
from hashlib import sha256
from secrets import token_hex
from typing import Any

from kvire.connectors.vllm.messages import Block
from kvire.core.errors import StoreError
from kvire.core.keys import BlockKey, ContentChain, Namespace, block_key
from kvire.store.tiered import TieredStore

log = logging.getLogger(__name__)


def exclusion(request: Any) -> str | None:
    """Why nothing is kept or looked up for a vLLM request, in a word for counters; None if it can be.

    A block's name is made of token ids. KV that depends on more than those has no name of its own.
    """
    if request.mm_features:
        return "multimodal"
    if request.prompt_embeds is not None or getattr(request, "prompt_is_token_ids", None) is not None:
        return "prompt_embeds"
    if request.lora_request is not None:
        return "lora"
    if getattr(request, "resumable", False):  # its tokens are replaced as it goes
        return "streaming_input"
    return None


class Roots:
    """Where the key chains of one vLLM's requests begin: the tenant's salt, divided by cache_salt, anew after a reset.

    namespace: without salt.
    """

    def __init__(self, store: TieredStore, namespace: Namespace) -> None:
        self._store = store
        self._namespace = namespace
        self._known: dict[str, tuple[str, BlockKey]] = {}  # cache_salt -> salt, root
        self._epoch = ""

    def reset(self) -> None:
        """From now on nothing that was stored before is found: the model may have other weights."""
        self._epoch = token_hex(16)
        self._known.clear()

    def of(self, cache_salt: str | None) -> tuple[str, BlockKey] | None:
        """Salt and root; None if there are no keys: then nothing can be kept, but everything can be served."""
        try:
            salt = self._store.tenant("").salt
        except (StoreError, OSError) as error:
            log.warning("Kvire keeps nothing: %s", error)
            return None
        if cache_salt:
            salt += "/" + sha256(cache_salt.encode("utf-8")).hexdigest()
        if self._epoch:
            salt += "/" + self._epoch
        known = self._known.get(cache_salt or "")
        if known is None or known[0] != salt:
            namespace = self._namespace.with_salt(salt)
            self._store.note_namespace(namespace.root, namespace.public_fields())
            known = self._known[cache_salt or ""] = (salt, namespace.root)
        return known


class Tracked:
    """One request. blocks: its full blocks, as far as tokens are known.

    done: leading blocks that need no save any more. stored: whether each block was held by the store when it was looked
    up. match: first block, stop, and tokens by tier of what can be loaded. loading: it was asked for. barred: no block
    from there on is looked up, because loading it failed.
    """

    def __init__(self, request: Any, salt: str, root: BlockKey, block_size: int) -> None:
        self.request = request
        self.root = root
        self.blocks: list[Block] = []
        self.done = 0
        self.barred: int | None = None
        self.stored: list[bool] = []
        self.failures = 0
        self.match: tuple[int, int, dict[str, int]] | None = None
        self.loading = False
        self.slower_tokens = 0  # stored, but computed because that is faster
        self.told = False  # whether its lookup was counted
        self._block_size = block_size
        self._contents = ContentChain(salt)

    def extend(self) -> None:
        """Name the blocks that became full since the last call."""
        size, start = self._block_size, len(self.blocks)
        stop = self.request.num_tokens // size
        if stop <= start:
            return
        ids = self.request.all_token_ids[start * size : stop * size]
        parent = self.blocks[-1].key if self.blocks else self.root
        for index in range(start, stop):
            tokens = tuple(ids[(index - start) * size : (index - start + 1) * size])
            key = block_key(parent, tokens)
            self.blocks.append(Block(key, parent, self.root, index, tokens, self._contents.add(tokens)))
            parent = key
