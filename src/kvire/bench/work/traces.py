"""Arrivals and lengths of recorded traces, scaled to what the machine can do, as prompts of made-up
words.

Traces whose blocks have ids are read as `kvire replay` reads them; Azure's tables, which have
lengths only, are read here. Blocks become words, the same block the same words, so that prompts
share what they shared.
"""

import csv
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from kvire.bench.work.prompts import BenchPrompt, Script, Writer, message
from kvire.bench.work.workloads import BenchWork, WorkSize
from kvire.core.errors import ConfigError
from kvire.replay.formats import read_trace
from kvire.replay.trace import Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class TraceScale:
    """How a recorded trace is scaled to this machine.

    lengths: of prompts and answers against the recorded ones.
    speed: how much faster requests arrive.
    requests: how many of the first ones are replayed.
    """

    lengths: float = 0.05
    speed: float = 1.0
    requests: int = 50


def read_arrivals(path: Path) -> Trace:
    """In the order of arrival; a table's requests have no blocks.

    Raises ConfigError, also for an unreadable line: without it, other requests would share less.
    """
    trace = _table(path) if path.suffix.lower() == ".csv" else read_trace(path)
    if trace.skipped:
        raise ConfigError(f"{path} cannot be replayed as it was recorded: {'; '.join(trace.skipped[:3])}")
    return trace


def digest(trace: Trace, scale: TraceScale) -> str:
    """Of the requests that are taken: two traces of one name are told apart by it."""
    taken = [(r.time_s, r.input_tokens, r.output_tokens, r.blocks) for r in trace.requests[: scale.requests]]
    return hashlib.sha256(repr((trace.block_tokens, taken)).encode()).hexdigest()[:16]


def trace_work(trace: Trace, scale: TraceScale, write: Writer, size: WorkSize) -> BenchWork:
    """One script for each request.

    Prompts are at most size.context_tokens, answers size.output_tokens long.
    """
    scripts = []
    for i, one in enumerate(trace.requests[: scale.requests]):
        tokens = min(size.context_tokens, max(1, round(one.input_tokens * scale.lengths)))
        text = _shared(trace, i, tokens, scale, write) if one.blocks else write.document(tokens, "trace", i)
        output = min(size.output_tokens, max(1, round(one.output_tokens * scale.lengths)))
        prompt = BenchPrompt((message("user", text),), output)
        scripts.append(Script((prompt,), (one.time_s - trace.requests[0].time_s) / scale.speed))
    return BenchWork(tuple(scripts))


def _shared(trace: Trace, index: int, tokens: int, scale: TraceScale, write: Writer) -> str:
    """Words of each block, and of its own behind them, up to the prompt's length.

    Where a block begins and ends is rounded to words, not how long each is: else rounding would add
    up, and blocks of less than a word would grow.
    """
    blocks, words = trace.requests[index].blocks, write.scale.words(tokens)
    words_per_block = trace.block_tokens * scale.lengths / write.scale.per_word
    parts, done = [write.document(0, "trace")], 0
    for place, block in enumerate(blocks, 1):
        end = min(words, round(place * words_per_block))
        if end > done:
            parts.append(write.text((end - done) * write.scale.per_word, "block", block))
            done = end
    if words > done:
        parts.append(write.text((words - done) * write.scale.per_word, "behind the blocks", index))
    return " ".join(parts)


def _table(path: Path) -> Trace:
    try:
        requests = sorted(_rows(path), key=lambda request: request.time_s)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{path} is no table of Azure's, with columns TIMESTAMP, ContextTokens, GeneratedTokens: {error}"
        ) from error
    if not requests:
        raise ConfigError(f"{path} has no request that can be replayed")
    return Trace(path.name, "azure", 1, requests)


def _rows(path: Path) -> Iterator[TraceRequest]:
    with path.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            at = datetime.strptime(row["TIMESTAMP"][:26], "%Y-%m-%d %H:%M:%S.%f")  # noqa: DTZ007 - only differences count
            since = (at - datetime(2000, 1, 1)).total_seconds()  # noqa: DTZ001
            yield TraceRequest(since, int(row["ContextTokens"]), int(row["GeneratedTokens"]), ())
