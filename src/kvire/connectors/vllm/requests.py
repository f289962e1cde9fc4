"""What the scheduler's side knows of one request: the names of its blocks, and what became of them."""

from collections.abc import Sequence
from hashlib import sha256
from itertools import pairwise
from typing import Any

from kvire.connectors.vllm.messages import Block
from kvire.core.keys import BlockKey, block_keys, content_ids


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


def salted(tenant_salt: str, cache_salt: str | None, epoch: str) -> str:
    """The salt of a request's blocks: the tenant's, divided by its cache_salt, and anew after each reset."""
    salt = tenant_salt
    if cache_salt:
        salt += "/" + sha256(cache_salt.encode("utf-8")).hexdigest()
    return f"{salt}/{epoch}" if epoch else salt


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
        self._salt = salt
        self._block_size = block_size
        self._keys: list[BlockKey] = []

    def extend(self) -> None:
        """Name the blocks that became full since the last call."""
        size, start = self._block_size, len(self.blocks)
        stop = self.request.num_tokens // size
        if stop <= start:
            return
        ids: Sequence[int] = self.request.all_token_ids[: stop * size]
        self._keys = block_keys(self.root, ids, size, self._keys)
        contents = content_ids(self._salt, ids, range(size, stop * size + 1, size))
        parents = [self.root, *self._keys]
        for index, (parent, key) in enumerate(pairwise(parents)):
            if index >= start:
                tokens = tuple(ids[index * size : (index + 1) * size])
                self.blocks.append(Block(key, parent, self.root, index, tokens, contents[index]))
