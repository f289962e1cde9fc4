"""G1: nobody's secret appears in anybody else's answer: 40 clients, 20 turns, a pool of a fifth of what they need."""

import pytest
from harness.canary import (
    CLIENTS,
    TURNS,
    CanaryTally,
    SecretTokens,
    SecretWords,
    run_canaries,
    secret_engine,
    small_pool,
)
from harness.differential import smollm2_engine


def run_secret_tokens(turns: int = TURNS) -> CanaryTally:
    talk = SecretTokens()
    engine = secret_engine(small_pool(talk, CLIENTS, turns))
    return run_canaries(engine, talk, seed=1, clients=CLIENTS, turns=turns)


def test_no_foreign_secret_in_800_responses() -> None:
    tally = run_secret_tokens()
    assert (tally.responses, tally.foreign, tally.recalled) == (800, 0, 800)
    assert tally.reused_tokens > 0.2 * tally.prompt_tokens and tally.evictions > 0


@pytest.mark.model
def test_no_foreign_secret_from_smollm2() -> None:
    tokenizer = smollm2_engine(4).tokenizer
    talk = SecretWords(tokenizer)
    engine = smollm2_engine(small_pool(talk, 8, 5))
    tally = run_canaries(engine, talk, seed=1, clients=8, turns=5)
    assert (tally.responses, tally.foreign) == (40, 0)
    assert tally.recalled > 25, "it would say a foreign word if it saw one"
    assert tally.reused_tokens > 0 and tally.evictions > 0
