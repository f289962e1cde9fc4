"""Fairness, limits and accounts of the scheduler, on the tiny model."""

import pytest
from harness.engines import BLOCK, ask, drive, oracle, request, scripted_engine, tiny_engine, words

from kvire.core.errors import GenerationError, QueueFullError, RequestError
from kvire.core.keys import block_keys
from kvire.core.report import MissReason
from kvire.engine import sampler
from kvire.engine.client import EngineClient
from kvire.engine.request import Failure
from kvire.engine.scheduler import MAX_PROMPT_LOGPROB_TOKENS

B = BLOCK


def test_the_oldest_is_never_preempted_and_nobody_starves() -> None:
    engine = tiny_engine(num_blocks=12)
    requests = [request(words(i, 2 * B), max_tokens=4 * B) for i in range(8)]
    answers = drive(engine, requests)
    assert engine.scheduler.preemptions > 0
    assert answers[requests[0].request_id, 0].cache.preemptions == 0
    for one in requests:
        assert len(answers[one.request_id, 0].token_ids) == 4 * B


def test_decodes_go_on_while_a_long_prompt_is_read() -> None:
    engine = tiny_engine(max_batch_tokens=2 * B, max_num_seqs=8)
    short, long = request(words(1, 5), max_tokens=40), request(words(2, 40 * B))
    engine.submit(short)
    engine.step()
    engine.submit(long)
    produced = [sum(len(o.token_ids) for o in engine.step() if o.request_id == short.request_id) for _ in range(10)]
    assert produced == [1] * 10


def test_a_small_request_behind_one_that_does_not_fit_yet_waits_its_turn() -> None:
    engine = tiny_engine(num_blocks=10)
    first, big, small = request(words(1, 6 * B), max_tokens=8), request(words(2, 7 * B)), request(words(3, 4))
    order = []
    for one in (first, big, small):
        engine.submit(one)
    while engine.has_work:
        order += [o.request_id for o in engine.step() if o.cache is not None and o.finish_reason is None]
    assert order == [first.request_id, big.request_id, small.request_id]


def test_the_queue_is_bounded() -> None:
    engine = tiny_engine(max_queue=4)
    for i in range(4):
        engine.submit(request(words(i, 4)))
    with pytest.raises(QueueFullError, match="4 requests"):
        engine.submit(request(words(9, 4)))
    drive(engine, [], exact=False)
    engine.submit(request(words(9, 4)))


@pytest.mark.parametrize(
    ("ids", "params"),
    [([], {}), ([-1], {}), ([10**6], {}), ([1], {"logit_bias": {10**6: 1.0}}), ([1] * 5000, {})],
)
def test_requests_that_cannot_be_served_are_refused_at_once(ids: list[int], params: dict) -> None:
    engine = tiny_engine()
    with pytest.raises(RequestError):
        engine.submit(request(ids, **params))
    assert not engine.has_work


def test_miss_reasons() -> None:
    engine = tiny_engine(num_blocks=16)
    prompt = words(1, 4 * B)
    assert ask(engine, prompt).cache.miss == MissReason.NEVER_STORED
    assert ask(engine, words(2, 1)).cache.miss == MissReason.SHORTER_THAN_BLOCK
    report = ask(engine, prompt).cache
    assert (report.miss, report.reused_tokens) == (MissReason.COMPLETE, 4 * B - 1)
    other = prompt[: 2 * B + 5] + words(3, 2 * B)
    report = ask(engine, other).cache
    assert (report.miss, report.miss_token, report.reused_tokens) == (MissReason.DIVERGED, 2 * B + 5, 2 * B + 5)
    near = prompt[:7] + words(4, 2 * B)
    report = ask(engine, near).cache
    assert (report.miss, report.miss_token, report.reused_tokens) == (MissReason.DIVERGED, 7, 7)
    ask(engine, words(5, 15 * B))
    report = ask(engine, prompt).cache
    assert (report.miss, report.miss_token) == (MissReason.EVICTED, 0)
    off = ask(tiny_engine(prefix_cache=False), prompt).cache
    assert (off.miss, off.reused_tokens) == (MissReason.OFF, 0)
    assert ask(engine, prompt, prompt_logprobs=0).cache.miss == MissReason.PROMPT_LOGPROBS


def test_miss_reasons_where_only_whole_blocks_are_reused() -> None:
    engine = tiny_engine(num_blocks=16, deterministic=True)
    prompt = words(1, 4 * B)
    assert ask(engine, prompt).cache.miss == MissReason.NEVER_STORED
    assert ask(engine, words(2, B)).cache.miss == MissReason.SHORTER_THAN_BLOCK
    report = ask(engine, prompt).cache
    assert (report.miss, report.reused_tokens) == (MissReason.COMPLETE, 3 * B)
    report = ask(engine, prompt[: 2 * B + 5] + words(3, 2 * B)).cache
    assert (report.miss, report.miss_token, report.reused_tokens) == (MissReason.DIVERGED, 2 * B + 5, 2 * B)
    report = ask(engine, prompt[:7] + words(4, 2 * B)).cache
    assert (report.miss, report.miss_token, report.reused_tokens) == (MissReason.SHORTER_THAN_BLOCK, 7, 0)


@pytest.mark.parametrize("length", [1, 2, B - 1, B, B + 1, 3 * B - 1, 3 * B, 3 * B + 1])
@pytest.mark.parametrize("answer_tokens", [1, 3, B, 2 * B + 3])
def test_generated_tokens_are_reused_in_the_next_turn(length: int, answer_tokens: int) -> None:
    """All but the last one, which was never run through the model."""
    engine = tiny_engine()
    first = ask(engine, words(1, length), max_tokens=answer_tokens)
    history = words(1, length) + first.token_ids
    answer = ask(engine, history + words(2, 9))
    assert answer.cache.reused_tokens == len(history) - 1
    assert answer.token_ids == oracle(history + words(2, 9)).token_ids


def test_a_hit_may_end_anywhere() -> None:
    engine = tiny_engine()
    prompt = words(1, 3 * B)
    ask(engine, prompt, max_tokens=1)
    for shared in range(1, 3 * B):
        ids = [*prompt[:shared], (prompt[shared] + 1) % 256, 7]
        answer = ask(engine, ids, max_tokens=2)
        assert answer.cache.reused_tokens == shared
        assert answer.token_ids == oracle(ids, max_tokens=2).token_ids


@pytest.mark.parametrize("length", [B - 4, B, 2 * B + 5, 3 * B])
def test_a_prompt_is_found_behind_however_many_others_that_begin_like_it(length: int) -> None:
    engine = tiny_engine(num_blocks=512)
    shared = words(1, min(length // 2, 2 * B))
    prompt = shared + words(2, length - len(shared))
    ask(engine, prompt, max_tokens=1)
    for i in range(80):
        ask(engine, [*shared, i, *words(100 + i, length - len(shared))], max_tokens=1)
    report = ask(engine, prompt, max_tokens=1).cache
    assert (report.miss, report.reused_tokens) == (MissReason.COMPLETE, length - 1)


@pytest.mark.parametrize("length", [B - 4, B, 2 * B + 5])
def test_short_prompts_that_had_to_make_room_are_told_from_unknown_ones(length: int) -> None:
    engine = tiny_engine(num_blocks=16)
    ask(engine, words(1, length), max_tokens=1)
    ask(engine, words(2, 15 * B), max_tokens=B)
    assert ask(engine, words(1, length), max_tokens=1).cache.miss == MissReason.EVICTED


def test_twins_do_not_turn_the_order_of_eviction_round() -> None:
    """A prompt that is scored computes every block again; what is remembered stays younger than what follows it."""
    engine = tiny_engine(num_blocks=64)
    prompt = words(1, 20 * B)
    ask(engine, prompt, max_tokens=1)
    ask(engine, prompt, max_tokens=1, prompt_logprobs=0)
    pool = engine.pool.pools[0]
    order = [block.key for block in pool._remembered.values()]
    keys = [key for key in block_keys(engine.root, prompt, B) if key in order]
    assert len(keys) == 20 and sorted(keys, key=order.index) == keys[::-1]


def test_nobody_waits_for_a_prompt_that_is_scored() -> None:
    """64 tokens a step: those who share its prefix are faster alone."""
    engine = tiny_engine(max_num_seqs=4)
    scored, plain = request(words(1, 30 * B), prompt_logprobs=0), request([*words(1, 29 * B), 1, 2], max_tokens=1)
    order = []
    for one in (scored, plain):
        engine.submit(one)
    while engine.has_work:
        order += [output.request_id for output in engine.step() if output.cache is not None]
    assert order[0] == plain.request_id


def test_a_partial_hit_survives_the_eviction_of_its_source() -> None:
    """The block that is copied is the first to be evicted for the sequence that copies it."""
    prompt = words(1, B - 3)
    ids = prompt + words(2, 7 * B)
    for num_blocks in (8, 9):
        engine = tiny_engine(num_blocks=num_blocks, max_model_len=8 * B)
        ask(engine, prompt, max_tokens=1)
        answer = ask(engine, ids, max_tokens=3)
        assert answer.cache.reused_tokens == B - 3
        assert answer.token_ids == oracle(ids, max_tokens=3).token_ids


def test_preempted_sequences_find_what_they_had_computed() -> None:
    engine = tiny_engine(num_blocks=40, max_batch_tokens=3 * B)
    old, new = request(words(1, 3 * B), max_tokens=4), request(words(2, 5 * B + 3), max_tokens=4)
    for one in (old, new):
        engine.submit(one)
    engine.step()
    engine.step()
    victim = engine.scheduler.running[-1]
    computed = victim.num_computed
    assert computed % B, "its last block is not full"
    engine.scheduler.preempt(victim)
    answers = drive(engine, [], exact=False)
    report = answers[new.request_id, 0].cache
    assert report.preemptions == 1 and report.recomputed_tokens == 0
    assert answers[new.request_id, 0].token_ids == oracle(words(2, 5 * B + 3), max_tokens=4).token_ids


def test_what_others_computed_while_a_prompt_was_preempted_counts_as_reused() -> None:
    prompt = words(1, 4 * B + 5)
    engine = tiny_engine(max_batch_tokens=B + 3, max_num_seqs=4)
    late = request(prompt, max_tokens=3)
    engine.submit(late)
    engine.step()
    victim = engine.scheduler.running[0]
    engine.scheduler.preempt(victim)
    engine.scheduler.waiting.remove(victim)  # somebody else comes first
    other = request(prompt[:-2], max_tokens=2)
    answers = drive(engine, [other], exact=False, check=False)
    run_before = engine.stats.forward_tokens
    engine.scheduler.add(victim)
    report = drive(engine, [], exact=False)[late.request_id, 0].cache
    assert answers[other.request_id, 0].cache.computed_tokens == 3 * B
    assert report.computed_tokens + report.recomputed_tokens == B + 3 + 2, "its first step, and what the other lacked"
    assert engine.stats.forward_tokens - run_before == 2 + 2


@pytest.mark.parametrize("kv_cache", ["contiguous", "off"])
def test_modes_to_measure_against_give_the_same_answers(kv_cache: str) -> None:
    """Samples, preemption-free waiting, penalties: nothing is shared, and every token is accounted for."""
    prompts = [words(i % 3, 5 + 13 * i) for i in range(8)]
    engine = tiny_engine(num_blocks=24, max_model_len=12 * B, max_batch_tokens=32, kv_cache=kv_cache)
    requests = [request(p, max_tokens=20, presence_penalty=0.5) for p in prompts]
    answers = drive(engine, requests)
    for one in requests:
        alone, answer = oracle(list(one.token_ids), max_tokens=20, presence_penalty=0.5), answers[one.request_id, 0]
        assert answer.token_ids == alone.token_ids
        assert (answer.cache.miss, answer.cache.reused_tokens) == (MissReason.OFF, 0)
    sampled = request(prompts[1], n=3, temperature=1.0, seed=1, max_tokens=9)
    same = request(prompts[1], n=3, temperature=1.0, seed=1, max_tokens=9)
    samples, expected = drive(engine, [sampled]), drive(tiny_engine(), [same])
    for i in range(3):
        assert samples[sampled.request_id, i].token_ids == expected[same.request_id, i].token_ids


def test_contiguous_reserves_the_most_an_answer_can_need() -> None:
    engine = tiny_engine(num_blocks=40, max_model_len=16 * B, kv_cache="contiguous")
    for i in range(4):
        engine.submit(request(words(i, 5), max_tokens=4))
    engine.step()
    assert len(engine.scheduler.running) == 2, "two times 16 blocks fit into 40"
    for seq in engine.scheduler.running:
        ids = seq.lease.leases[0].block_ids
        assert ids == list(range(ids[0], ids[0] + 16)), "side by side in memory"
    drive(engine, [], exact=False)


def test_off_recomputes_every_token_at_every_step() -> None:
    engine = tiny_engine(kv_cache="off")
    report = ask(engine, words(1, 20), max_tokens=5).cache
    assert engine.stats.forward_tokens == 20 + 21 + 22 + 23 + 24
    assert report.computed_tokens == 20
    assert report.recomputed_tokens == 20 + 21 + 22 + 23


def test_more_samples_than_seats() -> None:
    engine = tiny_engine(num_blocks=40, max_num_seqs=3)
    one = request(words(1, B + 3), n=10, temperature=1.0, seed=5, max_tokens=20)
    answers = drive(engine, [one])
    roomy = request(words(1, B + 3), n=10, temperature=1.0, seed=5, max_tokens=20)
    same = drive(tiny_engine(), [roomy])
    for i in range(10):
        assert answers[one.request_id, i].token_ids == same[roomy.request_id, i].token_ids


def test_a_hit_lost_before_it_was_used_counts_as_computed_again() -> None:
    """Preempted before its first chunk, a sequence loses the blocks that it hit; drive() checks the accounts."""
    preempted = 0
    for num_blocks in range(13, 18):
        engine = tiny_engine(num_blocks=num_blocks, max_batch_tokens=4, max_num_seqs=4)
        shared = words(1, 5 * B)
        ask(engine, [*shared, 1], max_tokens=1)
        older = [request(words(10 + i, B), max_tokens=40) for i in range(2)]
        hit = request([*shared, 7, 8], max_tokens=1)
        answers = drive(engine, [*older, request(words(50, 4 * B), max_tokens=1), hit])
        report = answers[hit.request_id, 0].cache
        preempted += report.device_tokens > 0 and report.recomputed_tokens > 0
    assert preempted > 0


def test_samples_without_a_seat_account_for_what_they_compute_again() -> None:
    for prefix_cache in (True, False):
        engine = tiny_engine(max_num_seqs=1, prefix_cache=prefix_cache)
        one = request(words(1, 3 * B + 5), n=6, temperature=1.0, seed=1, max_tokens=4)
        answers = drive(engine, [one])
        again = sum(answers[one.request_id, i].cache.recomputed_tokens for i in range(6))
        assert again == engine.stats.recomputed_tokens > 0


def test_prompt_logprobs_of_many_requests_share_one_bound() -> None:
    engine = tiny_engine(max_num_seqs=8)
    rows = []
    run = engine.run

    def counting(chunks):
        logits = run(chunks)
        rows.append(logits.shape[0])
        return logits

    engine.run = counting
    drive(engine, [request(words(i, 100), max_tokens=1, prompt_logprobs=0) for i in range(8)])
    assert max(rows) <= MAX_PROMPT_LOGPROB_TOKENS + 8


class Poisoned:
    """A model whose logits for one position are not finite."""

    def __init__(self, model, position: int) -> None:
        self.model, self.position = model, position

    def forward(self, batch):
        logits = self.model.forward(batch).clone()
        logits[batch.positions[batch.logits_rows] == self.position] = float("nan")
        return logits


def test_numbers_that_are_not_finite_end_one_request_and_leave_nothing_behind() -> None:
    engine = tiny_engine()
    healthy = engine.model
    engine.model = Poisoned(healthy, position=3 * B - 1)
    bad, good = request(words(1, 3 * B)), request(words(2, 20))
    for one in (bad, good):
        engine.submit(one)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    failures = [output for output in outputs if isinstance(output, Failure)]
    assert [failure.request_id for failure in failures] == [bad.request_id]
    assert "not finite" in failures[0].message
    assert len([o for o in outputs if o.request_id == good.request_id]) == 16, "the other one goes on"
    assert engine.pool.num_free == engine.pool.num_blocks
    engine.model = healthy
    assert ask(engine, words(1, 3 * B)).cache.reused_tokens == 0, "its blocks are forgotten"


def test_a_fault_in_one_request_ends_that_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()
    bad, good = request(words(1, 20), seed=99, temperature=1.0), request(words(2, 20))
    sample = sampler.sample

    def faulty(logits, params, *rest):
        if params.seed == 99:
            raise IndexError("a bug")
        return sample(logits, params, *rest)

    monkeypatch.setattr(sampler, "sample", faulty)
    with EngineClient(engine) as client:
        with pytest.raises(GenerationError, match="a bug"):
            list(client.stream(bad))
        assert len(list(client.stream(good))) == 16
        assert client.failure is None
    assert engine.pool.num_free == engine.pool.num_blocks


def test_a_stop_string_that_is_a_special_token() -> None:
    engine = scripted_engine([*b"ab", 258, *b"cd"])
    engine._special_ids = {"<pad>": 258}
    answer = ask(engine, words(1, 5), stop=("<pad>",), max_tokens=5)
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("ab", "stop", "<pad>")


def test_clear_forgets_every_prefix() -> None:
    engine = tiny_engine()
    ask(engine, words(1, 3 * B))
    engine.clear()
    assert ask(engine, words(1, 3 * B)).cache.reused_tokens == 0
    assert ask(engine, words(1, 3 * B)).cache.reused_tokens == 3 * B - 1


def test_aborting_twice_or_something_unknown_is_harmless() -> None:
    engine = tiny_engine()
    one = request(words(1, B), max_tokens=500)
    engine.submit(one)
    engine.step()
    for request_id in (one.request_id, one.request_id, "nobody"):
        engine.abort(request_id)
    outputs = engine.step()
    assert [o.finish_reason for o in outputs] == ["abort"]
    assert engine.pool.num_free == engine.pool.num_blocks


def test_ends_of_an_answer() -> None:
    script = list(b"abc")
    ended = ask(scripted_engine(script), words(1, 5), ignore_eos=False, max_tokens=50)
    assert (ended.text, ended.finish_reason, ended.token_ids[-1]) == ("abc", "stop", 257)
    by_id = ask(scripted_engine(script), words(1, 5), stop_token_ids=(ord("b"),), max_tokens=50)
    assert (by_id.token_ids, by_id.finish_reason, by_id.stop_reason) == ([97, 98], "stop", 98)
    cut = ask(scripted_engine(script), words(1, 5), max_tokens=2)
    assert (cut.text, cut.finish_reason) == ("ab", "length")
