"""kv_cache paged, contiguous and off, compared on the lengths of real conversations.

    python bench/kv_cache_modes.py [--rounds 2] [--json FILE] [--kv-memory 512MiB] [--requests 24]

The same memory and the same requests, all sent at once, in turn within each round. Memory is the
limit: contiguous reserves the model's whole context for every sequence, as caches without paging
do, so few run at once; paged gives each the blocks that it has filled. Prompts are random tokens,
new in every round: nothing is shared in either mode. `off` keeps nothing between steps and computes
all tokens for every new one: it runs the shortest of the conversations.

Answers are greedy in float32. Two modes put different sequences together in a step, so the last
bits of logits differ, and a near-tie may fall either way: where answers differ, the model is asked
how far apart its two likeliest tokens were at the first difference. In deterministic mode no answer
may differ.
"""

import argparse
import asyncio
import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

import reporting
from azure_lengths import CONVERSATIONS
from limits import Roofline
from reporting import Bar, figure, medians, ratios

from kvire import AsyncLLM
from kvire.models.resolve import resolve

MODEL = "smollm2"
MAX_MODEL_LEN = 8192  # what the model was made for: the default of an engine with room for it
MODES = ("paged", "contiguous")
SHORT_TOKENS = 140  # prompt and answer of the conversations that `off` runs
SHORT, EXACT = 3, 6  # how many run with the cache off, and in deterministic mode
LONGEST_EXACT = 300
TIE = 1e-3  # in log-probability: closer than this, rounding may decide (docs/architecture.md)

Lengths = Sequence[tuple[int, int]]
Prompts = list[list[int]]
Answers = list[tuple[int, ...]]


def main() -> None:
    options = _options()
    lengths = CONVERSATIONS[: options.requests]
    short = [pair for pair in CONVERSATIONS if sum(pair) <= SHORT_TOKENS][:SHORT]
    roofline = Roofline.measure(resolve(MODEL))
    rates, differing = {}, []
    for kv_memory in options.kv_memory:
        rates[kv_memory], ties = measure(kv_memory, lengths, MODES, options.rounds)
        differing += ties
    off_rates, ties = measure(options.kv_memory[-1], short, ("paged", "off"), options.rounds)
    differing += ties
    compared = exact(options.kv_memory[0])
    roofline = roofline.measured_again()
    table = [row for kv_memory, found in rates.items() for row in paged_rows(kv_memory, lengths, found, roofline)]
    table += [*off_rows(short, off_rates, roofline), *answer_rows(differing, compared)]
    reporting.write(
        options.json,
        {
            "machine": reporting.describe(),
            "limits": roofline.describe(),
            "max_model_len": MAX_MODEL_LEN,
            "lengths": lengths,
            "differing": differing,
            "table": table,
        },
    )


def measure(
    kv_memory: str, lengths: Lengths, modes: tuple[str, str], rounds: int
) -> tuple[dict[str, list[float]], list[dict[str, float]]]:
    """Output tokens a second by mode, one a round; and every answer that differs
    between the two.
    """
    rates: dict[str, list[float]] = defaultdict(list)
    differing = []
    with ExitStack() as stack:
        engines = {mode: AsyncLLM(MODEL, kv_cache=mode, **_engine(kv_memory)) for mode in modes}
        for llm in engines.values():
            stack.callback(llm.close)
            answer(llm, random_prompts(((64, 4),) * 4, 0), ((64, 4),) * 4)
        for i in range(1, rounds + 1):
            prompts, answers = random_prompts(lengths, i), {}
            for mode in modes if i % 2 else modes[::-1]:
                started = perf_counter()
                answers[mode] = answer(engines[mode], prompts, lengths)
                took = perf_counter() - started
                rates[mode].append(sum(map(len, answers[mode])) / took)
                print(f"{kv_memory}, round {i}, {mode}: {took:.0f} s, {rates[mode][-1]:.1f} tok/s", flush=True)
            differing += gaps(engines["paged"], prompts, *(answers[mode] for mode in modes))
    return rates, differing


def _engine(kv_memory: str) -> dict[str, Any]:
    return {"kv_memory": kv_memory, "max_model_len": MAX_MODEL_LEN}


def random_prompts(lengths: Lengths, seed: int) -> Prompts:
    rng = random.Random(seed)
    return [[rng.randrange(1000, 40000) for _ in range(prompt)] for prompt, _ in lengths]


def answer(llm: AsyncLLM, prompts: Prompts, lengths: Lengths) -> Answers:
    """All at once, each with the length that the trace gives it."""

    async def together() -> list[Any]:
        calls = [
            llm.generate(prompt, max_tokens=tokens, temperature=0, ignore_eos=True)
            for prompt, (_, tokens) in zip(prompts, lengths, strict=True)
        ]
        return await asyncio.gather(*calls)

    return [tuple(result.token_ids) for result in asyncio.run(together())]


def gaps(llm: AsyncLLM, prompts: Prompts, first: Answers, second: Answers) -> list[dict[str, float]]:
    """For every answer that differs: where, and how far apart the two likeliest tokens
    are there.
    """
    found = []
    for prompt, a, b in zip(prompts, first, second, strict=True):
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        if at is not None:
            call = llm.generate([*prompt, *a[:at]], max_tokens=1, temperature=0, ignore_eos=True, logprobs=2)
            top = sorted(asyncio.run(call).completions[0].logprobs[0].top.values())
            found.append({"prompt_tokens": len(prompt), "token": at, "gap": top[-1] - top[-2]})
    return found


def exact(kv_memory: str) -> tuple[int, int]:
    """Answers that differ between paged and contiguous in deterministic mode, and how many were
    compared.
    """
    lengths = [pair for pair in CONVERSATIONS if sum(pair) <= LONGEST_EXACT][:EXACT]
    prompts = random_prompts(lengths, 1)
    answers = []
    for mode in MODES:
        llm = AsyncLLM(MODEL, kv_cache=mode, deterministic=True, **_engine(kv_memory))
        try:
            print(f"deterministic, {mode}", flush=True)
            answers.append(answer(llm, prompts, lengths))
        finally:
            llm.close()
    return sum(a != b for a, b in zip(*answers, strict=True)), len(lengths)


def paged_rows(kv_memory: str, lengths: Lengths, rates: dict[str, list[float]], roofline: Roofline) -> list[Any]:
    limit = sum(tokens for _, tokens in lengths) / sum(least_s(pair, roofline) for pair in lengths)
    limit_is = "arithmetic of every token once"
    contiguous = medians({"contiguous": rates["contiguous"]}, "tok/s")
    what = f"{len(lengths)} conversations at once in {kv_memory}"
    return [
        figure(
            f"{what}: paged output", "tok/s", rates["paged"], baseline=contiguous, limit=limit, limit_is=limit_is
        ),
        figure(
            f"{what}: paged / contiguous", "x", ratios(rates["paged"], rates["contiguous"]), bar=Bar(">=", 2),
            limit=limit / statistics.median(rates["contiguous"]), limit_is=limit_is, baseline=contiguous,
        ),
    ]  # fmt: skip


def off_rows(lengths: Lengths, rates: dict[str, list[float]], roofline: Roofline) -> list[Any]:
    most = sum(prompt + tokens for prompt, tokens in lengths) / len(lengths)
    row = figure(
        f"{len(lengths)} conversations of {most:.0f} tokens: paged / off", "x", ratios(rates["paged"], rates["off"]),
        baseline=medians({"off": rates["off"]}, "tok/s"), limit_is="arithmetic with the cache off / with it",
        limit=sum(recompute_s(pair, roofline) for pair in lengths) / sum(least_s(pair, roofline) for pair in lengths),
    )  # fmt: skip
    return [row]


def answer_rows(differing: list[dict[str, float]], compared: tuple[int, int]) -> list[Any]:
    wide = [each for each in differing if each["gap"] > TIE]
    largest = max((each["gap"] for each in differing), default=0.0)
    ties = f"{len(differing)} differ in all, gap at most {largest:.1g}"
    wrong, total = compared
    return [
        figure(
            f"answers that differ between modes where the two likeliest tokens are more than {TIE:g} apart",
            "answers", [len(wide)], bar=Bar("<=", 0), baseline=ties,
        ),
        figure(f"the same in deterministic mode, of {total}", "answers", [wrong], bar=Bar("<=", 0)),
    ]  # fmt: skip


def least_s(pair: tuple[int, int], roofline: Roofline) -> float:
    """One conversation: its share of the arithmetic if every token is computed once, in steps as
    wide as one likes.
    """
    prompt, tokens = pair
    flops_of_one = roofline.prefill_s(prompt)
    wide = 64
    return flops_of_one + (tokens - 1) * roofline.decode_s(wide, prompt + tokens / 2) / wide


def recompute_s(pair: tuple[int, int], roofline: Roofline) -> float:
    """The same if everything before is computed again for every token."""
    prompt, tokens = pair
    return sum(roofline.prefill_s(prompt + i) for i in range(tokens))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=24, help=f"at most {len(CONVERSATIONS)}")
    parser.add_argument("--kv-memory", nargs="+", default=["512MiB"])
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
