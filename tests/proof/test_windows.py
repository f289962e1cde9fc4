"""Windows and sinks: at every position, prefill and decode, cold and warm, what the model says without any cache."""

import pytest
import torch
from harness.engines import ask, drive, request, words
from harness.families import family_engine, family_model, family_oracle

FAMILIES = ("gemma3_text", "mistral", "gpt_oss")
LENGTHS = (10, 24, 25, 47, 90)  # the window is 24 tokens, a block has 16
NEW_TOKENS = 40
TOLERANCE_NATS = 5e-3


def uncached_logprobs(family: str, ids: list[int]) -> list[float]:
    """Log-probability of each token after the first, from one plain forward of the whole text."""
    with torch.inference_mode():
        logits = family_model(family)(torch.tensor([ids])).logits[0, :-1].float()
    return torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist()


def equals_the_uncached_forward(families: tuple[str, ...] = FAMILIES) -> None:
    for family in families:
        engine = family_engine(family, max_batch_tokens=20, max_num_seqs=8)
        prompts = [words(i, length) for i, length in enumerate(LENGTHS)]
        for turn in ("cold", "warm"):
            requests = [request(p, max_tokens=NEW_TOKENS, logprobs=0) for p in prompts]
            answers = drive(engine, requests)
            for one in requests:
                answer = answers[one.request_id, 0]
                expected = uncached_logprobs(family, [*one.token_ids, *answer.token_ids])[len(one.token_ids) - 1 :]
                got = [entry.logprob for entry in answer.logprobs]
                assert got == pytest.approx(expected, abs=TOLERANCE_NATS), (family, turn, len(one.token_ids))
                assert turn == "cold" or answer.cache.reused_tokens > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_uncached_forward(family: str) -> None:
    equals_the_uncached_forward((family,))


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_too(family: str) -> None:
    """Logprobs of a prompt's own tokens, in chunks."""
    prompt = words(9, 100)
    scored = ask(family_oracle(family, max_batch_tokens=20, max_num_seqs=8), prompt, max_tokens=0, prompt_logprobs=0)
    got = [entry.logprob for entry in scored.prompt_logprobs[1:]]
    assert got == pytest.approx(uncached_logprobs(family, prompt), abs=TOLERANCE_NATS)
