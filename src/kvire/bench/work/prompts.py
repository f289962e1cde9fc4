"""Prompts of words drawn with a seed, so that every server sees the same text, and how many tokens
they are.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvire.bench.client import ApiMessage
from kvire.core.errors import ConfigError

# Common English words: nearly one token each for most tokenizers, and no phrase that a model knows
# by heart.
VOCABULARY = (
    "anchor basket candle desert engine forest garden harbor island jacket kettle ladder market needle orange "
    "paper quarry river silver table umbrella valley window yellow bridge copper dinner evening flower ground hammer "
    "iron journey kitchen letter mountain number office picture question railway station ticket uncle village water "
    "winter summer morning afternoon minute second animal butter cotton doctor eagle finger guitar horse insect"
)


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One request.

    messages: the whole conversation.
    output_tokens: length of the answer.
    """

    messages: tuple[ApiMessage, ...]
    output_tokens: int

    @property
    def text(self) -> str:
        """What decides its KV, apart from what the chat template writes around each message."""
        return "".join(f"{message['role']}\n{message['content']}\n" for message in self.messages)


@dataclass(frozen=True, slots=True)
class Script:
    """Prompts that one client sends, each after the answer to the one before.

    start_s: when, where that is given.
    """

    prompts: tuple[BenchPrompt, ...]
    start_s: float | None = None


@dataclass(frozen=True, slots=True)
class TokenScale:
    """How long texts are in tokens.

    per_word: of VOCABULARY, with the space.
    head: of an empty conversation.
    """

    per_word: float
    head: float

    @classmethod
    def measure(cls, count: Callable[[Sequence[ApiMessage]], int]) -> "TokenScale":
        """Find how many tokens a word takes.

        count: tokens of a conversation, by a tokenizer or by a server's usage.

        Raises ConfigError for no count.
        """
        few, many = 16, 272
        short, long = (count((message("user", words(random.Random(n), n)),)) for n in (few, many))  # noqa: S311
        if short <= 0 or long <= short:
            raise ConfigError(
                f"the server counts {short} tokens in {few} words and {long} in {many}: no measure of length"
            )
        per_word = (long - short) / (many - few)
        return cls(per_word, short - few * per_word)

    def words(self, tokens: float) -> int:
        """How many words have about so many tokens; at least one."""
        return max(1, round(tokens / self.per_word))


@dataclass(frozen=True, slots=True)
class Writer:
    """Makes texts.

    nonce: of this run, so that no server has seen the texts before;
    seed: of the random draw.
    """

    scale: TokenScale
    seed: int
    nonce: str

    def text(self, tokens: float, *names: object) -> str:
        """About so many tokens, always the same for the same names."""
        return words(random.Random(f"{self.seed}/{names}"), self.scale.words(tokens))  # noqa: S311

    def document(self, tokens: float, *names: object) -> str:
        """The same behind a mark that no other text has, so that two documents part at once."""
        mark = hashlib.sha256(f"{self.nonce}/{self.seed}/{names}".encode()).hexdigest()[:8]
        return f"{mark} {self.text(tokens, *names)}"


def message(role: str, content: str) -> dict[str, str]:
    """As the API has it."""
    return {"role": role, "content": content}


def words(rng: random.Random, count: int) -> str:
    """Sentences of a dozen words."""
    known = VOCABULARY.split()
    return " ".join(rng.choice(known) + ("." if i % 12 == 11 else "") for i in range(count))
