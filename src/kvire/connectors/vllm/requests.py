"""The scheduler's side of one request: the names of its blocks, and their state."""

from typing import Any

from kvire.plan.cost import Choice
from kvire.store.reuse.chain import Chain, Identity
from kvire.store.reuse.look import Found


def exclusion(request: Any) -> str | None:
    """A counter's label for a vLLM request that the store excludes, or None.

    A block's name is made of token ids; KV that depends on more has no name.
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


class Tracked:
    """One request.

    chain: its full blocks, as far as tokens are known.
    done: leading blocks that need no save any more.
    found: result of the last lookup.
    choice: decision about that, or about asking remote tiers; None without a decision.
    told: whether its lookup was counted.
    loading: whether a load was asked for.
    barred: first block that is not loaded, since a load of it failed; None without failures.
    failures: number of failed loads.
    """

    def __init__(self, request: Any, identity: Identity, block_size: int) -> None:
        self.request = request
        self.chain = Chain(identity, request.all_token_ids, block_size)
        self.done = 0
        self.found: Found | None = None
        self.choice: Choice | None = None
        self.told = False
        self.loading = False
        self.barred: int | None = None
        self.failures = 0

    def is_stored(self, index: int) -> bool:
        """Whether the store had all of block `index` at the last lookup."""
        return self.found is not None and index < len(self.found.rows) and self.found.whole(index)
