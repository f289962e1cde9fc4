"""G1: a hit never changes an answer. 2,000 requests of random traffic against the same engine that reuses nothing.

tools/prove.py runs the same with more.
"""

from collections.abc import Callable

import pytest
from harness import canary
from harness.differential import SMOLLM2, TINY, Subject, Tally, prove
from harness.engines import BLOCK, ask, words

from kvire.core.keys import block_keys
from kvire.engine.engine import Engine

EPISODE = 50  # requests


def proven(subject: Subject, requests: int, *, deterministic: bool, seed: int) -> Tally:
    tally = Tally()
    for first in range(0, requests, EPISODE):
        tally.add(prove(subject, seed + first, min(EPISODE, requests - first), deterministic=deterministic))
    assert tally.requests == requests
    return tally


@pytest.mark.parametrize(("deterministic", "requests"), [(True, 700), (False, 1100)])
def test_tiny_model(*, deterministic: bool, requests: int) -> None:
    tally = proven(TINY, requests, deterministic=deterministic, seed=1000)
    assert not tally.faults, tally.faults[:3]
    assert tally.reused_tokens > 0.1 * tally.prompt_tokens, "there was something that could go wrong"
    assert min(tally.evictions, tally.preemptions, tally.copies_on_write, tally.cancelled, tally.blocks_compared) > 0
    assert tally.harmless <= (0 if deterministic else 0.02 * requests)


@pytest.mark.model
@pytest.mark.parametrize(("deterministic", "requests"), [(True, 120), (False, 80)])
def test_smollm2(*, deterministic: bool, requests: int) -> None:
    tally = proven(SMOLLM2, requests, deterministic=deterministic, seed=2000)
    assert not tally.faults, tally.faults[:3]
    assert tally.reused_tokens > 0.1 * tally.prompt_tokens, "there was something that could go wrong"
    assert min(tally.evictions, tally.copies_on_write, tally.blocks_compared) > 0
    assert tally.harmless <= (0 if deterministic else 0.05 * requests)


@pytest.mark.parametrize(
    "build",
    [
        TINY.build,
        canary.secret_engine,
        pytest.param(SMOLLM2.build, marks=pytest.mark.model),
    ],
    ids=["tiny", "secrets", "smollm2"],
)
def test_sensitivity(build: Callable[..., Engine]) -> None:
    """Zeroing any one cached block moves the next logits: wrong KV cannot go unnoticed."""
    engine = build(num_blocks=16)
    prompt = words(0, 4 * BLOCK + 5)
    for at in range(3, len(prompt), 7):
        prompt[at] = at % 7  # secrets, for the model that looks at nothing else
    ask(engine, prompt)
    clean = ask(engine, prompt, logprobs=20, max_tokens=1)
    assert clean.cache.reused_tokens >= 4 * BLOCK
    for key in block_keys(engine.root, prompt, BLOCK):
        slab = engine.paged.slabs[0][engine.pool.pools[0]._index[key].id]
        kept = slab.clone()
        slab.zero_()
        moved = ask(engine, prompt, logprobs=20, max_tokens=1)
        slab.copy_(kept)
        before, after = clean.logprobs[0].top, moved.logprobs[0].top
        assert before.keys() != after.keys() or max(abs(before[t] - after[t]) for t in before) > 1e-2
    assert ask(engine, prompt, logprobs=20, max_tokens=1).logprobs[0].top == pytest.approx(clean.logprobs[0].top)
