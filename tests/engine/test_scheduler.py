"""Fairness, limits and accounts of the scheduler, on the tiny model."""

import pytest
from harness.engines import BLOCK, ask, drive, oracle, request, scripted_engine, tiny_engine, words

from kvire.core.errors import GenerationError, QueueFullError, RequestError
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
    assert ask(engine, words(2, B)).cache.miss == MissReason.SHORTER_THAN_BLOCK
    assert ask(engine, prompt).cache.miss == MissReason.COMPLETE
    other = prompt[: 2 * B + 5] + words(3, 2 * B)
    report = ask(engine, other).cache
    assert (report.miss, report.miss_token, report.reused_tokens) == (MissReason.DIVERGED, 2 * B + 5, 2 * B)
    near = prompt[:7] + words(4, 2 * B)
    report = ask(engine, near).cache
    assert (report.miss, report.miss_token) == (MissReason.SHORTER_THAN_BLOCK, 7)
    ask(engine, words(5, 14 * B))
    report = ask(engine, prompt).cache
    assert (report.miss, report.miss_token) == (MissReason.EVICTED, 0)
    off = ask(tiny_engine(prefix_cache=False), prompt).cache
    assert (off.miss, off.reused_tokens) == (MissReason.OFF, 0)
    assert ask(engine, prompt, prompt_logprobs=0).cache.miss == MissReason.PROMPT_LOGPROBS


def test_generated_tokens_are_reused_in_the_next_turn() -> None:
    engine = tiny_engine()
    first = ask(engine, words(1, 3 * B), max_tokens=2 * B + 3)
    history = words(1, 3 * B) + first.token_ids
    answer = ask(engine, history + words(2, 9))
    assert answer.cache.reused_tokens == (len(history) - 1) // B * B
    assert answer.token_ids == oracle(history + words(2, 9)).token_ids


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
    for num_blocks in range(10, 24):
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
    assert ask(engine, words(1, 3 * B)).cache.reused_tokens == 2 * B


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
