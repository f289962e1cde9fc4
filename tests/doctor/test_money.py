"""What caching saves, in USD, against no cache at all: by hand, with writes that are never read again."""

import json
import random
from collections import defaultdict
from typing import Any

import pytest
from doctor.examining import OFFERS, examine
from doctor.made_logs import QUESTIONS, RULES, as_lines, chat, claude, words
from rich.console import Console

from kvire.doctor.rules import CacheRules, Written
from kvire.doctor.text import losses, print_diagnosis
from kvire.doctor.values import diagnosis_values
from kvire.plan.prices import bill

USD = 1e-6  # prices are per million tokens
SYSTEM = words(4998)  # with its mark 1,250 tokens
CHATS = [chat(RULES, ("user", question)) for question in QUESTIONS]  # 2,000 tokens, then each another question


def reckoned(lines: list[bytes]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """All values, those of the provider with steps, and those of the one that prices writes."""
    values = diagnosis_values(examine(lines), OFFERS, ["stepwise-1", "claude-x"])
    return values, *values["providers"]


def test_what_is_written_and_seldom_found_costs_more_than_it_saves() -> None:
    """Nine system prompts are written, the first is found once: 1,250 x 2.70 saved, 9 x 1,250 x 0.75 paid."""
    systems = [words(4998, seed) for seed in (*range(9), 0)]
    values, stepwise, marked = reckoned(as_lines([claude(system, "What?", system_ttl="5m") for system in systems]))
    assert marked["cached_tokens"] == 1250
    assert marked["written_tokens"] == {"5m": 9 * 1250, "1h": 0}
    assert marked["saved_usd"] == pytest.approx((3375 - 8437.5) * USD)
    assert stepwise["saved_usd"] == pytest.approx(1152 * 1.5 * USD)  # nine steps of 128, and writing costs nothing
    (line,) = losses(values)
    assert line.startswith("Caching costs more than it saves as sent to marks claude-x: USD 0.0051 more")
    assert "11,250 tokens would be written" in line and "only 1,250 found" in line
    console = Console(width=200, record=True)
    print_diagnosis(values, console)
    shown = console.export_text()
    assert "-0.0051" in shown and "Caching costs more than it saves" in shown


@pytest.mark.parametrize(
    ("spacing_s", "found", "hour", "usd"),
    [
        (10, 2500, 1250, 2500 * 2.7 - 1250 * 3 - 300 * 0.75),
        (3600, 2500, 1250, 2500 * 2.7 - 1250 * 3 - 300 * 0.75),
        (3601, 0, 3750, -3750 * 3 - 300 * 0.75),
    ],
)
def test_breakpoints_of_an_hour_are_written_at_their_own_price(
    spacing_s: float, found: int, hour: int, usd: float
) -> None:
    """The system prompt for an hour, at 6.00; then a message of 100 tokens, never the same, for five minutes."""
    bodies = [claude(SYSTEM, words(398, i), mark=(0,), system_ttl="1h") for i in (1, 2, 3)]
    _, _, marked = reckoned(as_lines(bodies, spacing_s))
    assert marked["cached_tokens"] == found
    assert marked["written_tokens"] == {"5m": 300, "1h": hour}
    assert marked["saved_usd"] == pytest.approx(usd * USD)


def test_a_log_of_openai_pays_for_no_write() -> None:
    """8,004 bytes, 2,001 tokens, are shared: 1,920 in steps of 128, each 1.50 cheaper, four times."""
    values, stepwise, _ = reckoned(as_lines(CHATS))
    assert (stepwise["cached_tokens"], stepwise["written_tokens"]) == (4 * 1920, {"5m": 0, "1h": 0})
    assert stepwise["saved_usd"] == pytest.approx(4 * 1920 * 1.5 * USD)
    assert not losses(values)


def test_breakpoints_that_are_assumed_write_once_what_is_found_again_as_the_plan_does() -> None:
    values, _, marked = reckoned(as_lines(CHATS))
    assert (marked["cached_tokens"], marked["written_tokens"]["5m"]) == (4 * 2000, 2000)
    assert marked["saved_usd"] == pytest.approx((8000 * 2.7 - 2000 * 0.75) * USD)
    planned = bill(OFFERS.table.find("claude-x"), values["prompt_tokens"] // 5, 2000, 0)
    assert marked["saved_usd"] == pytest.approx(5 * planned.plain_usd - planned.first_usd - 4 * planned.cached_usd)


def test_what_expired_is_written_again_before_it_is_found() -> None:
    """Found at 10 s; lost at 400 s, and nobody else comes: not worth a write; lost at 800 s, and found at 810 s."""
    times = (0, 10, 400, 800, 810)
    lines = [as_lines([body], None)[0][:-1] + b', "ts": %d}' % t for body, t in zip(CHATS, times, strict=True)]
    _, _, marked = reckoned(lines)
    assert (marked["cached_tokens"], marked["written_tokens"]["5m"]) == (2 * 2000, 2 * 2000)


def test_assumed_breakpoints_equal_a_count_prefix_by_prefix() -> None:
    """Of every prefix: whether its last use is fresh, and if so, whether that use found it or had to write it."""
    rules = CacheRules(0, 1, 300, explicit=True)
    for seed in range(300):
        rng = random.Random(seed)
        time_s, lines, found, written = 0, [], 0, 0
        used: defaultdict[str, list[int]] = defaultdict(list)
        for _ in range(rng.randrange(2, 14)):
            time_s += rng.choice([0, 10, 150, 290, 310, 1000])
            prompt = "".join(rng.choice(("aaaa", "bbbb")) for _ in range(rng.randrange(1, 7)))
            lines.append(json.dumps({"ts": 1000 + time_s, "prompt": prompt}).encode())
            for end in range(4, len(prompt) + 1, 4):
                uses = used[prompt[:end]]
                if end < len(prompt) and uses and time_s - uses[-1] <= 300:
                    found += 1
                    written += len(uses) == 1 or uses[-1] - uses[-2] > 300
                uses.append(time_s)
        totals = examine(lines, [rules]).by_rules[0]
        assert (totals.cached, totals.written) == (found, Written(written, 0)), seed


def test_a_conversation_writes_each_turn_once() -> None:
    """Turns of 100 tokens; of the last, nothing is found again."""
    turns = [("assistant" if i % 2 else "user", words(398, i)) for i in range(7)]
    _, _, marked = reckoned(as_lines([chat(words(4998), *turns[: 2 * i + 1]) for i in range(4)]))
    assert marked["cached_tokens"] == 1350 + 1550 + 1750
    assert marked["written_tokens"]["5m"] == 1750


@pytest.mark.parametrize(("size_bytes", "written"), [(4094, 2 * 1024), (4090, 0)])
def test_a_prefix_below_the_minimum_is_not_written(size_bytes: int, written: int) -> None:
    bodies = [claude(words(size_bytes, seed), "What?", system_ttl="5m") for seed in (1, 2)]
    assert examine(as_lines(bodies)).by_rules[1].written == Written(written, 0)


def test_a_prompt_that_is_found_whole_is_not_written_again() -> None:
    bodies = [claude(SYSTEM, words(398), mark=(0,))] * 3
    totals = examine(as_lines(bodies), [CacheRules(1024, 1, 300, explicit=True)]).by_rules[0]
    assert totals.written == Written(1350, 0)


def test_mending_saves_the_write_too_where_the_miss_was_written() -> None:
    """10:00 and 10:01 before the system prompt: 1,249 tokens found at 0.30 instead of written at 6.00."""
    bodies = [claude(f"10:0{i}" + SYSTEM[5:], end * 9, system_ttl="1h") for i, end in enumerate("ab")]
    values, _, _ = reckoned(as_lines(bodies))
    (finding,) = values["findings"]
    assert finding["saved"][1]["tokens"] == 1249
    assert finding["saved"][1]["usd"] == pytest.approx(1249 * (6.0 - 0.3) * USD)


def test_mending_one_of_two_lifetimes_saves_each_at_its_price() -> None:
    """The system prompt was written for an hour, and a first message of 100 tokens, now found too, for 5 minutes."""
    bodies = [
        claude(f"10:0{i}" + SYSTEM[5:], words(398, 1), "Yes", end * 9, mark=(0,), system_ttl="1h")
        for i, end in enumerate("ab")
    ]
    values, _, _ = reckoned(as_lines(bodies))
    (finding,) = values["findings"]
    assert finding["saved"][1]["tokens"] == 1349
    # 1,250 of them lie before the end of the system prompt; the token of the time is lost at the end of all.
    assert finding["saved"][1]["usd"] == pytest.approx((1250 * (6.0 - 0.3) + 99 * (3.75 - 0.3)) * USD)
