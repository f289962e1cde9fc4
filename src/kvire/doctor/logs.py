"""Lines of a request log as requests. What a line is, is seen from its content, line by line.

A request's body may stand alone or be wrapped: {"request" | "body" | "input" | "params": {...}, "response": {...},
"usage": {...}, "timestamp": ...}, also twice (batch files). Other lines are prompts: a JSON string, {"prompt": ...},
or, in a file without JSON objects, simply text.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, islice
from typing import Any

from kvire.doctor import render
from kvire.doctor.prompt import Prompt

WRAPPERS = ("request", "request_body", "body", "input", "params", "kwargs")
TIMES = ("timestamp", "created", "created_at", "ts", "time", "start_time", "request_time")
# Fields by which a request goes on with what the provider keeps, or takes text from there, by the kind of body.
KEPT_BY_PROVIDER = {
    "responses": ("previous_response_id", "conversation", "session", "prompt"),
    "chat": ("session",),
    "completions": ("session",),
}
MOST_NESTED = 4
OPENAI_ROLES = frozenset(("system", "developer", "tool", "function"))
LOOK_AHEAD_LINES = 20
# Times in milli-, micro- and nanoseconds are known by their size: as seconds they would lie beyond the year 5000.
LATEST_S = 1e11
LARGEST_TIME = 1e21
NUMBER = re.compile(r"[0-9]+(?:\.[0-9]*)?")  # before ISO: "1712123012345" is also a moment of 1712


@dataclass(frozen=True, slots=True)
class Usage:
    """What the provider counted. cached_tokens: of the prompt's; None if it did not say. prompt_tokens: all of them,
    also where the API counts cached ones apart (Anthropic).
    """

    prompt_tokens: int
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One prompt of the log. line: its number, from 1. api: what its body looks like. sent_s: seconds since the epoch,
    None if the line does not say. incomplete: part of the prompt is kept by the provider, not in the log.
    """

    line: int
    api: str
    model: str
    prompt: Prompt
    sent_s: float | None = None
    usage: Usage | None = None
    incomplete: bool = False


@dataclass(frozen=True, slots=True)
class Malformed:
    """A line that is no request. reason: never quotes the line."""

    line: int
    reason: str


class _NotARequestError(ValueError):
    pass


def read_log(lines: Iterable[bytes]) -> Iterator[LoggedRequest | Malformed]:
    """Everything in a log but its empty lines. A body with several prompts gives several requests."""
    rest = iter(lines)
    first = list(islice(rest, LOOK_AHEAD_LINES))
    is_text = not any(_is_object(line) for line in first) and not _is_json_in_lines(first)
    for number, line in enumerate(chain(first, rest), 1):
        if not line.strip():
            continue
        try:
            yield from _requests(number, line, is_text=is_text)
        except (_NotARequestError, render.UnknownBodyError) as error:
            yield Malformed(number, str(error))
        except (TypeError, AttributeError, KeyError, RecursionError) as error:
            yield Malformed(number, f"a field has an unexpected type ({type(error).__name__})")


def _is_json_in_lines(lines: list[bytes]) -> bool:
    """Whether a file begins as one JSON value would that is not one line."""
    start = next((line.strip() for line in lines if line.strip()), b"")
    return start in {b"[", b"{"} or start.startswith(b"[{")


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _requests(number: int, line: bytes, *, is_text: bool) -> Iterator[LoggedRequest]:
    try:
        value = json.loads(line)
    except ValueError as error:
        if is_text and not line.lstrip().startswith(b"{"):
            yield LoggedRequest(number, "prompt", "", render.of_text(line.decode("utf-8", "replace")))
            return
        raise _NotARequestError("no JSON") from error
    except RecursionError as error:
        raise _NotARequestError("nested too deeply") from error
    if isinstance(value, str):
        yield LoggedRequest(number, "prompt", "", render.of_text(value))
    elif isinstance(value, list) and value and all(isinstance(one, dict) and "role" in one for one in value):
        yield LoggedRequest(number, "chat", "", render.of_chat({"messages": value}))
    elif isinstance(value, dict):
        yield from _from_object(number, value)
    elif is_text:
        yield LoggedRequest(number, "prompt", "", render.of_text(line.decode("utf-8", "replace")))
    else:
        raise _NotARequestError("JSON, but neither an object nor text")


def _from_object(number: int, value: dict[str, Any]) -> Iterator[LoggedRequest]:
    levels = [value]
    while not _is_body(levels[-1]) and len(levels) <= MOST_NESTED:
        levels.append(_unwrapped(levels[-1]))
    body = levels[-1]
    if not _is_body(body):
        raise _NotARequestError(f"no messages, prompt or input within {MOST_NESTED} wrappers")
    api = _api(body, levels)
    match api:
        case "anthropic":
            prompts = [render.of_anthropic(body)]
        case "chat":
            prompts = [render.of_chat(body)]
        case "responses":
            prompts = [render.of_responses(body)]
        case _:
            prompts = render.of_completion(body)
    answers = [answer for level in levels for answer in _answers(level)]
    usage = next((found for level in (*levels, *answers) if (found := _usage(level.get("usage")))), None)
    model = body.get("model") or next((one["model"] for one in (*levels, *answers) if one.get("model")), "")
    for prompt in prompts:
        yield LoggedRequest(
            number,
            api,
            str(model),
            prompt,
            _time(levels, answers),
            usage if len(prompts) == 1 else None,
            incomplete=any(body.get(name) for name in KEPT_BY_PROVIDER.get(api, ())),
        )


def _is_body(level: dict[str, Any]) -> bool:
    if isinstance(level.get("messages"), list) or isinstance(level.get("prompt"), (str, list)):
        return True
    return isinstance(level.get("input"), (str, list)) and not any(
        isinstance(level.get(name), (dict, str)) for name in WRAPPERS if name != "input"
    )


def _unwrapped(level: dict[str, Any]) -> dict[str, Any]:
    for name in WRAPPERS:
        inner = level.get(name)
        if isinstance(inner, str) and inner.lstrip().startswith("{"):
            try:
                inner = json.loads(inner)
            except ValueError as error:
                raise _NotARequestError(f"{name} is no JSON") from error
        if isinstance(inner, dict):
            return inner
    raise _NotARequestError("no messages, prompt or input in it, nor in a request inside it")


def _api(body: dict[str, Any], levels: list[dict[str, Any]]) -> str:
    if not isinstance(body.get("messages"), list):
        return "completions" if isinstance(body.get("prompt"), (str, list)) else "responses"
    url = next((str(level["url"]) for level in levels if level.get("url")), "")
    if (
        "system" in body
        or "anthropic_version" in body
        or url.endswith("/messages")
        or any("input_schema" in tool for tool in body.get("tools") or ())
    ):
        return "anthropic"
    if any(message.get("role") in OPENAI_ROLES or "tool_calls" in message for message in body["messages"]):
        return "chat"  # also for a claude model: gateways take it so
    looks = str(body.get("model", "")).startswith("claude") or any(map(_has_anthropic_blocks, body["messages"][:8]))
    return "anthropic" if looks else "chat"


def _has_anthropic_blocks(message: dict[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(
        isinstance(block, dict) and ("cache_control" in block or block.get("type") in {"tool_use", "tool_result"})
        for block in content
    )


def _answers(level: dict[str, Any]) -> Iterator[dict[str, Any]]:
    answer = level.get("response")
    for _ in range(MOST_NESTED):
        if not isinstance(answer, dict):
            return
        yield answer
        answer = answer.get("body")


def _usage(usage: Any) -> Usage | None:
    """OpenAI counts cached tokens among the prompt's; Anthropic counts three disjoint numbers; DeepSeek two."""
    if not isinstance(usage, dict):
        return None
    given = usage.get("prompt_tokens", usage.get("input_tokens"))
    if type(given) is not int or given < 0:
        return None
    if "cache_read_input_tokens" in usage or "cache_creation_input_tokens" in usage:
        read, written = usage.get("cache_read_input_tokens") or 0, usage.get("cache_creation_input_tokens") or 0
        return Usage(given + read + written, read)
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    cached = details.get("cached_tokens", usage.get("prompt_cache_hit_tokens"))
    return Usage(given, cached if isinstance(cached, int) else None)


def _time(levels: list[dict[str, Any]], answers: list[dict[str, Any]]) -> float | None:
    for level in (*levels, *answers):
        for name in TIMES:
            if (found := _seconds(level.get(name))) is not None:
                return found
    return None


def _seconds(value: Any) -> float | None:
    if isinstance(value, str):
        if NUMBER.fullmatch(value):
            return _seconds(float(value))
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            return None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < LARGEST_TIME:
        return None
    seconds = float(value)
    while abs(seconds) > LATEST_S:
        seconds /= 1000
    return seconds
