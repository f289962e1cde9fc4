"""What the scheduler's side knows of one request: the names of its blocks, and what
became of them.
"""

from typing import Any

from kvire.plan.cost import Choice
from kvire.store.reuse.chain import Chain, Identity
from kvire.store.reuse.look import Found


def exclusion(request: Any) -> str | None:
    """Why nothing is kept or looked up for a vLLM request, in a word for counters; None if it can
    be.

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


class Tracked:
    """One request.

    chain: its full blocks, as far as tokens are known.
    done: leading blocks that need no save any more.
    found: what the store had when it was looked up last.
    choice: what was decided about that, or about asking remote tiers; None if there was nothing to
        decide.
    told: whether its lookup was counted.
    loading: a load of what was found was asked for.
    barred: no block from there on is loaded, because that failed; None if it did not.
    failures: how often it did.
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
        """Whether the store had block `index` whole when it was looked up."""
        return self.found is not None and index < len(self.found.rows) and self.found.whole(index)
