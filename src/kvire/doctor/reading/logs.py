"""Lines of a request log as requests. The content of each line decides its kind.

A request's body may stand alone or be wrapped: {"request" | "body" | "input" | "params": {...},
"response": {...}, "usage": {...}, "timestamp": ...}, also twice (batch files), also as JSON in a
string. Other lines are prompts: a JSON string, {"prompt": ...}, or, in a file without JSON objects,
simply text. A file may also be one JSON array of these, or have them written over several lines.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, islice
from typing import Any

from kvire.doctor.prompt import LoggedPrompt
from kvire.doctor.reading import render
from kvire.doctor.reading.bodies import api_of, prompts_of_body
from kvire.doctor.reading.lines import LONGEST_LINE_BYTES, TOO_LONG, json_values
from kvire.doctor.reading.usage import TokenUsage, Transcripts, usage_in

WRAPPERS = (
    "request",
    "request_body",
    "body",
    "input",
    "params",
    "kwargs",
    "proxy_server_request",  # LiteLLM
    "inputBodyJson",  # Bedrock's log of invocations
)
ANSWERS = ("response", "output", "body", "outputBodyJson", "result", "message", "llm_output", "kwargs", "data")
# Fields that some logs write as JSON in a string.
MAY_BE_TEXT = ("messages", "contents", "tools", "metadata", "response", "usage", "model_parameters")
TIMES = ("timestamp", "created", "created_at", "ts", "time", "start_time", "startTime", "request_time")
# Fields by which a request goes on with what the provider keeps, or takes text from there, by the
# kind of body.
KEPT_BY_PROVIDER = {
    "responses": ("previous_response_id", "conversation", "session", "prompt"),
    "chat": ("session",),
    "completions": ("session",),
    "gemini": ("cachedContent", "cached_content"),
}
MOST_NESTED = 4
ARRAY_OF_OBJECTS = re.compile(rb"\s*\[\s*(\{|$)")
GEMINI_URL = re.compile(r"models/([^/:]+):")
LOOK_AHEAD_LINES = 20
# Times in milli-, micro- and nanoseconds are known by their size: as seconds they would lie beyond
# the year 5000.
LATEST_S = 1e11
LARGEST_TIME = 1e21
NUMBER = re.compile(r"[0-9]+(?:\.[0-9]*)?")  # before ISO: "1712123012345" is also a moment of 1712


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One prompt of a log.

    line: its number, from 1; in a file with one JSON array, the element's number.
    api: the shape of its body.
    sent_s: seconds since the epoch, None if the line does not say.
    incomplete: part of the prompt is kept by the provider, not in the log.
    """

    line: int
    api: str
    model: str
    prompt: LoggedPrompt
    sent_s: float | None = None
    usage: TokenUsage | None = None
    incomplete: bool = False


@dataclass(frozen=True, slots=True)
class LoggedUsage:
    """Counted tokens of a request without its prompt in the log.

    answer: names the answer; several lines, also of several files, may have the same one.
    """

    line: int
    answer: str
    usage: TokenUsage


@dataclass(frozen=True, slots=True)
class Malformed:
    """A line without a request.

    reason: never quotes the line.
    """

    line: int
    reason: str


class _NotARequestError(ValueError):
    pass


Item = LoggedRequest | LoggedUsage | Malformed


def read_log(lines: Iterable[bytes]) -> Iterator[Item]:
    """All lines of a log but the empty ones.

    A body with several prompts gives several requests.
    """
    rest = iter(lines)
    first = list(islice(rest, LOOK_AHEAD_LINES))
    transcripts = Transcripts()
    spread = _spread(first)
    is_text = spread is None and not any(_is_object(line) for line in first)
    every: Iterable[bytes] = chain(first, rest)
    for number, line in enumerate(every if spread is None else json_values(every, in_array=spread == b"["), 1):
        if not line.strip():
            continue
        try:
            yield from _requests(number, line, transcripts, is_text=is_text)
        except (_NotARequestError, render.UnknownBodyError) as error:
            yield Malformed(number, str(error))
        except (TypeError, AttributeError, KeyError, RecursionError) as error:
            yield Malformed(number, f"a field has an unexpected type ({type(error).__name__})")


def _spread(first: list[bytes]) -> bytes | None:
    """Beginning of a file with JSON over several lines: "[" for one array, "{" for objects; None if
    each line stands alone.
    """
    begun = [line.strip() for line in first if line.strip()]
    if not begun:
        return None
    if ARRAY_OF_OBJECTS.match(begun[0]):
        is_prompts = len(begun) > 1 and _is_json(begun[0])  # an array in each line
        return None if is_prompts or _is_chat(begun[0]) else b"["
    return b"{" if begun[0] == b"{" else None


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _is_chat(line: bytes) -> bool:
    """Whether a line is a list of messages."""
    try:
        return _are_messages(json.loads(line))
    except (ValueError, RecursionError):
        return False


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) and "role" in one for one in value)


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _requests(number: int, line: bytes, transcripts: Transcripts, *, is_text: bool) -> Iterator[Item]:
    value = _value(line)
    if isinstance(value, str):
        yield LoggedRequest(number, "prompt", "", render.of_text(value))
    elif _are_messages(value):
        yield LoggedRequest(number, "chat", "", render.of_chat({"messages": value}))
    elif isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        for one in value:
            yield from _from_object(number, one, transcripts)
    elif isinstance(value, dict):
        yield from _from_object(number, value, transcripts)
    elif is_text and not line.lstrip().startswith(b"{"):
        yield LoggedRequest(number, "prompt", "", render.of_text(_text(line)))
    else:
        raise _NotARequestError("no JSON" if value is None else "JSON, but neither an object nor text")


def _value(line: bytes) -> Any:
    """The JSON value of a line; None if it has none."""
    if line == TOO_LONG:
        raise _NotARequestError(f"longer than {LONGEST_LINE_BYTES >> 20} MiB, or JSON that never ends")
    try:
        return json.loads(line)
    except ValueError:
        return None
    except RecursionError as error:
        raise _NotARequestError("nested too deeply") from error


def _text(line: bytes) -> str:
    """A line of plain text as a prompt."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _NotARequestError("neither JSON nor UTF-8 text") from error
    if "\0" in text:
        raise _NotARequestError("neither JSON nor text: it has zero bytes")
    return text


def _from_object(number: int, value: dict[str, Any], transcripts: Transcripts) -> Iterator[Item]:
    levels = _levels(value)
    answers = [answer for level in levels for answer in _answers(level)]
    body = levels[-1]
    if _is_body(body):
        yield from _from_body(number, body, levels, answers)
    elif transcripts.is_line(value):
        if (counted := transcripts.answer(value)) is not None:
            yield LoggedUsage(number, *counted)
    elif (usage := usage_in((*answers, *reversed(levels)))) is not None and usage.cached_tokens is not None:
        name = next((value[field] for field in ("id", "request_id", "requestId") if value.get(field)), f"line {number}")
        yield LoggedUsage(number, str(name), usage)
    else:
        raise _NotARequestError("no messages, prompt or input in it, nor in a request inside it")


def _from_body(
    number: int, body: dict[str, Any], levels: list[dict[str, Any]], answers: list[dict[str, Any]]
) -> Iterator[LoggedRequest]:
    parameters = body.get("model_parameters")  # LiteLLM's callbacks keep the tools there
    body = parameters | body if isinstance(parameters, dict) else body
    api = api_of(body, levels)
    prompts = prompts_of_body(api, body)
    usage = usage_in((*answers, *reversed(levels))) if len(prompts) == 1 else None
    for prompt in prompts:
        yield LoggedRequest(
            number,
            api,
            _model((body, *levels, *answers)),
            prompt,
            _time(levels, answers),
            usage,
            incomplete=any(body.get(name) for name in KEPT_BY_PROVIDER.get(api, ())),
        )


def _model(parts: Iterable[dict[str, Any]]) -> str:
    for part in parts:
        for field in ("model", "modelId", "modelVersion"):
            if part.get(field):
                return str(part[field])
        if found := GEMINI_URL.search(str(part.get("url", ""))):
            return found[1]
    return ""


def _levels(value: dict[str, Any]) -> list[dict[str, Any]]:
    """The line and its nested objects, down to the request's body if it has one."""
    levels = [_opened(value)]
    while not _is_body(levels[-1]) and len(levels) <= MOST_NESTED:
        if (inner := _unwrapped(levels[-1])) is None:
            break
        levels.append(_opened(inner))
    return levels


def _opened(level: dict[str, Any]) -> dict[str, Any]:
    """The object with JSON strings replaced by their values."""
    texts = {name: level[name] for name in MAY_BE_TEXT if isinstance(level.get(name), str)}
    return level | {name: _parsed(name, text) for name, text in texts.items()} if texts else level


def _parsed(name: str, text: str) -> Any:
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _NotARequestError(f"{name} is no JSON") from error


def _is_body(level: dict[str, Any]) -> bool:
    if any(isinstance(level.get(name), list) for name in ("messages", "contents")):
        return True
    if isinstance(level.get("prompt"), (str, list)):
        return True
    return isinstance(level.get("input"), (str, list)) and not any(
        isinstance(level.get(name), (dict, str)) for name in WRAPPERS if name != "input"
    )


def _unwrapped(level: dict[str, Any]) -> dict[str, Any] | None:
    for name in WRAPPERS:
        inner = level.get(name)
        if isinstance(inner, str) and inner.lstrip().startswith("{"):
            inner = _parsed(name, inner)
        if isinstance(inner, dict) and inner:
            return inner
    return None


def _answers(level: dict[str, Any], depth: int = 0) -> Iterator[dict[str, Any]]:
    """The answer beside a request, and the objects in it."""
    for name in ANSWERS if depth else ("response", "output"):
        answer = level.get(name)
        if isinstance(answer, dict) and depth < MOST_NESTED:
            yield _opened(answer)
            yield from _answers(_opened(answer), depth + 1)


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
