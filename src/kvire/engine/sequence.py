"""One answer in the making: its tokens, its blocks, and how far it has come."""

from collections import Counter
from enum import Enum, auto

from kvire.cache.grouped import GroupedLease
from kvire.core.keys import BlockKey, block_keys
from kvire.core.report import CacheReport, MissReason
from kvire.engine.detokenizer import Detokenizer
from kvire.engine.request import Request, TokenLogprobs


class State(Enum):
    """Waiting sequences hold no blocks; running ones hold blocks for every token they have."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """Sample `index` of `request`. order: (arrival, index); smaller is older and is served first.

    token_ids: prompt and answer. num_computed: leading tokens whose KV is in `lease`. keys: of full
    blocks, as far as they are known. siblings: further samples that wait to share the prompt.
    """

    def __init__(
        self, request: Request, index: int, arrival: int, root: BlockKey, block_size: int, detokenizer: Detokenizer
    ) -> None:
        self.request = request
        self.params = request.params
        self.index = index
        self.order = (arrival, index)
        self.root = root
        self.block_size = block_size
        self.detokenizer = detokenizer
        self.stop_ids: dict[int, str | int] = {token_id: token_id for token_id in request.params.stop_token_ids}
        self.token_ids = list(request.token_ids)
        self.num_prompt = len(request.token_ids)
        self.state = State.WAITING
        self.lease: GroupedLease | None = None
        self.keys: list[BlockKey] = []
        self.num_computed = 0
        self.num_published = 0
        self.waits_for: BlockKey | None = None  # a block that another sequence is computing
        self.detached = False  # a block is not in the index, so none that follows may be
        self.most_computed = 0  # high-water mark: what is computed below it is computed again
        self.siblings: list[Sequence] = []
        self.answer_counts: Counter[int] = Counter()
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.device_tokens = 0
        self.recomputed_tokens = 0
        self.preemptions = 0
        self.miss = MissReason.NEVER_STORED
        self.miss_token: int | None = None
        self.admitted = False

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
        """Whether logprobs of its prompt are still to be noted."""
        return self.params.prompt_logprobs is not None and self.num_answer == 0

    @property
    def report(self) -> CacheReport:
        """Where the prompt's KV came from."""
        return CacheReport(
            device_tokens=self.device_tokens,
            computed_tokens=self.num_prompt - self.device_tokens,
            miss=self.miss,
            miss_token=self.miss_token,
            recomputed_tokens=self.recomputed_tokens,
            preemptions=self.preemptions,
        )

    def full_block_keys(self) -> list[BlockKey]:
        """Keys of all full blocks of the tokens there are now."""
        self.keys = block_keys(self.root, self.token_ids, self.block_size, self.keys)
        return self.keys

    def parent_of(self, index: int) -> BlockKey:
        """Key of the block before block `index`, or the root."""
        return self.keys[index - 1] if index else self.root

    def block_tokens(self, index: int) -> list[int]:
        """Token ids of block `index`."""
        return self.token_ids[index * self.block_size : (index + 1) * self.block_size]

    def append(self, token_id: int) -> None:
        """Add a token to the answer."""
        self.token_ids.append(token_id)
        self.answer_counts[token_id] += 1

    def advance(self, count: int) -> None:
        """`count` more tokens are computed; those that were computed before count as recomputed."""
        again = min(self.num_computed + count, self.most_computed) - self.num_computed
        self.recomputed_tokens += max(0, again)
        self.num_computed += count
        self.most_computed = max(self.most_computed, self.num_computed)
