"""On block traces the share that could be cached is the ideal that the traces' own hash ids give."""

import json
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
from doctor.examining import examine

from kvire.replay.formats import read_trace
from kvire.replay.simulate import ideal

TRACES = Path(__file__).parents[3] / "shared" / "traces"
WORDS = 2  # that a block of a trace is made of
UNBLOCKED = 1 << 23  # words from here on are in no block; a token id is below 1 << 24
MADE = [[0, 1, 2], [0, 1, 3, 4], [0, 1, 3, 4], [5], [0, 2]]  # hits: 0, 2, 3 (the last block is computed), 0, 1

needs_traces = pytest.mark.skipif(not TRACES.exists(), reason="the recorded traces are not beside the repository")


def diagnosed(prompts: list[list[int]]) -> tuple[int, int]:
    totals = examine([json.dumps({"prompt": ids}).encode() for ids in prompts], []).totals
    return totals.ideal_tokens, totals.prompt_tokens


def test_a_made_trace() -> None:
    assert diagnosed(MADE) == (6, 14)


def assert_the_same_ideal(
    folder: Path, requests: list[tuple[float, int, list[int]]], block_tokens: int, rate: float
) -> None:
    """Requests: time, input tokens, blocks. Each block as two words, prompts as long as they were in these, and what
    fills no block is never the same: both commands find the same, word for word, and the known rate.
    """
    rows, prompts = [], []
    unique = count(UNBLOCKED)
    for time_s, tokens, blocks in requests:
        length = max(1, round(tokens * WORDS / block_tokens))
        ids = blocks[: -(-length // WORDS)]
        rows.append({"t": time_s, "input_tokens": length, "block_tokens": WORDS, "blocks": ids})
        words = [one * WORDS + i for one in ids for i in range(WORDS)][:length]
        prompts.append(words + list(islice(unique, length - len(words))))
    trace = folder / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    replayed = read_trace(trace)
    assert diagnosed(prompts) == (ideal(replayed).tokens, replayed.input_tokens)
    assert ideal(replayed).tokens / replayed.input_tokens == pytest.approx(rate, abs=0.004)  # lengths are rounded


@needs_traces
@pytest.mark.parametrize(("name", "rate"), [("conversation", 0.374), ("synthetic", 0.651)])
def test_a_mooncake_trace_has_the_ideal_that_replay_gives(tmp_path: Path, name: str, rate: float) -> None:
    lines = (TRACES / f"mooncake_{name}_trace.jsonl").read_text().splitlines()
    rows = [(row["timestamp"], row["input_length"], row["hash_ids"]) for row in map(json.loads, lines)]
    assert_the_same_ideal(tmp_path, rows, 512, rate)


@pytest.mark.slow
@needs_traces
def test_claude_code_sessions_have_the_ideal_that_replay_gives(tmp_path: Path) -> None:
    """Ids mean something within a session only, so each pair of session and id is numbered."""
    sessions = sorted((TRACES / "claude_code").glob("*.json"))
    assert sessions
    rows: list[tuple[float, int, list[int]]] = []
    numbers: dict[tuple[str, int], int] = {}
    for path in sessions:
        session = json.loads(path.read_text())
        assert (session["block_size"], session["hash_id_scope"]) == (64, "local")
        for entry in requests_of(session):
            ids = [numbers.setdefault((path.name, one), len(numbers)) for one in entry["hash_ids"]]
            rows.append((entry["t"], entry["in"], ids))
    rows.sort(key=lambda row: row[0])
    assert_the_same_ideal(tmp_path, rows, 64, 0.957)


def requests_of(session: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Also those of subagents, which are nested."""
    for entry in session["requests"]:
        yield from requests_of(entry) if "requests" in entry else [entry]
