"""Token counts of a prompt in a log: one row of FORMS for the names of each API and gateway.

Transcripts of agents (Claude Code, Codex) have answers with their counts, and never a whole
request.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Counts of the provider.

    prompt_tokens: of the whole prompt, also if the API counts cached ones apart (Anthropic).
    cached_tokens: of these, tokens read from a cache; None if the log does not say.
    written_tokens: of these, tokens written into a cache; 0 if the log does not say.
    """

    prompt_tokens: int
    cached_tokens: int | None
    written_tokens: int = 0


class UsageForm(NamedTuple):
    """Places of the counts in one kind of record.

    A dot leads into an object; of several fields the largest count holds.

    prompt: the prompt's tokens.
    cached: tokens read from a cache.
    written: tokens written into a cache.
    apart: whether `prompt` leaves out tokens read and written.
    """

    prompt: str
    cached: tuple[str, ...]
    written: tuple[str, ...] = ()
    apart: bool = False


# The first row of which `prompt` and one of the others are in a record reads it. Gateways mix
# forms: a record with `prompt_tokens` counts cached ones in it, also where Anthropic's two fields
# stand beside it (LiteLLM).
FORMS = (
    UsageForm(  # OpenAI chat, Azure, OpenRouter, vLLM, SGLang, LiteLLM; then DeepSeek; then Moonshot, Together
        "prompt_tokens",
        (
            "prompt_tokens_details.cached_tokens",
            "cache_read_input_tokens",
            "prompt_cache_hit_tokens",
            "cached_tokens",
        ),
        ("prompt_tokens_details.cache_write_tokens", "cache_creation_input_tokens"),
    ),
    UsageForm(  # OpenAI responses
        "input_tokens", ("input_tokens_details.cached_tokens",), ("input_tokens_details.cache_write_tokens",)
    ),
    UsageForm("input_tokens", ("input_token_details.cached_tokens",)),  # OpenAI realtime
    UsageForm(  # LangChain
        "input_tokens", ("input_token_details.cache_read",), ("input_token_details.cache_creation",)
    ),
    UsageForm("input_tokens", ("cache_read_tokens",), ("cache_write_tokens",)),  # pydantic-ai
    UsageForm("input_tokens", ("cached_input_tokens",)),  # Codex
    UsageForm(  # Anthropic
        "input_tokens", ("cache_read_input_tokens",), ("cache_creation_input_tokens",), apart=True
    ),
    UsageForm(  # Inspect
        "input_tokens", ("input_tokens_cache_read",), ("input_tokens_cache_write",), apart=True
    ),
    UsageForm(  # Bedrock Converse
        "inputTokens", ("cacheReadInputTokens",), ("cacheWriteInputTokens",), apart=True
    ),
    UsageForm(  # Bedrock's log of invocations
        "inputTokenCount", ("cacheReadInputTokenCount",), ("cacheWriteInputTokenCount",), apart=True
    ),
    UsageForm(  # Vercel's AI SDK 6
        "inputTokens", ("inputTokenDetails.cacheReadTokens",), ("inputTokenDetails.cacheWriteTokens",)
    ),
    UsageForm("inputTokens.total", ("inputTokens.cacheRead",), ("inputTokens.cacheWrite",)),  # one of its providers
    UsageForm("inputTokens", ("cachedInputTokens",)),  # Vercel's AI SDK 5
    UsageForm("promptTokenCount", ("cachedContentTokenCount",)),  # Gemini
    UsageForm("prompt_token_count", ("cached_content_token_count",)),  # Gemini's Python client
    UsageForm("native_tokens_prompt", ("native_tokens_cached",)),  # OpenRouter's record of a generation
    UsageForm(  # Langfuse
        "input",
        ("cache_read_input_tokens", "input_cached_tokens"),
        ("cache_creation_input_tokens", "input_cache_creation"),
        apart=True,
    ),
    UsageForm("prompt_n", ("cache_n",), apart=True),  # llama.cpp's timings
)
PROMPT_FIELDS = tuple(dict.fromkeys(form.prompt for form in FORMS))
# Where in a part of a line the record lies; else the part itself may be one.
PLACES = (
    "usage",
    "usage_metadata",
    "usageMetadata",
    "usage_details",
    "usageDetails",
    "token_usage",
    "metadata.usage_object",  # LiteLLM's rows of spending
    "providerMetadata.anthropic.usage",  # Vercel's AI SDK keeps the provider's own there
    "response_metadata.token_usage",
    "meta_info",
    "timings",
    "data",
)
TOTAL_FIELDS = ("total_tokens", "totalTokens")
ANSWER_FIELDS = ("output_tokens", "completion_tokens", "outputTokens")


def read_usage(record: Any) -> TokenUsage | None:
    """The counts of a record in any of FORMS; None if it counts no prompt."""
    if not isinstance(record, dict):
        return None
    for form in FORMS:
        given, read, written = (_count(record, fields) for fields in ((form.prompt,), form.cached, form.written))
        if given is not None and (read is not None or written is not None):
            beside = (read or 0) + (written or 0)
            leaves_out = form.apart or _leaves_out(record, given, beside)
            return TokenUsage(given + beside if leaves_out else given, read or 0, written or 0)
    given = _count(record, PROMPT_FIELDS)
    return None if given is None else TokenUsage(given, None)


def usage_in(parts: Iterable[dict[str, Any]]) -> TokenUsage | None:
    """The first record of a line with a count of cached tokens, else the first with a count of a
    prompt.
    """
    places = (place for part in parts for place in (*(_at(part, path) for path in PLACES), part))
    found = [usage for place in places if (usage := read_usage(place))]
    return next((usage for usage in found if usage.cached_tokens is not None), found[0] if found else None)


def _leaves_out(record: dict[str, Any], given: int, beside: int) -> bool:
    """Whether a count lacks the cached tokens that it should include: some clients pass on the
    provider's own count.

    A whole cannot be less than its parts; and a record that has the total of prompt and answer
    tells it.
    """
    if given < beside:
        return True
    total, answer = _count(record, TOTAL_FIELDS), _count(record, ANSWER_FIELDS)
    return beside > 0 and total is not None and answer is not None and total - answer == given + beside


def _count(record: dict[str, Any], paths: tuple[str, ...]) -> int | None:
    """The largest whole number at these places; None if there is none."""
    found = [value for path in paths if type(value := _at(record, path)) is int and value >= 0]
    return max(found, default=None)


def _at(record: dict[str, Any], path: str) -> Any:
    value: Any = record
    for field in path.split("."):
        value = value.get(field) if isinstance(value, dict) else None
    return value


# Fields of which one is in every line of such a file, beside `type`.
MARKS = ("sessionId", "uuid", "leafUuid", "messageId", "payload")


class Transcripts:
    """Reads the lines of one file, in order: Codex tells the session and the model once."""

    def __init__(self) -> None:
        self._session = ""

    def is_line(self, value: dict[str, Any]) -> bool:
        """Whether a line comes from a transcript."""
        return isinstance(value.get("type"), str) and any(mark in value for mark in MARKS)

    def answer(self, value: dict[str, Any]) -> tuple[str, TokenUsage] | None:
        """Name of a line's answer, and its counts; several lines may have the same answer.

        None if it counts nothing.

        Claude Code writes a line per block of an answer, each with the usage of the whole answer.
        Codex repeats its counts with every refresh of the display, and in the file of a session
        that continues another.
        """
        payload = value.get("payload")
        found = self._codex(value, payload) if isinstance(payload, dict) else _claude_code(value)
        return None if found is None or not found[1].prompt_tokens else found

    def _codex(self, value: dict[str, Any], payload: dict[str, Any]) -> tuple[str, TokenUsage] | None:
        if value["type"] == "session_meta":
            self._session = str(payload.get("id", ""))
        told = payload.get("info")
        if payload.get("type") != "token_count" or not isinstance(told, dict):
            return None
        last, total = told.get("last_token_usage"), told.get("total_token_usage")
        usage = read_usage(last)
        # Totals grow with each answer, so they name it. Those of a session's first are not yet its
        # own.
        session = self._session if last == total else ""
        return None if usage is None else (json.dumps([session, last, total], sort_keys=True), usage)


def _claude_code(value: dict[str, Any]) -> tuple[str, TokenUsage] | None:
    message = value.get("message")
    if value["type"] != "assistant" or not isinstance(message, dict):
        return None
    usage, name = read_usage(message.get("usage")), message.get("id")
    return None if usage is None or not isinstance(name, str) else (name, usage)
