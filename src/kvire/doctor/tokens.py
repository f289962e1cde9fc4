"""Tokens of a prompt, and before a byte of it: estimated, or counted with a tokenizer."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvire.doctor.prompt import PART, TOKENS, parts_of_prompt
from kvire.doctor.reading.logs import LoggedRequest
from kvire.doctor.reading.render import TOKEN_ID_BYTES

# English text and JSON come to about four bytes a token in the common vocabularies; other scripts
# to fewer.
BYTES_PER_TOKEN = 4.0
TOKEN_IDS = PART + TOKENS.encode()


class Ruler(Protocol):
    """Tokens of one prompt."""

    @property
    def tokens(self) -> int:
        """Of the whole prompt."""

    def before(self, end_bytes: int) -> int:
        """Whole tokens in the prompt's first bytes."""


class Counter(Protocol):
    """Makes rulers; says in words how it counts."""

    def ruler(self, request: LoggedRequest) -> Ruler:
        """For one prompt; called once for each request, in the log's order."""

    def method(self) -> str:
        """For the report."""


@dataclass(frozen=True, slots=True)
class EstimatedRuler:
    """Equally many bytes per token in the whole prompt; its first lead_bytes make none."""

    tokens: int
    bytes_per_token: float
    lead_bytes: int = 0

    def before(self, end_bytes: int) -> int:
        """See Ruler."""
        return min(self.tokens, int(max(0, end_bytes - self.lead_bytes) / self.bytes_per_token))


class Estimate:
    """Bytes / 4 until a model's `usage` is known: a prompt with usage has exactly its tokens, one
    without gets the bytes per token of its model's earlier ones.
    """

    def __init__(self) -> None:
        self._seen: dict[str, list[int]] = {}  # model -> bytes, tokens
        self._requests = self._with_usage = 0

    def ruler(self, request: LoggedRequest) -> Ruler:
        """See Counter."""
        size_bytes = len(request.prompt.text)
        if request.prompt.text.startswith(TOKEN_IDS):
            return EstimatedRuler(size_bytes // TOKEN_ID_BYTES, TOKEN_ID_BYTES, len(TOKEN_IDS))
        seen = self._seen.setdefault(request.model, [0, 0])
        self._requests += 1
        if request.usage is not None and request.usage.prompt_tokens > 0 and not request.incomplete:
            self._with_usage += 1
            seen[0] += size_bytes
            seen[1] += request.usage.prompt_tokens
            return EstimatedRuler(request.usage.prompt_tokens, max(size_bytes, 1) / request.usage.prompt_tokens)
        ratio = seen[0] / seen[1] if seen[0] and seen[1] else BYTES_PER_TOKEN
        return EstimatedRuler(int(size_bytes / ratio), ratio)

    def method(self) -> str:
        """See Counter."""
        if not self._with_usage:
            return f"estimated: {BYTES_PER_TOKEN:g} bytes of UTF-8 a token (the log has no usage)"
        size_bytes, tokens = (sum(seen[i] for seen in self._seen.values()) for i in (0, 1))
        share = self._with_usage / self._requests
        return (
            f"from the log's usage for {share:.0%} of the requests, {size_bytes / tokens:.2f} bytes a token on "
            "average; where in a prompt a token lies, and the other requests, are estimated from that"
        )


@dataclass(frozen=True, slots=True)
class CountedRuler:
    """Converts bytes to tokens by the prompt's own tokens.

    ends: end of each token in the prompt, in bytes, ascending.
    """

    ends: Sequence[int]

    @property
    def tokens(self) -> int:
        """See Ruler."""
        return len(self.ends)

    def before(self, end_bytes: int) -> int:
        """See Ruler."""
        return bisect_right(self.ends, end_bytes)


class Tokenized:
    """Counts with a model's tokenizer.

    ends_of: the end of each token of a text, in characters.
    """

    def __init__(self, name: str, ends_of: Callable[[str], Sequence[int]]) -> None:
        self._name = name
        self._ends_of = ends_of

    def ruler(self, request: LoggedRequest) -> Ruler:
        """See Counter."""
        ends: list[int] = []
        for part in parts_of_prompt(request.prompt.text):
            text = part.text.decode("utf-8", "replace")
            ends += [part.content + offset for offset in _in_bytes(text, self._ends_of(text))]
        return CountedRuler(ends)

    def method(self) -> str:
        """See Counter."""
        return f"counted with the tokenizer of {self._name}, part by part, without a chat template's own tokens"


def _in_bytes(text: str, ends: Sequence[int]) -> Sequence[int]:
    if text.isascii():
        return ends
    sums = [0]
    for character in text:
        sums.append(sums[-1] + len(character.encode("utf-8", "surrogatepass")))
    return [sums[end] for end in ends]
