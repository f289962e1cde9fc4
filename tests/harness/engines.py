"""Small engines for tests: a random model whose answers depend on every cached token, and a
scripted one.
"""

import copy
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from time import monotonic
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from harness import waiting
from kvire.attention.cpu import best_attention
from kvire.attention.paged_cache import PagedCache, PagedModel
from kvire.attention.tiled_model import TiledModel
from kvire.cache.batch import Batch
from kvire.cache.paged import PagedKV
from kvire.core.config import EngineConfig
from kvire.core.keys import Namespace
from kvire.core.report import CacheReport
from kvire.core.spec import KVGroup, KVSpec, LayerKind
from kvire.engine.engine import Engine
from kvire.engine.request import Output, Request, SamplingParams, TokenLogprobs

VOCAB = 259  # 256 bytes, then beginning, end and padding
EOS = 257
BLOCK = 16


class ByteTokenizer:
    """One token per byte of UTF-8."""

    def decode(self, ids, **_: bool) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


@cache
def tiny_llama():
    """Weights large enough that an answer depends on every token it attends to
    (test_sensitivity).
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=4096,
        initializer_range=0.3,
        bos_token_id=256,
        eos_token_id=EOS,
    )
    return AutoModelForCausalLM.from_config(config).eval()


SPEC = KVSpec((KVGroup(LayerKind.FULL, (0, 1, 2), 2, 16, 16),), "float32", BLOCK)


def namespace(salt: str = "", numerics: str = "float32/portable") -> Namespace:
    return Namespace("weights", "config", numerics, "float32", "tiny", BLOCK, salt=salt)


def tiny_engine(num_blocks: int = 256, *, backend=None, max_model_len: int | None = None, **options) -> Engine:
    """The tiny llama over a pool of `num_blocks` blocks of 16 tokens."""
    model = copy.deepcopy(tiny_llama())
    return engine_of(model, SPEC, num_blocks, backend=backend, max_model_len=max_model_len, **options)


def engine_of(
    model, spec: KVSpec, num_blocks: int | list[int], *, backend=None, max_model_len: int | None = None, **options
) -> Engine:
    """A transformers model of at least VOCAB tokens over a pool of its own.

    num_blocks: or so many in each group.
    """
    paged = PagedKV(spec, num_blocks)
    deterministic = options.get("deterministic", False)
    backend = backend or best_attention("portable", deterministic=deterministic)
    bound = (TiledModel if deterministic else PagedModel)(model, PagedCache(paged, backend))
    return _engine(bound, paged, max(paged.num_blocks), max_model_len, options | {"numerics": backend.name})


class ScriptedModel:
    """Writes what it is told: after a prompt of n tokens, script[0], script[1], ... whatever the
    cache holds.
    """

    def __init__(self, script: list[int], prompt_tokens: int) -> None:
        self.script = script
        self.prompt_tokens = prompt_tokens
        self.computed_tokens = 0

    def forward(self, batch: Batch) -> torch.Tensor:
        self.computed_tokens += batch.token_ids.numel()
        logits = torch.zeros(batch.logits_rows.numel(), VOCAB)
        for row, position in enumerate(batch.positions[batch.logits_rows].tolist()):
            at = position + 1 - self.prompt_tokens
            logits[row, self.script[at] if 0 <= at < len(self.script) else EOS] = 50.0
        return logits


def scripted_engine(script: list[int], prompt_tokens: int = 5, num_blocks: int = 64, **options) -> Engine:
    return _engine(ScriptedModel(script, prompt_tokens), PagedKV(SPEC, num_blocks), num_blocks, None, options)


def _engine(model, paged: PagedKV, num_blocks: int, max_model_len: int | None, options: dict) -> Engine:
    """An engine over a tiny model.

    options: of EngineConfig; `store`, an open TieredStore; and `numerics`, which decide bits.
    """
    options = dict(options)
    store, numerics = options.pop("store", None), options.pop("numerics", "scripted")
    numerics += "/deterministic" * options.get("deterministic", False)
    return Engine(
        model,
        paged,
        EngineConfig(block_size=BLOCK, **options),
        namespace(numerics=numerics),
        max_model_len=min(max_model_len or 4096, num_blocks * BLOCK),
        vocab_size=VOCAB,
        eos_token_ids=frozenset([EOS]),
        tokenizer=ByteTokenizer(),
        store=store,
    )


@dataclass
class Answer:
    """All outputs of one sample, joined."""

    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    cache: CacheReport | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def drive(
    engine: Engine, requests: list[Request], *, check: bool = True, exact: bool = True
) -> dict[tuple[str, int], Answer]:
    """Run requests to their end, checking the pool at every step and the accounts at the end.

    exact: nothing else ran meanwhile, so the reports must explain every token.
    """
    for request in requests:
        engine.submit(request)
    answers: dict[tuple[str, int], Answer] = defaultdict(Answer)
    run_before, idle_since = engine.stats.forward_tokens, monotonic()
    while engine.has_work:
        steps = engine.stats.steps
        outputs = engine.step()
        if engine.stats.steps > steps:
            idle_since = monotonic()
        assert monotonic() - idle_since < waiting.PATIENCE_S, "work is waiting, but nothing runs"
        for output in outputs:
            assert isinstance(output, Output), f"{output}"
            answer = answers[output.request_id, output.index]
            assert answer.finish_reason is None, "nothing comes after the end"
            answer.token_ids += output.token_ids
            answer.pieces.append(output.text)
            answer.finish_reason, answer.stop_reason = output.finish_reason, output.stop_reason
            answer.cache = output.cache or answer.cache
            answer.logprobs += output.logprobs or ()
            answer.prompt_logprobs = output.prompt_logprobs or answer.prompt_logprobs
        if check:
            engine.pool.check()
    settle(engine)
    assert engine.pool.num_free == engine.pool.num_blocks, "all blocks are free at idle"
    explained = 0
    for request in requests:
        for index in range(request.params.n):
            answer = answers[request.request_id, index]
            assert answer.cache is not None and answer.cache.prompt_tokens == len(request.token_ids)
            assert answer.cache.reused_tokens < len(request.token_ids)
            # The last token of an answer is never run; the prompt is counted once, with the first
            # answer.
            explained += answer.cache.recomputed_tokens + max(0, len(answer.token_ids) - 1)
            explained += answer.cache.computed_tokens if index == 0 else 0
    if exact:
        assert explained == engine.stats.forward_tokens - run_before, "the reports account for every token that was run"
    return dict(answers)


def settle(engine: Engine) -> None:
    """Wait until no read writes into the pool any more."""

    def is_quiet() -> bool:
        engine.poll()
        return not engine.scheduler.prefetcher.draining

    waiting.until(is_quiet)


@contextmanager
def held(engine: Engine, when: Callable[[], object] = lambda: True) -> Iterator[threading.Event]:
    """While this lasts, the engine stands still in the first step for which `when()`, asked on its
    thread, is true.

    Gives an event: it does now.
    """
    model, stands, go = engine.model, threading.Event(), threading.Event()

    def forward(batch):
        if not go.is_set() and when():
            stands.set()
            go.wait()
        return model.forward(batch)

    engine.model = SimpleNamespace(forward=forward)
    try:
        yield stands
    finally:
        engine.model = model
        go.set()


_numbers = iter(range(10**9))


def request(token_ids: list[int], **params) -> Request:
    """A greedy request that ignores the end token, unless told otherwise."""
    options = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True} | params
    return Request(f"test-{next(_numbers)}", tuple(token_ids), SamplingParams(**options))


def ask(engine: Engine, token_ids: list[int], **params) -> Answer:
    """One request, alone."""
    one = request(token_ids, **params)
    return drive(engine, [one])[one.request_id, 0]


def words(seed: int, length: int) -> list[int]:
    """A fixed prompt of exactly `length` tokens: W(n) of the replayed cases."""
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def oracle(token_ids: list[int], **params) -> Answer:
    """The same engine, nothing cached, nobody else there."""
    return ask(tiny_engine(prefix_cache=False), token_ids, **params)
