"""`kvire replay`: what people and programs get, and what they are told when they ask for nonsense."""

import json

import pytest
from replay.traces import write_lines
from typer.testing import CliRunner

from kvire.cli.main import cli
from kvire.core.errors import ConfigError
from kvire.plan.hits import read_curve


@pytest.fixture
def trace(tmp_path):
    """Two sessions that take turns, of 4 blocks of 10 tokens each."""
    entries = [
        {"t": t, "tokens": 41, "output_tokens": 5, "block_tokens": 10, "blocks": [f"{t % 2}-{i}" for i in range(4)]}
        for t in range(10)
    ]
    return write_lines(tmp_path / "trace.jsonl", entries)


def replay(*arguments):
    result = CliRunner().invoke(cli, ["replay", *map(str, arguments)])
    if isinstance(result.exception, ConfigError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_json_says_all_and_the_planner_reads_it(trace):
    report = json.loads(
        replay(trace, "--json", "--policy", "lru", "--policy", "optimum", "--capacity", 60, "--capacity", "100%")
    )
    assert report["schema"] == "kvire.replay/1"
    assert report["trace"]["working_set_tokens"] == 80
    assert report["ideal_hit_rate"] == pytest.approx(8 * 40 / 410)
    lru, optimum = report["curves"]
    # six blocks: lru keeps the session at hand and the first two blocks of the other one
    assert lru["points"][0] == {"capacity_tokens": 60, "hit_rate": pytest.approx(8 * 20 / 410), "request_hit_rate": 0.8}
    assert lru["points"][1]["hit_rate"] == report["ideal_hit_rate"]
    assert optimum["points"][0]["hit_rate"] == pytest.approx(8 * 30 / 410)
    assert "request_hit_rate" not in optimum["points"][0]  # it is a bound on tokens
    curve = read_curve(report)
    assert curve.policy == "lru" and curve.hit_rate(80) == pytest.approx(8 * 40 / 410)


def test_bytes_and_tiers(trace):
    report = json.loads(
        replay(trace, "--json", "--bytes-per-token", 1000, "--tier", "memory=40kB", "--tier", "disk=100%")
    )
    store, optimum = report["curves"]
    assert report["tiers"][0] == {"name": "memory", "capacity_tokens": 40, "capacity_bytes": 40_000}
    [point] = store["points"]
    assert point["hit_rate_by_tier"] == {"memory": 0.0, "disk": pytest.approx(8 * 40 / 410)}
    assert point["hit_rate"] == optimum["points"][0]["hit_rate"] == report["ideal_hit_rate"]


def test_a_models_bytes_are_those_that_a_store_keeps(trace):
    """18 layers of gemma3-270m, K and V of 256, also those that see 512 tokens only."""
    options = ("--model", "gemma3-270m", "--capacity", "2MB", "--capacity", 80)
    report = json.loads(replay(trace, "--json", *options, "--kv-dtype", "float32"))
    each = 18 * 512 * 4
    assert report["kv"] == {
        "bytes_per_token": each, "model": "Gemma 3 270M", "kv_dtype": "float32", "state_bytes_per_sequence": 0
    }  # fmt: skip
    points = report["curves"][0]["points"]
    assert [(point["capacity_tokens"], point["capacity_bytes"]) for point in points] == [
        (2_000_000 // each, 2_000_000),
        (80, 80 * each),
    ]
    assert json.loads(replay(trace, "--json", *options))["kv"]["bytes_per_token"] == each // 2
    assert "18,432 bytes: Gemma 3 270M, KV in float16, every layer in full" in replay(trace, *options)
    assert "a token takes 1,000 bytes" in replay(trace, "--bytes-per-token", 1000)
    assert json.loads(replay(trace, "--json"))["kv"] is None
    assert "recurrent states" in replay(trace, "--model", "qwen3.5-27b")


def test_the_table_and_the_picture(trace, tmp_path):
    for ending, head in ((".svg", b"<svg"), (".png", b"\x89PNG")):
        text = replay(
            trace,
            "--policy",
            "s3-fifo",
            "--policy",
            "ttl=9",
            "--policy",
            "optimum",
            "--picture",
            tmp_path / f"curves{ending}",
        )
        assert (tmp_path / f"curves{ending}").read_bytes().startswith(head)
    assert "78.0% of the tokens hit" in text
    for word in ("s3-fifo", "ttl=9", "optimum", "100.0%"):
        assert word in text
    assert "memory" in replay(trace, "--tier", "memory=50")


def test_all_policies(trace):
    curves = json.loads(replay(trace, "--policy", "all", "--json"))["curves"]
    names = ["lru", "cost-aware", "gdsf", "lfu", "store", "s3-fifo", "sieve", "optimum"]
    assert [curve["policy"] for curve in curves] == names
    sizes = [[point["capacity_tokens"] for point in curve["points"]] for curve in curves]
    assert sizes == [[10, 20, 40, 80]] * 8  # 1, 5 and 10 % are less than one block


def test_skipped_lines_are_told(trace):
    with trace.open("a") as file:
        file.write("{]\n")
    for options in ((), ("--spread",), ("--half", 1), ("--coarse", 2)):
        assert "line 11: not JSON" in replay(trace, *options)


def test_all_may_stand_beside_others(trace):
    policies = [
        c["policy"] for c in json.loads(replay(trace, "--policy", "lru", "--policy", "all", "--json"))["curves"]
    ]
    assert len(policies) == 8


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--policy", "mru"], "no policy 'mru'"),
        (["--policy", "ttl=-1"], "no lifetime"),
        (["--capacity", "5GB"], "--bytes-per-token"),
        (["--model", "smollm2", "--bytes-per-token", "9"], "either --model or --bytes-per-token"),
        (["--kv-dtype", "int8"], "add --model"),
        (["--model", "smollm2", "--kv-dtype", "int4"], "not 'int4'"),
        (["--capacity", "many"], "no size"),
        (["--capacity", "9"], "holds no block"),
        (["--tier", "tape=5"], "memory=SIZE and disk=SIZE"),
        (["--tier", "disk=50", "--policy", "lru"], "leave out"),
        (["--picture", "a.gif"], ".svg or a .png"),
        (["--coarse", "9"], "fills a block of 90 tokens"),
    ],
)
def test_mistakes_are_named(trace, arguments, why):
    with pytest.raises(ConfigError, match=why):
        replay(trace, *arguments)


def test_halves_are_of_time_or_of_sessions(trace):
    assert json.loads(replay(trace, "--half", 2, "--json"))["requests"] == 5
