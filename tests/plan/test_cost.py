"""Load, compute, or both at once: never predicted to be slower than computing, whatever the figures."""

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvire.plan.cost import LEAST_GAIN, LOAD_ALONE, Choice, PrefillSpeed, Speed, Way, choose

speeds = st.builds(Speed, st.floats(0, 10), st.floats(1, 1e12))
starts = st.integers(0, 5_000)
lengths = st.integers(1, 20_000)
sizes = st.integers(1, 1 << 34)


def prefill(token_s: float, context_s: float = 0.0) -> PrefillSpeed:
    speed = PrefillSpeed(token_s)
    speed.context_s = context_s
    return speed


prefills = st.builds(prefill, st.floats(1e-7, 1), st.floats(0, 1e-5))


@given(speeds, prefills, starts, lengths, sizes)
@example(Speed(10, 1), prefill(1e-7), 0, 1, 1 << 34)
@example(Speed(0, 1e12), prefill(1.0), 0, 1, 1)
def test_the_choice_is_never_predicted_to_be_slower_than_computing(speed, prefill, start, length, size_bytes):
    choice = choose(speed, prefill, start, start + length, size_bytes)
    assert choice.compute_s == prefill.seconds(start, start + length)
    assert choice.load_s == speed.seconds(size_bytes)
    match choice.way:
        case Way.COMPUTE:
            assert choice.seconds == choice.compute_s and choice.saved_s == 0
        case Way.LOAD:
            assert choice.seconds == choice.load_s <= LOAD_ALONE * choice.compute_s
        case Way.BOTH:
            assert choice.seconds <= (1 - LEAST_GAIN) * choice.compute_s
            last_s = choice.compute_s - prefill.seconds(start, start + length - 1)
            assert choice.seconds <= choice.load_s + last_s + 1e-9, "both at once is no slower than loading alone"


@given(speeds, prefills, starts, lengths, sizes, st.floats(1, 100))
def test_a_faster_tier_is_never_used_less(speed, prefill, start, length, size_bytes, factor):
    order = [Way.COMPUTE, Way.BOTH, Way.LOAD]
    faster = Speed(speed.latency_s / factor, speed.bytes_per_s * factor)
    slow, fast = (choose(each, prefill, start, start + length, size_bytes) for each in (speed, faster))
    assert order.index(fast.way) >= order.index(slow.way)
    if fast.way is slow.way:
        assert fast.seconds <= slow.seconds * (1 + 1e-9)


@given(prefills, starts, lengths, sizes)
def test_both_meet_where_the_two_ends_have_taken_equally_long(prefill, start, length, size_bytes):
    """Checked against trying every meeting point, on spans that are short enough for it."""
    length = min(length, 60)
    compute_s = prefill.seconds(start, start + length)
    speed = Speed(0.1 * compute_s, size_bytes / (0.5 * compute_s))
    choice = choose(speed, prefill, start, start + length, size_bytes)
    points = range(start, start + length + 1)
    best_s = min(
        max(prefill.seconds(start, at), speed.seconds(size_bytes * (start + length - at) // length)) for at in points
    )
    if choice.way is Way.BOTH:
        token_s = max(prefill.seconds(at, at + 1) for at in points)
        assert best_s - 1e-9 <= choice.seconds <= best_s + 2 * token_s + 1e-9


def test_each_way_where_it_belongs():
    """512 tokens that take one second to compute and 1 MB to load."""
    by_speed = {rate: choose(Speed(0.0, rate), prefill(1 / 512), 0, 512, 1 << 20).way for rate in (1e3, 1e6, 1e9)}
    assert by_speed == {1e3: Way.COMPUTE, 1e6: Way.BOTH, 1e9: Way.LOAD}
    assert choose(Speed(2.0, 1e9), prefill(1 / 512), 0, 512, 1 << 20).way is Way.COMPUTE, "it answers too late"
    half = choose(Speed(0.0, 1 << 20), prefill(1 / 512), 0, 512, 1 << 20)
    assert half == Choice(Way.BOTH, pytest.approx(0.5, abs=0.01), 1.0, 1.0)


@given(st.floats(1e-6, 1e-2), st.floats(0, 1e-6), st.integers(0, 2**32))
def test_the_fit_recovers_what_steps_cost(token_s, context_s, seed):
    rng, fitted, truth = random.Random(seed), PrefillSpeed(1.0), prefill(token_s, context_s)
    for _ in range(40):
        start, count = rng.randrange(4_000), rng.randrange(32, 512)
        fitted.measured(start, count, truth.seconds(start, start + count))
    assert fitted.samples == 40
    for start, stop in ((0, 512), (1_000, 1_100), (3_000, 4_096)):
        assert fitted.seconds(start, stop) == pytest.approx(truth.seconds(start, stop), rel=0.02)


def test_the_fit_survives_noise_and_follows_change():
    rng, fitted = random.Random(1), PrefillSpeed(1.0)
    for token_s in (1e-3, 4e-3):
        truth = prefill(token_s, 1e-7)
        for _ in range(200):
            start, count = rng.randrange(4_000), rng.randrange(32, 512)
            fitted.measured(start, count, truth.seconds(start, start + count) * rng.uniform(0.9, 1.1))
        assert fitted.seconds(0, 2_048) == pytest.approx(truth.seconds(0, 2_048), rel=0.1)


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 600), st.floats(1e-6, 10)), min_size=1, max_size=50))
def test_whatever_is_measured_a_longer_prompt_never_costs_less(steps):
    """Outliers bend the fit, but never below zero; the next decision must make sense all the same."""
    fitted = PrefillSpeed(2e-3)
    for start, count, seconds in steps:
        fitted.measured(start, count, seconds)
    assert fitted.token_s > 0 and fitted.context_s >= 0
    costs = [fitted.seconds(0, stop) for stop in (1, 100, 1_000, 10_000)]
    assert costs == sorted(costs) and costs[0] > 0
    assert fitted.seconds(500, 900) == pytest.approx(fitted.seconds(0, 900) - fitted.seconds(0, 500), rel=1e-6)


@given(prefills, starts, st.floats(1e-9, 1e4))
def test_a_chunk_takes_no_longer_than_was_asked_for_or_is_one_token(prefill, start, seconds):
    count = prefill.tokens_within(start, seconds)
    assert count >= 1
    if count > 1:
        at_the_start_s = prefill.token_s + start * prefill.context_s
        assert count * at_the_start_s <= seconds * (1 + 1e-9) < (count + 1) * at_the_start_s * (1 + 1e-9)


def test_time_until_so_many_bytes_have_come():
    assert Speed(0.5, 1e6).seconds(2_000_000) == 2.5
