"""One answer in progress: its tokens, its blocks, and its progress."""

from collections import Counter
from enum import Enum, auto

from kvire.cache.grouped import GroupedLease
from kvire.core.keys import BlockKey
from kvire.core.report import CacheReport
from kvire.engine.detokenizer import Detokenizer
from kvire.engine.request import Request, TokenLogprobs
from kvire.store.reuse.chain import Chain, Identity
from kvire.store.reuse.reused import Reused


class State(Enum):
    """Waiting sequences hold no blocks; running ones hold blocks for every token they have."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """Sample `index` of `request`.

    order: (arrival, index); smaller is older and is served first.
    token_ids: prompt and answer.
    chain: names of their full blocks.
    reuse: sources of the prompt's KV, and its load in progress.
    num_computed: leading tokens whose KV is in `lease`.
    siblings: further samples that wait to share the prompt.
    """

    def __init__(
        self,
        request: Request,
        index: int,
        arrival: int,
        identity: Identity,
        block_size: int,
        detokenizer: Detokenizer,
    ) -> None:
        self.request = request
        self.params = request.params
        self.index = index
        self.order = (arrival, index)
        self.detokenizer = detokenizer
        self.stop_ids: dict[int, str | int] = {token_id: token_id for token_id in request.params.stop_token_ids}
        self.token_ids = list(request.token_ids)
        self.num_prompt = len(request.token_ids)
        self.chain = Chain(identity, self.token_ids, block_size)
        self.reuse = Reused()
        self.state = State.WAITING
        self.lease: GroupedLease | None = None
        self.num_computed = 0
        self.num_published = 0
        self.waits_for: BlockKey | None = None  # a block that another sequence is computing
        self.detached = False  # a block is not in the index, so none that follows may be
        self.most_computed = 0  # high-water mark: tokens computed below it are recomputed
        self.siblings: list[Sequence] = []
        self.answer_counts: Counter[int] = Counter()
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.recomputed_tokens = 0
        self.preemptions = 0
        self.admitted_s: float | None = None  # of the monotonic clock: when it first got blocks

    @property
    def num_tokens(self) -> int:
        """Prompt and answer."""
        return len(self.token_ids)

    @property
    def num_answer(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_remaining(self) -> int:
        """Tokens to compute before the next one can be sampled; 1 while decoding."""
        return len(self.token_ids) - self.num_computed

    @property
    def scores_prompt(self) -> bool:
        """Whether logprobs of its prompt are still missing."""
        return self.params.prompt_logprobs is not None and self.num_answer == 0

    @property
    def report(self) -> CacheReport:
        """Sources of the prompt's KV."""
        return self.reuse.report(
            self.num_prompt, recomputed_tokens=self.recomputed_tokens, preemptions=self.preemptions
        )

    def append(self, token_id: int) -> None:
        """Add a token to the answer."""
        self.token_ids.append(token_id)
        self.answer_counts[token_id] += 1

    def share_prompt(self, source: "Sequence") -> None:
        """Take the prompt's KV, and its sources, from another sample of the same request."""
        self.chain, self.reuse = source.chain.fork(self.token_ids), source.reuse.share()
        self.num_computed, self.num_published = source.num_computed, source.num_published
        self.detached, self.most_computed = source.detached, source.most_computed

    def jump(self, num_tokens: int) -> None:
        """The KV of the first `num_tokens` tokens is present, without being computed now."""
        self.num_computed = num_tokens
        self.most_computed = max(self.most_computed, num_tokens)  # lost before use, it is computed again

    def advance(self, count: int) -> None:
        """`count` more tokens are computed; those below the high-water mark count as recomputed."""
        again = min(self.num_computed + count, self.most_computed) - self.num_computed
        self.recomputed_tokens += max(0, again)
        self.num_computed += count
        self.most_computed = max(self.most_computed, self.num_computed)
