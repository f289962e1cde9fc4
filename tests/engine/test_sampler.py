"""Sampling against plain definitions, and randomness that depends on nothing but seed, sample and position."""

from collections import Counter

import pytest
import torch

from kvire.core.errors import RequestError
from kvire.engine import sampler
from kvire.engine.request import SamplingParams


def params(**options) -> SamplingParams:
    return SamplingParams(**options)


def draw(logits: torch.Tensor, count: int = 4000, **options) -> Counter[int]:
    p = params(**options)
    return Counter(sampler.sample(logits, p, [], Counter(), 1, 0, i) for i in range(count))


def test_greedy_takes_the_likeliest() -> None:
    logits = torch.tensor([0.0, 3.0, 2.0])
    assert sampler.sample(logits, params(temperature=0.0), [], Counter(), 1, 0, 0) == 1


def test_frequencies_follow_the_probabilities() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    seen = draw(logits)
    for token, share in enumerate((0.5, 0.3, 0.2)):
        assert seen[token] / 4000 == pytest.approx(share, abs=0.03)


def test_temperature_sharpens() -> None:
    seen = draw(torch.tensor([0.5, 0.3, 0.2]).log(), temperature=0.5)
    assert seen[0] / 4000 == pytest.approx(0.25 / 0.38, abs=0.03)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 1}, {0}),
        ({"top_p": 0.5}, {0, 1}),
        ({"top_p": 0.39}, {0}),
        ({"top_p": 0.71}, {0, 1, 2}),
        ({"min_p": 0.45}, {0, 1, 2}),
        ({"min_p": 0.8}, {0}),
        ({"top_k": 3, "top_p": 0.5}, {0, 1}),
    ],
)
def test_what_the_filters_keep(options: dict, kept: set[int]) -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert set(draw(logits, 1500, **options)) == kept


def test_a_flat_nucleus_wider_than_the_first_candidates() -> None:
    """top_p over a nearly flat vocabulary needs more candidates than are looked at first."""
    seen = draw(torch.zeros(1000), 3000, top_p=0.9)
    assert len(seen) > 2 * sampler.NUCLEUS_CANDIDATES
    assert max(seen) < 1000


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e-39, "top_p": 0.9},
        {"temperature": 5e-324, "min_p": 0.5},
        {"temperature": 100.0, "top_p": 1e-6},
        {"temperature": 1.0, "repetition_penalty": 0.01, "top_p": 0.9},
        {"temperature": 1e-30, "top_k": 1},
    ],
)
def test_extreme_parameters_still_choose_a_likely_token(options: dict) -> None:
    logits = torch.tensor([1.0, 9.0, 2.0, -50.0])
    token = sampler.sample(logits, params(**options), [0], Counter(), 1, 0, 5)
    assert token == (0 if "repetition_penalty" in options else 1)


def test_penalties_as_defined() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0, 1.0])
    answer = Counter({2: 3})
    scores = sampler.penalised(logits, params(repetition_penalty=2.0), [0, 1], answer)
    assert scores.tolist() == [1.0, -4.0, 0.5, 1.0]
    scores = sampler.penalised(logits, params(presence_penalty=0.5, frequency_penalty=0.25), [0, 1], answer)
    assert scores.tolist() == [2.0, -2.0, 1.0 - 0.5 - 0.75, 1.0]
    scores = sampler.penalised(logits, params(logit_bias={1: 5.0}), [], Counter())
    assert scores.tolist() == [2.0, 3.0, 1.0, 1.0]
    assert logits.tolist() == [2.0, -2.0, 1.0, 1.0], "the logits themselves are untouched"


def test_randomness_is_a_function() -> None:
    assert sampler.uniform(1, 2, 3) == sampler.uniform(1, 2, 3)
    drawn = {sampler.uniform(s, i, p) for s in (0, 1, -1, 2**63) for i in range(4) for p in range(50)}
    assert len(drawn) == 4 * 4 * 50
    assert all(0 <= u < 1 for u in drawn)


def test_logprobs_are_of_the_raw_model() -> None:
    logits = torch.tensor([1.0, 2.0, 3.0])
    entry = sampler.token_logprobs(logits, 0, 2)
    wanted = torch.log_softmax(logits, 0)
    assert entry.logprob == pytest.approx(float(wanted[0]))
    assert list(entry.top) == [2, 1]
    assert sampler.token_logprobs(logits, 0, 0).top == {}


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": "hot"},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"top_k": 2.5},
        {"min_p": 2},
        {"n": 0},
        {"n": 129},
        {"n": True},
        {"max_tokens": -1},
        {"max_tokens": 0},
        {"repetition_penalty": 0.0},
        {"logprobs": 21},
        {"seed": 2**70},
        {"stop": ("x" * 257,)},
        {"stop": ("",)},
        {"stop": tuple("abcdefghijklmnopq")},
        {"logit_bias": {1: float("inf")}},
        {"logit_bias": {1.5: 1.0}},
        {"logit_bias": {True: 1.0}},
        {"stop_token_ids": None},
        {"stop_token_ids": 5},
        {"stop_token_ids": (1.0,)},
        {"ignore_eos": "yes"},
        {"top_p": 1e-46},
        {"repetition_penalty": 1e-39},
        {"logit_bias": dict.fromkeys(range(2000), 1.0)},
    ],
)
def test_wrong_parameters_are_refused(options: dict) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**options)
    assert next(iter(options)) in str(error.value)
