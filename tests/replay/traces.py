"""Traces for tests: made ones, and those beside the repository where they are."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvire.replay.trace import Trace, TraceRequest

SHARED = Path(__file__).parents[3] / "shared" / "traces"


def recorded(name: str) -> Path:
    """A recorded trace; skips the test where there is none."""
    if not (SHARED / name).exists():
        pytest.skip(f"the recorded traces are not beside the repository: {name}")
    return SHARED / name


def trace_of(chains: Sequence[tuple[Sequence[object], int]], block_tokens: int = 10, every_s: float = 1.0) -> Trace:
    """Chains of names with the number of prompt tokens, one each `every_s`."""
    trace = Trace("made", "made", block_tokens)
    numbers: dict[tuple[int, object], int] = {}
    for place, (names, input_tokens) in enumerate(chains):
        parent, blocks = -1, []
        for name in names:
            if (parent, name) not in numbers:
                numbers[parent, name] = len(trace.parents)
                trace.parents.append(parent)
                trace.depths.append(len(blocks))
            parent = numbers[parent, name]
            blocks.append(parent)
        trace.requests.append(TraceRequest(place * every_s, input_tokens, 1, tuple(blocks)))
    return trace


def random_trace(seed: int, requests: int = 60, sessions: int = 8, longest: int = 9) -> Trace:
    """Sessions that grow, begin again, and share their first block now and then."""
    rng = random.Random(seed)
    chains: dict[int, list[object]] = {}
    made = []
    for place in range(requests):
        session = rng.randrange(sessions)
        chain = chains.setdefault(session, ["shared"] if rng.random() < 0.5 else [("first", session)])
        if rng.random() < 0.1:
            del chain[1:]
        chain += [(session, place, i) for i in range(rng.randrange(1, 4))]
        del chain[longest:]
        made.append((tuple(chain), 10 * len(chain) - rng.randrange(8)))
    return trace_of(made)


def write_lines(path: Path, entries: Sequence[object]) -> Path:
    path.write_text("".join(f"{e if isinstance(e, str) else json.dumps(e)}\n" for e in entries), encoding="utf-8")
    return path
