"""What workloads ask: sizes, shared beginnings, and traces scaled down with their reuse."""

import json
import re
from math import inf
from pathlib import Path

import pytest

from kvire.bench.run import new_nonce
from kvire.bench.settings import Settings
from kvire.bench.states import TierState
from kvire.bench.work.ideal import characters, common, reusable
from kvire.bench.work.prompts import TokenScale, Writer
from kvire.bench.work.traces import TraceScale, digest, read_arrivals, trace_work
from kvire.bench.work.workloads import WORKLOADS, BenchWork, WorkSize
from kvire.core.errors import ConfigError

SCALE = TokenScale(per_word=1.0, head=0.0)  # a token is a word
WRITE = Writer(SCALE, seed=0, nonce="n")
SIZE = WorkSize(context_tokens=600, scripts=3, at_once=2, output_tokens=5)
TRACES = Path(__file__).parents[2] / ".." / "shared" / "traces"


def prompts(scripts):
    return [prompt for script in scripts for prompt in script.prompts]


@pytest.mark.parametrize("name", sorted(set(WORKLOADS) - {"random"}))
def test_probes_begin_like_the_fill_and_go_on_otherwise(name):
    work = WORKLOADS[name](WRITE, SIZE, name)
    shares = [reusable([probe], prompts(work.fill), characters)[0] for probe in prompts(work.probe)]
    least = 0.3 if name == "shortchat" else 0.75
    assert all(least < share < 1.0 for share in shares), shares
    assert all(prompt.output_tokens == 5 for prompt in prompts((*work.fill, *work.probe)))
    longest = max(len(probe.text.split()) for probe in prompts(work.probe))
    if name == "shortchat":
        assert longest < 100
    else:
        assert 0.8 * SIZE.context_tokens < longest < 1.3 * SIZE.context_tokens


def test_documents_part_at_once_and_random_prompts_share_nothing():
    for name in ("docqa", "multiturn", "random"):
        fill = WORKLOADS[name](WRITE, SIZE, name).fill
        first = [characters(script.prompts[0]) for script in fill]
        assert max(common(first[0], other) for other in first[1:]) < len("user\n") + 8
    assert WORKLOADS["random"](WRITE, SIZE, "random").probe == ()


def test_everything_is_new_in_every_repeat_and_run_and_the_same_for_every_server():
    settings = plan()
    cell = next(settings.cells())
    again = settings.work(cell, WRITE, 1)
    assert settings.work(cell, WRITE, 1) == again
    for other in (settings.work(cell, WRITE, 2), settings.work(cell, Writer(SCALE, 0, "m"), 1)):
        assert max(reusable(prompts(other.fill), prompts(again.fill), characters)) < 0.05


def plan(**more):
    return Settings(
        **(
            {
                "workloads": ("docqa",),
                "contexts": (600,),
                "at_once": (1,),
                "states": (TierState.E,),
                "nonce": new_nonce(),
            }
            | more
        )
    )


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_every_client_has_something_to_send(name):
    settings = plan(workloads=(name,), at_once=(1, 8), scripts=3)
    one, eight = (settings.work(cell, WRITE, 1).baseline for cell in settings.cells())
    assert (len(one), len(eight)) == (3, 8)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"workloads": ("docqa", "dokqa")}, "no workload 'dokqa'"),
        ({"workloads": ()}, "nothing to measure"),
        ({"contexts": (16,)}, "--context"),
        ({"at_once": (0,)}, "--concurrency"),
        ({"output_tokens": 1}, "--output-tokens"),
        ({"repeats": 0}, "--repeats"),
        ({"states": ()}, "--state"),
        ({"rate_per_s": 0.0}, "--rate"),
        ({"rate_per_s": inf}, "--rate"),
        ({"trace": Path("/nowhere.csv"), "trace_scale": TraceScale(speed=inf)}, "--speed"),
        ({"trace": Path("/nowhere.jsonl")}, "cannot read /nowhere"),
        ({"trace": Path("/nowhere.csv")}, "cannot read /nowhere"),
        ({"trace": Path("/nowhere.csv"), "trace_scale": TraceScale(requests=0)}, "--requests"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(wrong, says):
    with pytest.raises(ConfigError, match=says):
        plan(**wrong)


def test_works_without_a_probe_have_two_states():
    settings = plan(
        states=(TierState.E, TierState.G, TierState.Z), workloads=("random", "shortchat"), contexts=(64, 128)
    )
    assert [(cell.workload, cell.context_tokens) for cell in settings.cells()] == [
        ("random", 64), ("random", 128), ("shortchat", 60),
    ]  # fmt: skip
    assert settings.states_of(BenchWork(())) == (TierState.E, TierState.Z)


MOONCAKE = [
    {"timestamp": 2000, "input_length": 1200, "output_length": 40, "hash_ids": [0, 1, 2]},
    {"timestamp": 5000, "input_length": 1100, "output_length": 400, "hash_ids": [0, 1, 7]},
    {"timestamp": 3500, "input_length": 600, "output_length": 4, "hash_ids": [8, 9]},
]


def lines(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_trace_keeps_order_arrivals_lengths_and_reuse(tmp_path):
    trace = read_arrivals(lines(tmp_path / "trace.jsonl", MOONCAKE))
    work = trace_work(trace, TraceScale(lengths=0.1, speed=2.0, requests=10), WRITE, WorkSize(600, 1, 1, 30))
    assert [script.start_s for script in work.fill] == [0.0, 0.75, 1.5]
    asked = prompts(work.fill)
    assert [prompt.output_tokens for prompt in asked] == [4, 1, 30]  # the last is cut to --output-tokens
    lengths = [len(prompt.text.split()) for prompt in asked]
    assert lengths == pytest.approx([120, 60, 110], abs=5)
    shares = reusable(asked, [], characters)
    assert shares[1] < 0.2 and shares[2] == pytest.approx(1024 / 1100, abs=0.05)
    assert len(prompts(trace_work(trace, TraceScale(0.1, 1.0, 2), WRITE, SIZE).fill)) == 2
    assert digest(trace, TraceScale()) != digest(trace, TraceScale(requests=2))


@pytest.mark.parametrize("lengths", [1.0, 0.05, 0.01])
def test_short_blocks_neither_grow_nor_shrink(tmp_path, lengths):
    """Blocks of 64 tokens become 3.2 words, or less than one: what prompts share is the same share at every scale."""
    ids = list(range(200))
    rows = [
        {"t": i, "tokens": 64 * 200 + 1280, "block_tokens": 64, "blocks": ids[:150] + [f"{i}/{k}" for k in range(50)]}
        for i in range(2)
    ]
    trace = read_arrivals(lines(tmp_path / "own.jsonl", rows))
    asked = prompts(trace_work(trace, TraceScale(lengths), WRITE, WorkSize(99_999, 1, 1, 30)).fill)
    assert [len(prompt.text.split()) for prompt in asked] == [pytest.approx(14080 * lengths, abs=4)] * 2
    assert reusable(asked, [], characters)[1] == pytest.approx(9600 / 14080, abs=0.06)


def test_tables_have_no_blocks_and_share_nothing(tmp_path):
    table = tmp_path / "azure.csv"
    table.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:05.2319600,3180,8\n"
                     "2023-11-16 18:17:03.9799600,4808,10\n")  # fmt: skip
    work = trace_work(read_arrivals(table), TraceScale(0.1), WRITE, WorkSize(600, 1, 1, 30))
    assert [script.start_s for script in work.fill] == [0.0, pytest.approx(1.252)]
    assert [len(prompt.text.split()) for prompt in prompts(work.fill)] == pytest.approx([480, 318], abs=4)
    assert max(reusable(prompts(work.fill), [], characters)) < 0.05


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("bad.jsonl", ""),
        ("bad.jsonl", "{}\n"),
        ("bad.jsonl", "no json\n"),
        ("bad.jsonl", json.dumps(MOONCAKE[0]) + "\n{\n"),
        ("bad.csv", ""),
        ("bad.csv", "TIMESTAMP,Tokens\n2023-11-16 18:17:05.2319600,3\n"),
        ("bad.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,3,4\n"),
    ],
)
def test_a_trace_that_cannot_be_read_as_a_whole_is_refused(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=re.escape(name)):
        read_arrivals(tmp_path / name)


@pytest.mark.skipif(not TRACES.exists(), reason="the shared traces are not here")
def test_real_traces_are_read():
    for name in ("mooncake_conversation_trace.jsonl", "AzureLLMInferenceTrace_conv.csv", "claude_code"):
        assert len(read_arrivals(TRACES / name).requests) > 1000
