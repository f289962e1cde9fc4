"""A report as a run would make it, from answers whose times a test knows."""

from dataclasses import replace
from typing import Any

from kvire.bench.arm import MeasuredPass
from kvire.bench.client import StreamedAnswer
from kvire.bench.load import Pass, Sample
from kvire.bench.results import SCHEMA, rows_of
from kvire.bench.run import plain
from kvire.bench.settings import Settings
from kvire.bench.states import Proof, TierState
from kvire.bench.work.prompts import BenchPrompt, message

PROMPT_TOKENS = 1000
TTFT_S = {TierState.E: 3.2, TierState.G: 0.3, TierState.D: 0.4, TierState.Z: 3.0}
NOISE = (1.0, 1.1, 0.95, 1.05, 0.9)  # of the machine, in each repeat
DOUBT = "3.0 MB of the store lay in the page cache before"


def made_report(slower: float = 1.0, failing: TierState | None = None) -> dict[str, Any]:
    """States E, G, D (unproved), Z; G is ten times as fast as Z in every repeat, and one of its answers differs.

    failing: a state in which another request of each repeat failed, that took 100 s in the others; None: no such one.
    """
    settings = Settings(
        workloads=("docqa",), contexts=(1024,), at_once=(1,), states=tuple(TTFT_S), nonce="n", scripts=1
    )  # fmt: skip
    cell = next(settings.cells())
    passes = [
        MeasuredPass(
            cell,
            repeat,
            state,
            _pass(state, TTFT_S[state] * NOISE[repeat - 1] * slower, repeat, failing),
            _proof(state),
            (0.9, 0.9),
            state is not TierState.E,
        )
        for repeat in range(1, 6)
        for state in TTFT_S
    ]
    model = {
        "name": "smollm2",
        "weights_bytes": 10**8,
        "kv_dtype": "float32",
        "kv_bytes_per_token": 46_080,
        "kv_groups": [{"bytes_per_token": 46_080.0, "window": None}],
        "block_tokens": 16,
    }
    arm = {
        "name": "A",
        "kind": "kvire",
        "model": model,
        "options": [],
        "store": "/store",
        "remote": None,
        "ideal_by": "token ids",
    }
    machine = {
        "cpu": "some",
        "cores": 2,
        "memory_bytes": 8 * 10**9,
        "system": "Linux",
        "python": "3.11",
        "packages": {"kvire": "0"},
    }
    return {
        "schema": SCHEMA, "created": "2026-01-01T00:00:00+00:00", "command": ["kvire", "bench"], "commit": "abc+",
        "machine": machine, "model": model, "settings": plain(settings), "arms": [arm],
        "rows": rows_of("A", arm, passes, settings),
    }  # fmt: skip


def _proof(state: TierState) -> Proof:
    return Proof(("as it should be",), (DOUBT,) if state is TierState.D else ())


def _pass(state: TierState, ttft_s: float, repeat: int, failing: TierState | None) -> Pass:
    cached = 900 if state in {TierState.G, TierState.D} else 0
    cache = {"device_tokens": cached, "memory_tokens": 0, "disk_tokens": 0, "remote_tokens": 0, "miss": "complete"}
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": cached}}
    pieces = ("a", "b", "x" if (state, repeat) == (TierState.G, 2) else "c")
    times = tuple(ttft_s + 0.05 * i for i in range(3))
    timing = {"ttft_s": ttft_s - 0.01}
    answer = StreamedAnswer(times, pieces, times[-1], usage, {"cache": cache, "timing": timing})
    prompt = BenchPrompt((message("user", "x"),), 3)
    samples = [Sample(0, 0, prompt, 0.0, answer)]
    if failing is not None:
        slow = replace(answer, at_s=(100.0,), pieces=("a",), end_s=100.0)
        samples.append(Sample(1, 0, prompt, 0.0, replace(slow, error="timeout") if state is failing else slow))
    return Pass(tuple(samples), times[-1] + 0.1, 0.05)
