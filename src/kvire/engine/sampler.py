"""From logits to the next token.

Randomness is counter-based: the number drawn for a token depends on (seed, sample index, position)
only, so an answer does not depend on other requests or on preemption.
"""

from collections import Counter

import numpy as np
import torch
from torch import Tensor

from kvire.engine.request import SamplingParams, TokenLogprobs

# Likeliest tokens looked at first for top-p; almost always they hold the mass, and sorting a whole
# vocabulary takes milliseconds.
NUCLEUS_CANDIDATES = 256


def sample(
    logits: Tensor,
    params: SamplingParams,
    prompt: list[int],
    answer: Counter[int],
    seed: int,
    index: int,
    position: int,
) -> int:
    """Sample a token id.

    logits: float32 [vocab], unchanged.
    prompt, answer: tokens that penalties look at.
    """
    scores = penalised(logits, params, prompt, answer)
    if params.temperature == 0:
        return int(scores.numpy().argmax())
    # In float64 and from the largest score down, so that no temperature overflows.
    wide = scores.double()
    probs, ids = _candidates(torch.softmax((wide - wide.max()) / params.temperature, dim=-1), params)
    cumulative = probs.cumsum(0)
    draw = uniform(seed, index, position) * float(cumulative[-1])
    choice = int(torch.searchsorted(cumulative, draw, right=True))
    return int(ids[min(choice, ids.numel() - 1)])


def penalised(logits: Tensor, params: SamplingParams, prompt: list[int], answer: Counter[int]) -> Tensor:
    """Scores after logit_bias and penalties; `logits` itself if there are none.

    Repetition penalty: Keskar et al., arXiv 1909.05858; the others as the OpenAI API defines them.
    """
    if not needs_penalties(params):
        return logits
    scores = logits.clone()
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*prompt, *answer}))
        values = scores[seen]
        factor = params.repetition_penalty
        scores[seen] = torch.where(values > 0, values / factor, values * factor)
    if answer and (params.presence_penalty or params.frequency_penalty):
        ids = torch.tensor(list(answer.keys()))
        counts = torch.tensor(list(answer.values()), dtype=scores.dtype)
        scores[ids] -= params.presence_penalty + params.frequency_penalty * counts
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias.keys()))
        scores[ids] += torch.tensor(list(params.logit_bias.values()), dtype=scores.dtype)
    return scores


def needs_penalties(params: SamplingParams) -> bool:
    """Whether the scores differ from the model's logits."""
    return bool(
        params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty or params.logit_bias
    )


def uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) that depends on the three arguments only (Philox, counter-based)."""
    key = np.array([seed % 2**64, index], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=position)).random())


def token_logprobs(logits: Tensor, token_id: int, top: int) -> TokenLogprobs:
    """Log-probabilities of a token and of the likeliest ones.

    logits: float32 [vocab] of the raw model.
    top: how many likeliest tokens to list.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    values, ids = logprobs.topk(min(top, logprobs.numel())) if top else (logprobs[:0], logprobs[:0].long())
    best = {int(i): float(v) for i, v in zip(ids, values, strict=True)}
    return TokenLogprobs(token_id, float(logprobs[token_id]), best)


def _candidates(probs: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """(probabilities, token ids) of the tokens that top_k, top_p and min_p leave.

    top_k first, then top_p over the rest (renormalised), then min_p relative to the likeliest.
    """
    vocab = probs.numel()
    if params.top_k:
        values, ids = probs.topk(min(params.top_k, vocab))
    elif params.top_p < 1.0:
        values, ids = probs.topk(min(NUCLEUS_CANDIDATES, vocab))
        if float(values.sum()) < params.top_p:
            values, ids = probs.sort(descending=True)
    else:
        values, ids = probs, torch.arange(vocab)
    if params.top_p < 1.0:
        # Keep a token if the mass before it is below top_p: the one that crosses the line stays.
        total = float(values.sum()) if params.top_k else 1.0
        keep = values.cumsum(0) - values < params.top_p * total
        values, ids = values[keep], ids[keep]
    if params.min_p > 0.0:
        keep = values >= params.min_p * values.max()
        values, ids = values[keep], ids[keep]
    return values, ids
