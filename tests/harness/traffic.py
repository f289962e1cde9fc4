"""Random traffic as clients make it: prompts that share prefixes, are asked again, and grow turn by
turn.

Everything follows from the seed and from the answers that came back.
"""

import random
from dataclasses import dataclass, field
from itertools import count

from kvire.engine.request import Request, SamplingParams

KINDS = {"fresh": 1, "again": 3, "branch": 4, "turn": 3}
REMEMBERED = 8  # earlier conversations that new prompts may continue
_numbers = count()


@dataclass(frozen=True)
class Shape:
    """How long things are.

    vocab: ids that prompts are made of.
    longest_prompt, longest_answer: in tokens.
    """

    vocab: int
    block_size: int
    longest_prompt: int
    longest_answer: int


@dataclass
class Traffic:
    """Makes requests; `ended` tells it of answers, which become the beginnings of later prompts."""

    rng: random.Random
    shape: Shape
    logprobs: int
    conversations: list[tuple[int, ...]] = field(default_factory=list)  # prompt + answer
    prompts: list[tuple[int, ...]] = field(default_factory=list)

    def next(self) -> Request:
        """The next request."""
        kind = self.rng.choices(list(KINDS), list(KINDS.values()))[0] if self.conversations else "fresh"
        prompt = getattr(self, "_" + kind)()
        self.prompts = [*self.prompts, prompt][-REMEMBERED:]
        return Request(f"traffic-{next(_numbers)}", prompt, self._params())

    def ended(self, request: Request, answer: list[int]) -> None:
        """Remember a finished conversation."""
        self.conversations = [*self.conversations, (*request.token_ids, *answer)][-REMEMBERED:]

    def _fresh(self) -> tuple[int, ...]:
        return self._words(self._length(self.shape.longest_prompt))

    def _again(self) -> tuple[int, ...]:
        return self.rng.choice(self.prompts)

    def _branch(self) -> tuple[int, ...]:
        """The beginning of an earlier conversation, cut anywhere, and something new."""
        base = self.rng.choice(self.conversations)
        kept = base[: self._length(min(len(base), self.shape.longest_prompt - 1))]
        return kept + self._words(self._length(self.shape.longest_prompt - len(kept)))

    def _turn(self) -> tuple[int, ...]:
        """A whole earlier conversation and the user's next words, if that is not too long."""
        base = self.rng.choice(self.conversations)
        if len(base) >= self.shape.longest_prompt:
            return self._branch()
        room = min(self.shape.block_size, self.shape.longest_prompt - len(base))
        return base + self._words(self.rng.randint(1, room))

    def _words(self, length: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(self.shape.vocab) for _ in range(length))

    def _length(self, longest: int) -> int:
        """1 to longest, mostly a block multiple or one beside it."""
        if self.rng.random() < 0.3:
            return self.rng.randint(1, longest)
        multiple = self.shape.block_size * self.rng.randint(1, max(1, longest // self.shape.block_size))
        return min(max(1, multiple + self.rng.choice((-1, 0, 1))), longest)

    def _params(self) -> SamplingParams:
        rng = self.rng
        options: dict[str, float] = {"temperature": 0.0}
        if rng.random() < 0.3:
            options = {"temperature": rng.choice((0.7, 1.0)), "seed": rng.randrange(2**32)}
            if rng.random() < 0.3:
                options["top_p"] = 0.9
        if rng.random() < 0.1:
            options |= {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
        longest = self.shape.longest_answer
        return SamplingParams(
            max_tokens=longest if rng.random() < 0.1 else rng.randint(1, max(1, longest // 2)),
            ignore_eos=rng.random() < 0.8,
            logprobs=self.logprobs,
            n=rng.choices((1, 2, 3, 4), (16, 2, 1, 1))[0],
            **options,
        )
