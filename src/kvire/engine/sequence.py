"""One answer in the making: its tokens, its blocks, and how far it has come."""

from collections import Counter
from enum import Enum, auto
from typing import Any

from kvire.cache.grouped import GroupedLease
from kvire.core.keys import BlockKey, ContentChain, block_keys
from kvire.core.report import CacheReport, MissReason
from kvire.engine.detokenizer import Detokenizer
from kvire.engine.loading import Load
from kvire.engine.request import Request, TokenLogprobs
from kvire.store.explain import Answer, StoreMiss
from kvire.store.tier import TierKind


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
        self,
        request: Request,
        index: int,
        arrival: int,
        root: BlockKey,
        block_size: int,
        detokenizer: Detokenizer,
        salt: str = "",
    ) -> None:
        self.request = request
        self.params = request.params
        self.index = index
        self.order = (arrival, index)
        self.root = root
        self.salt = salt
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
        self.contents: list[bytes] = []  # as far as they were asked for
        self.content_chain = ContentChain(self.salt)
        self.looked_up: tuple[int, float, Any] | None = None  # device blocks, when, and what is stored beyond
        self.load: Load | None = None  # blocks on their way from the store
        self.passed_over = False  # something is stored, but computing it is faster
        self.loads = True  # whether it may load once more
        self.device_tokens = 0
        self.loaded_tokens: Counter[TierKind] = Counter()
        self.load_miss: tuple[MissReason, int] | None = None  # the first token computed that could have been loaded
        self.explanation: Answer | None = None  # of the store, from block `explained` on
        self.explained = 0
        self.load_wait_s = 0.0
        self.reused_spans: list[tuple[int, int]] = []  # of prompt tokens that were not computed
        self.saved_s: float | None = None
        self.recomputed_tokens = 0
        self.preemptions = 0
        self.miss = MissReason.NEVER_STORED
        self.miss_token: int | None = None
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
        """Whether logprobs of its prompt are still to be noted."""
        return self.params.prompt_logprobs is not None and self.num_answer == 0

    @property
    def report(self) -> CacheReport:
        """Where the prompt's KV came from."""
        loaded = {kind: self.loaded_tokens[kind] for kind in TierKind}
        miss, miss_token, detail = self._miss()
        return CacheReport(
            device_tokens=self.device_tokens,
            memory_tokens=loaded[TierKind.MEMORY],
            disk_tokens=loaded[TierKind.DISK],
            remote_tokens=loaded[TierKind.REMOTE],
            computed_tokens=self.num_prompt - self.device_tokens - sum(loaded.values()),
            miss=miss,
            miss_token=miss_token,
            miss_detail=detail,
            saved_s=self.saved_s,
            recomputed_tokens=self.recomputed_tokens,
            preemptions=self.preemptions,
        )

    def _miss(self) -> tuple[MissReason, int | None, str | None]:
        """The first token that was computed, why, and which fields of the namespace differ, if those are why."""
        if self.load_miss is not None:
            return (*self.load_miss, None)
        found = self.explanation.poll() if self.explanation is not None else None
        if found is None or self.miss_token is None:
            return self.miss, self.miss_token, None
        known_nothing = (MissReason.NEVER_STORED, MissReason.SHORTER_THAN_BLOCK)
        if found.shared_tokens and (token := self.explained * self.block_size + found.shared_tokens) > self.miss_token:
            return (MissReason.DIVERGED if self.miss in known_nothing else self.miss), token, None
        if found.reason is not None and found.reason is not StoreMiss.NEVER_STORED and self.miss in known_nothing:
            return MissReason(found.reason), self.miss_token, ", ".join(found.fields) or None
        return self.miss, self.miss_token, None

    def full_block_keys(self) -> list[BlockKey]:
        """Keys of all full blocks of the tokens there are now."""
        self.keys = block_keys(self.root, self.token_ids, self.block_size, self.keys)
        return self.keys

    def block_contents(self, stop: int) -> list[bytes]:
        """Content ids (keys.content_ids) of the first `stop` full blocks, at least."""
        for index in range(len(self.contents), stop):
            self.contents.append(self.content_chain.add(self.block_tokens(index)))
        return self.contents

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

    def share_prompt(self, source: "Sequence") -> None:
        """The prompt's KV, and where it came from, are those of another sample of the same request."""
        self.keys, self.contents = list(source.keys), list(source.contents)
        self.content_chain = source.content_chain.copy()
        self.num_computed, self.num_published = source.num_computed, source.num_published
        self.detached, self.most_computed = source.detached, source.most_computed
        self.device_tokens, self.loaded_tokens = source.device_tokens, source.loaded_tokens.copy()
        self.miss, self.miss_token, self.load_miss = source.miss, source.miss_token, source.load_miss
        self.explanation, self.explained, self.saved_s = source.explanation, source.explained, source.saved_s

    def jump(self, num_tokens: int) -> None:
        """The KV of the first `num_tokens` tokens is there, without having been computed now."""
        self.num_computed = num_tokens
        self.most_computed = max(self.most_computed, num_tokens)  # lost before use, it is computed again

    def advance(self, count: int) -> None:
        """`count` more tokens are computed; those that were computed before count as recomputed."""
        again = min(self.num_computed + count, self.most_computed) - self.num_computed
        self.recomputed_tokens += max(0, again)
        self.num_computed += count
        self.most_computed = max(self.most_computed, self.num_computed)
