"""Answers worked out by hand, and those that other code measured on the recorded traces."""

import heapq

import pytest
from replay.traces import random_trace, recorded, trace_of, write_lines

from kvire.replay.caches import RankCache
from kvire.replay.formats import read_trace
from kvire.replay.optimum import ceiling_tokens
from kvire.replay.policies import POLICIES, policy_named
from kvire.replay.simulate import ideal

CONVERSATION, SYNTHETIC = "mooncake_conversation_trace.jsonl", "mooncake_synthetic_trace.jsonl"
ENDLESS = 1 << 40


def hits(trace, policy, blocks):
    return policy_named(policy)(trace, blocks, lambda _: None).tokens


# Blocks of 10 tokens; the last token of a prompt is always computed.
MADE = trace_of([
    ("ab", 21),   # nothing
    ("ab", 20),   # everything but one token: 19
    ("ac", 21),   # a: 10
    ("d", 10),    # nothing
    ("ab", 21),   # with room for three blocks, b went for d (or for c): 10, else 20
    ("ac", 21),
])  # fmt: skip

WITH_ROOM_FOR_THREE = [
    {"t": t, "tokens": 512 * len(blocks), "block_tokens": 512, "blocks": list(blocks)}
    for t, blocks in enumerate(("123", "9", "123"))
]


def test_by_hand():
    assert ideal(MADE).tokens == 19 + 10 + 0 + 20 + 20
    assert ideal(MADE).requests == 4
    # lru with 3 blocks: a b | a b | a b c | d for b: a c d | b for c: a b d | c for d: a b c
    assert hits(MADE, "lru", 3) == 19 + 10 + 0 + 10 + 10
    # the optimum never keeps d: a b c stay
    assert ceiling_tokens(MADE, 3) == 19 + 10 + 0 + 20 + 20
    # and with two blocks it keeps a, and b or c for one more hit; the 19 of the second request count 10 and 9
    assert ceiling_tokens(MADE, 2) == 19 + 10 + 0 + 20 + 10
    # one block: a
    assert hits(MADE, "lru", 1) == 10 + 10 + 0 + 0 + 10


@pytest.mark.parametrize("policy", ["lru", "store"])
def test_the_end_of_a_prompt_goes_first_in_every_run(tmp_path, policy):
    """9 takes the place of 3, so the third request hits 1 and 2: 1,024 of 3,584 tokens."""
    trace = read_trace(write_lines(tmp_path / "t.jsonl", WITH_ROOM_FOR_THREE))
    assert {hits(trace, policy, 3) for _ in range(200)} == {1024}
    assert trace.input_tokens == 3584 and round(1024 / 3584, 4) == 0.2857


def test_the_optimum_does_not_keep_what_is_never_asked_again(tmp_path):
    """It keeps 1, 2 and 3, and leaves 9 out; of 1,536 tokens found the last one is computed all the same."""
    trace = read_trace(write_lines(tmp_path / "t.jsonl", WITH_ROOM_FOR_THREE))
    assert ceiling_tokens(trace, 3) == 1535


def test_a_cache_that_evicts_a_prompts_beginning_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(RankCache, "_free", lambda self, block: self._turn[block] != self._turns)
    monkeypatch.setattr(
        RankCache,
        "_queue",
        lambda self, block: heapq.heappush(self._heap, (self._order[block], self.depths[block], block)),
    )
    trace = read_trace(write_lines(tmp_path / "t.jsonl", WITH_ROOM_FOR_THREE))
    assert hits(trace, "lru", 3) == 0


def test_a_lifetime_counts_from_the_last_use():
    trace = trace_of([("ab", 21), ("ab", 21), ("c", 11), ("c", 11), ("ab", 21)])
    assert hits(trace, "ttl=1.5", ENDLESS) == 20 + 10
    assert hits(trace, "ttl=3", ENDLESS) == 20 + 10  # exactly three seconds is too late
    assert hits(trace, "ttl=3.5", ENDLESS) == 20 + 10 + 20


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "optimum"])
def test_with_room_for_everything_every_policy_reaches_the_ideal(policy):
    trace = random_trace(3)
    assert hits(trace, policy, len(trace.parents)) == ideal(trace).tokens
    assert ceiling_tokens(trace, len(trace.parents)) == ideal(trace).tokens


@pytest.mark.parametrize(
    ("name", "ideal_rate", "points", "lifetimes"),
    [
        (CONVERSATION, 0.374, {0.5e6: 0.045, 1.5e6: 0.067, 5.1e6: 0.216, 15.4e6: 0.332, 51e6: 0.371}, {300: 0.293}),
        (
            SYNTHETIC,
            0.651,
            {0.5e6: 0.086, 1.5e6: 0.194, 5.1e6: 0.432, 15.4e6: 0.636, 51e6: 0.651},
            {60: 0.328, 300: 0.595},
        ),
    ],
)  # fmt: skip
def test_recorded_traces(name, ideal_rate, points, lifetimes):
    trace = read_trace(recorded(name))
    total = trace.input_tokens
    assert ideal(trace).tokens / total == pytest.approx(ideal_rate, abs=0.0005)
    for tokens, rate in points.items():
        assert hits(trace, "lru", int(tokens) // trace.block_tokens) / total == pytest.approx(rate, abs=0.01)
    for seconds, rate in lifetimes.items():
        assert hits(trace, f"ttl={seconds}", ENDLESS) / total == pytest.approx(rate, abs=0.003)


def test_the_recorded_sessions():
    trace = read_trace(recorded("claude_code"))
    assert len(trace.requests) == 1306
    assert ideal(trace).tokens / trace.input_tokens == pytest.approx(0.9574, abs=0.0001)
