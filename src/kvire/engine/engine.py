"""The engine: one visible loop over everything else.

    poll      take new requests and cancellations
    admit     match prefixes, lease blocks             (scheduler)
    schedule  choose this step's chunks                (scheduler)
    run       one forward pass over the packed batch   (model)
    commit    sample, publish full blocks, hand out text

Engine.step() alone drives it, on one thread; nothing here takes a lock or calls back.
"""

import logging
import secrets
from collections import Counter, deque
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from kvire.cache.batch import Batch
from kvire.cache.grouped import GroupedPool
from kvire.cache.paged import PagedKV
from kvire.core.config import EngineConfig
from kvire.core.errors import QueueFullError, RequestError
from kvire.core.keys import BlockKey, Namespace
from kvire.core.tier_kind import LoadedTokens
from kvire.engine import sampler
from kvire.engine.detokenizer import Detokenizer
from kvire.engine.packing import build_batch, logits_rows
from kvire.engine.prefetch import Prefetcher
from kvire.engine.request import Abort, Clear, Failure, Output, Request, TokenLogprobs
from kvire.engine.scheduler import Chunk, Scheduler
from kvire.engine.sequence import Sequence, State
from kvire.plan.cost import PrefillSpeed
from kvire.store.reuse.look import parts_of_groups
from kvire.store.reuse.no_reuse import AnyReuse, NoReuse
from kvire.store.reuse.planner import Reuse
from kvire.store.tiered import TieredStore

log = logging.getLogger(__name__)

# Before the first measurement: a guess for the size of SmolLM2 on two cores, which the first load
# must beat.
PREFILL_TOKEN_S = 0.002

NOT_FINITE = (
    "the model gave numbers that are not finite; if kv_dtype is float16, its range may be too small for this model: "
    "try bfloat16 or float32"
)


class Model(Protocol):
    """Interface of a model: write the batch's KV, return logits of its logits_rows."""

    def forward(self, batch: Batch) -> Tensor:
        """float32 [R, vocab]."""


@dataclass(slots=True)
class EngineStats(LoadedTokens):
    """Counters since the engine was made; they only grow. Times in seconds."""

    requests: int = 0
    prompt_tokens: int = 0
    device_tokens: int = 0
    loaded_tokens: Counter[str] = field(default_factory=Counter)  # by the kind of tier
    computed_tokens: int = 0
    saved_s: float = 0.0  # time that computing the reused tokens would have taken, less the time waiting for them
    generated_tokens: int = 0
    recomputed_tokens: int = 0
    steps: int = 0
    forward_tokens: int = 0  # everything that ran through the model
    forward_s: float = 0.0
    misses: dict[str, int] = field(default_factory=dict)


class Engine:
    """Runs requests on a model over a paged cache.

    namespace: everything besides tokens that decides KV.
    max_model_len: longest prompt + answer.
    eos_token_ids: end an answer unless it ignores them.
    tokenizer: None for ids only.
    store: open, and closed with the engine; None for the pool alone.
    """

    def __init__(
        self,
        model: Model,
        paged: PagedKV,
        config: EngineConfig,
        namespace: Namespace,
        *,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: frozenset[int] = frozenset(),
        tokenizer: Any = None,
        store: TieredStore | None = None,
    ) -> None:
        self.model = model
        self.paged = paged
        self.config = config
        self.namespace = namespace
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.tokenizer = tokenizer
        self.pool = GroupedPool(paged.spec.groups, paged.num_blocks, paged.spec.block_size)
        self.reuse = _reuse(store, config, namespace, paged)
        prefetcher = Prefetcher(self.reuse, self.pool, paged.memory)
        self.scheduler = Scheduler(self.pool, config, max_model_len, prefetcher, paged.copy_block)
        self.stats = EngineStats()
        self.inbox: SimpleQueue[Request | Abort | Clear] = SimpleQueue()
        self._sequences: dict[str, list[Sequence]] = {}
        self._seeds: dict[str, int] = {}
        self._arrivals = 0
        self._outputs: deque[Output | Failure] = deque()
        self._special_ids = _special_ids(tokenizer)

    @property
    def root(self) -> BlockKey:
        """Parent of every first block, for requests without tenant and cache_salt."""
        return self.reuse.name().root

    def close(self) -> None:
        """Close the store, then free the pool; step() must not be called any more."""
        self.reuse.close()
        self.paged.close()

    def validate(self, request: Request) -> None:
        """Raise RequestError if the request can never be served. Reads only immutable state."""
        length = len(request.token_ids)
        if length == 0:
            raise RequestError("the prompt is empty: it must hold at least one token")
        if not all(0 <= token_id < self.vocab_size for token_id in request.token_ids):
            raise RequestError(f"token ids must lie between 0 and {self.vocab_size - 1}")
        if any(not 0 <= token_id < self.vocab_size for token_id in request.params.logit_bias):
            raise RequestError(f"logit_bias names a token outside 0 to {self.vocab_size - 1}")
        limit = self.max_model_len - (1 if request.params.max_tokens else 0)
        if length > limit:
            raise RequestError(
                f"the prompt has {length} tokens, but this engine holds {self.max_model_len} tokens of prompt and "
                "answer together; shorten the prompt, or raise max_model_len or kv_memory if the model allows it"
            )

    def submit(self, request: Request) -> None:
        """Queue a request for the next step. Raises RequestError or QueueFullError."""
        self.validate(request)
        if len(self.scheduler.waiting) + self.inbox.qsize() >= self.config.max_queue:
            raise QueueFullError(f"{self.config.max_queue} requests are waiting already; try again in a moment")
        self.inbox.put(request)

    def abort(self, request_id: str) -> None:
        """Cancel a request; its blocks are free before the next step. Unknown ids are ignored."""
        self.inbox.put(Abort(request_id))

    def clear(self) -> None:
        """Forget every remembered prefix before the next step; running answers go on."""
        self.inbox.put(Clear())

    @property
    def has_work(self) -> bool:
        """Whether step() has anything to do."""
        return self.scheduler.has_work or not self.inbox.empty()

    def step(self) -> list[Output | Failure]:
        """Do one step of the loop.

        Returns the new part of each answer, and the requests that failed.
        """
        self.poll()
        self.scheduler.admit()
        chunks = self.scheduler.schedule()
        if chunks:
            logits = self.run(chunks)
            self.commit(chunks, logits)
        else:
            self.scheduler.nap()
        outputs, self._outputs = list(self._outputs), deque()
        return outputs

    def poll(self) -> None:
        """Take requests and cancellations that arrived since the last step."""
        self.scheduler.poll()
        while True:
            try:
                message = self.inbox.get_nowait()
            except Empty:
                return
            if isinstance(message, Abort):
                self._abort(message.request_id)
            elif isinstance(message, Clear):
                self.pool.clear()
            else:
                self._accept(message)

    def run(self, chunks: list[Chunk]) -> Tensor:
        """One forward pass: logits [R, vocab], a row per token whose successor is wanted."""
        started = monotonic()
        logits = self.model.forward(build_batch(chunks, self.pool.block_size))
        seconds, tokens = monotonic() - started, sum(chunk.count for chunk in chunks)
        self.stats.forward_s += seconds
        self.stats.steps += 1
        self.stats.forward_tokens += tokens
        longest = max(chunks, key=lambda chunk: chunk.count)
        self.reuse.prefill.step(longest.seq.num_computed, longest.count, tokens, seconds)
        return logits

    def commit(self, chunks: list[Chunk], logits: Tensor) -> None:
        """Publish computed blocks, sample due tokens, hand out new text.

        A failure in one request ends that request only.
        """
        row = 0
        for chunk in chunks:
            rows = logits[row : row + logits_rows(chunk)]
            row += len(rows)
            if chunk.seq.state is not State.RUNNING:
                continue  # it belongs to a request that just failed
            try:
                self._commit(chunk, rows)
            except AssertionError:
                raise  # one of our own promises is broken: better no answer from here on than a wrong one
            except Exception as error:
                log.exception("request %s failed", chunk.seq.request.request_id)
                self._fail(chunk.seq, f"{type(error).__name__}: {error}")

    def _commit(self, chunk: Chunk, rows: Tensor) -> None:
        seq, completes = chunk.seq, chunk.completes
        if not np.isfinite(rows.numpy()).all():  # torch wakes its threads for it, which takes 40 times as long
            self._fail(seq, NOT_FINITE)
            return
        if seq.scores_prompt:
            self._note_prompt_logprobs(chunk, rows)
        recomputed = seq.recomputed_tokens
        self.scheduler.advance(chunk)
        self.stats.recomputed_tokens += seq.recomputed_tokens - recomputed
        if completes:
            self._start_siblings(seq, rows[-1])
            self._next_token(seq, rows[-1])
            if self.config.kv_cache == "off" and seq.state is State.RUNNING:
                self.scheduler.drop(seq)

    def _accept(self, request: Request) -> None:
        arrival, self._arrivals = self._arrivals, self._arrivals + 1
        identity = self.reuse.name(request.tenant, request.cache_salt)
        first, *others = [
            Sequence(
                request,
                i,
                arrival,
                identity,
                self.pool.block_size,
                Detokenizer(self.tokenizer, request.params.stop_strings),
            )
            for i in range(request.params.n)
        ]
        first.siblings = others
        for seq in (first, *others):
            for stop in request.params.stop_strings:
                if (special := self._special_ids.get(stop)) is not None:  # such tokens have no text to search
                    seq.stop_ids[special] = stop
        self._sequences[request.request_id] = [first, *others]
        seed = request.params.seed
        self._seeds[request.request_id] = secrets.randbits(64) if seed is None else seed
        self.scheduler.add(first)

    def _fail(self, seq: Sequence, message: str) -> None:
        """End a failed request, and forget its computed blocks: no other request may reuse them."""
        request_id = seq.request.request_id
        keys = [key for sample in self._sequences[request_id] for key in sample.chain.keys]
        for key in keys:
            self.pool.forget(key)
        self._remove(request_id, remember=False)
        self.reuse.discard(keys)
        self._outputs.append(Failure(request_id, message))

    def _remove(self, request_id: str, *, remember: bool = True) -> list[Sequence]:
        """Free everything that a request holds; returns its unfinished sequences."""
        unfinished = [seq for seq in self._sequences.pop(request_id, []) if seq.state is not State.FINISHED]
        for seq in unfinished:
            self.scheduler.remove(seq, remember=remember)
        self._seeds.pop(request_id, None)
        return unfinished

    def _abort(self, request_id: str) -> None:
        self._outputs += [Output(request_id, seq.index, (), "", "abort") for seq in self._remove(request_id)]

    def _start_siblings(self, seq: Sequence, logits: Tensor) -> None:
        """The prompt is computed: let the other samples share it, as far as there are seats."""
        siblings, seq.siblings = seq.siblings, []
        for sibling in siblings:
            sibling.prompt_logprobs = seq.prompt_logprobs
            if self.config.kv_cache == "paged" and len(self.scheduler.running) < self.config.max_num_seqs:
                self.scheduler.fork(seq, sibling)
                self._next_token(sibling, logits)
            else:
                sibling.most_computed = sibling.num_prompt  # no seat to share from: the prompt is computed again
                self.scheduler.add(sibling)

    def _next_token(self, seq: Sequence, logits: Tensor) -> None:
        """Sample a token from `logits` [vocab], append it and check whether the answer ends."""
        if seq.index == 0 and seq.num_answer == 0:
            self._count_request(seq)
        if seq.params.max_tokens == 0:
            self._emit(seq, None, None, "length")
            return
        seed = self._seeds[seq.request.request_id]
        prompt = seq.token_ids[: seq.num_prompt]
        token = sampler.sample(logits, seq.params, prompt, seq.answer_counts, seed, seq.index, seq.num_tokens)
        logprobs = None
        if seq.params.logprobs is not None:
            logprobs = sampler.token_logprobs(logits, token, seq.params.logprobs)
        seq.append(token)
        self.stats.generated_tokens += 1
        self._emit(seq, token, logprobs, self._finish_reason(seq, token))

    def _finish_reason(self, seq: Sequence, token: int) -> str | None:
        if token in seq.stop_ids:
            seq.stop_reason = seq.stop_ids[token]
            return "stop"
        if token in self.eos_token_ids and not seq.params.ignore_eos:
            return "stop"
        if seq.num_answer >= seq.params.max_tokens or seq.num_tokens >= self.max_model_len:
            return "length"
        return None

    def _emit(self, seq: Sequence, token: int | None, logprobs: TokenLogprobs | None, finish: str | None) -> None:
        """Hand out one token and the text that it completes."""
        text = "" if token is None else seq.detokenizer.add(token)
        if finish is not None:
            text += seq.detokenizer.finish()
        if seq.detokenizer.stopped_by is not None:
            seq.stop_reason, finish = seq.detokenizer.stopped_by, "stop"
        first = seq.num_answer <= 1
        busy_s = monotonic() - seq.admitted_s if first and seq.admitted_s is not None else 0.0
        load_s = min(seq.reuse.waited_s, busy_s)
        if finish is not None:
            self._finish(seq, finish)
        self._outputs.append(
            Output(
                seq.request.request_id,
                seq.index,
                () if token is None else (token,),
                text,
                finish_reason=finish,
                stop_reason=seq.stop_reason,
                logprobs=None if logprobs is None else (logprobs,),
                cache=seq.report if first or finish is not None else None,
                prompt_logprobs=tuple(seq.prompt_logprobs) if first and seq.prompt_logprobs else None,
                load_s=load_s,
                prefill_s=busy_s - load_s,
            )
        )

    def _finish(self, seq: Sequence, reason: str) -> None:
        seq.finish_reason = reason
        self.scheduler.remove(seq)
        sequences = self._sequences[seq.request.request_id]
        if all(s.state is State.FINISHED for s in sequences):
            del self._sequences[seq.request.request_id], self._seeds[seq.request.request_id]

    def _count_request(self, seq: Sequence) -> None:
        reused, prefill = seq.reuse, self.reuse.prefill
        if prefill.samples:
            spans = [(0, reused.device_tokens), *reused.spans]
            reused.saved_s = sum(prefill.seconds(*span) for span in spans) - reused.waited_s
        report = seq.report
        self.stats.loaded_tokens.update(report.loaded_tokens)
        self.stats.saved_s += report.saved_s or 0.0
        self.stats.requests += 1
        self.stats.prompt_tokens += report.prompt_tokens
        self.stats.device_tokens += report.device_tokens
        self.stats.computed_tokens += report.computed_tokens
        self.stats.misses[report.miss] = self.stats.misses.get(report.miss, 0) + 1

    def _note_prompt_logprobs(self, chunk: Chunk, rows: Tensor) -> None:
        """rows[i] predicts the token after position num_computed + i."""
        seq, wanted = chunk.seq, chunk.seq.params.prompt_logprobs
        assert wanted is not None
        if not seq.prompt_logprobs:
            seq.prompt_logprobs.append(None)
        for i, logits in enumerate(rows):
            position = seq.num_computed + i + 1
            if position == len(seq.prompt_logprobs) and position < seq.num_prompt:
                seq.prompt_logprobs.append(sampler.token_logprobs(logits, seq.token_ids[position], wanted))


def _reuse(store: TieredStore | None, config: EngineConfig, namespace: Namespace, paged: PagedKV) -> AnyReuse:
    """The planner of reuse; a NoReuse without a store, or if the engine is not to reuse
    anything.
    """
    prefill = PrefillSpeed(PREFILL_TOKEN_S)
    if store is None or not config.prefix_cache or config.kv_cache != "paged":
        return NoReuse(namespace, prefill=prefill)
    return Reuse(store, namespace, parts_of_groups(paged.spec), paged.spec.block_size, prefill=prefill)


def _special_ids(tokenizer: Any) -> dict[str, int]:
    """Ids of tokens that have no text in an answer, by how they are written."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {str(token): token_id for token_id, token in added.items() if token.special}
