"""Bug reports of other systems, replayed on the engine; each replay also has to notice a broken build.

The names S02, S10, ... are those of the collection that CONTRIBUTING.md describes. Where a case is about
the HTTP interface, its other half is in tests/server.
"""

import random

import pytest
from harness import kv_mutants, mutants
from harness.broken_builds import Cases, Claim, Mutant, each_broken_build, each_claim, must_notice
from harness.engines import (
    BLOCK,
    ask,
    drive,
    oracle,
    request,
    scripted_engine,
    tiny_engine,
    words,
)

from kvire.core.errors import RequestError
from kvire.core.keys import block_keys
from kvire.core.report import MissReason
from kvire.engine.engine import Engine

B = BLOCK


def s02_whole_prompt_cached() -> None:
    for n in (1, B - 1, B, B + 1, 4 * B - 1, 4 * B, 4 * B + 1):
        engine = tiny_engine()
        expected = oracle(words(2, n))
        for call in range(3):
            answer = ask(engine, words(2, n))
            assert answer.token_ids == expected.token_ids, (n, call)
            assert answer.cache.reused_tokens == (0 if call == 0 else n - 1), (n, call)
        extended = words(2, n) + words(3, 3 * B)
        answer = ask(engine, extended)
        assert answer.token_ids == oracle(extended).token_ids, n
        assert answer.cache.reused_tokens == n, "all of the first n tokens are reusable"


def s10_hit_on_a_block_not_yet_computed() -> None:
    shared = words(10, 8 * B)
    prompts = [shared + words(100 + i, 5 + i % 3) for i in range(32)]
    expected = [oracle(p, max_tokens=6).token_ids for p in prompts]
    for chunk_tokens in (512, 3 * B):
        engine = tiny_engine(max_batch_tokens=chunk_tokens)
        requests = [request(p, max_tokens=6) for p in prompts]
        answers = drive(engine, requests)
        got = [answers[r.request_id, 0] for r in requests]
        assert [a.token_ids for a in got] == expected
        computed = sum(a.cache.computed_tokens for a in got)
        assert computed == len(shared) + sum(len(p) - len(shared) for p in prompts), (
            "each shared block is computed once"
        )
    engine = tiny_engine(max_batch_tokens=3 * B, max_num_seqs=8)
    doomed, *requests = [request(p, max_tokens=6) for p in prompts[:6]]
    engine.submit(doomed)
    engine.step()
    engine.abort(doomed.request_id)  # its prompt is half computed
    answers = drive(engine, requests)
    assert engine.pool.num_free == engine.pool.num_blocks
    assert [answers[r.request_id, 0].token_ids for r in requests] == expected[1:6]


def s13_cache_as_long_as_the_input() -> None:
    engine = tiny_engine()
    prompt = words(13, 5 * B)
    ask(engine, prompt)
    for n in (5 * B, 5 * B - 1, 4 * B + 1, 4 * B, 4 * B - 1):
        answer = ask(engine, prompt[:n])
        assert answer.token_ids == oracle(prompt[:n]).token_ids, n
        assert answer.cache.computed_tokens >= 1
    longer = [*prompt, 7]
    assert ask(engine, longer).token_ids == oracle(longer).token_ids


def s16_long_prompt_answers() -> None:
    engine = tiny_engine(num_blocks=64, max_model_len=60 * B)
    prompt = words(16, 54 * B)
    expected = ask(tiny_engine(num_blocks=64, max_model_len=60 * B, prefix_cache=False), prompt, max_tokens=40)
    assert len(expected.token_ids) == 40
    for _ in range(2):
        answer = ask(engine, prompt, max_tokens=40)
        assert answer.token_ids == expected.token_ids
        assert answer.text


def s27_silent_zero_hit_rate() -> None:
    for shared_tokens in (int(0.9 * B), int(1.1 * B)):
        for deterministic in (False, True):
            engine = tiny_engine(deterministic=deterministic)
            shared = words(27, shared_tokens)
            for i in range(20):
                ask(engine, [*shared, i, *words(500 + i, 2 * B - 1 - shared_tokens)], max_tokens=1)
            assert engine.stats.misses.pop(MissReason.NEVER_STORED) == 1, "only the first shares nothing"
            whole_blocks = shared_tokens // B * B
            assert engine.stats.device_tokens == 19 * (whole_blocks if deterministic else shared_tokens)
            too_short = deterministic and not whole_blocks
            reasons = [MissReason.SHORTER_THAN_BLOCK] if too_short else [MissReason.DIVERGED, MissReason.COMPLETE]
            assert sum(engine.stats.misses.get(reason, 0) for reason in reasons) == 19
    unrelated = tiny_engine()
    for i in range(20):
        ask(unrelated, [i, *words(900 + i, 2 * B)], max_tokens=1)
    assert unrelated.stats.misses == {MissReason.NEVER_STORED: 20}


def s28_hole_in_the_prefix() -> None:
    prompt = words(28, 10 * B + 3)
    expected = oracle(prompt).token_ids
    for k in range(10):
        engine = tiny_engine()
        ask(engine, prompt)
        for pool in engine.pool.pools:
            pool.forget(block_keys(engine.root, prompt, B)[k])
        answer = ask(engine, prompt)
        assert answer.cache.reused_tokens == k * B, "the hit ends at the hole"
        assert answer.token_ids == expected


def s29_evicting_a_block_in_use() -> None:
    """Two sequences computed one prefix separately before either was indexed; then both are used and evicted."""
    rng = random.Random(29)
    prompts = [words(29 + i % 3, B * (2 + i % 4)) for i in range(24)]
    engine = tiny_engine(num_blocks=20)
    requests = [request(p, max_tokens=rng.randrange(4, 30)) for p in prompts]
    answers = drive(engine, requests)
    for one in requests:
        alone = oracle(list(one.token_ids), max_tokens=one.params.max_tokens)
        assert answers[one.request_id, 0].token_ids == alone.token_ids


def s30_preemption_loses_output() -> None:
    variants = [
        {},
        {"presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"repetition_penalty": 1.3},
        {"temperature": 1.0, "seed": 30},
        {"temperature": 0.8, "top_p": 0.9, "seed": 31},
    ]
    for params in variants:
        prompts = [words(30, 2 * B), words(31, 2 * B - 3), words(32, B)]
        engine = tiny_engine(num_blocks=10)
        requests = [request(p, max_tokens=5 * B, **params) for p in prompts]
        answers = drive(engine, requests)
        assert engine.scheduler.preemptions > 0, "the pool is too small for all"
        for one in requests:
            alone, shared = oracle(list(one.token_ids), max_tokens=5 * B, **params), answers[one.request_id, 0]
            assert shared.token_ids == alone.token_ids, params
            assert shared.text == alone.text, params
            assert sum(map(len, shared.pieces)) == len(alone.text), "no piece is sent twice"


def s31_client_gone_work_goes_on() -> None:
    for steps_before in (0, 1, 3, 10):
        engine = tiny_engine(max_num_seqs=8, max_batch_tokens=2 * B)
        requests = [request(words(31 + i, 3 * B), max_tokens=2000) for i in range(20)]
        for one in requests:
            engine.submit(one)
        for _ in range(steps_before):
            engine.step()
        for one in requests:
            engine.abort(one.request_id)
        engine.step()
        assert not engine.has_work, "one step later nothing runs"
        assert engine.pool.num_free == engine.pool.num_blocks
        engine.pool.check()


def s32_request_can_never_fit() -> None:
    engine = tiny_engine(num_blocks=49, max_model_len=4096)
    for i in range(5):
        with pytest.raises(RequestError, match=str(49 * B)):  # the message names the limit
            engine.submit(request(words(32 + i, 1000)))
    assert len(ask(engine, words(1, 10)).token_ids) == 16
    grown = ask(engine, words(2, 48 * B), max_tokens=4000)
    assert grown.finish_reason == "length"
    assert len(grown.token_ids) == B


def s33_after_context_overflow() -> None:
    engine = tiny_engine(num_blocks=64, max_model_len=200)
    assert ask(engine, words(33, 150), max_tokens=4000).finish_reason == "length"
    assert ask(engine, words(34, 20)).token_ids == oracle(words(34, 20)).token_ids, "the next chat works"
    for n in (199, 200, 201, 600):
        for max_tokens in (1, 100):
            one = request(words(35, n), max_tokens=max_tokens)
            if n < 200:
                assert drive(engine, [one])[one.request_id, 0].finish_reason == "length"
            else:
                with pytest.raises(RequestError, match="200 tokens"):
                    engine.submit(one)


def s37_prompt_logprobs_with_cached_prefix() -> None:
    for n in (10, B, 7 * B + 5, 40 * B):
        engine = tiny_engine()
        for max_tokens in (0, 5):
            first, second = (ask(engine, words(37, n), max_tokens=max_tokens, prompt_logprobs=1) for _ in range(2))
            assert len(second.prompt_logprobs) == n and second.prompt_logprobs[0] is None
            for a, b in zip(first.prompt_logprobs[1:], second.prompt_logprobs[1:], strict=True):
                assert a.token_id == b.token_id and abs(a.logprob - b.logprob) < 1e-3
            assert first.token_ids == second.token_ids and len(second.token_ids) == max_tokens


def s38_cached_tokens_with_samples() -> None:
    for prompt in (words(38, 5), words(39, 5 * B)):
        for n in (1, 2, 4, 8):
            engine = tiny_engine()
            params = {"n": n, "temperature": 1.0, "seed": 38, "max_tokens": 12}
            for cached in (0, len(prompt) - 1):
                one = request(prompt, **params)
                answers = drive(engine, [one])
                assert {answers[one.request_id, i].cache.reused_tokens for i in range(n)} == {cached}
                texts = [tuple(answers[one.request_id, i].token_ids) for i in range(n)]
                assert len(set(texts)) == n, "samples differ"
                again = request(prompt, **params)
                rerun = drive(tiny_engine(), [again])
                assert texts == [tuple(rerun[again.request_id, i].token_ids) for i in range(n)]


def s38_samples_share_the_prompt() -> None:
    """Samples of one prompt part ways in a block that they share: each must go on as if it were alone."""
    for length in (5, B - 1, B, 3 * B + 7):
        prompt = words(380, length)
        one = request(prompt, n=4, max_tokens=2 * B, temperature=1.0, seed=7, logprobs=0)
        engine = tiny_engine()
        answers = drive(engine, [one])
        assert engine.stats.computed_tokens == length, "the prompt is computed once"
        for i in range(4):
            sample = answers[one.request_id, i]
            scored = oracle(prompt + sample.token_ids, max_tokens=0, prompt_logprobs=0).prompt_logprobs[length:]
            for got, alone in zip(sample.logprobs, scored, strict=True):
                assert abs(got.logprob - alone.logprob) < 1e-3


ALPHABET = list(b"DEFGHIJKLMNOPQRSTUVWXYZ")


def s41_stop_string_leaks() -> None:
    text = bytes(ALPHABET).decode()
    for start in range(12):
        for length in range(1, 13):
            stop = text[start : start + length]
            engine = scripted_engine(ALPHABET)
            answer = ask(engine, words(41, 5), stop=(stop, "never"), max_tokens=len(ALPHABET))
            assert answer.text == text[:start], (stop, answer.pieces)
            assert answer.finish_reason == "stop" and answer.stop_reason == stop
            assert len(answer.token_ids) == start + length, "nothing is computed after the stop"
    unfinished = ask(scripted_engine(ALPHABET), words(41, 5), stop=("XYZ!",), max_tokens=len(ALPHABET))
    assert unfinished.text == text, "what only looked like a stop string is shown in the end"
    repeated = ask(scripted_engine(list(b"aabaabaac")), words(41, 5), stop=("aabaac",), max_tokens=9)
    assert repeated.text == "aab"


S42_TEXTS = [
    "안녕하세요 세계",
    "สวัสดีชาวโลก",
    "👨‍👩‍👧‍👦 family 👩🏽‍🚀",
    "🇰🇷🇫🇷🇧🇷",
    "e\u0301a\u0300 n\u0303",
    "mixed ASCII 漢字かな交じり文 end",
]


def s42_characters_split_over_tokens() -> None:
    for text in S42_TEXTS:
        script = list(text.encode())
        answer = ask(scripted_engine(script), words(42, 5), max_tokens=len(script))
        assert answer.text == text
        assert not any("\ufffd" in piece for piece in answer.pieces)
        for cut in range(1, len(script)):
            part = ask(scripted_engine(script), words(42, 5), max_tokens=cut)
            assert part.text == bytes(script[:cut]).decode(errors="replace"), "equals the decoding of all ids"


CASES: Cases = [
    (s02_whole_prompt_cached, [mutants.whole_prompt_counts_as_hit, mutants.last_block_never_reused,
                               mutants.chain_broken_at_multiples, mutants.sequence_reports_nothing_reused]),
    (s10_hit_on_a_block_not_yet_computed, [mutants.published_when_allocated, kv_mutants.stale_blocks_after_abort]),
    (s13_cache_as_long_as_the_input, [mutants.whole_prompt_counts_as_hit, mutants.position_off_by_one]),
    (s16_long_prompt_answers, [mutants.long_prompts_answer_nothing]),
    (s27_silent_zero_hit_rate, [mutants.misses_all_alike]),
    (s28_hole_in_the_prefix, [mutants.hit_over_a_hole]),
    (s29_evicting_a_block_in_use, [mutants.block_in_use_freed, mutants.reference_not_taken]),
    (s30_preemption_loses_output, [mutants.preemption_drops_output, mutants.preemption_forgets_penalties,
                                   mutants.randomness_by_step]),
    (s31_client_gone_work_goes_on, [mutants.abort_ignored, mutants.abort_leaks_blocks]),
    (s32_request_can_never_fit, [mutants.impossible_requests_wait]),
    (s33_after_context_overflow, [mutants.growth_without_limit]),
    (s37_prompt_logprobs_with_cached_prefix, [mutants.prompt_logprobs_from_cache]),
    (s38_cached_tokens_with_samples, [mutants.cached_tokens_per_sample, mutants.samples_share_randomness]),
    (s38_samples_share_the_prompt, [mutants.fork_writes_in_place, mutants.copy_on_write_forgets_to_copy]),
    (s41_stop_string_leaks, [mutants.stop_checked_after_showing, mutants.tail_lost_at_the_end]),
    (s42_characters_split_over_tokens, [mutants.every_token_decoded_alone, mutants.tail_lost_at_the_end]),
]  # fmt: skip


@each_claim(CASES)
def test_holds(claim: Claim) -> None:
    claim()


@each_broken_build(CASES)
@pytest.mark.timeout(120)
def test_notices_a_broken_build(claim: Claim, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    must_notice(claim, mutant, monkeypatch)


def test_sensitivity() -> None:
    """Zeroing any one cached block of the tiny model moves its next logits: wrong KV cannot go unnoticed."""
    engine = tiny_engine()
    prompt = words(0, 8 * B + 5)
    ask(engine, prompt)
    clean = next_logprobs(engine, prompt)
    with engine.pool.match(engine.root, block_keys(engine.root, prompt, B), prompt).lease.leases[0] as lease:
        ids = lease.block_ids
    assert len(ids) == 8
    for block in ids:
        kept = engine.paged.slabs[0][block].clone()
        engine.paged.slabs[0][block].zero_()
        moved = next_logprobs(engine, prompt)
        engine.paged.slabs[0][block].copy_(kept)
        assert max(abs(moved[token] - clean[token]) for token in moved.keys() & clean.keys()) > 1e-2
    assert next_logprobs(engine, prompt) == pytest.approx(clean)


def next_logprobs(engine: Engine, prompt: list[int]) -> dict[int, float]:
    """The likeliest next tokens after a prompt that is cached."""
    answer = ask(engine, prompt, logprobs=20, max_tokens=1)
    assert answer.cache.reused_tokens
    return answer.logprobs[0].top
