"""Random traffic through an engine, every answer compared with the same engine that reuses nothing.

One episode is one engine with a pool, a step size and a crowd of its own, in three steps:

- `run` drives the traffic;
- `judge` asks the oracle (prefix_cache=False, one request at a time, samples one after the other)
  and compares as verdict.py says;
- `compare_blocks` recomputes the blocks that the engine still remembers and compares bytes.
"""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.engines import BLOCK, Answer, drive, request, settle, tiny_engine
from harness.traffic import Shape, Traffic
from harness.verdict import Oracle, as_far_as, exactly, nearly
from kvire.attention.cpu import best_attention, native_available
from kvire.cache.block_pool import Block
from kvire.core.config import EngineConfig
from kvire.engine.build import build_engine
from kvire.engine.engine import Engine
from kvire.engine.request import Failure, Request
from kvire.store.tiered import TieredStore

BLOCK_ERROR = 1e-3  # fast mode: largest difference of a number in a block, relative to the block's largest
CANCELLED = 0.25  # share of requests that are cancelled, in episodes that cancel


@dataclass(frozen=True)
class Subject:
    """A model to prove. build(num_blocks, attention=..., **options) -> an engine of EngineConfig's
    options.
    """

    name: str
    build: Callable[..., Engine]
    shape: Shape
    pools: tuple[int, ...]  # sizes in blocks; the smallest holds one request
    attention: tuple[str, ...]  # kinds to prove


def _tiny(num_blocks: int, *, attention: str = "portable", **options: Any) -> Engine:
    backend = best_attention(attention, deterministic=options.get("deterministic", False))
    return tiny_engine(num_blocks, backend=backend, **options)


def smollm2_engine(num_blocks: int, *, store: TieredStore | None = None, **options: Any) -> Engine:
    """SmolLM2-135M in float32 over blocks of 16 tokens."""
    kv_memory = num_blocks * BLOCK * SMOLLM2_TOKEN_BYTES
    return build_engine("smollm2", EngineConfig(block_size=BLOCK, kv_memory=kv_memory, **options), store=store)[0]


SMOLLM2_TOKEN_BYTES = 30 * 3 * 64 * 2 * 4  # layers, heads, width, K and V, float32
KINDS = ("portable", "native") if native_available() else ("portable",)
TINY = Subject("tiny llama", _tiny, Shape(256, BLOCK, 6 * BLOCK + 1, 2 * BLOCK + 2), (9, 12, 20, 32, 64, 160), KINDS)
SMOLLM2 = Subject("SmolLM2-135M", smollm2_engine, Shape(49152, BLOCK, 4 * BLOCK + 1, 4), (6, 8, 24), ("auto",))


@dataclass
class Asked:
    """One request on its way.

    cancel_after: cancelled once that many steps have passed since it came.
    """

    request: Request
    cancel_after: int | None
    steps: int = 0
    cancelled: bool = False
    answers: dict[int, Answer] = field(default_factory=lambda: defaultdict(Answer))
    failure: str | None = None

    @property
    def ended(self) -> bool:
        done = sum(answer.finish_reason is not None for answer in self.answers.values())
        return self.failure is not None or done == self.request.params.n


@dataclass
class Tally:
    """What came out, added up over episodes.

    wrong: requests with a wrong answer, and `faults` says why.
    """

    requests: int = 0
    answers: int = 0
    tokens: int = 0
    cancelled: int = 0
    wrong: int = 0
    harmless: int = 0  # requests with a harmless divergence
    prompt_tokens: int = 0
    reused_tokens: int = 0
    loaded_tokens: int = 0
    met_loads: int = 0  # loads in which part was loaded and part computed
    evictions: int = 0
    preemptions: int = 0
    copies_on_write: int = 0
    blocks_compared: int = 0
    worst_nats: float = 0.0
    faults: list[str] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Add what another episode counted."""
        for name, value in vars(other).items():
            mine = getattr(self, name)
            setattr(self, name, max(mine, value) if name == "worst_nats" else mine + value)

    def fault(self, text: str) -> None:
        """One more request went wrong."""
        self.wrong += 1
        self.faults.append(text)


@dataclass
class Episode:
    """An engine, what it was asked, and what its options were."""

    subject: Subject
    seed: int
    deterministic: bool
    options: dict
    engine: Engine
    asked: list[Asked] = field(default_factory=list)

    def another_engine(self, **options: Any) -> Engine:
        """One that computes alike and has room for everything."""
        alike = {name: value for name, value in self.options.items() if name in ("attention", "deterministic")}
        return self.subject.build(**(alike | {"num_blocks": self.subject.pools[-1]} | options))

    def __str__(self) -> str:
        return f"{self.subject.name} seed {self.seed} {self.options}"


def prove(subject: Subject, seed: int, requests: int, *, deterministic: bool) -> Tally:
    """One episode from traffic to verdict."""
    episode = run(subject, seed, requests, deterministic=deterministic)
    tally = judge(episode)
    tally.blocks_compared = compare_blocks(episode)
    return tally


def run(
    subject: Subject,
    seed: int,
    requests: int,
    *,
    deterministic: bool,
    traffic: Traffic | None = None,
    store: TieredStore | None = None,
) -> Episode:
    """Drive `requests` requests through a new engine, checking pool and accounts.

    traffic: goes on from an earlier engine.
    store: what the engine keeps blocks in.
    """
    rng = random.Random(seed)
    options = _random_options(rng, subject, deterministic=deterministic)
    cancels, crowd = rng.random() < 0.5, rng.randint(1, 32)
    engine = subject.build(**options, **({} if store is None else {"store": store}))
    poison(engine)
    traffic = traffic or Traffic(rng, subject.shape, logprobs=2 if deterministic else 20)
    episode = Episode(subject, seed, deterministic, options, engine)
    open_: dict[str, Asked] = {}
    while open_ or len(episode.asked) < requests:
        while len(open_) < crowd and len(episode.asked) < requests and rng.random() < 0.7:
            cancel_after = rng.choice((0, 0, 1, 2, rng.randrange(20))) if cancels and rng.random() < CANCELLED else None
            asked = Asked(traffic.next(), cancel_after)
            engine.submit(asked.request)
            episode.asked.append(asked)
            open_[asked.request.request_id] = asked
        _cancel_what_is_due(engine, open_)
        _take(engine, open_)
        for done in [asked for asked in open_.values() if asked.ended]:
            del open_[done.request.request_id]
            if not done.cancelled and done.failure is None:
                traffic.ended(done.request, done.answers[0].token_ids)
        engine.pool.check()
        poison_blank_blocks(engine)
    _check_accounts(episode)
    return episode


def _random_options(rng: random.Random, subject: Subject, *, deterministic: bool) -> dict:
    max_num_seqs = rng.choice((1, 2, 8, 32))
    size = subject.shape.block_size
    tokens = rng.choice((3, 7, size - 1, size, size + 1, 3 * size, 512))
    options = {
        "num_blocks": rng.choice(subject.pools),
        "max_num_seqs": max_num_seqs,
        "max_batch_tokens": max(max_num_seqs, tokens),
        "attention": rng.choice(subject.attention),
    }
    return options | ({"deterministic": True} if deterministic else {})


def poison(engine: Engine) -> None:
    """Fill the pool with NaN: KV that nobody wrote cannot pass as an answer."""
    for slab in engine.paged.slabs:
        if engine.paged.spec.dtype == "int8":
            slab.view(torch.uint8).fill_(0xFF)  # scales are then no numbers
        else:
            slab.fill_(math.nan)


def poison_blank_blocks(engine: Engine) -> None:
    """What nobody holds and nobody can find must never be read again."""
    for slab, pool in zip(engine.paged.slabs, engine.pool.pools, strict=True):
        if blank := [block.id for block in pool._blank]:
            slab.view(torch.uint8)[blank] = 0xFF  # not a number, in any dtype's scales or numbers


def _cancel_what_is_due(engine: Engine, open_: dict[str, Asked]) -> None:
    for asked in open_.values():
        if asked.steps == asked.cancel_after and not asked.ended:
            engine.abort(asked.request.request_id)
            asked.cancelled = True
        asked.steps += 1


def _take(engine: Engine, open_: dict[str, Asked]) -> None:
    for output in engine.step():
        asked = open_[output.request_id]
        if isinstance(output, Failure):
            asked.failure = output.message
            continue
        answer = asked.answers[output.index]
        assert answer.finish_reason is None, "nothing comes after the end"
        answer.token_ids += output.token_ids
        answer.logprobs += output.logprobs or ()
        answer.finish_reason = output.finish_reason
        answer.cache = output.cache or answer.cache


def _check_accounts(episode: Episode) -> None:
    """reused + computed = prompt for every answer, and without cancellations the reports explain
    every token run.
    """
    engine, explained = episode.engine, 0
    settle(engine)
    assert engine.pool.num_free == engine.pool.num_blocks, "all blocks are free at idle"
    for asked in episode.asked:
        for index, answer in asked.answers.items():
            if answer.cache is None:
                assert asked.cancelled
                continue
            assert answer.cache.prompt_tokens == len(asked.request.token_ids)
            assert 0 <= answer.cache.reused_tokens < answer.cache.prompt_tokens
            explained += answer.cache.recomputed_tokens + max(0, len(answer.token_ids) - 1)
            explained += answer.cache.computed_tokens if index == 0 else 0
    if not any(asked.cancelled or asked.failure for asked in episode.asked):
        assert explained == engine.stats.forward_tokens, "the reports account for every token that was run"


def judge(episode: Episode) -> Tally:
    """Compare every answer with the oracle's."""
    stats = episode.engine.stats
    tally = Tally(
        requests=len(episode.asked),
        cancelled=sum(asked.cancelled for asked in episode.asked),
        prompt_tokens=stats.prompt_tokens,
        reused_tokens=stats.device_tokens + stats.memory_tokens + stats.disk_tokens + stats.remote_tokens,
        loaded_tokens=stats.memory_tokens + stats.disk_tokens + stats.remote_tokens,
        met_loads=episode.engine.scheduler.prefetcher.met,
        evictions=episode.engine.pool.stats.evictions,
        preemptions=episode.engine.scheduler.preemptions,
        copies_on_write=episode.engine.pool.stats.copies_on_write,
    )
    oracle = Oracle(episode.another_engine(prefix_cache=False, max_num_seqs=1))
    for asked in episode.asked:
        if asked.failure is not None:
            tally.fault(f"{episode}: {asked.failure}")
            continue
        expected = oracle.answers(asked.request)
        verdicts = []
        for index, answer in asked.answers.items():
            tally.answers += 1
            tally.tokens += len(answer.token_ids)
            cold = as_far_as(answer, expected[index]) if asked.cancelled else expected[index]
            verdicts.append(
                exactly(cold, answer) if episode.deterministic else nearly(oracle, asked.request, cold, answer)
            )
        tally.worst_nats = max([tally.worst_nats, *(verdict.worst_nats for verdict in verdicts)])
        if wrong := [verdict.fault for verdict in verdicts if verdict.fault]:
            tally.fault(f"{episode} prompt of {len(asked.request.token_ids)} {asked.request.params}: {wrong[0]}")
        else:
            tally.harmless += any(verdict.diverged for verdict in verdicts)
    return tally


def compare_blocks(episode: Episode) -> int:
    """Recompute every remembered block in a fresh engine; how many were compared.

    Raises AssertionError.

    Deterministic: identical bytes. Fast: no number further off than BLOCK_ERROR of the block's
    largest.
    """
    engine = episode.engine
    fresh = episode.another_engine()
    compared: set[bytes] = set()
    for chain in remembered_chains(engine):
        fresh.clear()
        drive(fresh, [request([token for block in chain for token in block.token_ids], max_tokens=1)], check=False)
        (computed,) = remembered_chains(fresh)  # under other keys, if the tenant's salt is another
        for held, again in zip(chain, computed, strict=True):
            assert held.token_ids == again.token_ids
            got, want = _kv(engine, held), _kv(fresh, again)
            if episode.deterministic:
                assert torch.equal(got, want), f"{episode}: block {held.id} is not what a fresh engine computes"
            else:
                error = float((got - want).abs().max() / want.abs().max())
                assert error <= BLOCK_ERROR, f"{episode}: block {held.id} is off by {error:.2g}"
            compared.add(held.key)
    return len(compared)


def remembered_chains(engine: Engine) -> Iterator[list[Block]]:
    """Blocks of a one-group engine's index from the root to each leaf, in token order."""
    (pool,) = engine.pool.pools
    parents = {block.parent for block in pool._index.values()}
    for key, leaf in pool._index.items():
        if key in parents:
            continue
        chain = [leaf]
        while chain[-1].parent != engine.root:
            chain.append(pool._index[chain[-1].parent])
        yield chain[::-1]


def _kv(engine: Engine, block: Block) -> torch.Tensor:
    """K and V of all layers, as far as the block is filled."""
    paged, count = engine.paged, len(block.token_ids)
    parts = [part(layer) for layer in paged.group_of for part in (paged.k, paged.v)]
    return torch.cat([part[block.id, :count].flatten() for part in parts])
