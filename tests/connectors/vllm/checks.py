"""What tests and tools/vllm_check.py both ask of real engines, at any size: traffic, and engines that are killed."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

ROUNDING_NAT = 1e-3  # a choice closer than that may fall otherwise: products over other numbers of rows round otherwise
KILLED_WITHIN_S = 1.5

Start = Callable[[int], Any]  # an engine; the number counts them
Asked = tuple[list[int], list[int], list[float]]  # prompt, expected answer, and its gaps: see Driver.generate


def overlapping(
    count: int, seed: int, *, vocabulary: range = range(256), longest: int = 300, share: float = 0.8
) -> list[list[int]]:
    """Prompts of up to `longest` tokens; most begin with some of an earlier one, cut anywhere."""
    dice = random.Random(seed)
    found: list[list[int]] = []
    for _ in range(count):
        begin = dice.choice(found)[: dice.randrange(longest)] if found and dice.random() < share else []
        rest = dice.randrange(1, max(2, longest - len(begin)))
        found.append(begin + [dice.choice(vocabulary) for _ in range(rest)])
    return found


@dataclass
class Comparison:
    """Answers beside those of an engine without the store. wrong: other tokens, with no near-tie that explains them.
    near_ties: other tokens from a choice on whose two likeliest tokens were closer than ROUNDING_NAT.
    """

    requests: int = 0
    wrong: int = 0
    near_ties: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    worst: list[dict[str, Any]] = field(default_factory=list)

    def add(self, asked: Asked, answer: Sequence[int], cached: int) -> None:
        """One request."""
        prompt, expected, gaps = asked
        self.requests += 1
        self.prompt_tokens += len(prompt)
        self.reused_tokens += cached
        differs = next((i for i, (a, b) in enumerate(zip(answer, expected, strict=True)) if a != b), None)
        if differs is None:
            return
        is_tie = gaps[differs] < ROUNDING_NAT
        self.near_ties += is_tie
        self.wrong += not is_tie
        self.worst.append({"prompt_tokens": len(prompt), "token": differs, "gap_nat": gaps[differs], "reused": cached})


def compare(engine: Any, asked: Sequence[Asked], to: Comparison, *, at_once: int, max_tokens: int) -> None:
    """Ask an engine, some at once."""
    for start in range(0, len(asked), at_once):
        some = asked[start : start + at_once]
        answer = engine("generate", prompts=[prompt for prompt, *_ in some], max_tokens=max_tokens)
        for one, tokens, cached in zip(some, answer["tokens"], answer["cached"], strict=True):
            to.add(one, tokens, cached or 0)


def killed_at_random(
    start: Start, asked: Sequence[Asked], kills: int, *, max_tokens: int = 40, seed: int = 0
) -> Comparison:
    """Start an engine, compare some answers, kill it in the middle of others, and again; the last one answers all.

    Raises what a start raises that fails.
    """
    dice, found = random.Random(seed), Comparison()
    for number in range(kills):
        engine = start(number)
        compare(engine, dice.sample(asked, 6), found, at_once=6, max_tokens=max_tokens)
        engine.send("generate", prompts=[prompt for prompt, *_ in dice.sample(asked, 8)], max_tokens=max_tokens)
        time.sleep(dice.random() * KILLED_WITHIN_S)
        engine.kill()
    with start(kills) as last:
        compare(last, asked, found, at_once=len(asked), max_tokens=max_tokens)
    return found
