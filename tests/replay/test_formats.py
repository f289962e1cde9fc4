"""Every format is told from its content, and what is no trace says why."""

import gzip
import json

import pytest
from replay.traces import recorded, write_lines

from kvire.core.errors import ConfigError
from kvire.replay.formats import read_trace
from kvire.replay.policies import policy_named
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


BAILIAN = [
    {"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.0, "input_length": 48, "output_length": 5, "type": "text",
     "turn": 1, "hash_ids": [1, 2, 3]},
    {"chat_id": 2, "parent_chat_id": 1, "timestamp": 30.5, "input_length": 64, "output_length": 5, "turn": 2,
     "hash_ids": [1, 2, 3, 4]},
    {"chat_id": 3, "parent_chat_id": -1, "timestamp": 61.0, "input_length": 33, "output_length": 5, "turn": 1,
     "hash_ids": [1, 2, 9]},
]  # fmt: skip


def test_bailians_blocks_of_16_and_seconds_are_told_from_the_file(tmp_path):
    """The second prompt hits the first's 48 tokens, the third 32: 80 of 145."""
    trace = read_trace(write_lines(tmp_path / "t.jsonl", BAILIAN))
    assert (trace.format, trace.block_tokens, trace.duration_s, trace.notes) == ("bailian", 16, 61.0, [])
    assert (ideal(trace).tokens, trace.input_tokens) == (80, 145)
    assert round(80 / 145, 4) == 0.5517
    assert [request.session for request in trace.requests] == ["1", "1", "3"]


def of_size(size, *, unit=1, fields=()):
    """The same prompts in blocks of another size, and times in another unit."""
    rows = []
    for row in BAILIAN:
        kept = {name: value for name, value in row.items() if name.endswith("length") or name == "hash_ids"}
        length = -(-row["input_length"] * size // 16)
        rows.append(kept | {"timestamp": int(row["timestamp"] * unit), "input_length": length} | dict(fields))
    return rows


@pytest.mark.parametrize("size", [8, 16, 32, 64, 128, 256, 512, 1024])
def test_every_usual_size_is_told_by_lengths_and_ids(tmp_path, size):
    trace = read_trace(write_lines(tmp_path / "t.jsonl", of_size(size, unit=1000)))
    assert (trace.format, trace.block_tokens, trace.duration_s) == ("mooncake", size, 61.0)
    assert ideal(trace).tokens / trace.input_tokens == pytest.approx(80 / 145, abs=0.01)


def test_a_size_that_is_not_usual_is_given_by_option_or_field(tmp_path):
    path = write_lines(tmp_path / "t.jsonl", of_size(48))
    with pytest.raises(ConfigError, match=r"no usual size fits them.*--block-tokens.*a field block_size"):
        read_trace(path)
    assert read_trace(path, block_tokens=48).block_tokens == 48
    said = write_lines(tmp_path / "said.jsonl", of_size(48, fields={"block_size": 48}.items()))
    assert read_trace(said).block_tokens == 48
    with pytest.raises(ConfigError, match="leave --block-tokens 16 out"):
        read_trace(said, block_tokens=16)


@pytest.mark.parametrize("wrong", [1, 8, 15, 17, 32, 64, 512])
def test_a_wrong_size_is_an_error_that_names_the_option(tmp_path, wrong):
    path = write_lines(tmp_path / "t.jsonl", BAILIAN)
    with pytest.raises(
        ConfigError, match=rf"blocks of {wrong} tokens do not fit \d of the 3 .*blocks of 16 do.*--block-t"
    ):
        read_trace(path, block_tokens=wrong)


def test_prompts_of_one_block_do_not_tell_its_size(tmp_path):
    rows = [
        {"timestamp": t, "input_length": n, "output_length": 1, "hash_ids": [1]} for t, n in ((0.5, 16), (61.0, 12))
    ]
    path = write_lines(tmp_path / "t.jsonl", rows)
    with pytest.raises(
        ConfigError, match=r"prompts fit blocks of 16, 32, 64, 128, 256, 512, 1024 tokens.*--block-tokens"
    ):
        read_trace(path)
    trace = read_trace(path, block_tokens=16)
    assert trace.duration_s == 60.5
    assert trace.notes == ["timestamps have fractions, so they are read as seconds; if they are not: --time-unit ms"]
    assert read_trace(path, block_tokens=16, time_unit="ms").duration_s == pytest.approx(0.0605)
    with pytest.raises(ConfigError, match="--time-unit is s or ms"):
        read_trace(path, block_tokens=16, time_unit="min")


def test_a_reader_that_takes_512_for_granted_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr("kvire.replay.formats.block_tokens_of", lambda *_: 512)
    with pytest.raises(ConfigError, match="no request that can be replayed"):
        read_trace(write_lines(tmp_path / "t.jsonl", BAILIAN))


def test_delays_count_from_the_request_before_in_the_session(tmp_path):
    row = {"input_length": 1500, "output_length": 5, "hash_ids": [1, 2, 3]}
    rows = [
        {"session_id": "a", "delay": 500, **row},
        {"session_id": "b", "timestamp": 2000, **row},
        {"session_id": "a", "delay": 250, **row},
        {"session_id": "b", "delay": 1000, **row},
        {"session_id": "b", **row},
        row,
    ]
    trace = read_trace(write_lines(tmp_path / "t.jsonl", rows))
    assert [(r.session, r.time_s) for r in trace.requests] == [
        ("a", 0.5), ("a", 0.75), ("b", 2.0), ("b", 3.0), ("b", 3.0)
    ]  # fmt: skip
    assert trace.block_tokens == 512
    assert trace.skipped == ["t.jsonl line 6: timestamp must be a number, or there must be a delay or a session_id"]
    [note] = trace.notes
    assert note.startswith("4 requests without a timestamp")


def test_a_trace_without_times_is_replayed_in_its_order_and_no_clock_is_asked(tmp_path):
    rows = [{name: row[name] for name in ("input_length", "output_length", "hash_ids")} for row in BAILIAN]
    trace = read_trace(write_lines(tmp_path / "t.jsonl", rows))
    assert ideal(trace).tokens == 80
    assert not trace.is_timed and "no times" in trace.notes[0]
    with pytest.raises(ConfigError, match="ttl=300 needs times"):
        policy_named("ttl=300")(trace, 10, lambda _: None)


def test_a_row_with_fewer_ids_than_its_length_needs_gets_a_note(tmp_path):
    rows = [
        {"timestamp": 0, "input_length": 1030, "output_length": 7, "hash_ids": [4, 5, 6]},
        {"timestamp": 1, "input_length": 6758, "output_length": 7, "hash_ids": [4, 5]},
        {"timestamp": 2, "input_length": 1030, "output_length": 7, "hash_ids": [4, 5, 7]},
    ]
    trace = read_trace(write_lines(tmp_path / "t.jsonl", rows))
    assert trace.block_tokens == 512
    assert trace.notes == ["t.jsonl line 2: 2 blocks hold 1,024 of 6,758 tokens; 5,734 never hit"]
    alone = write_lines(tmp_path / "alone.jsonl", rows[1:2])
    assert read_trace(alone, block_tokens=512).notes == [trace.notes[0].replace("t.jsonl line 2", "alone.jsonl line 1")]


def test_arrays_and_gzip_are_read_alike(tmp_path):
    for name, text in (("array.json", json.dumps(BAILIAN, indent=1)), ("line.json", json.dumps(BAILIAN))):
        (tmp_path / name).write_text(text)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
        for path in (tmp_path / name, tmp_path / f"{name}.gz"):
            assert ideal(read_trace(path)).tokens == 80
    (tmp_path / "cut.gz").write_bytes(gzip.compress(text.encode())[:-9])
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "cut.gz")
