"""Reads traces: JSONL with hash_ids (Mooncake's, Bailian's, Dynamo's), sessions of kv-cache-tester,
and our own JSONL.

The format, and if possible block size and time unit, are inferred from the content.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kvire.core.errors import ConfigError
from kvire.replay.block_size import block_tokens_of
from kvire.replay.trace import Trace, TraceRequest

TIME_UNITS = {"s": 1.0, "ms": 1e-3}
MOST_NAMED = 20  # unreadable or noteworthy lines that are listed one by one
MOST_TOKENS = 1 << 40  # beyond that a number of tokens is a mistake
GZIP_MAGIC = b"\x1f\x8b"

SkipReport = Callable[[str, int, int], None]  # stage, done, total


class _Raw(NamedTuple):
    """A request as a file has it.

    place: in the file, for messages.
    time: when it came.
    delay: how long after the request before it in its session; None where the file does not say.
    ids: its blocks, unique within `scope`.
    block_tokens: None where the file does not say.
    """

    place: str
    time: float | None
    delay: float | None
    input_tokens: int
    output_tokens: int
    ids: Sequence[Any]
    block_tokens: int | None
    session: str
    scope: str


class _LineError(Exception):
    """A line is no request, with the reason."""


@dataclass(slots=True)
class _Told:
    """Sentences about lines: the first of them, and how many there are."""

    lines: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, place: str, why: str) -> None:
        self.count += 1
        if len(self.lines) < MOST_NAMED:
            self.lines.append(f"{place}: {why}")

    def told(self) -> list[str]:
        more = self.count - len(self.lines)
        return self.lines + ([f"and {more:,} more"] if more else [])


def read_trace(
    path: Path, report: SkipReport = lambda *_: None, *, block_tokens: int | None = None, time_unit: str | None = None
) -> Trace:
    """The trace in a file, or in a folder of sessions, merged by time.

    block_tokens: of each of its hash_ids, where the file does not tell.
    time_unit: one of TIME_UNITS, likewise.

    Lines that are no request are skipped and counted in Trace.skipped.

    Raises ConfigError for a file that is no trace.
    """
    if time_unit not in (None, *TIME_UNITS):
        raise ConfigError(f"--time-unit is s or ms, got {time_unit}")
    files = sorted(path.glob("*.json*")) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"{path} has no .json or .jsonl file: name a trace, or a folder of sessions")
    skipped = _Told()
    raw: list[_Raw] = []
    kinds = set()
    for number, file in enumerate(files, 1):
        kind, requests = _read_file(file, skipped)
        kinds.add(kind)
        raw += requests
        report("reading the trace", number, len(files))
    _check_one_kind(path, kinds, raw, skipped)
    kind = kinds.pop()
    trace = Trace(path.name, kind, _size_of_blocks(path, raw, block_tokens))
    _link(trace, _timed(trace, raw, time_unit, skipped), skipped)
    if not trace.requests:
        raise ConfigError(_nothing(path, skipped))
    trace.skipped = skipped.told()
    return trace


def _check_one_kind(path: Path, kinds: set[str], raw: list[_Raw], skipped: _Told) -> None:
    if not raw:
        raise ConfigError(_nothing(path, skipped))
    if len(sizes := {request.block_tokens for request in raw if request.block_tokens}) > 1:
        raise ConfigError(f"{path} has blocks of different sizes, {sorted(sizes)}: replay one size at a time")
    if len(kinds) > 1:
        raise ConfigError(f"{path} has traces of different formats, {sorted(kinds)}: replay them one by one")


def _nothing(path: Path, skipped: _Told) -> str:
    reasons = "; ".join(skipped.told()[:3])
    return f"{path} has no request that can be replayed{': ' if reasons else ''}{reasons}"


def _size_of_blocks(path: Path, raw: list[_Raw], given: int | None) -> int:
    """As the file says, or the user, or as lengths and numbers of ids tell."""
    said = next((request.block_tokens for request in raw if request.block_tokens), None)
    if said is not None and given not in (None, said):
        raise ConfigError(f"{path} says that its blocks have {said} tokens: leave --block-tokens {given} out")
    if said is not None:
        return said
    try:
        return block_tokens_of(((request.input_tokens, len(request.ids)) for request in raw if request.ids), given)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _read_file(path: Path, skipped: _Told) -> tuple[str, list[_Raw]]:
    text = _text(path)
    first = next((line for line in text.split("\n") if line.strip()), "")
    if "," in first and not first.lstrip().startswith(("{", "[")):
        raise ConfigError(
            f"{path} is a table without block hashes (Azure's traces are): it says how long prompts were, not what "
            "they share, so there is nothing to hit. kvire bench can replay its arrivals and lengths"
        )
    whole = _whole(text)
    if isinstance(whole, dict) and isinstance(whole.get("requests"), list):
        return "kv-cache-tester", list(_session_requests(path, whole, skipped))
    entries = _elements(path, whole) if isinstance(whole, list) else _lines(path, text, skipped)
    if '"hash_ids"' not in text:
        return "kvire", list(_requests(entries, _own, skipped))
    reader = _HashIds()
    requests = list(_requests(entries, reader.request, skipped))
    return "bailian" if reader.chats else "mooncake", requests


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if content.startswith(GZIP_MAGIC) else content).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text: a trace is JSONL, or JSON of one session") from error
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def _whole(text: str) -> Any:
    """A file that is one JSON value; None for JSONL."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _elements(path: Path, values: list[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"{path.name} element {number}", value) for number, value in enumerate(values, 1))


def _lines(path: Path, text: str, skipped: _Told) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield f"{path.name} line {number}", json.loads(line)
        except (ValueError, RecursionError):
            skipped.add(f"{path.name} line {number}", "not JSON")


def _requests(entries: Iterator[tuple[str, Any]], read: Callable[[str, Any], _Raw], skipped: _Told) -> Iterator[_Raw]:
    for place, entry in entries:
        try:
            yield read(place, entry)
        except _LineError as error:
            skipped.add(place, str(error))


def _session_requests(path: Path, session: Mapping[str, Any], skipped: _Told) -> Iterator[_Raw]:
    block_tokens = session.get("block_size")
    if block_tokens is not None and (not isinstance(block_tokens, int) or block_tokens < 1):
        raise ConfigError(f"{path} is a session whose block_size is no whole number above 0")
    scope = path.name if session.get("hash_id_scope", "local") == "local" else ""

    def walk(entries: Sequence[Any], place: str) -> Iterator[_Raw]:
        for number, entry in enumerate(entries, 1):
            here = f"{place} request {number}"
            if isinstance(entry, dict) and isinstance(entry.get("requests"), list):  # a subagent
                yield from walk(entry["requests"], here)
                continue
            try:
                raw = _raw(here, entry, "t", "in", "out", "hash_ids", block_tokens)
                yield _with_time(raw, "t")._replace(session=scope, scope=scope)
            except _LineError as error:
                skipped.add(here, str(error))

    yield from walk(session["requests"], path.name)


class _HashIds:
    """Lines with hash_ids.

    Bailian's name a chat and its parent chat, others at most a session.
    """

    def __init__(self) -> None:
        self.chats: dict[Any, str] = {}  # the first of each conversation

    def request(self, place: str, entry: Any) -> _Raw:
        raw = _raw(place, entry, "timestamp", "input_length", "output_length", "hash_ids", None)
        size = entry.get("block_size", entry.get("block_tokens"))
        if size is not None and (type(size) is not int or size < 1):
            raise _LineError("block_size must be a whole number above 0")
        return raw._replace(block_tokens=size, delay=_number(entry, "delay"), session=self._session(entry))

    def _session(self, entry: Mapping[str, Any]) -> str:
        chat, before = entry.get("chat_id"), entry.get("parent_chat_id")
        if isinstance(chat, int | str):
            first = self.chats.get(before) if isinstance(before, int | str) else None
            self.chats[chat] = first or f"{chat}"
            return self.chats[chat]
        session = entry.get("session_id", "")
        return f"{session}" if isinstance(session, int | str) else ""


def _own(place: str, entry: Any) -> _Raw:
    if not isinstance(entry, dict):
        raise _LineError("not an object")
    size = entry.get("block_tokens")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise _LineError("block_tokens must be a whole number above 0")
    session = entry.get("session", "")
    tokens = "tokens" if "tokens" in entry else "input_tokens"
    raw = _with_time(_raw(place, entry, "t", tokens, "output_tokens", "blocks", size), "t")
    _check_length(raw, size, tokens)
    return raw._replace(session=f"{session}") if isinstance(session, int | str) else raw


def _raw(place: str, entry: Any, time: str, tokens: str, answer: str, ids: str, block_tokens: int | None) -> _Raw:
    if not isinstance(entry, dict):
        raise _LineError("not an object")
    blocks = entry.get(ids)
    if not isinstance(blocks, list) or not all(isinstance(block, int | str) for block in blocks):
        raise _LineError(f"{ids} must be a list of numbers or strings")
    input_tokens, output_tokens = _count(entry, tokens, least=1), _count(entry, answer, least=0)
    return _Raw(place, _number(entry, time), None, input_tokens, output_tokens, blocks, block_tokens, "", "")


def _with_time(raw: _Raw, name: str) -> _Raw:
    if raw.time is None:
        raise _LineError(f"{name} must be a number")
    return raw


def _check_length(raw: _Raw, block_tokens: int, tokens: str) -> None:
    if raw.ids and raw.input_tokens <= (len(raw.ids) - 1) * block_tokens:
        raise _LineError(f"{len(raw.ids)} blocks of {block_tokens} do not fit into {tokens} {raw.input_tokens}")


def _number(entry: Mapping[str, Any], name: str) -> float | None:
    """None if the field is not there."""
    value = entry.get(name)
    if value is not None and (not isinstance(value, int | float) or not abs(value) < float("inf")):
        raise _LineError(f"{name} must be a number")
    return None if value is None else float(value)


def _count(entry: Mapping[str, Any], name: str, least: int) -> int:
    value = entry.get(name, 0 if least == 0 else None)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST_TOKENS:
        raise _LineError(f"{name} must be a whole number from {least}")
    return value


def _timed(trace: Trace, raw: list[_Raw], unit: str | None, skipped: _Told) -> list[tuple[float, _Raw]]:
    """Requests with their times in seconds, in the order of the file; notes the assumed units."""
    trace.is_timed = any(request.time is not None or request.delay is not None for request in raw)
    if not trace.is_timed:
        trace.notes.append("no times in the trace: requests in its order, and no policy can look at the clock")
        return [(0.0, request) for request in raw]
    scale = TIME_UNITS[unit or _unit(trace, raw)]
    latest: dict[str, float] = {}
    timed = []
    for request in raw:
        if request.time is None and request.delay is None and not request.session:
            skipped.add(request.place, "timestamp must be a number, or there must be a delay or a session_id")
            continue
        before_s = latest.get(request.session, 0.0)
        time_s = before_s + scale * (request.delay or 0.0) if request.time is None else scale * request.time
        latest[request.session] = time_s
        timed.append((time_s, request))
    if delayed := sum(request.time is None for _, request in timed):
        trace.notes.append(
            f"{delayed:,} requests without a timestamp: each comes its delay after the one before in its session, as "
            "if answers took no time; a session's first counts from 0"
        )
    return timed


def _unit(trace: Trace, raw: list[_Raw]) -> str:
    """The unit of times: Mooncake's and Dynamo's are whole milliseconds."""
    if trace.format != "mooncake":
        return "s"
    if all(request.time is None or request.time.is_integer() for request in raw):
        return "ms"
    trace.notes.append("timestamps have fractions, so they are read as seconds; if they are not: --time-unit ms")
    return "s"


def _link(trace: Trace, timed: list[tuple[float, _Raw]], skipped: _Told) -> None:
    """Number the blocks: one number for an id below the same parent in the same scope."""
    numbers: dict[Hashable, int] = {}
    short = _Told()
    for time_s, request in sorted(timed, key=lambda one: one[0]):
        try:
            _check_length(request, trace.block_tokens, "a prompt of")
        except _LineError as error:
            skipped.add(request.place, str(error))
            continue
        held = len(request.ids) * trace.block_tokens
        if (missing := request.input_tokens - held) >= trace.block_tokens:
            short.add(
                request.place,
                f"{len(request.ids):,} blocks hold {held:,} of {request.input_tokens:,} tokens; {missing:,} never hit",
            )
        chain: list[int] = []
        for block in request.ids:
            trace.append(chain, numbers, ("" if chain else request.scope, chain[-1] if chain else -1, block))
        trace.requests.append(
            TraceRequest(time_s, request.input_tokens, request.output_tokens, tuple(chain), request.session)
        )
    trace.notes += short.told()
