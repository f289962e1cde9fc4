"""Causes that part otherwise equal prompts, advice for each, and the parts of a diagnosis."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvire.doctor.reading.usage import TokenUsage
from kvire.doctor.rules import CacheRules, ReuseRules, Written


class Cause(StrEnum):
    """Why a prompt differs from an earlier one although the text after the difference is the same
    again.
    """

    TIME = "time stamp"
    RANDOM_ID = "random id"
    COUNTER = "counter"
    USER = "user name or id"
    TOOL_ORDER = "tools in another order"
    TOOL_SET = "other tools"
    JSON_FORM = "JSON written differently"
    REASONING = "reasoning dropped or changed"
    TRUNCATED = "history cut at the front"
    INSERTED = "text inserted before the history"
    MOVED_PASSAGES = "passages in another order"
    CONTEXT = "changing text before fixed text"
    SYSTEM = "changed system prompt"
    HISTORY = "changed history"
    WHITE_SPACE = "white space"
    MEDIA = "image or file"
    SETTINGS = "changed settings"
    MODEL = "another model"


ADVICE = {
    Cause.TIME: "Put the time at the end of the prompt (into the last message), or round it to the day.",
    Cause.RANDOM_ID: "Leave ids out of the prompt, or put them behind everything that stays the same; "
    "for traces there are headers and metadata fields.",
    Cause.COUNTER: "Put numbers that change per request behind everything that stays the same.",
    Cause.USER: "Put what is about the user behind the instructions that all users share.",
    Cause.TOOL_ORDER: "Send the tools in one fixed order, for example sorted by name.",
    Cause.TOOL_SET: "Send the same tools with every request and limit their use by tool_choice or by instruction; "
    "tools stand in front of everything else.",
    Cause.JSON_FORM: "Send JSON text back exactly as it came, or write it in one fixed form (sorted keys, the same "
    "separators).",
    Cause.REASONING: "Send earlier turns back as they were, reasoning included, or leave it out at once.",
    Cause.TRUNCATED: "Cut history rarely and by large steps (say, half of it), not by a message each turn; "
    "or summarise it at the end.",
    Cause.INSERTED: "Put what was looked up for this turn behind the history, beside the question.",
    Cause.MOVED_PASSAGES: "Send the same passages in one fixed order, for example by document id.",
    Cause.CONTEXT: "Put the fixed text first and what changes behind it.",
    Cause.SYSTEM: "Keep one system prompt, and put what changes into the last message.",
    Cause.HISTORY: "Append to the history; do not edit it.",
    Cause.WHITE_SPACE: "Send earlier text back byte for byte: no trimming, no change of line ends.",
    Cause.MEDIA: "Send the same image or file by the same bytes or the same URL, and put new ones at the end.",
    Cause.SETTINGS: "Keep tool_choice, thinking and the response format the same within a conversation.",
    Cause.MODEL: "Caches are per model: stay with one model within a conversation.",
}


MOST_SHOWN_BYTES = 60


@dataclass(frozen=True, slots=True)
class Example:
    """First place of a cause.

    line, other_line: of the logs, whose names are empty where there is only one.
    character: in the part that `place` names, from 0.
    token: how many tokens of the prompt come before it.
    piece, other_piece: the text there in the two prompts.
    """

    log: str
    line: int
    other_log: str
    other_line: int
    place: str
    character: int
    token: int
    piece: str
    other_piece: str


@dataclass(slots=True)
class Finding:
    """One cause in one kind of place, or several close together.

    tokens: what prompts would have shared without it, beyond what they did share, if the causes
        before it in the same prompts are mended too.
    by_rules: of these, what each provider's cache would have given back;
    written: how many more would have been written into it.
    first_token, last_token: where in prompts it stood, counted as in Example.
    """

    causes: tuple[Cause, ...]
    where: str
    example: Example
    requests: int = 0
    tokens: int = 0
    by_rules: list[int] = field(default_factory=list)
    written: list[Written] = field(default_factory=list)
    first_token: int = 0
    last_token: int = 0

    @property
    def advice(self) -> str:
        """Advice for mending the cause."""
        return " ".join(ADVICE[cause] for cause in self.causes)


@dataclass(slots=True)
class RuleTotals:
    """Tokens of all prompts under one provider's rules, and how many mark too little; see
    ReuseRules.
    """

    rules: CacheRules
    cached: int = 0
    too_old: int = 0
    no_breakpoint: int = 0
    too_short: int = 0
    partial_step: int = 0
    written: Written = field(default_factory=Written)
    marks_too_little: int = 0

    def add(self, reuse: ReuseRules) -> None:
        """One more prompt."""
        self.cached += reuse.tokens
        self.too_old += reuse.too_old
        self.no_breakpoint += reuse.no_breakpoint
        self.too_short += reuse.too_short
        self.partial_step += reuse.partial_step
        self.written = self.written.plus(reuse.written)
        self.marks_too_little += reuse.marks_too_little


@dataclass(slots=True)
class MeasuredLog:
    """Sums of `usage` over the requests with a count of cached tokens.

    ideal_tokens: tokens that they could have.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    written_tokens: int = 0
    ideal_tokens: int = 0

    def add(self, usage: TokenUsage, ideal_tokens: int = 0) -> None:
        """One more request."""
        self.requests += 1
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens or 0
        self.written_tokens += usage.written_tokens
        self.ideal_tokens += ideal_tokens


@dataclass(slots=True)
class Refused:
    """Requests refused by their API for one reason.

    log, line: of the first.
    """

    log: str
    line: int
    requests: int = 0


@dataclass(slots=True)
class Totals:
    """The whole log.

    malformed: lines;
    malformed_first: the first of them, log, line and reason.
    incomplete: requests whose prompt is partly kept by the provider; not in any figure.
    media: images and files, whose tokens are not known.
    backwards: requests with an earlier time than the one before.
    first_s, latest_s: the earliest and latest time;
    last_s: of the last request.
    refused: by reason, requests refused by their API; nothing of them is cached.
    measured: by the usage of the requests;
    without_prompt: of requests with nothing but their usage in the log.
    """

    requests: int = 0
    prompt_tokens: int = 0
    prompt_bytes: int = 0
    ideal_tokens: int = 0
    malformed: int = 0
    malformed_first: list[tuple[str, int, str]] = field(default_factory=list)
    incomplete: int = 0
    media: int = 0
    timed: int = 0
    backwards: int = 0
    first_s: float | None = None
    latest_s: float | None = None
    last_s: float | None = None
    with_breakpoints_api: int = 0
    without_breakpoint: int = 0
    refused: dict[str, Refused] = field(default_factory=dict)
    apis: dict[str, int] = field(default_factory=dict)
    models: dict[str, int] = field(default_factory=dict)
    measured: MeasuredLog = field(default_factory=MeasuredLog)
    without_prompt: MeasuredLog = field(default_factory=MeasuredLog)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings of an examination.

    findings: most tokens first.
    token_method: how tokens were counted.
    forgotten_bytes: text that had to make room in the index; if there is any, shares are lower
        bounds.
    """

    totals: Totals
    by_rules: Sequence[RuleTotals]
    findings: Sequence[Finding]
    token_method: str
    forgotten_bytes: int
    memory_bytes: int


def counted(count: int, noun: str, plural: str = "") -> str:
    """1 request, 2,000 requests."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def masked(text: str) -> str:
    """The shape of a piece: digits as 9, letters as a and A."""
    return "".join(
        "9" if one.isdigit() else ("A" if one.isupper() else "a") if one.isalpha() else one for one in shortened(text)
    )


def shortened(text: str) -> str:
    """At most MOST_SHOWN_BYTES characters, on one line."""
    line = "".join(one if one.isprintable() else "\N{MIDDLE DOT}" for one in text)
    return line if len(line) <= MOST_SHOWN_BYTES else line[: MOST_SHOWN_BYTES - 1] + "\N{HORIZONTAL ELLIPSIS}"
