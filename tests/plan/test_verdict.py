"""Times per tier, hit curves, and what to buy: or nothing, and why."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvire.core.errors import ConfigError
from kvire.plan.hardware import break_even_bytes_per_s, machine
from kvire.plan.hits import HitCurve, assumed_reuse, read_curve
from kvire.plan.plan import Money, Plan, device_tokens
from kvire.plan.report import plan_values
from kvire.plan.serve import PromptShape, computed, from_device, from_tier
from kvire.plan.shape import Storage
from kvire.plan.sizing import ServingUse
from kvire.plan.tiers import PlannedTier, parse_tier, presets
from kvire.plan.verdict import Demand, decide, offers, stored_bytes_per_token

from .shapes import shape

FP16, H100 = Storage("float16", 16), machine("h100")
LLAMA, GEMMA = shape("llama-3.1-8b"), shape("gemma3-270m")
PROMPT = PromptShape(8192, 64)
CURVE = HitCurve("lru", ((1e6, 0.1), (1e7, 0.4), (1e8, 0.6)), 0.65)


def tier(gb_s: float, size: str = "10TB", price: float | None = 0.01, latency_s: float = 1e-4) -> PlannedTier:
    made = parse_tier(f"disk={size}@{gb_s}")
    return replace(made, latency_s=latency_s, usd_per_gb_month=price)


@given(st.floats(0.001, 1000), st.integers(1, 8192), st.integers(64, 8192))
def test_no_tier_is_slower_than_computing_nor_faster_than_the_device(gb_s: float, new: int, tokens: int) -> None:
    prompt = PromptShape(tokens, min(new, tokens))
    found = from_tier(LLAMA, H100, prompt, FP16, tier(gb_s))
    assert from_device(LLAMA, H100, prompt).seconds <= found.seconds * (1 + 1e-9)
    assert found.seconds <= computed(LLAMA, H100, prompt).seconds * (1 + 1e-6)
    assert found.low_s <= found.seconds * (1 + 1e-9) and found.seconds <= found.high_s * (1 + 1e-9)


def test_what_is_loaded_is_the_whole_blocks_before_the_new_tokens() -> None:
    found = from_tier(LLAMA, H100, PromptShape(8192, 70), FP16, tier(50, latency_s=0.0))
    reused = 8112  # 8,122 are known, in whole blocks of 16
    assert found.way == "load"
    assert found.load_s == pytest.approx(reused * 131_072 / 50e9)
    assert found.seconds == pytest.approx(found.load_s + H100.prefill_s(LLAMA, reused, 8192))


def test_break_even_is_where_loading_takes_as_long_as_computing() -> None:
    rate = break_even_bytes_per_s(LLAMA, FP16, H100, 8192)
    at = from_tier(LLAMA, H100, PromptShape(8192, 1), FP16, tier(rate / 1e9, latency_s=0.0))
    assert at.load_s == pytest.approx(computed(LLAMA, H100, PromptShape(8192, 1)).seconds, rel=0.01)
    assert at.way == "both"  # neither alone is better, so they meet


def test_a_state_is_loaded_whole_or_not_at_all() -> None:
    hybrid = shape("qwen3.5-27b")
    assert from_tier(hybrid, H100, PROMPT, FP16, tier(50)).way == "load"
    slow = from_tier(hybrid, H100, PROMPT, FP16, tier(0.5))
    assert slow.way == "compute"
    assert slow.seconds == computed(hybrid, H100, PROMPT).seconds


@pytest.mark.parametrize("new", [0, 101])
def test_at_least_one_token_is_new_and_at_most_all(new: int) -> None:
    with pytest.raises(ConfigError, match="new ones"):
        PromptShape(100, new)


def test_tiers_as_people_write_them() -> None:
    mine = parse_tier("mine=2TB@7,0.1ms,$0.08")
    assert (mine.capacity_bytes, mine.bytes_per_s, mine.latency_s, mine.usd_per_gb_month) == (
        2 * 10**12,
        7e9,
        1e-4,
        0.08,
    )
    assert mine.state == "N" and parse_tier("frame-ssd=1TB@3").state == "D" and parse_tier("ram").state == "R"
    assert parse_tier("nvme4=4TB") == replace(presets()["nvme4"], capacity_bytes=4 * 10**12)
    assert parse_tier("s3@0.5,20ms").bytes_per_s == 0.5e9
    assert mine.usd_per_month(5e11) == pytest.approx(40)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "mine",
        "mine=2TB",
        "ram=lots",
        "ram=1TB@0",
        "ram=1TB@7,soon",
        "=1TB@7",
        "a b=1TB@1",
        "ram=1TB@7,1.2.3ms",
        "ram=1TB@7,$1.2.3",
    ],
)
def test_tiers_that_are_not_understood(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_tier(text)


REPORT = {
    "schema": "kvire.replay/1", "block_tokens": 16, "ideal_hit_rate": 0.374,
    "curves": [
        {"policy": "s3fifo", "points": [{"capacity_tokens": 500_000, "hit_rate": 0.05}]},
        {"policy": "lru", "points": [
            {"capacity_tokens": 5_000_000, "hit_rate": 0.216}, {"capacity_tokens": 500_000, "hit_rate": 0.045},
            {"capacity_tokens": 15_000_000, "hit_rate": 0.2159},
        ]},
    ],
}  # fmt: skip


def test_a_curve_of_replay() -> None:
    curve = read_curve(REPORT)
    assert curve.policy == "lru" and curve.ideal == 0.374
    assert curve.hit_rate(0) == 0
    assert curve.hit_rate(250_000) == pytest.approx(0.0225)
    assert curve.hit_rate(2_750_000) == pytest.approx((0.045 + 0.216) / 2)
    assert curve.hit_rate(15e6) == curve.hit_rate(1e12) == 0.216  # a dip is noise, and beyond the end nothing is known
    assert read_curve(REPORT, "s3fifo").hit_rate(1e9) == 0.05


@pytest.mark.parametrize(
    "report",
    [
        {**REPORT, "schema": "kvire.replay/9"},
        {**REPORT, "curves": []},
        {**REPORT, "curves": [{"policy": "lru", "points": [{"capacity_tokens": 1}]}]},
        {**REPORT, "curves": [{"policy": "lru", "points": [{"capacity_tokens": 1, "hit_rate": 1.2}]}]},
    ],
)
def test_reports_that_are_no_curve(report: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        read_curve(report)
    with pytest.raises(ConfigError, match="fifo"):
        read_curve(REPORT, "fifo")


@given(st.floats(0, 2e8), st.floats(0, 2e8))
def test_more_room_never_finds_less(one: float, other: float) -> None:
    assert CURVE.hit_rate(min(one, other)) <= CURVE.hit_rate(max(one, other)) <= CURVE.ideal


def test_a_tier_that_helps_is_bought() -> None:
    verdict = decide(LLAMA, FP16, H100, [tier(14)], Demand(CURVE, PROMPT))
    assert verdict.buy is not None and verdict.certain
    assert verdict.buy.tokens == 10**13 // 131_072
    assert verdict.buy.added_hit_rate == pytest.approx(CURVE.hit_rate(10**13 / 131_072))


def test_a_tier_slower_than_computing_is_not() -> None:
    verdict = decide(LLAMA, FP16, H100, [tier(0.05)], Demand(CURVE, PROMPT))
    assert verdict.buy is None
    assert "3.56 GB/s" in verdict.reason and "0.05" in verdict.reason  # the break-even, and what the tier gives


def test_what_the_device_keeps_lies_in_the_tier_too() -> None:
    """Every block goes to every tier: one no larger than the device's room finds nothing more."""
    room = Demand(CURVE, PROMPT, device_tokens=2_000_000)
    (small,) = offers(LLAMA, FP16, H100, [tier(50, size="100GB")], room)
    assert small.tokens < room.device_tokens and small.added_hit_rate == 0
    (large,) = offers(LLAMA, FP16, H100, [tier(50, size="1TB")], room)
    assert large.hit_rate == CURVE.hit_rate(large.tokens)


def test_money_chooses_among_tiers_with_a_price() -> None:
    """One without, as a network's, does not stop it."""
    busy = Demand(CURVE, PROMPT, requests_per_hour=10_000, usd_per_hour=3.0)
    verdict = decide(LLAMA, FP16, H100, [tier(14), tier(14, price=None)], busy)
    assert verdict.buy is not None and verdict.buy.usd_per_month is not None
    assert "whose price is known" in verdict.reason


def test_another_tier_at_the_other_end_is_a_doubt() -> None:
    """Twice as slow, the cheap one no longer brings three quarters of what memory does."""
    both = [replace(tier(14, price=0.004), title="the cheap one"), replace(tier(55, price=0.25), title="memory")]
    for rate in (14, 10, 8, 6, 5, 4):
        both[0] = replace(both[0], bytes_per_s=rate * 1e9)
        verdict = decide(LLAMA, FP16, H100, both, Demand(CURVE, PROMPT))
        if verdict.buy is not None and verdict.buy.tier.title == "the cheap one" and not verdict.certain:
            assert "of memory" in verdict.doubt
            return
    pytest.fail("the answer changed at no rate")


def test_a_flat_curve_buys_nothing_however_fast_the_tier() -> None:
    """All that can be found fits the device."""
    flat = HitCurve("lru", ((1e5, 0.37), (1e8, 0.38)), 0.38)
    verdict = decide(LLAMA, FP16, H100, [tier(1000)], Demand(flat, PROMPT, device_tokens=200_000))
    assert verdict.buy is None and verdict.certain
    assert "the device alone finds 37.0%" in verdict.reason


def test_the_cheapest_that_brings_nearly_all_is_taken() -> None:
    cheap, dear = tier(14, price=0.004), tier(55, price=0.25)
    verdict = decide(LLAMA, FP16, H100, [dear, cheap], Demand(CURVE, PROMPT))
    assert verdict.buy is not None and verdict.buy.tier == cheap


def test_money_decides_where_it_is_known() -> None:
    """The same tier pays at many requests an hour, and not at few."""
    busy = Demand(CURVE, PROMPT, requests_per_hour=10_000, usd_per_hour=3.0)
    bought = decide(LLAMA, FP16, H100, [tier(14)], busy).buy
    assert bought is not None
    saved = (bought.without_s - bought.ttft_s) / 3600 * 3.0 * 10_000 * 730
    assert bought.saved_usd_per_month == pytest.approx(saved)
    assert bought.usd_per_month == pytest.approx(100)
    idle = decide(LLAMA, FP16, H100, [tier(14)], replace(busy, requests_per_hour=1))
    assert idle.buy is None and "100.00 USD a month" in idle.reason


def test_an_answer_that_hinges_on_the_assumptions_says_so() -> None:
    """A tier near break-even helps on a slow device, and not on a fast one."""
    rate = break_even_bytes_per_s(LLAMA, FP16, H100, PROMPT.tokens) / 1e9
    for share in (0.1, 0.15, 0.2, 0.3, 0.5, 1, 2):
        verdict = decide(LLAMA, FP16, H100, [tier(share * rate)], Demand(CURVE, PROMPT))
        if not verdict.certain:
            assert verdict.doubt
            return
    pytest.fail("no tier near break-even was called uncertain")


@given(st.sampled_from([0.1, 1.0, 10.0]), st.floats(0, 1e8))
def test_offers_never_take_longer_than_nothing(gb_s: float, device_tokens: float) -> None:
    found = offers(LLAMA, FP16, H100, [tier(gb_s), parse_tier("ram")], Demand(CURVE, PROMPT, int(device_tokens)))
    assert all(0 <= offer.saving < 1 and offer.added_hit_rate >= 0 for offer in found)
    prices = [offer.usd_per_month for offer in found if offer.usd_per_month is not None]
    assert prices == sorted(prices)


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_reuse_is_a_share(share: float) -> None:
    with pytest.raises(ConfigError, match="--reuse"):
        assumed_reuse(share, 100)


@pytest.mark.parametrize(
    ("name", "each"),
    [
        ("gemma3-270m", 18 * 512 * 2),  # 15 of 18 layers slide: K and V of 256 for every token all the same
        ("gpt-oss-20b", 24 * 8 * 128 * 2),
        ("llama-3.1-8b", 131_072),
        ("deepseek-v3.2", 70_272 + 61 * 128 * 2),  # the indexer's keys too
    ],
)
def test_a_store_keeps_every_layer_of_every_token(name: str, each: int) -> None:
    assert stored_bytes_per_token(shape(name), FP16, 8192) == each
    assert stored_bytes_per_token(shape(name), replace(FP16, dtype="float32"), 8192) == 2 * each


def test_a_store_keeps_a_state_for_each_sequence() -> None:
    hybrid = shape("qwen3.5-27b")
    assert stored_bytes_per_token(hybrid, FP16, 8192) == 65_536 + hybrid.state_bytes(FP16) / 8192
    assert any("one recurrent state for each sequence" in note for note in plan_values(plan("qwen3.5-27b"))["notes"])


def test_a_store_of_int8_keeps_the_scales_and_every_rank_its_part() -> None:
    assert stored_bytes_per_token(GEMMA, Storage("int8", 16), 8192) == 18 * (512 + 2 * 4)
    assert stored_bytes_per_token(LLAMA, Storage("float16", 16, tp=16), 8192) == 2 * 131_072  # 8 heads, twice


def test_the_disk_held_what_is_planned() -> None:
    """Fifty pages through gemma3-270m, and an answer of 16, the last of which is never computed; in float32.

    A block is a slot of 4 KiB pages for 15 sliding layers (16 x 15 x 2 KiB and a page) and one for 3 full ones
    (16 x 3 x 2 KiB and a page). Slots come in whole segments of at most 64 MiB.
    """
    found = json.loads((Path(__file__).parents[2] / "docs" / "results" / "fifty_pages.json").read_text())
    prompt = int(found["table"][0]["figure"].split()[0].replace(",", ""))
    blocks = (prompt + 16 - 1) // 16
    pages = [16 * 15 * 2 // 4 + 1, 16 * 3 * 2 // 4 + 1]
    segments = [-(-blocks // ((64 << 20) // (4096 * one))) * ((64 << 20) // (4096 * one)) * one for one in pages]
    assert sum(segments) * 4096 == pytest.approx(found["stored_mb"] * 1e6, rel=0.01)
    planned = stored_bytes_per_token(GEMMA, Storage("float32", 16), prompt) * 16 * blocks
    assert planned == 36_864 * 16 * blocks
    assert blocks * sum(pages) * 4096 == pytest.approx(planned, rel=0.02)


def plan(name: str) -> Plan:
    return Plan(
        title=name,
        source="",
        verified=True,
        shape=shape(name),
        storage=Storage("float32", 16),
        use=ServingUse(context=8192),
        prompt=PROMPT,
        tiers=(tier(14, size="36864MB"),),
        money=Money(requests_per_hour=10, output_tokens=256),
        who=H100,
        memory_bytes=4 * 10**9,
        curve=HitCurve("lru", ((1e8, 0.6),), 0.75),
    )


def test_sizes_of_tiers_and_wear_count_what_is_stored_and_the_device_what_it_keeps() -> None:
    """A million tokens of 36,864 bytes to the tier; of 8,192, a quarter and 256 of answer are new, 240 times a day."""
    record = plan_values(plan("gemma3-270m"))
    (offer,) = record["verdict"]["offers"]
    assert offer["tokens"] == 1_000_000
    assert record["money"]["disk_wear"]["bytes_per_day"] == 24 * 10 * (2048 + 256) * 36_864
    assert record["kv"]["stored_bytes_per_token"] == 36_864
    # On the device 15 layers keep 33 blocks of 16 for a window of 512, not 512 of them.
    each = 8192 * 3 * 2048 + 33 * 16 * 15 * 2048
    assert record["kv"]["sequence_bytes"] == each
    room = int(4e9 * 0.9) - plan("gemma3-270m").weights_bytes - each
    assert device_tokens(plan("gemma3-270m")) == int(room / (each / 8192))
