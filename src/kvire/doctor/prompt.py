"""A request's prompt as one run of bytes, in the provider's order of reading: prefixes are prefixes
of this run.

Each part begins with two bytes, PART and its kind: upper case for a new message, lower case for a
further part of the same one. Reasoning is a part before its message, so that leaving it out changes
nothing else. A prompt of plain text has no such mark, and is its own bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

PART = b"\x1e"
_PART, _NOT_PART = "\x1e", "\x1a"

TOOL, FORMAT, SYSTEM, SETTINGS = "T", "F", "S", "P"
USER, ASSISTANT, RESULT, OTHER = "U", "A", "O", "X"
REASONING, CALL, MEDIA, TOKENS = "R", "C", "I", "N"
KIND_NAMES = {
    TOOL: "tool definition",
    FORMAT: "response format",
    SYSTEM: "system prompt",
    SETTINGS: "settings",
    USER: "user",
    ASSISTANT: "assistant",
    RESULT: "tool result",
    OTHER: "other role",
    REASONING: "reasoning",
    CALL: "tool call",
    MEDIA: "image or file",
    TOKENS: "token ids",
}
# Anthropic's limit, and Bedrock's for its cachePoint.
MOST_BREAKPOINTS = 4
BEFORE_MESSAGES = frozenset((TOOL, FORMAT, SYSTEM, SETTINGS))


@dataclass(frozen=True, slots=True)
class LoggedPrompt:
    """One prompt.

    text: see above.
    breakpoints: (end in bytes, seconds to live) of each cache_control, ascending; None where the
        request's API has none.
    media: images and files, of which only a digest is in the text.
    refused_for: why the API refuses these breakpoints, so that nothing is cached; None if it takes
        them.
    """

    text: bytes
    breakpoints: tuple[tuple[int, int], ...] | None = None
    media: int = 0
    refused_for: str | None = None


class PromptWriter:
    """Puts a prompt together, part by part."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._size_bytes = 0
        self._breakpoints: list[tuple[int, int]] = []
        self._refused_for: str | None = None
        self.media = 0

    def add(self, kind: str, text: str, *, first: bool = True) -> None:
        """Add a part.

        first: whether a message (a tool, ...) begins with it.
        """
        if _PART in text:
            text = text.replace(_PART, _NOT_PART)
        part = f"{_PART}{kind if first else kind.lower()}{text}"
        self._parts.append(part)
        self._size_bytes += len(part) if part.isascii() else len(part.encode("utf-8", "surrogatepass"))

    def mark(self, ttl_s: int) -> None:
        """A cache breakpoint here. A second one at the same place changes nothing."""
        if self._breakpoints and self._breakpoints[-1][0] == self._size_bytes:
            return
        if self._breakpoints and self._breakpoints[-1][1] < ttl_s:
            self.refuse("a breakpoint for an hour stands behind one for five minutes")
        self._breakpoints.append((self._size_bytes, ttl_s))
        if len(self._breakpoints) > MOST_BREAKPOINTS:
            self.refuse(f"it has more than {MOST_BREAKPOINTS} breakpoints")

    def refuse(self, reason: str) -> None:
        """The API refuses the request for this; the first reason is kept."""
        self._refused_for = self._refused_for or reason

    def prompt(self, *, has_breakpoints: bool = False) -> LoggedPrompt:
        """The finished prompt.

        has_breakpoints: whether the API has them, also if there are none.
        """
        text = "".join(self._parts).encode("utf-8", "surrogatepass")
        if self._refused_for is not None:
            return LoggedPrompt(text, (), self.media, self._refused_for)
        breakpoints = tuple(self._breakpoints) if has_breakpoints or self._breakpoints else None
        return LoggedPrompt(text, breakpoints, self.media)


class PromptPart(NamedTuple):
    """A part of a prompt: its kind (upper case), its beginning and end (bytes, mark included), and
    its number among its like: tools and messages count from 1, messages without the parts before
    them.
    """

    kind: str
    start: int
    end: int
    number: int
    text: bytes

    @property
    def content(self) -> int:
        """Beginning of its text, in bytes of the prompt."""
        return self.end - len(self.text)

    @property
    def place(self) -> str:
        """In words: "tool 2", "system prompt", "message 3 (user)"."""
        if self.kind == TOOL:
            return f"tool {self.number}"
        if self.kind in BEFORE_MESSAGES or not self.number:
            return KIND_NAMES.get(self.kind, "prompt")
        return f"message {self.number} ({KIND_NAMES.get(self.kind, 'text')})"


def parts_of_prompt(text: bytes) -> list[PromptPart]:
    """The parts of a prompt's bytes; a prompt of plain text is one part of kind ""."""
    if not text.startswith(PART):
        return [PromptPart("", 0, len(text), 0, text)]
    return list(_parts(text))


def _parts(text: bytes) -> Iterator[PromptPart]:
    at = tools = messages = 0
    for piece in text.split(PART)[1:]:
        mark = piece[:1].decode("ascii", "replace")
        kind = mark.upper()
        if kind == TOOL:
            tools += 1
        elif kind not in (*BEFORE_MESSAGES, REASONING) and (mark.isupper() or not messages):
            messages += 1
        number = tools if kind == TOOL else 0 if kind in BEFORE_MESSAGES else messages + (kind == REASONING)
        yield PromptPart(kind, at, at + 1 + len(piece), number, piece[1:])
        at += 1 + len(piece)
