"""What is stored of windows, of int8 pools, of failed requests, and under keys that collide."""

import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from engine.test_scheduler import Poisoned
from engine.test_windows import FAMILIES, alone, window_engine
from harness.differential import poison
from harness.engines import (
    BLOCK,
    SPEC,
    Answer,
    ask,
    drive,
    engine_of,
    request,
    settle,
    tiny_engine,
    tiny_llama,
    words,
)
from harness.loads import HASTY_S, PATIENT_S, at_rest, engine_over, finish, ids_of, keep
from harness.stored import disk, memory, say_what_prefill_costs, store_over
from harness.waiting import PATIENCE_S
from store.stores import BentTier, open_store

from kvire.core import keys
from kvire.core.keys import BlockKey
from kvire.core.report import MissReason
from kvire.core.spec import KVSpec
from kvire.core.tier_kind import TierKind
from kvire.engine.engine import Engine
from kvire.engine.request import Failure
from kvire.store.tiered import TieredStore

B = BLOCK
PROMPT = words(1, 10 * B + 3)


def windows_over(store: TieredStore, family: str, *, token_s: float = PATIENT_S, **options) -> Engine:
    engine = window_engine(family, store=store, **options)
    say_what_prefill_costs(engine, token_s)
    poison(engine)
    return engine


def assert_as_alone(family: str, answer: Answer, prompt: list[int], **params) -> None:
    """The same tokens and logprobs: these models say the same whatever they see, only a little more or less surely."""
    expected = alone(family, prompt, logprobs=0, **params)
    assert answer.token_ids == expected.token_ids
    assert [entry.logprob for entry in answer.logprobs] == pytest.approx(
        [entry.logprob for entry in expected.logprobs], abs=2e-4
    )


def keep_windows(store: TieredStore, family: str, prompt: list[int] = PROMPT) -> None:
    ask(windows_over(store, family), prompt)
    assert store.flush(10)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [10 * B - 1, 10 * B, 10 * B + 1, 2 * B, B + 1])
def test_a_restart_reads_only_what_the_windows_need(tmp_path: Path, family: str, length: int) -> None:
    prompt, tier = words(1, length), BentTier()
    with open_store(tmp_path, tier) as store:
        keep_windows(store, family, prompt)
        engine = windows_over(store, family)
        answer = ask(engine, prompt, logprobs=0)
        full = (length - 1) // B
        assert answer.cache.disk_tokens == full * B
        assert_as_alone(family, answer, prompt)
        needed = {g: full - engine.pool.first_needed(g, full * B) for g in range(len(engine.pool.pools))}
        assert Counter(block_id.group for block_id in tier.log) == needed


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_block_shortens_the_load_to_where_every_window_is_whole(tmp_path: Path, family: str) -> None:
    for lost in range(10):
        with open_store(tmp_path / str(lost), tier := BentTier()) as store:
            keep_windows(store, family)
            engine = windows_over(store, family)
            group = len(engine.pool.pools) - 1  # the sliding one
            tier.inner.delete([ids_of(engine, PROMPT, group=group)[lost]], "room")
            answer = ask(engine, PROMPT, logprobs=0)
            assert answer.cache.disk_tokens == (10 if lost < 8 else lost) * B, "only the last two are looked at"
            assert_as_alone(family, answer, PROMPT)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("trouble", ["damaged", "dead", "slow"])
def test_a_load_that_fails_is_computed_from_the_start(tmp_path: Path, family: str, trouble: str) -> None:
    tier = BentTier()
    with open_store(tmp_path, tier, readers=1) as store:
        keep_windows(store, family)

        engine = windows_over(store, family, token_s=HASTY_S if trouble == "slow" else PATIENT_S)
        needed = ids_of(engine, PROMPT, group=len(engine.pool.pools) - 1)[8]

        def bend(block_id, buffers, length):
            if trouble == "damaged":
                buffers[-1][-1] ^= block_id == needed
            elif len(tier.log) == 1:
                tier.dead = trouble == "dead"
                if trouble == "slow":
                    tier.gate.clear()
            return length

        tier.bend = bend
        if trouble == "damaged":  # everything else is there when the engine looks
            loads = lambda running: [seq.reuse.load for seq in running if seq.reuse.load]
            engine.scheduler.prefetcher.nap = lambda running: [load.ticket.wait(PATIENCE_S) for load in loads(running)]
        if trouble == "slow":
            engine.submit(one := request(PROMPT, logprobs=0))
            answer = finish(engine, one)
            tier.gate.set()
            at_rest(engine)
        else:
            answer = ask(engine, PROMPT, logprobs=0)
        assert_as_alone(family, answer, PROMPT)
        assert answer.cache.reused_tokens == 0
        expected = {"damaged": MissReason.DAMAGED, "dead": MissReason.UNAVAILABLE, "slow": MissReason.SLOWER}
        assert answer.cache.miss is expected[trouble]


@pytest.mark.parametrize("family", FAMILIES)
def test_windows_from_a_remote_tier(tmp_path: Path, family: str) -> None:
    """Nobody knows beforehand what it has: all of it, nothing, or what goes on where the device knows half a block."""
    with open_store(tmp_path, BentTier(TierKind.REMOTE), load_timeout_s=PATIENCE_S) as store:
        engine = windows_over(store, family)
        report = ask(engine, PROMPT, max_tokens=30).cache
        assert (report.reused_tokens, report.miss) == (0, MissReason.NEVER_STORED)
        assert store.flush(10)
        for known in ([], [*PROMPT[: 3 * B + 5], 7]):
            engine = windows_over(store, family)
            if known:
                ask(engine, known, max_tokens=1)
            answer = ask(engine, PROMPT, logprobs=0)
            assert_as_alone(family, answer, PROMPT)
            assert answer.cache.reused_tokens == 10 * B
            assert answer.cache.remote_tokens == (7 if known else 10) * B


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_disk_certainly_has_is_not_staked_on_what_a_remote_tier_may_have(tmp_path: Path, family: str) -> None:
    tiers = (BentTier(TierKind.DISK, "near"), BentTier(TierKind.REMOTE, "far"))
    with open_store(tmp_path, *tiers, load_timeout_s=PATIENCE_S) as store:
        keep_windows(store, family)
        longer = [*PROMPT, *words(5, 3 * B)]
        answer = ask(windows_over(store, family), longer, logprobs=0)
        assert answer.cache.disk_tokens == 10 * B
        assert_as_alone(family, answer, longer)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_random_traffic_over_windows_and_restarts_answers_as_if_alone(tmp_path: Path, family: str) -> None:
    rng, known, loaded = random.Random(family), [], 0
    for _ in range(4):
        with store_over(disk, tmp_path) as store:
            engine = windows_over(
                store, family, full_blocks=40, window_blocks=24, max_batch_tokens=2 * B, max_num_seqs=6,
                max_model_len=12 * B,
            )  # fmt: skip
            for _ in range(3):
                requests = []
                for _ in range(5):
                    base = rng.choice(known)[: rng.randrange(1, 9 * B)] if known and rng.random() < 0.8 else []
                    ids = (base + words(rng.randrange(1000), rng.randrange(1, 3 * B)))[: 10 * B]
                    requests.append(request(ids, max_tokens=rng.randrange(1, 20), n=rng.choice([1, 1, 2]), logprobs=0))
                answers = drive(engine, requests)
                for one in requests:
                    answer = answers[one.request_id, 0]
                    known.append(list(one.token_ids) + answer.token_ids)
                    assert_as_alone(family, answer, list(one.token_ids), max_tokens=one.params.max_tokens)
            loaded += engine.stats.disk_tokens
            assert store.flush(10)
    assert loaded > 0


def int8_engine(store: TieredStore) -> Engine:
    engine = engine_of(tiny_llama(), KVSpec(SPEC.groups, "int8", B), 64, kv_dtype="int8", store=store)
    say_what_prefill_costs(engine, PATIENT_S)
    return engine


def test_int8_blocks_come_back_with_their_scales(tmp_path: Path) -> None:
    """S15: byte for byte, so that every later answer is the first warm one."""
    with store_over(disk, tmp_path) as store:
        first = int8_engine(store)
        cold, warm = ask(first, PROMPT, logprobs=3), ask(first, PROMPT, logprobs=3)
        wrote = [bytes(first.paged.memory(0, first.pool.pools[0]._index[key.key].id)) for key in ids_of(first, PROMPT)]
    with store_over(disk, tmp_path) as store:
        again = int8_engine(store)
        loaded = ask(again, PROMPT, logprobs=3)
        assert loaded.cache.disk_tokens == 10 * B
        read = [bytes(again.paged.memory(0, again.pool.pools[0]._index[key.key].id)) for key in ids_of(again, PROMPT)]
    assert read == wrote and len(set(read)) == 10
    assert loaded.token_ids == warm.token_ids == cold.token_ids
    deltas = [abs(a.logprob - b.logprob) for a, b in zip(loaded.logprobs, warm.logprobs, strict=True)]
    assert max(deltas) < 1e-4


@pytest.mark.parametrize("blocks", [3, 150])
def test_nothing_of_a_request_with_numbers_that_are_not_finite_stays_in_the_store(tmp_path: Path, blocks: int) -> None:
    """Also of what waits to be written just then."""
    prompt, tier = words(1, blocks * B), BentTier()
    with open_store(tmp_path, tier) as store:
        engine = engine_over(store, max_batch_tokens=2 * B)
        healthy = engine.model
        engine.model = Poisoned(healthy, position=len(prompt) - 1)
        tier.gate.clear()
        engine.submit(request(prompt))
        outputs = engine.step()
        assert tier.waiting.wait(PATIENCE_S)
        while engine.has_work:
            outputs += engine.step()
        assert [type(output) for output in outputs] == [Failure]
        tier.gate.set()
        assert store.flush(10)
        assert tier.writes, "some were on their way"
        assert store.held(ids_of(engine, prompt)) == [None] * blocks
        settle(engine)
        engine.model = healthy
        assert ask(engine, prompt).cache.reused_tokens == 0


def constant(parent: BlockKey, token_ids: list[int]) -> BlockKey:
    return BlockKey(bytes(32))


def two_bits(parent: BlockKey, token_ids: list[int]) -> BlockKey:
    return BlockKey(bytes([sum(token_ids) % 4]) * 32)


@pytest.mark.parametrize("tiers", [memory, disk])
@pytest.mark.parametrize("broken_hash", [constant, two_bits])
def test_keys_that_collide_give_no_foreign_block_through_the_store(
    tmp_path: Path, tiers, broken_hash, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S12: tokens, parents and roots are compared there, too."""
    rng = random.Random(12)
    shared = [words(seed, 2 * B) for seed in range(3)]
    prompts = [[*rng.choice(shared)[: rng.randrange(2 * B)], *words(rng.randrange(10**6), B)] for _ in range(60)]
    with_one = tiny_engine(prefix_cache=False)
    expected = [ask(with_one, prompt, max_tokens=4).token_ids for prompt in prompts]
    monkeypatch.setattr(keys, "block_key", broken_hash)
    with store_over(tiers, tmp_path) as store:
        for prompt, token_ids in zip(prompts, expected, strict=True):
            answer = ask(engine_over(store, num_blocks=8), prompt, max_tokens=4)
            assert answer.token_ids == token_ids
            assert store.flush(10)
        assert sum(handle.counts.foreign for handle in store.stats().handles.values()) > 0, "and counted"


def test_deterministic_blocks_are_the_same_bits_loaded_and_computed(tmp_path: Path) -> None:
    with store_over(disk, tmp_path) as store:
        keep(store, PROMPT, deterministic=True)
        engines = [engine_over(store, deterministic=True), engine_over(store, deterministic=True, token_s=1e-12)]
        answers = [ask(engine, PROMPT, logprobs=5) for engine in engines]
        assert [answer.cache.disk_tokens for answer in answers] == [10 * B, 0]
        assert answers[0].logprobs == answers[1].logprobs
        kv = [
            torch.stack([engine.paged.slabs[0][engine.pool.pools[0]._index[i.key].id] for i in ids_of(engine, PROMPT)])
            for engine in engines
        ]
        assert torch.equal(*kv)
