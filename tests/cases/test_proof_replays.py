"""Further replays on the engine, as in test_engine_replays.py: block borders, sliding windows, hashes, drift."""

import random
from collections.abc import Sequence

import pytest
from harness import kv_mutants as kv
from harness import mutants
from harness.broken_builds import Cases, Claim, Mutant, each_broken_build, each_claim, must_notice
from harness.differential import poison
from harness.engines import BLOCK, Answer, ask, drive, request, tiny_engine, words
from harness.families import family_engine, family_oracle
from harness.verdict import Oracle, exactly, nearly
from models.tiny import WINDOW

from kvire.core import keys
from kvire.core.keys import BlockKey, block_key, block_keys
from kvire.engine.engine import Engine

B = BLOCK
AT_ONCE = 50


def s01_one_block_beside_strangers() -> None:
    strangers = [words(200 + k, k * B) for k in range(3, 10)]
    for deterministic in (False, True):
        alone = tiny_engine(prefix_cache=False, deterministic=deterministic)
        expected = {tuple(p): ask(alone, p, max_tokens=32, logprobs=0) for p in strangers}
        for n in (B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1):
            prompt = words(1, n) + words(100, 8)
            expected[tuple(prompt)] = ask(alone, prompt, max_tokens=32, logprobs=0)
            engine = tiny_engine(deterministic=deterministic)
            ask(engine, words(1, n), max_tokens=1)
            requests = [request(p, max_tokens=32, logprobs=0) for p in (prompt, *strangers)]
            answers = drive(engine, requests)
            for one in requests:
                got = answers[one.request_id, 0]
                assert got.token_ids == expected[one.token_ids].token_ids, (n, deterministic)
                assert not deterministic or got.logprobs == expected[one.token_ids].logprobs, n
            assert answers[requests[0].request_id, 0].cache.reused_tokens >= n // B * B


def s04_same_prompt_six_times_over_a_window() -> None:
    prompt = words(4, int(1.4 * WINDOW))
    for family in ("gemma3_text", "mistral"):
        expected = ask(family_oracle(family), prompt, max_tokens=64)
        for with_others in (False, True):
            engine = family_engine(family, kv_memory="512KiB" if with_others else "8MiB")
            ask(engine, words(40, 2 * B))  # block 0, which empty entries of a block table name, is somebody else's
            for call in range(6):
                answer = ask(engine, prompt, max_tokens=64)
                assert answer.token_ids == expected.token_ids, (family, with_others, call)
                if with_others:
                    drive(engine, [request(words(1000 * call + i, 6 * B)) for i in range(call % 3, 8)])
                else:
                    assert call == 0 or answer.cache.reused_tokens >= len(prompt) // B * B
            assert engine.pool.stats.evictions > 0 or not with_others


def s05_divergence_in_the_last_blocks() -> None:
    prompt = words(5, 4 * WINDOW + 6)
    for family in ("gemma3_text", "mistral"):
        alone = family_oracle(family)
        for tail in range(3, 2 * B + 1, 3 if family == "mistral" else 5):
            engine = family_engine(family)
            ask(engine, prompt, max_tokens=8)
            diverged = [*prompt, *words(6, 10)]
            at = len(prompt) - tail
            diverged[at : at + 3] = [token ^ 1 for token in prompt[at : at + 3]]
            answer = ask(engine, diverged, max_tokens=8)
            assert answer.token_ids == ask(alone, diverged, max_tokens=8).token_ids, (family, tail)
            assert at // B - answer.cache.reused_tokens // B <= 2, (family, tail, answer.cache)
            assert answer.cache.reused_tokens <= at


def s05_blocks_behind_the_window_are_gone() -> None:
    prompt = words(5, 4 * WINDOW + 6)
    engine = family_engine("mistral", kv_memory="512KiB", max_num_seqs=2)
    ask(engine, prompt, max_tokens=8)
    for i in range(100):
        if engine.pool.stats.evictions:
            break
        ask(engine, words(100 + i, 2 * B + 5), max_tokens=1)
    held = [engine.pool.pools[0].contains(key) for key in block_keys(engine.root, prompt, B)]
    assert not all(held) and all(held[-2:]), "what is given back first goes first"
    diverged = [*prompt[:-5], *words(7, 15)]
    answer = ask(engine, diverged, max_tokens=8)
    assert answer.cache.reused_tokens >= len(prompt) - 5 - 2 * B
    assert answer.token_ids == ask(family_oracle("mistral"), diverged, max_tokens=8).token_ids


def constant(parent: BlockKey, token_ids: Sequence[int]) -> BlockKey:
    return BlockKey(bytes(32))


def eight_bits(parent: BlockKey, token_ids: Sequence[int]) -> BlockKey:
    return BlockKey(block_key(parent, token_ids)[:1] * 32)


def rolling(parent: BlockKey, token_ids: Sequence[int]) -> BlockKey:
    """A polynomial in 31: it does not change when one token falls by 1 and its neighbour rises by 31."""
    value = int.from_bytes(parent[:4], "big")
    for token in token_ids:
        value = (31 * value + token) % 2**32
    return BlockKey(value.to_bytes(4, "big") * 8)


def s12_hash_collisions() -> None:
    rng = random.Random(12)
    shared = [words(seed, 2 * B) for seed in range(6)]
    prompts = [[*rng.choice(shared)[: rng.randrange(2 * B)], *words(rng.randrange(2**32), B)] for _ in range(440)]
    for seed in range(30):  # pairs that the rolling hash takes for one another
        prompt, at = words(5000 + seed, 2 * B + 3), rng.randrange(2 * B - 1)
        prompt[at : at + 2] = [100, 100]
        prompts += [prompt, [*prompt[:at], 99, 131, *prompt[at + 2 :]]]
    alone = tiny_engine(prefix_cache=False)
    expected = [answer.token_ids for answer in in_batches(alone, prompts)]
    for broken_hash in (constant, eight_bits, rolling):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(keys, "block_key", broken_hash)
            engine = tiny_engine()
            assert [answer.token_ids for answer in in_batches(engine, prompts)] == expected, broken_hash.__name__
            assert engine.pool.stats.collisions > 0, "every one is counted"


def s40_drift_between_cold_and_warm() -> None:
    rng = random.Random(40)
    shared = [words(seed, 3 * B) for seed in range(50)]
    prompts = [[*rng.choice(shared)[: rng.randrange(3 * B)], *words(rng.randrange(2**32), B)] for _ in range(1000)]
    for deterministic in (False, True):
        alone = Oracle(tiny_engine(prefix_cache=False, deterministic=deterministic))
        engine = tiny_engine(num_blocks=4000, deterministic=deterministic)
        poison(engine)
        harmless = 0
        for first in range(0, len(prompts), 4 * AT_ONCE):
            some = prompts[first : first + 4 * AT_ONCE]
            in_batches(engine, some)
            cold_answers, warm_answers = in_batches(alone.engine, some), in_batches(engine, some)
            for prompt, cold, warm in zip(some, cold_answers, warm_answers, strict=True):
                assert warm.cache.reused_tokens >= (len(prompt) - 1) // B * B, "all of it is remembered"
                verdict = exactly(cold, warm) if deterministic else nearly(alone, request(prompt), cold, warm)
                assert not verdict.fault, (deterministic, len(prompt), verdict.fault)
                harmless += verdict.diverged
        assert harmless <= 10, "one in a hundred may fall the other way at a near-tie"


def in_batches(engine: Engine, prompts: list[list[int]]) -> list[Answer]:
    """Greedy answers of four tokens, fifty prompts at a time."""
    found = []
    for first in range(0, len(prompts), AT_ONCE):
        requests = [request(prompt, max_tokens=4, logprobs=20) for prompt in prompts[first : first + AT_ONCE]]
        answers = drive(engine, requests, check=False)
        found += [answers[one.request_id, 0] for one in requests]
    return found


CASES: Cases = [
    (s01_one_block_beside_strangers, [kv.block_tables_of_the_neighbour, kv.logits_of_the_neighbour,
                                      mutants.position_off_by_one, kv.wrong_slot_after_a_hit]),
    (s04_same_prompt_six_times_over_a_window, [kv.window_hit_needs_too_little, kv.window_gives_back_too_early]),
    (s05_divergence_in_the_last_blocks, [kv.window_hit_needs_too_little, kv.partial_hit_one_token_too_long]),
    (s05_blocks_behind_the_window_are_gone, [kv.window_hit_needs_the_whole_prefix]),
    (s12_hash_collisions, [kv.tokens_not_compared, kv.collisions_not_counted]),
    (s40_drift_between_cold_and_warm, [kv.remembered_kv_is_rounded, kv.one_token_too_much_counts_as_hit,
                                       kv.partial_copy_forgotten]),
]  # fmt: skip


@each_claim(CASES)
def test_holds(claim: Claim) -> None:
    claim()


@each_broken_build(CASES)
@pytest.mark.timeout(180)
def test_notices_a_broken_build(claim: Claim, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    must_notice(claim, mutant, monkeypatch)
