"""Reads traces: Mooncake's JSONL, sessions of kv-cache-tester, and our own JSONL. The content says which it is."""

import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvire.core.errors import ConfigError
from kvire.replay.trace import Request, Trace

MOONCAKE_BLOCK_TOKENS = 512  # the README beside the FAST'25 traces
MOST_NAMED = 20  # lines that could not be read and are told one by one
MOST_TOKENS = 1 << 40  # beyond that a number of tokens is a mistake

Report = Callable[[str, int, int], None]  # stage, done, total


class _Raw(NamedTuple):
    """A request as a file has it. ids: its blocks, unique within `scope`."""

    time_s: float
    input_tokens: int
    output_tokens: int
    ids: Sequence[Any]
    block_tokens: int
    scope: str


class _LineError(Exception):
    """A line is no request; says why."""


@dataclass(slots=True)
class _Skipped:
    """What could not be read."""

    lines: list[str]
    count: int = 0

    def add(self, place: str, why: str) -> None:
        self.count += 1
        if len(self.lines) < MOST_NAMED:
            self.lines.append(f"{place}: {why}")

    def told(self) -> list[str]:
        more = self.count - len(self.lines)
        return self.lines + ([f"and {more:,} more"] if more else [])


def read_trace(path: Path, report: Report = lambda *_: None) -> Trace:
    """The trace in a file, or in a folder of sessions, merged by time.

    Lines that are no request are skipped and told in Trace.skipped. Raises ConfigError for what is no trace at all.
    """
    files = sorted(path.glob("*.json*")) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"{path} has no .json or .jsonl file: name a trace, or a folder of sessions")
    skipped = _Skipped([])
    raw: list[_Raw] = []
    kinds = set()
    for number, file in enumerate(files, 1):
        kind, requests = _read_file(file, skipped)
        kinds.add(kind)
        raw += requests
        report("reading the trace", number, len(files))
    if not raw:
        reasons = "; ".join(skipped.told()[:3])
        raise ConfigError(f"{path} has no request that can be replayed{': ' if reasons else ''}{reasons}")
    if len(sizes := {request.block_tokens for request in raw}) > 1:
        raise ConfigError(f"{path} has blocks of different sizes, {sorted(sizes)}: replay one size at a time")
    if len(kinds) > 1:
        raise ConfigError(f"{path} has traces of different formats, {sorted(kinds)}: replay them one by one")
    return _linked(path.name, kinds.pop(), raw, skipped.told())


def _read_file(path: Path, skipped: _Skipped) -> tuple[str, list[_Raw]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text: a trace is JSONL, or JSON of one session") from error
    first = next((line for line in text.split("\n") if line.strip()), "")
    if "," in first and not first.lstrip().startswith("{"):
        raise ConfigError(
            f"{path} is a table without block hashes (Azure's traces are): it says how long prompts were, not what "
            "they share, so there is nothing to hit. kvire bench can replay its arrivals and lengths"
        )
    if (session := _session(text)) is not None:
        return "kv-cache-tester", list(_session_requests(path, session, skipped))
    kind = "mooncake" if '"hash_ids"' in text else "kvire"
    return kind, list(_lines(path, text, kind, skipped))


def _session(text: str) -> Mapping[str, Any] | None:
    """One JSON object that lists requests, else None."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and isinstance(value.get("requests"), list) else None


def _session_requests(path: Path, session: Mapping[str, Any], skipped: _Skipped) -> Iterator[_Raw]:
    block_tokens = session.get("block_size")
    if not isinstance(block_tokens, int) or block_tokens < 1:
        raise ConfigError(f"{path} is a session without block_size: how many tokens one of its hash_ids stands for")
    scope = path.name if session.get("hash_id_scope", "local") == "local" else ""

    def walk(entries: Sequence[Any], place: str) -> Iterator[_Raw]:
        for number, entry in enumerate(entries, 1):
            here = f"{place} request {number}"
            if isinstance(entry, dict) and isinstance(entry.get("requests"), list):  # a subagent
                yield from walk(entry["requests"], here)
                continue
            try:
                yield _raw(entry, "t", "in", "out", "hash_ids", block_tokens, scope)
            except _LineError as error:
                skipped.add(here, str(error))

    yield from walk(session["requests"], path.name)


def _lines(path: Path, text: str, kind: str, skipped: _Skipped) -> Iterator[_Raw]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            skipped.add(f"{path.name} line {number}", "not JSON")
            continue
        try:
            yield _mooncake(entry) if kind == "mooncake" else _own(entry)
        except _LineError as error:
            skipped.add(f"{path.name} line {number}", str(error))


def _mooncake(entry: Any) -> _Raw:
    raw = _raw(entry, "timestamp", "input_length", "output_length", "hash_ids", MOONCAKE_BLOCK_TOKENS, "")
    return raw._replace(time_s=raw.time_s / 1e3)


def _own(entry: Any) -> _Raw:
    if not isinstance(entry, dict):
        raise _LineError("not an object")
    size = entry.get("block_tokens")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise _LineError("block_tokens must be a whole number above 0")
    session = entry.get("session", "")
    raw = _raw(entry, "t", "tokens" if "tokens" in entry else "input_tokens", "output_tokens", "blocks", size, "")
    return raw._replace(scope=f"{session}") if isinstance(session, int | str) else raw


def _raw(entry: Any, time: str, tokens: str, answer: str, ids: str, block_tokens: int, scope: str) -> _Raw:
    if not isinstance(entry, dict):
        raise _LineError("not an object")
    blocks = entry.get(ids)
    if not isinstance(blocks, list) or not all(isinstance(block, int | str) for block in blocks):
        raise _LineError(f"{ids} must be a list of numbers or strings")
    time_s = entry.get(time)
    if not isinstance(time_s, int | float) or not abs(time_s) < float("inf"):
        raise _LineError(f"{time} must be a number")
    input_tokens = _count(entry, tokens, least=1)
    least = (len(blocks) - 1) * block_tokens + 1 if blocks else 0
    if input_tokens < least:
        raise _LineError(f"{len(blocks)} blocks of {block_tokens} do not fit into {tokens} {input_tokens}")
    return _Raw(float(time_s), input_tokens, _count(entry, answer, least=0), blocks, block_tokens, scope)


def _count(entry: Mapping[str, Any], name: str, least: int) -> int:
    value = entry.get(name, 0 if least == 0 else None)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST_TOKENS:
        raise _LineError(f"{name} must be a whole number from {least}")
    return value


def _linked(name: str, kind: str, raw: list[_Raw], skipped: list[str]) -> Trace:
    """Number the blocks: one number for an id below the same parent in the same scope."""
    trace = Trace(name, kind, raw[0].block_tokens, skipped=skipped)
    shared = kind == "kvire"  # there a session is only a label: ids mean the same in all of them
    numbers: dict[Hashable, int] = {}
    for request in sorted(raw, key=lambda request: request.time_s):
        chain: list[int] = []
        for block in request.ids:
            trace.append(chain, numbers, ("" if shared or chain else request.scope, chain[-1] if chain else -1, block))
        trace.requests.append(
            Request(request.time_s, request.input_tokens, request.output_tokens, tuple(chain), request.scope)
        )
    return trace
