"""Each planted cause is named, with the place, the token, and what it costs by hand calculation."""

import json
from collections.abc import Callable

import pytest
from doctor.examining import OFFERS, examine
from doctor.made_logs import ALL, RULES, Made, as_lines, chat, words

from kvire.doctor.diagnose import Doctor
from kvire.doctor.reading.logs import read_log
from kvire.doctor.tokens import Estimate
from kvire.doctor.values import diagnosis_values


@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_a_planted_cause_is_named_and_costs_what_a_hand_calculation_says(make: Callable[[], Made]) -> None:
    made = make()
    found = examine(as_lines(made.bodies)).findings
    assert [(str(one.causes[0]), one.where) for one in found] == [(str(made.cause), made.where)]
    assert tuple(map(str, found[0].causes[1:])) == made.together_with
    assert (found[0].example.token, found[0].requests) == (made.token, made.requests_hit)
    assert found[0].tokens == made.tokens


def test_the_example_points_at_the_character_and_masks_the_piece() -> None:
    lines = as_lines(ALL[0]().bodies)
    values = diagnosis_values(examine(lines), OFFERS)
    example = values["findings"][0]["example"]
    assert (example["line"], example["other_line"], example["place"], example["character"]) == (
        2,
        1,
        "system prompt",
        6,
    )
    assert example["piece"] == example["other_piece"] == "9999-99-99A99:99:99A"
    shown = diagnosis_values(examine(lines), OFFERS, show_text=True)["findings"][0]["example"]
    assert (shown["piece"], shown["other_piece"]) == ("2026-11-30T10:00:01Z", "2026-11-30T10:00:00Z")


def test_prompts_that_only_go_on_are_no_finding() -> None:
    turns = [("user" if i % 2 == 0 else "assistant", words(300, i)) for i in range(9)]
    growing = [chat(RULES, *turns[: 2 * i + 1]) for i in range(5)]
    asked = [chat(RULES, ("user", words(200, 50 + i))) for i in range(20)]
    assert not examine(as_lines(growing + asked)).findings


def test_unrelated_prompts_are_no_finding() -> None:
    unrelated = [chat(words(700, i), ("user", words(4000 + 300 * i, 100 + i))) for i in range(20)]
    diagnosis = examine(as_lines(unrelated))
    assert not diagnosis.findings
    assert diagnosis.totals.ideal_tokens == 0


def test_the_closest_earlier_prompt_is_found_among_many_others() -> None:
    """A cut history diverges where fifty other chats do; the one that it comes from is not the last of them."""
    own = [("user" if i % 2 == 0 else "assistant", words(600, i)) for i in range(12)]
    others = [chat(RULES, ("user", words(900, 200 + i))) for i in range(50)]
    lines = as_lines([chat(RULES, *own[:9]), *others, chat(RULES, *own[2:11])])
    found = examine(lines).findings
    assert [(str(one.causes[0]), one.example.line, one.example.other_line) for one in found] == [
        ("history cut at the front", 52, 1)
    ]


def test_a_short_message_that_stands_elsewhere_too_says_nothing() -> None:
    """ "Go on." comes later in the other chat; that is no history that was cut."""
    answer = ("assistant", words(4000, 1))
    bodies = [
        chat(RULES, ("user", "Start!"), answer, ("user", "Go on."), ("assistant", words(90, 2)), ("user", "Why?")),
        chat(RULES, ("user", "Go on."), answer, ("user", "So?")),
    ]
    assert [str(one.causes[0]) for one in examine(as_lines(bodies)).findings] == ["changed history"]


def test_a_few_fixed_words_behind_other_text_are_another_prompt() -> None:
    """2,000 bytes that differ, then 600 that do not: less than half of what follows is the same again."""
    bodies = [chat("Sum up.", ("user", words(2000, i) + "\n" + words(600, 9) + str(i) * 9)) for i in range(4)]
    assert not examine(as_lines(bodies)).findings


def test_words_of_one_length_are_no_ids() -> None:
    tones = [
        chat(f"In 3 steps, be {tone}.\n{words(4000)}", ("user", q)) for tone, q in (("formal", "A?"), ("casual", "B?"))
    ]
    assert [str(one.causes[0]) for one in examine(as_lines(tones)).findings] == ["changed system prompt"]


def test_two_causes_in_one_prompt_are_credited_with_what_is_behind_each() -> None:
    bodies = [
        chat(f"Info: 2026-11-30T10:00:0{i}Z{RULES}", ("user", f"Ticket {i}:\n{words(4000, 3)}{q}"))
        for i, q in enumerate("ab")
    ]
    found = examine(as_lines(bodies)).findings
    # The time as in made_logs: 26 bytes = 6 tokens are shared; the same from 28 (7) to 8037 (2009): 2 + 2002 - 6.
    # The number is byte 8037; the same from 8038 (2009) to 12040 (3010): 1001 more.
    assert [(str(one.causes[0]), one.tokens, one.example.token) for one in found] == [
        ("time stamp", 1998, 2),
        ("counter", 1001, 2009),
    ]


def test_pieces_close_together_are_one_finding() -> None:
    heads = ["0b0e4bfa93; a line between; 2026-11-30T10:00:01Z", "91c7de021f; a line between; 2026-11-30T10:00:02Z"]
    (found,) = examine(
        as_lines([chat(head + RULES, ("user", q)) for head, q in zip(heads, "ab", strict=True)])
    ).findings
    assert list(map(str, found.causes)) == ["random id", "time stamp"]


def test_several_logs_are_one_history_and_are_named() -> None:
    """The second log's line 1 comes after the first one's line 31, and is compared with it."""
    others = [chat(words(700, i), ("user", words(400, 100 + i))) for i in range(30)]
    stamped = [chat(f"Now 2026-11-30 10:00:0{i} {words(150)}", ("user", q)) for i, q in enumerate(("What?", "Other"))]
    doctor = Doctor([], Estimate())
    doctor.examine(read_log(as_lines([*others, stamped[0]])), "a.jsonl")
    doctor.examine(read_log(as_lines(stamped[1:])), "b.jsonl")
    example = doctor.diagnosis().findings[0].example
    assert (example.log, example.line, example.other_log, example.other_line) == ("b.jsonl", 1, "a.jsonl", 31)


def test_prompts_of_one_line_are_compared_with_each_other() -> None:
    prompts = [f"Now 2026-11-30 10:00:0{i} {words(400)}" for i in range(3)]
    (found,) = examine([json.dumps({"prompt": prompts}).encode()]).findings
    assert (str(found.causes[0]), found.requests) == ("time stamp", 2)


def test_hours_are_between_the_earliest_and_the_latest_request() -> None:
    lines = as_lines(ALL[0]().bodies, 3600)
    assert [diagnosis_values(examine(log), OFFERS)["hours"] for log in (lines, lines[::-1])] == [3, 3]


def test_another_models_prompts_are_no_closest_ones() -> None:
    turns = [("user" if i % 2 == 0 else "assistant", words(900, i)) for i in range(9)]
    bodies = [chat(RULES, *turns, model="one"), chat(words(99), *turns[2:], model="two")]
    assert not examine(as_lines(bodies)).findings
