"""Sliding groups in the engine: what lies behind the window is given back while a sequence runs, and still hits."""

import copy
import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from harness.engines import BLOCK, ask, drive, engine_of, request, words
from models.tiny import make_tiny

from kvire.core.config import EngineConfig
from kvire.core.errors import ConfigError
from kvire.core.spec import KVGroup, KVSpec, LayerKind
from kvire.engine.engine import Engine
from kvire.engine.memory_plan import MemoryPlan
from kvire.models.loader import LoadedModel, load_model

B = BLOCK
WINDOW = 24  # of the tiny models
SPAN = 3  # blocks of 16 tokens that 24 positions can touch
FAMILIES = ["gemma3_text", "mistral"]


@cache
def loaded(family: str) -> LoadedModel:
    with TemporaryDirectory() as folder:
        return load_model(make_tiny(family, Path(folder)))


def window_engine(family: str, full_blocks: int = 256, window_blocks: int | None = None, **options) -> Engine:
    spec = KVSpec(loaded(family).groups, "float32", B)
    blocks = [full_blocks if group.window is None else window_blocks or full_blocks for group in spec.groups]
    limit = options.pop("max_model_len", full_blocks * B)
    engine = engine_of(copy.deepcopy(loaded(family).model), spec, blocks, **options)
    engine.max_model_len = engine.scheduler.max_model_len = limit  # windows alone hold more than the pool
    engine.vocab_size = loaded(family).config.vocab_size
    return engine


def alone(family: str, token_ids: list[int], **params):
    return ask(window_engine(family, prefix_cache=False), token_ids, **params)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_running_sequence_holds_its_window_and_no_more(family: str) -> None:
    engine = window_engine(family, max_batch_tokens=2 * B)
    engine.submit(request(words(1, 20 * B), max_tokens=3 * B))
    most = 0
    while engine.has_work:
        engine.step()
        for seq in engine.scheduler.running:
            for pool, lease in zip(engine.pool.pools, seq.lease.leases, strict=True):
                if hasattr(pool, "window"):
                    held = [i for i, block in enumerate(lease.blocks) if block is not None]
                    most = max(most, len(held))
                    assert held == list(range(pool.first_needed(seq.num_computed), len(lease.blocks)))
        engine.pool.check()
    assert most <= SPAN, "between steps only what the next token looks at is held"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_small_window_pool_serves_long_sequences(family: str) -> None:
    """Two windows and a chunk are enough for any length, whoever else runs."""
    window_blocks = 2 * SPAN + 2
    engine = window_engine(family, 200, window_blocks, max_batch_tokens=2 * B, max_num_seqs=4, max_model_len=40 * B)
    requests = [request(words(i, 100 + 37 * i), max_tokens=30) for i in range(6)]
    answers = drive(engine, requests)
    for one in requests:
        answer = answers[one.request_id, 0]
        assert answer.token_ids == alone(family, list(one.token_ids), max_tokens=30).token_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_hits_wherever_it_parts_from_a_remembered_one(family: str) -> None:
    prompt = words(5, 8 * B + 6)
    for shared in range(1, len(prompt), 7):
        engine = window_engine(family)
        ask(engine, prompt, max_tokens=1)
        ids = [*prompt[:shared], (prompt[shared] + 1) % 256, *words(6, 10)]
        answer = ask(engine, ids)
        assert answer.cache.reused_tokens == shared
        assert answer.token_ids == alone(family, ids).token_ids


def test_a_long_prompt_does_not_cost_others_their_windows() -> None:
    """What it gives back on its way is evicted before the windows at the ends of prompts."""
    engine = window_engine("gemma3_text", 256, 20, max_batch_tokens=4 * B)
    prompt = words(7, 6 * B + 3)
    ask(engine, prompt, max_tokens=1)
    ask(engine, words(8, 40 * B), max_tokens=1)
    assert ask(engine, prompt, max_tokens=1).cache.reused_tokens == len(prompt) - 1


def test_prompts_wait_for_windows_instead_of_taking_them_from_each_other() -> None:
    engine = window_engine("mistral", 14, max_batch_tokens=2 * B, max_num_seqs=16, max_model_len=64 * B)
    requests = [request(words(i, 12 * B), max_tokens=8) for i in range(12)]
    answers = drive(engine, requests)
    assert engine.scheduler.preemptions <= 2
    for one in requests[::4]:
        assert answers[one.request_id, 0].token_ids == alone("mistral", list(one.token_ids), max_tokens=8).token_ids


def test_other_traffic_that_evicts_windows_shortens_hits_but_changes_nothing() -> None:
    """A full group may remember more than the window group: the hit ends where both can go on."""
    engine = window_engine("gemma3_text", 256, 16, max_batch_tokens=4 * B)
    prompt = words(7, 6 * B + 3)
    first = ask(engine, prompt)
    reused = []
    for i in range(6):
        ask(engine, words(100 + i, 3 * B + 5 * i), max_tokens=2)
        again = ask(engine, prompt)
        assert again.token_ids == first.token_ids
        reused.append(again.cache.reused_tokens)
        if again.cache.reused_tokens < len(prompt) - 1:
            assert again.cache.miss == "evicted"
    assert max(reused) > 0
    ask(engine, words(200, 15 * B), max_tokens=1)
    lost = ask(engine, prompt).cache
    assert (lost.miss, lost.reused_tokens) == ("evicted", 0), "the full group alone is no hit"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"prefix_cache": False}, {"kv_cache": "contiguous"}])
def test_random_traffic_answers_as_if_alone(family: str, options: dict) -> None:
    rng = random.Random(family)
    engine = window_engine(family, 40, 24, max_batch_tokens=2 * B, max_num_seqs=6, max_model_len=12 * B, **options)
    known: list[list[int]] = []
    for _ in range(6):
        requests = []
        for _ in range(6):
            base = rng.choice(known)[: rng.randrange(1, 9 * B)] if known and rng.random() < 0.7 else []
            ids = (base + words(rng.randrange(1000), rng.randrange(1, 3 * B)))[: 10 * B]
            requests.append(request(ids, max_tokens=rng.randrange(1, 20), n=rng.choice([1, 1, 2]), seed=1))
        answers = drive(engine, requests)
        for one in requests:
            answer = answers[one.request_id, 0]
            known.append(list(one.token_ids) + answer.token_ids)
            expected = alone(family, list(one.token_ids), max_tokens=one.params.max_tokens)
            assert answer.token_ids == expected.token_ids
    assert (engine.stats.device_tokens > 0) == ("prefix_cache" not in options and "kv_cache" not in options)


def gemma_like(window: int = 512) -> KVSpec:
    full = KVGroup(LayerKind.FULL, (5,), 1, 256, 256)
    sliding = KVGroup(LayerKind.SLIDING, (0, 1, 2, 3, 4), 1, 256, 256, window=window)
    return KVSpec((full, sliding), "float32", 32)


def test_a_window_group_takes_what_running_sequences_can_hold_and_the_full_group_the_rest() -> None:
    spec, size = gemma_like(), 2**30
    plan = MemoryPlan.measure(EngineConfig(kv_memory=size), spec, 32768, 2**33)
    full, sliding = plan.num_blocks
    span = 512 // 32 + 2
    assert sliding == 2 * 32 * span + 512 // 32 + 2
    assert full == (size - sliding * spec.block_bytes(1)) // spec.block_bytes(0)
    assert plan.pool_bytes <= size < plan.pool_bytes + spec.block_bytes(0)
    assert plan.max_model_len == 32768
    contiguous = MemoryPlan.measure(EngineConfig(kv_memory=size, kv_cache="contiguous"), spec, 8192, 2**33)
    assert contiguous.num_blocks[0] == contiguous.num_blocks[1] < full


def test_plans_of_small_pools_and_of_windows_alone() -> None:
    spec = gemma_like(window=4096)
    plan = MemoryPlan.measure(EngineConfig(kv_memory=2**26), spec, 32768, 2**33)
    assert plan.num_blocks[0] == plan.num_blocks[1], "fewer blocks than windows could take"
    assert plan.max_model_len == plan.num_blocks[0] * 32 < 32768
    only = KVSpec((KVGroup(LayerKind.SLIDING, (0,), 1, 64, 64, window=64),), "float32", 32)
    assert MemoryPlan.measure(EngineConfig(kv_memory=2**24), only, 4096, 2**33).num_blocks == (1024,)
    small = EngineConfig(kv_memory=only.block_bytes(0) * 400, max_num_seqs=16, max_batch_tokens=64)
    assert MemoryPlan.measure(small, only, 100_000, 2**33).max_model_len == 100_000, (
        "it holds its window, whatever it reads"
    )
    with pytest.raises(ConfigError, match="holds 32 tokens, but 4096 need"):
        MemoryPlan.measure(EngineConfig(kv_memory=only.block_bytes(0)), only, 4096, 2**33)
    with pytest.raises(ConfigError, match="are free"):
        MemoryPlan.measure(EngineConfig(kv_memory=2**34), only, 4096, 2**33)


def test_auto_takes_half_of_what_is_free_but_not_more_than_all_sequences_can_use() -> None:
    spec = gemma_like()
    plan = MemoryPlan.measure(EngineConfig(max_num_seqs=2), spec, 1024, 2**40)
    assert plan.num_blocks[0] == 2 * 1024 // 32
    half = MemoryPlan.measure(EngineConfig(), spec, 32768, 2**30)
    assert 0.99 < half.pool_bytes / 2**29 <= 1
