"""Providers' rules at their edges: minimum lengths, steps, times to live, breakpoints."""

import json
from typing import Any

import pytest
from doctor.examining import OFFERS, examine
from doctor.made_logs import as_lines, claude, time_stamp, words

from kvire.doctor.prompt import PromptWriter
from kvire.doctor.rules import CacheRules, Written
from kvire.doctor.text import losses
from kvire.doctor.values import diagnosis_notes, diagnosis_values

AUTOMATIC = CacheRules(min_tokens=1024, step_tokens=128, ttl_s=300)
MARKED = CacheRules(min_tokens=1024, step_tokens=1, ttl_s=300, explicit=True)
ANY = CacheRules(min_tokens=0, step_tokens=1, ttl_s=1e9)


def prompts(shared_tokens: int, *times_s: float) -> list[bytes]:
    """Plain prompts with exactly so many tokens in common, and 40 of their own."""
    return [
        json.dumps({"ts": t, "prompt": words(4 * shared_tokens) + chr(65 + i) * 160}).encode()
        for i, t in enumerate(times_s)
    ]


@pytest.mark.parametrize(("shared", "cached"), [(1023, 0), (1024, 1024), (1151, 1024), (1152, 1152), (1300, 1280)])
def test_minimum_and_steps(shared: int, cached: int) -> None:
    diagnosis = examine(prompts(shared, 0, 1), [AUTOMATIC])
    totals = diagnosis.by_rules[0]
    assert diagnosis.totals.ideal_tokens == shared
    assert totals.cached == cached
    assert (totals.too_short, totals.partial_step) == ((shared, 0) if not cached else (0, shared - cached))


@pytest.mark.parametrize(
    ("times_s", "cached"),
    [((0, 300), 1), ((0, 301), 0), ((0, 200, 450), 2), ((0, 200, 501), 1), ((0, 301, 302), 1)],
)
def test_an_entry_lives_so_long_after_its_last_use(times_s: tuple[float, ...], cached: int) -> None:
    totals = examine(prompts(2048, *times_s), [AUTOMATIC]).by_rules[0]
    assert totals.cached == 2048 * cached
    assert totals.too_old == 2048 * (len(times_s) - 1 - cached)


def test_without_times_nothing_expires() -> None:
    lines = [json.dumps({"prompt": json.loads(line)["prompt"]}).encode() for line in prompts(2048, 0, 1e6)]
    assert examine(lines, [AUTOMATIC]).by_rules[0].cached == 2048


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    lines = [json.dumps({"prompt": words(8000)}).encode()] * 2
    diagnosis = examine(lines, [ANY])
    assert diagnosis.totals.ideal_tokens == diagnosis.by_rules[0].cached == 1999


SYSTEM = words(4998)  # with its mark 1,250 tokens


def test_only_what_a_breakpoint_ends_is_cached() -> None:
    marked = [claude(SYSTEM, words(998, 1) + 8 * end, system_ttl="5m") for end in "ab"]
    totals = examine(as_lines(marked), [MARKED]).by_rules[0]
    assert (totals.cached, totals.no_breakpoint) == (1250, 250)
    plain = [claude(SYSTEM, words(998, 1) + 8 * end) for end in "ab"]
    diagnosis = examine(as_lines(plain), [MARKED])
    assert (diagnosis.by_rules[0].cached, diagnosis.by_rules[0].no_breakpoint) == (0, 1500)
    assert diagnosis.totals.without_breakpoint == 2


@pytest.mark.parametrize(
    ("ttl", "spacing_s", "cached"), [("5m", 300, 2), ("5m", 301, 0), ("1h", 3600, 2), ("1h", 3601, 0)]
)
def test_an_entry_lives_as_long_as_its_breakpoint_says_and_a_read_prolongs_it(
    ttl: str, spacing_s: float, cached: int
) -> None:
    bodies = [claude(SYSTEM, end * 9, system_ttl=ttl) for end in "abc"]
    totals = examine(as_lines(bodies, spacing_s), [MARKED]).by_rules[0]
    assert totals.cached == 1250 * cached
    assert totals.too_old == 1250 * (2 - cached)


def test_a_conversation_reads_what_its_last_turn_wrote() -> None:
    turns = [words(398, i) for i in range(9)]
    bodies = [claude(SYSTEM, *turns[: 2 * i + 1], mark=(2 * i,)) for i in range(4)]
    # The second reads system and 1 message, the third 3, the fourth 5: 1250 + 100 each.
    assert examine(as_lines(bodies), [MARKED]).by_rules[0].cached == 3 * 1250 + 100 * (1 + 3 + 5)


@pytest.mark.parametrize(("added", "cached"), [(19, 1350), (20, 0)])
def test_a_breakpoint_looks_at_twenty_blocks_itself_included(added: int, cached: int) -> None:
    turns = [words(398, i) for i in range(1 + added)]
    bodies = [claude(SYSTEM, turns[0], mark=(0,)), claude(SYSTEM, *turns, mark=(added,))]
    assert examine(as_lines(bodies), [MARKED]).by_rules[0].cached == cached


def test_runs_of_tool_calls_and_of_results_are_one_position_each() -> None:
    """Thirty calls at once, then their results: two positions, and a question."""
    calls = [{"type": "tool_use", "id": f"u{i}", "name": "f", "input": {}} for i in range(30)]
    results = [{"type": "tool_result", "tool_use_id": f"u{i}", "content": "ok"} for i in range(30)]
    first, second = claude(SYSTEM, words(398), mark=(0,)), claude(SYSTEM, words(398), "x", "y", mark=(2,))
    second["messages"][1]["content"], second["messages"][2]["content"][:0] = calls, results
    assert examine(as_lines([first, second]), [MARKED]).by_rules[0].cached == 1350


EPHEMERAL = {"type": "ephemeral"}


def marked_at(*controls: dict[str, str], text: str = "Hej") -> dict[str, Any]:
    """A request whose blocks of one message have these breakpoints."""
    blocks = [{"type": "text", "text": text, "cache_control": control} for control in controls]
    return {"model": "claude-x", "system": SYSTEM, "messages": [{"role": "user", "content": blocks}]}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (marked_at(*[EPHEMERAL] * 5), "more than 4 breakpoints"),
        (marked_at(*[EPHEMERAL] * 4) | {"cache_control": EPHEMERAL}, None),  # the last block has it already
        (marked_at(EPHEMERAL, EPHEMERAL | {"ttl": "1h"}), "for an hour stands behind one for five minutes"),
        (marked_at(EPHEMERAL | {"ttl": "1h"}, EPHEMERAL), None),
        (marked_at(EPHEMERAL, text=""), "an empty text block"),
        (marked_at(EPHEMERAL | {"ttl": "1d"}), "unknown type or ttl"),
        (marked_at({"type": "persistent"}), "unknown type or ttl"),
        (
            {"model": "claude-x", "system": SYSTEM, "messages": [{"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "cache_control": EPHEMERAL}]}]},
            "a block of thinking",
        ),
        ({"system": [{"text": SYSTEM}, *[{"cachePoint": {}}, {"text": "a"}] * 5], "messages": []}, "more than 4"),
        ({"system": [{"cachePoint": {}}, {"text": SYSTEM}], "messages": []}, "an empty text block"),
    ],
)  # fmt: skip
def test_what_the_api_refuses_caches_nothing_and_is_said(body: dict[str, Any], reason: str | None) -> None:
    diagnosis = examine(as_lines([body] * 2), [MARKED])
    totals = diagnosis.by_rules[0]
    if reason is None:
        assert not diagnosis.totals.refused and totals.cached > 1000 and totals.written.five_minutes > 0
        return
    ((said, refused),) = diagnosis.totals.refused.items()
    assert reason in said
    assert (refused.requests, refused.line) == (2, 1)
    assert (totals.cached, totals.written) == (0, Written())
    assert diagnosis.totals.without_breakpoint == 0
    (note,) = [note for note in diagnosis_notes(diagnosis) if "refuses" in note]
    assert note.startswith("2 requests that the API refuses, first in line 1: ") and said in note


def test_counting_refused_breakpoints_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptWriter, "refuse", lambda *_: None)
    totals = examine(as_lines([marked_at(*[EPHEMERAL] * 5)] * 2), [MARKED]).by_rules[0]
    assert totals.cached > 0


def test_a_refused_request_leaves_nothing_for_the_next() -> None:
    turns = [words(398, i) for i in range(7)]
    bodies = [claude(SYSTEM, *turns[:5], mark=(0, 1, 2, 3, 4)), claude(SYSTEM, *turns, mark=(6,))]
    assert examine(as_lines(bodies), [MARKED]).by_rules[0].cached == 0


@pytest.mark.parametrize(("size_bytes", "little"), [(4094, 0), (4090, 2)])
def test_breakpoints_before_the_minimum_length_are_said(size_bytes: int, little: int) -> None:
    """With its mark of 2 bytes the system prompt has 1,024 tokens, or one less."""
    bodies = [claude(words(size_bytes), "What?" + end, system_ttl="5m") for end in "ab"]
    values = diagnosis_values(examine(as_lines(bodies)), OFFERS, ["claude-x"])
    (provider,) = values["providers"]
    assert (provider["marks_too_little"], provider["cached_tokens"] == 0) == (little, bool(little))
    said = "As sent to marks claude-x: 2 requests with breakpoints that all end before the minimum of 1,024 tokens"
    assert any(line.startswith(said) for line in losses(values)) == bool(little)


def test_an_entry_is_read_whole_or_not_at_all() -> None:
    bodies = [claude(SYSTEM, words(500, 1) + end * 498, mark=(0,)) for end in "ab"]
    assert examine(as_lines(bodies), [MARKED]).by_rules[0].cached == 0


def test_a_read_prolongs_an_entry_that_no_breakpoint_of_the_reader_ends() -> None:
    first = words(398, 1)
    bodies = [claude(SYSTEM, first, mark=(0,)), *(claude(SYSTEM, first, end * 9, end * 9, mark=(2,)) for end in "ab")]
    assert examine(as_lines(bodies, 200), [MARKED]).by_rules[0].cached == 2 * 1350


@pytest.mark.parametrize(("spacing_s", "tokens"), [(300, 3 * 1920), (301, 0)])
def test_what_mending_gives_back_expires_too(spacing_s: float, tokens: int) -> None:
    (finding,) = examine(as_lines(time_stamp().bodies, spacing_s), [AUTOMATIC]).findings
    assert finding.by_rules == [tokens]
    assert finding.tokens == time_stamp().tokens


@pytest.mark.parametrize(("spacing_s", "cached"), [(3600, 1250), (3601, 0)])
def test_what_mending_gives_back_lives_as_long_as_its_breakpoint_says(spacing_s: float, cached: int) -> None:
    """10:01 and 10:02 in front of the system prompt: all of it but the five bytes (one token) of the time."""
    bodies = [claude(f"10:0{i}" + SYSTEM[5:], end * 9, system_ttl="1h") for i, end in enumerate("ab")]
    (finding,) = examine(as_lines(bodies, spacing_s), [MARKED]).findings
    assert finding.by_rules == [max(0, cached - 1)]


def test_prompts_of_another_api_are_reckoned_with_breakpoints_at_their_best() -> None:
    chats = [
        {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": words(900, 1) + end}]}
        for end in "ab"
    ]
    assert examine(as_lines(chats), [MARKED]).by_rules[0].cached == 1250
