"""The answers of transformers, token for token: SmolLM2 and Gemma 3, cold and warm, in mixed batches."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvire import LLM
from kvire.models.loader import load_model
from kvire.models.resolve import resolve

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(1200)]

REPORT = Path(__file__).parents[2] / "demo" / "report.md"
# Prompts by length, and where in the report they begin. The beginnings were chosen so that no greedy choice of the
# float32 answer is a near-tie (top two log-probabilities at least 0.03 apart): rounding KV to float16 moves logits
# by up to 0.02, so a nearer tie may fall either way, with or without a cache.
BEGINNINGS = {
    5: 410, 17: 29, 31: 410, 32: 410, 33: 3, 64: 53, 65: 53, 100: 333, 150: 333, 200: 29,
    256: 170, 300: 11, 400: 53, 500: 53, 640: 333, 800: 53, 1000: 11, 1300: 29, 1500: 170, 2000: 29,
}  # fmt: skip
LENGTHS = tuple(BEGINNINGS)
GEMMA_LENGTHS = (20, 500, 520, 700, 1100, 1500)  # its windows are 512 tokens
NEW_TOKENS = 64


def prompts(name: str, lengths: tuple[int, ...]) -> list[list[int]]:
    """Stretches of the report of exactly these lengths."""
    ids = load_model(resolve(name)).tokenizer(REPORT.read_text(encoding="utf-8"))["input_ids"]
    starts = [BEGINNINGS[n] if name == "smollm2" else 37 * i * (i % 2) for i, n in enumerate(lengths)]
    return [ids[start : start + n] for start, n in zip(starts, lengths, strict=True)]


def expected(name: str, many: list[list[int]]) -> list[list[int]]:
    """Greedy answers of transformers' own generate, each prompt alone."""
    model = load_model(resolve(name)).model
    answers = []
    for ids in many:
        prompt = torch.tensor([ids])
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        answers.append(out[0, len(ids) :].tolist())
    return answers


@pytest.fixture(scope="module")
def smollm2() -> tuple[list[list[int]], list[list[int]]]:
    many = prompts("smollm2", LENGTHS)
    return many, expected("smollm2", many)


@pytest.fixture(scope="module")
def gemma3() -> tuple[list[list[int]], list[list[int]]]:
    many = prompts("gemma3-270m", GEMMA_LENGTHS)
    return many, expected("gemma3-270m", many)


def answers_cold_and_warm(
    name: str, many: list[list[int]], **options: str
) -> Iterator[tuple[str, list[list[int]], int]]:
    with LLM(name, kv_memory="1GiB", **options) as llm:
        for state in ("cold", "warm"):
            results = llm.generate(many, max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
            yield state, [r.token_ids for r in results], sum(r.cache.reused_tokens for r in results)


@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
def test_smollm2(kv_dtype: str, smollm2: tuple[list[list[int]], list[list[int]]]) -> None:
    many, wanted = smollm2
    for state, got, reused in answers_cold_and_warm("smollm2", many, kv_dtype=kv_dtype):
        for ids, answer, want in zip(many, got, wanted, strict=True):
            assert answer == want, (state, len(ids))
        if state == "warm":
            assert reused == sum(n - 1 for n in LENGTHS), "all but each last token was reused"


@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
def test_gemma3_past_its_window(kv_dtype: str, gemma3: tuple[list[list[int]], list[list[int]]]) -> None:
    many, wanted = gemma3
    for state, got, _ in answers_cold_and_warm("gemma3-270m", many, kv_dtype=kv_dtype):
        for ids, answer, want in zip(many, got, wanted, strict=True):
            assert answer == want, (state, len(ids))
