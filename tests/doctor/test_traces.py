"""On block traces the share that could be cached is the ideal that the traces' own hash ids give."""

import json
from pathlib import Path

import pytest
from doctor.examining import examine

from kvire.replay.formats import read_trace
from kvire.replay.simulate import ideal

TRACES = Path(__file__).parents[3] / "shared" / "traces"
WORDS, TOKENS_PER_WORD = 2, 256  # of a block of 512 tokens
MADE = [[0, 1, 2], [0, 1, 3, 4], [0, 1, 3, 4], [5], [0, 2]]  # hits: 0, 2, 3 (the last block is computed), 0, 1


def diagnosed(prompts: list[list[int]]) -> tuple[int, int]:
    totals = examine([json.dumps({"prompt": ids}).encode() for ids in prompts], []).totals
    return totals.ideal_tokens, totals.prompt_tokens


def test_a_made_trace() -> None:
    assert diagnosed(MADE) == (6, 14)


@pytest.mark.skipif(not TRACES.exists(), reason="needs shared/traces")
@pytest.mark.parametrize(("name", "rate"), [("conversation", 0.374), ("synthetic", 0.651)])
def test_a_mooncake_trace_has_the_ideal_that_replay_gives(tmp_path: Path, name: str, rate: float) -> None:
    """Each block of 512 tokens as two, prompts as long as they were in these: token for token, and the known rate."""
    rows, prompts = [], []
    for row in map(json.loads, (TRACES / f"mooncake_{name}_trace.jsonl").read_text().splitlines()):
        length = max(1, round(row["input_length"] / TOKENS_PER_WORD))
        ids = row["hash_ids"][: -(-length // WORDS)]
        rows.append({"t": row["timestamp"], "input_tokens": length, "block_tokens": WORDS, "blocks": ids})
        prompts.append([one * WORDS + i for one in ids for i in range(WORDS)][:length])
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    replayed = read_trace(trace)
    assert diagnosed(prompts) == (ideal(replayed).tokens, replayed.input_tokens)
    assert ideal(replayed).tokens / replayed.input_tokens == pytest.approx(
        rate, abs=0.004
    )  # lengths are rounded to words
