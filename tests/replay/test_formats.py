"""Every format is told from its content, and what is no trace says why."""

import json

import pytest
from replay.traces import recorded, write_lines

from kvire.core.errors import ConfigError
from kvire.replay.formats import read_trace
from kvire.replay.simulate import ideal


def test_mooncake(tmp_path):
    entries = [
        {"timestamp": 3000, "input_length": 1030, "output_length": 7, "hash_ids": [4, 5, 6]},
        {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [4, 9]},
    ]
    trace = read_trace(write_lines(tmp_path / "t.txt", entries))
    assert (trace.format, trace.block_tokens, trace.input_tokens) == ("mooncake", 512, 1630)
    assert [r.time_s for r in trace.requests] == [0.0, 3.0]
    assert [r.blocks for r in trace.requests] == [(0, 1), (0, 2, 3)]
    assert trace.parents == [-1, 0, 0, 2]
    assert trace.depths == [0, 1, 1, 2]


def test_the_same_id_after_another_block_is_another_block(tmp_path):
    entries = [{"t": 0, "input_tokens": 20, "block_tokens": 10, "blocks": ids} for ids in ([1, 2], [3, 2])]
    trace = read_trace(write_lines(tmp_path / "t.jsonl", entries))
    assert trace.requests[0].blocks[1] != trace.requests[1].blocks[1]
    assert ideal(trace).tokens == 0


def test_sessions_are_merged_by_time_share_nothing_and_bring_their_subagents(tmp_path):
    def session(times, **more):
        entries = [{"t": t, "in": 130, "out": 1, "hash_ids": [1, 2]} for t in times]
        return json.dumps({"block_size": 64, "requests": entries, **more})

    nested = {"type": "subagent", "requests": [{"t": 2, "in": 70, "out": 1, "hash_ids": [7]}]}
    first = json.loads(session([0, 4], hash_id_scope="local"))
    first["requests"].append(nested)
    (tmp_path / "a.json").write_text(json.dumps(first))
    (tmp_path / "b.json").write_text(session([1], hash_id_scope="local"))
    trace = read_trace(tmp_path)
    assert [r.time_s for r in trace.requests] == [0, 1, 2, 4]
    assert [r.session for r in trace.requests] == ["a.json", "b.json", "a.json", "a.json"]
    assert ideal(trace).tokens == 128  # the second of a.json; b.json has the same ids and another scope
    first, second = trace.halves()
    assert [len(first.requests), len(second.requests)] == [3, 1]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "line 2: not JSON"),
        ([], "not an object"),
        ({"t": 0, "tokens": 5, "block_tokens": 0, "blocks": []}, "block_tokens must be a whole number above 0"),
        ({"t": 0, "tokens": 5, "block_tokens": 4}, "blocks must be a list"),
        ({"t": 0, "tokens": 5, "block_tokens": 4, "blocks": [[1]]}, "blocks must be a list"),
        ({"t": None, "tokens": 5, "block_tokens": 4, "blocks": [1]}, "t must be a number"),
        ({"t": 0, "block_tokens": 4, "blocks": [1]}, "input_tokens must be a whole number from 1"),
        ({"t": 0, "tokens": 8, "block_tokens": 4, "blocks": [1, 2, 3]}, "3 blocks of 4 do not fit into tokens 8"),
        ({"t": 0, "tokens": 8, "output_tokens": -1, "block_tokens": 4, "blocks": [1]}, "output_tokens must be"),
    ],
)
def test_a_line_that_is_no_request_is_named_and_skipped(tmp_path, line, why):
    good = {"t": 0, "tokens": 9, "output_tokens": 3, "block_tokens": 4, "blocks": ["a", "b"]}
    trace = read_trace(write_lines(tmp_path / "t.jsonl", [good, line, good]))
    assert len(trace.requests) == 2
    [told] = trace.skipped
    assert told.startswith("t.jsonl line 2") and why in told
    with pytest.raises(ConfigError, match="no request that can be replayed"):
        read_trace(write_lines(tmp_path / "bad.jsonl", [line]))


def test_many_bad_lines_are_counted(tmp_path):
    good = {"t": 0, "tokens": 9, "block_tokens": 4, "blocks": ["a"]}
    trace = read_trace(write_lines(tmp_path / "t.jsonl", [good, *["{"] * 30]))
    assert len(trace.skipped) == 21
    assert trace.skipped[-1] == "and 10 more"


def test_what_is_no_block_trace_says_why(tmp_path):
    table = tmp_path / "azure.csv"
    table.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,4808,10\n")
    with pytest.raises(ConfigError, match="without block hashes"):
        read_trace(table)
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "missing.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no \.json"):
        read_trace(tmp_path / "empty")
    sizes = [{"t": 0, "tokens": 9, "block_tokens": n, "blocks": [1]} for n in (4, 8)]
    with pytest.raises(ConfigError, match="different sizes"):
        read_trace(write_lines(tmp_path / "sizes.jsonl", sizes))
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="no text"):
        read_trace(binary)


def test_the_recorded_table_is_refused():
    with pytest.raises(ConfigError, match="without block hashes"):
        read_trace(recorded("AzureLLMInferenceTrace_code.csv"))


def test_spread_and_coarse(tmp_path):
    entries = [{"t": t, "tokens": 45, "block_tokens": 10, "blocks": [1, 2, 3, t]} for t in (0, 0, 3, 3)]
    trace = read_trace(write_lines(tmp_path / "t.jsonl", entries))
    assert [r.time_s for r in trace.spread().requests] == [0.0, 1.5, 3.0, 3.0]
    coarse = trace.coarse(2)
    assert coarse.block_tokens == 20
    assert [r.blocks for r in coarse.requests] == [(0, 1), (0, 1), (0, 2), (0, 2)]
    assert coarse.parents == [-1, 0, 0]
