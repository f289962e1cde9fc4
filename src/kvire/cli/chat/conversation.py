"""A chat as data: its messages, their share of the context, and the cost of dropping some."""

from dataclasses import dataclass, field
from typing import Any

WARN_SHARE = 0.8  # of the context, from which on the status line warns


@dataclass(slots=True)
class Conversation:
    """Messages, oldest first.

    llm: encodes them.
    max_tokens: longest answer.
    known: exact ids of the last prompt and answer; the next prompt begins with them if possible.
    """

    llm: Any
    system: str | None = None
    max_tokens: int = 256
    messages: list[dict[str, Any]] = field(default_factory=list)
    known: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.messages:
            self.clear()

    def clear(self) -> None:
        """Forget all turns; the system message stays."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self.known = ()

    @property
    def limit(self) -> int:
        """Tokens of prompt and answer together."""
        return int(self.llm.max_model_len)

    @property
    def reserve(self) -> int:
        """Tokens kept free for the next answer: its limit, at most a quarter of the context."""
        return min(self.max_tokens, self.limit // 4)

    def encoded(self, messages: list[dict[str, Any]] | None = None) -> tuple[int, ...]:
        """Token ids of the conversation up to where the next answer begins."""
        ids: tuple[int, ...] = self.prompt(messages).token_ids
        return ids

    def prompt(self, messages: list[dict[str, Any]] | None = None) -> Any:
        """The same as a ChatPrompt, which also has the number of `known` tokens that it drops."""
        return self.llm.continue_chat(self.messages if messages is None else messages, self.known)

    def fits(self, messages: list[dict[str, Any]]) -> bool:
        """Whether an answer of `reserve` tokens has room after these messages."""
        return len(self.encoded(messages)) + self.reserve <= self.limit

    def without_oldest_turns(self) -> tuple[list[dict[str, Any]], int, int]:
        """(messages left, turns dropped, cached tokens lost) after dropping the oldest turns.

        Everything after the first dropped turn moves: its KV no longer follows the same prefix and
        is computed again. To pay that price seldom, turns are dropped until half of the context is
        free.
        """
        before = self.encoded(self.messages[:-1])  # the chat so far; the last message is new
        head = [m for m in self.messages[:1] if m["role"] == "system"]
        turns = self.messages[len(head) :]
        dropped = 0
        while len(turns) > 1 and len(self.encoded(head + turns)) > self.limit // 2:
            turns = turns[_turn_length(turns) :]
            dropped += 1
        kept = head + turns
        block_size = self.llm.engine.config.block_size
        cached = len(before) // block_size if self.llm.engine.config.prefix_cache else 0
        still = _common_prefix(before, self.encoded(kept)) // block_size
        return kept, dropped, max(0, cached - still) * block_size


def _turn_length(messages: list[dict[str, Any]]) -> int:
    """Messages of the first turn: the user's, and everything up to the user's next one."""
    return next((i for i, m in enumerate(messages) if i and m["role"] == "user"), len(messages) - 1)


def _common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
