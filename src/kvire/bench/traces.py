"""Arrivals and lengths of recorded traces, scaled to what the machine can do, as prompts of made-up words.

Read are Mooncake's JSONL (512-token blocks with ids), Claude Code sessions of kv-cache-tester (one JSON, or a folder
of them; 64-token blocks) and Azure's CSV (lengths only, so nothing is shared). Block ids become words, the same id the
same words, so that prompts share what they shared.
"""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from kvire.bench.prompts import Prompt, Script, Writer, message
from kvire.bench.workloads import Size, Work
from kvire.core.errors import ConfigError

MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request. at_s: after the first. blocks: ids of its full or partial blocks; empty where they are unknown."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[str, ...] = ()
    block_tokens: int = MOONCAKE_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class TraceScale:
    """lengths: of prompts and answers against the recorded ones. speed: how much faster requests arrive. requests: how
    many of the first ones are taken.
    """

    lengths: float = 0.05
    speed: float = 1.0
    requests: int = 50


def read_trace(path: Path, limit: int) -> list[Recorded]:
    """The first `limit` requests in the order of their arrival, the first at 0 s. Raises ConfigError."""
    try:
        found = sorted(_records(path), key=lambda one: one.at_s)[:limit]
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no trace that is known here (Mooncake JSONL, Claude Code session JSON, Azure CSV): {error}"
        ) from error
    if not found:
        raise ConfigError(f"the trace {path} holds no requests")
    first = found[0].at_s
    return [
        Recorded(one.at_s - first, one.input_tokens, one.output_tokens, one.blocks, one.block_tokens) for one in found
    ]


def trace_work(records: list[Recorded], scale: TraceScale, write: Writer, size: Size) -> Work:
    """One script for each request. Prompts are at most size.context_tokens, answers size.output_tokens long."""
    scripts = []
    for i, one in enumerate(records[: scale.requests]):
        tokens = min(size.context_tokens, max(1, round(one.input_tokens * scale.lengths)))
        text = _shared(one, tokens, scale, write) if one.blocks else write.document(tokens, "trace", i)
        output = min(size.output_tokens, max(1, round(one.output_tokens * scale.lengths)))
        prompt = Prompt((message("user", text),), output)
        scripts.append(Script((prompt,), one.at_s / scale.speed))
    return Work(tuple(scripts))


def _shared(one: Recorded, tokens: int, scale: TraceScale, write: Writer) -> str:
    """Words of each block by its id; the last block is cut to the prompt's length."""
    block_tokens = max(1.0, one.block_tokens * scale.lengths)
    parts, left = [write.document(0, "trace")], float(tokens)
    for block in one.blocks:
        if left <= 0:
            break
        parts.append(write.text(min(left, block_tokens), "block", block) if left >= 1 else "")
        left -= block_tokens
    return " ".join(parts)


def _records(path: Path) -> Iterator[Recorded]:
    if path.is_dir():
        for file in sorted(path.glob("*.json")):
            yield from _session(file)
    elif path.suffix == ".csv":
        yield from _azure(path)
    elif path.suffix == ".json":
        yield from _session(path)
    else:
        yield from _mooncake(path)


def _mooncake(path: Path) -> Iterator[Recorded]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                row = json.loads(line)
                blocks = tuple(map(str, row["hash_ids"]))
                yield Recorded(row["timestamp"] / 1e3, row["input_length"], row["output_length"], blocks)


def _session(path: Path) -> Iterator[Recorded]:
    """Ids are the session's own. Requests of subagents stand inside the one that called them."""
    session = json.loads(path.read_text(encoding="utf-8"))
    name, block_tokens = session["id"], session["block_size"]

    def walk(requests: list[dict[str, Any]], start_s: float) -> Iterator[Recorded]:
        for request in requests:
            at_s = start_s + request["t"]
            if "in" in request:
                blocks = tuple(f"{name}/{block}" for block in request["hash_ids"])
                yield Recorded(at_s, request["in"], request["out"], blocks, block_tokens)
            yield from walk(request.get("requests") or [], at_s)

    yield from walk(session["requests"], 0.0)


def _azure(path: Path) -> Iterator[Recorded]:
    with path.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            at = datetime.strptime(row["TIMESTAMP"][:26], "%Y-%m-%d %H:%M:%S.%f")  # noqa: DTZ007 - only differences count
            yield Recorded(at.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
