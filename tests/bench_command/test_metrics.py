"""Each metric on made samples, against values worked out by hand."""

import random

import pytest

from kvire.bench.intervals import median_interval, quantile, ratio_interval
from kvire.bench.load import Loop
from kvire.bench.metrics import Slo, by_repeat, prefill_tokens_per_s, summarise
from kvire.bench.results import loaded_bytes_per_token
from kvire.bench.work.ideal import Seen, ceiling, reusable
from kvire.bench.work.prompts import BenchPrompt, Script, TokenScale, Writer, message
from kvire.core.errors import ConfigError
from kvire.core.spec import KVGroup, LayerKind
from kvire.plan.shape import Storage, group_bytes


def sample(repeat=1, ttft=0.5, tpot=0.05, out=11, prompt=100, cached=40, **more):
    tiers = {"device": cached, "memory": 0, "disk": 0, "remote": 0} if cached is not None else None
    return {
        "repeat": repeat, "sent_s": 0.0, "ttft_s": ttft, "tpot_s": tpot, "e2e_s": ttft + (tpot or 0) * (out - 1),
        "gaps_s": [tpot or 0] * (out - 1), "pieces": out, "prompt_tokens": prompt, "output_tokens": out,
        "cached_tokens": cached, "by_tier": tiers, "ideal_tokens": 50.0, "server": {}, "error": None,
    } | more  # fmt: skip


def one_pass(repeat=1, wall=2.0, cpu=0.1, late=0.0):
    return {"repeat": repeat, "wall_s": wall, "client_cpu": cpu, "late_s": late}


def test_times_are_medians_over_repeats_of_medians_within():
    samples = [
        sample(1, 1.0),
        sample(1, 2.0),
        sample(1, 9.0),
        sample(2, 4.0),
        sample(3, 6.0, error="timeout"),
        sample(3, 7.0),
    ]
    found = summarise(samples, [one_pass(i) for i in (1, 2, 3)], Slo())
    assert by_repeat(samples, "ttft_s") == {1: 2.0, 2: 4.0, 3: 7.0}
    assert (found["ttft_s"]["median"], found["ttft_s"]["low"], found["ttft_s"]["high"]) == (4.0, 2.0, 7.0)
    assert found["ttft_p95_s"] == 9.0
    assert (found["requests"], found["answered"], found["errors"]) == (6, 5, {"timeout": 1})


def test_throughput_goodput_and_user_rates():
    samples = [
        sample(ttft=0.5, tpot=0.05),
        sample(ttft=1.5, tpot=0.05),
        sample(ttft=0.5, tpot=0.2),
        sample(out=1, tpot=None),
    ]
    found = summarise(samples, [one_pass(wall=2.0)], Slo(ttft_s=1.0, tpot_s=0.1))
    assert found["tps_system"]["median"] == (11 + 11 + 11 + 1) / 2.0
    assert found["goodput_per_s"]["median"] == 2 / 2.0  # the first, and the one of a single token
    assert found["tps_user"] == pytest.approx(1 / 0.05)
    assert found["itl_s"] == {"p50": 0.05, "p99": 0.2, "n": 30}


def test_hit_rates_are_of_tokens_and_split_by_tier():
    on_disk = {"device": 10, "memory": 0, "disk": 290, "remote": 0}
    samples = [sample(prompt=100, cached=0), sample(prompt=300, cached=300, by_tier=on_disk, ideal_tokens=299.0)]
    found = summarise(samples, [one_pass()], Slo())
    assert found["hit_rate"] == 300 / 400 and found["ideal_hit_rate"] == 349 / 400
    assert found["hit_by_tier"] == {"device": 10 / 400, "memory": 0, "disk": 290 / 400, "remote": 0}
    silent = summarise([sample(cached=None)], [one_pass()], Slo())
    assert silent["hit_rate"] is None and silent["hit_by_tier"] is None


def test_ttft_is_split_as_far_as_the_server_tells():
    told = {"ttft_s": 0.4, "queue_s": 0.1, "load_s": 0.2, "prefill_s": None}
    found = summarise([sample(ttft=0.5, server=told)], [one_pass()], Slo())
    assert found["split"] == {"queue_s": 0.1, "load_s": 0.2, "prefill_s": None}
    assert found["outside_server_s"] == pytest.approx(0.1)


def test_a_client_that_takes_half_a_core_is_flagged():
    assert not summarise([sample()], [one_pass(cpu=0.5)], Slo())["client_saturated"]
    found = summarise([sample()], [one_pass(cpu=0.1), one_pass(2, cpu=0.51)], Slo())
    assert found["client_saturated"] and found["client_cpu"] == 0.51


def test_nothing_answered_is_no_figure():
    found = summarise([sample(error="connection")], [one_pass()], Slo())
    assert found["answered"] == 0 and "ttft_s" not in found


def test_prefill_speed_is_over_the_time_in_which_somebody_waited():
    samples = [sample(ttft=1.0, cached=0, sent_s=0.0), sample(ttft=3.0, cached=0, sent_s=1.0)]
    assert prefill_tokens_per_s(samples) == 200 / 4.0
    together = [sample(ttft=2.0, cached=0), sample(ttft=1.0, cached=0, sent_s=0.5)]
    assert prefill_tokens_per_s(together) == 200 / 2.0
    apart = [sample(ttft=1.0, cached=20, sent_s=0.0), sample(ttft=1.0, cached=0, sent_s=100.0)]
    assert prefill_tokens_per_s(apart) == 180 / 2.0, "nothing is computed while nobody asks"
    assert prefill_tokens_per_s([sample(error="timeout")]) is None


def test_windows_are_loaded_as_far_as_they_reach():
    """As `kvire plan` counts, which rounds each group up to blocks."""
    groups = (KVGroup(LayerKind.FULL, (0,), 2, 16, 16), KVGroup(LayerKind.SLIDING, (1, 2, 3), 2, 16, 16, window=64))
    told = [{"bytes_per_token": 4.0 * group.elements_per_token, "window": group.window} for group in groups]
    for tokens in (48, 1000):
        found = round(loaded_bytes_per_token(told, [sample(prompt=tokens)] * 3) * tokens)
        planned = sum(group_bytes(group, tokens, Storage("float32", 16)) for group in groups)
        assert found == 256 * tokens + 3 * 256 * min(tokens, 64)
        assert planned - 4 * 256 * 16 <= found <= planned
    assert loaded_bytes_per_token(None, [sample()]) is loaded_bytes_per_token(told, []) is None


@pytest.mark.parametrize(
    ("n", "low", "high", "coverage"),
    [(1, 1, 1, None), (2, 1, 2, 0.5), (5, 1, 5, 0.9375), (6, 1, 6, 0.96875), (9, 2, 8, 0.9609375)],
)
def test_order_statistics_of_the_median(n, low, high, coverage):
    """Coverages from the binomial distribution: 1 - 2 P(X < k), X ~ B(n, 1/2)."""
    found = median_interval([float(value) for value in range(n, 0, -1)])
    assert (found.low, found.high, found.coverage, found.n) == (low, high, coverage, n)
    assert found.median == (n + 1) / 2


def test_ratios_of_two_runs():
    found = ratio_interval([2.0, 2.2, 1.8, 2.1, 1.9], [1.0, 1.1, 0.9, 1.05, 0.95])
    assert found.median == 2.0 and found.low < 2.0 < found.high and found.coverage == 0.95
    assert found.low > 1.5 and found.high < 2.6
    same = ratio_interval([1.0] * 5, [1.0] * 5)
    assert (same.low, same.high) == (1.0, 1.0)
    assert ratio_interval([1.0] * 4, [2.0] * 5).coverage is None


def test_quantiles_are_values_that_were_measured():
    assert [quantile([4.0, 1.0, 3.0, 2.0], share) for share in (0.0, 0.25, 0.5, 0.51, 1.0)] == [1.0, 1.0, 2.0, 3.0, 4.0]


def test_the_ideal_is_the_longest_common_beginning():
    seen = Seen()
    for earlier in ((1, 2, 3, 4), (1, 2, 9), (5,)):
        seen.add(earlier)
    assert [seen.shared(units) for units in ((1, 2, 3, 7), (1, 2, 9, 9), (5, 5), (6,), ())] == [3, 3, 1, 0, 0]
    prompts = [BenchPrompt((message("user", text),), 1) for text in ("aaaa", "aabb", "zzzz")]
    tokens = {"aaaa": (1, 1, 1, 1), "aabb": (1, 1, 2, 2), "zzzz": (3, 3, 3, 3)}
    shares = reusable(prompts, [BenchPrompt((message("user", "zzzz"),), 1)], lambda p: tokens[p.messages[0]["content"]])
    assert shares == [0.0, 0.5, 0.75], "the last token is always computed"


def test_prompts_under_way_together_may_meet_each_other():
    prompts = [BenchPrompt((message("user", text),), 1) for text in ("aaaa", "aabb", "aaaa")]
    tokens = {"aaaa": (1, 1, 1, 1), "aabb": (1, 1, 2, 2)}

    def shares(*waits, before=()):
        return ceiling(prompts, waits, before, lambda prompt: tokens[prompt.messages[0]["content"]])

    assert shares((0.0, 1.0), (2.0, 3.0), (4.0, 5.0)) == [0.0, 0.5, 0.75]
    assert shares((4.0, 5.0), (2.0, 3.0), (0.0, 1.0)) == [0.75, 0.5, 0.0], "in the order in which they were sent"
    assert shares((0.0, 2.5), (2.0, 3.0), (4.0, 5.0)) == [0.5, 0.5, 0.75], "the second may have come first"
    assert shares((0.0, 1.0), (2.0, 3.0), (4.0, 5.0), before=[prompts[1]]) == [0.5, 0.75, 0.75]


def test_the_longest_beginning_is_found_among_many():

    rng = random.Random(3)
    made = [tuple(rng.randrange(3) for _ in range(rng.randrange(1, 9))) for _ in range(200)]
    seen = Seen()
    for i, units in enumerate(made):
        by_hand = max(
            (next((k for k in range(len(units)) if units[: k + 1] != old[: k + 1]), len(units)) for old in made[:i]),
            default=0,
        )
        assert seen.shared(units) == by_hand
        seen.add(units)


def test_arrivals_are_poisson_by_seed_and_a_closed_loop_has_none():
    scripts = [Script(())] * 4000
    assert Loop(4).starts_s(scripts) is None
    starts = Loop(1, rate_per_s=2.0, seed=5).starts_s(scripts)
    assert (
        starts == Loop(1, rate_per_s=2.0, seed=5).starts_s(scripts) != Loop(1, rate_per_s=2.0, seed=6).starts_s(scripts)
    )
    assert starts == sorted(starts) and starts[0] == 0.0
    assert starts[-1] == pytest.approx(2000, rel=0.1)
    assert Loop(1).starts_s([Script((), 1.5), Script((), 0.5)]) == [1.5, 0.5]


def test_text_lengths_follow_the_tokenizer():
    scale = TokenScale.measure(lambda messages: 7 + 2 * len(messages[0]["content"].split()))
    assert (scale.per_word, scale.head) == (2.0, 7.0)
    write = Writer(scale, seed=1, nonce="n")
    assert len(write.text(100, "a").split()) == 50 == len(write.document(100, "a").split()) - 1
    assert write.text(100, "a") == write.text(100, "a") != write.text(100, "b")
    assert write.text(50, "a") == " ".join(write.text(100, "a").split()[:25]), (
        "a shorter text is the longer one's beginning"
    )
    marks = {Writer(scale, 1, nonce).document(4, name).split()[0] for nonce in "ab" for name in "cd"}
    assert len(marks) == 4


@pytest.mark.parametrize("text", ["ttft=0", "tpot", "ttft=1,e2e=3", "ttft=x", "ttft=inf", "tpot=nan"])
def test_limits_that_mean_nothing_are_refused(text):
    with pytest.raises(ConfigError, match="--slo"):
        Slo.parse(text)


def test_limits_are_read():
    assert Slo.parse("tpot=0.2") == Slo(1.0, 0.2) and Slo.parse("ttft=3,tpot=1") == Slo(3.0, 1.0)
