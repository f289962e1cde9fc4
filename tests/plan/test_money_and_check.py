"""Prices, disk wear, sizing, and predictions beside a bench report."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvire.core.errors import ConfigError
from kvire.plan.check import check_times
from kvire.plan.prices import Price, bill, hosted_prices, own_usd_per_million, price_table, years_until_worn
from kvire.plan.shape import Storage
from kvire.plan.sizing import MemoryUse, ServingUse, growth, longest_context, parity_tokens, parity_users, users

from .shapes import GIB, shape

FP16 = Storage("float16", 16)
PRICES = price_table().prices


def test_a_bill_by_hand() -> None:
    """10,000 prompt tokens, 8,000 of them sent before, 500 of answer: 3 / 0.30 / 3.75 / 15 USD per million."""
    found = bill(price_table().find("claude-sonnet-4.5"), 10_000, 8_000, 500)
    assert found.plain_usd == pytest.approx(0.030 + 0.0075)
    assert found.first_usd == pytest.approx(0.006 + 0.030 + 0.0075)  # the 8,000 written at 3.75
    assert found.cached_usd == pytest.approx(0.006 + 0.0024 + 0.0075)
    assert found.hits_until_paid == 1
    hour = bill(price_table().find("claude-sonnet-4.5"), 10_000, 8_000, 0, ttl="1h")
    assert hour.first_usd == pytest.approx(0.006 + 0.048)
    assert hour.hits_until_paid == 2  # 0.024 more to write, 0.0216 saved by each hit


def test_minimum_lengths_and_steps_are_respected() -> None:
    openai, haiku = price_table().find("gpt-5.4"), price_table().find("claude-haiku-4.5")
    assert [openai.cached_tokens(n) for n in (1023, 1024, 1151, 1152)] == [0, 1024, 1024, 1152]
    assert [haiku.cached_tokens(n) for n in (4095, 4096, 5000)] == [0, 4096, 5000]
    below = bill(haiku, 5000, 4000, 0)
    assert below.cached_usd == below.plain_usd and below.hits_until_paid is None


@given(st.sampled_from(PRICES), st.integers(1, 200_000), st.integers(0, 200_000), st.integers(0, 4000))
def test_a_hit_never_costs_more_and_a_write_never_less(price: Price, prompt: int, shared: int, output: int) -> None:
    found = bill(price, prompt, shared, output)
    assert found.cached_usd <= found.plain_usd <= found.first_usd + 1e-12
    assert found.cached_tokens <= min(shared, prompt)


def test_every_price_is_dated_sourced_and_consistent() -> None:
    assert price_table().date.startswith("2026-") and "verify" in price_table().about
    for price in PRICES:
        assert price.source and price.read.startswith("2026-")
        assert 0 < price.cached_input < price.input < price.output
        assert all(write > price.input for write in price.cache_write.values())
    assert {price.provider for price in PRICES} >= {"openai", "anthropic", "google", "deepseek"}
    assert hosted_prices(["gpt-5.4"]) == (price_table().find("gpt-5.4"),)


def test_prices_that_are_not_there_and_tokens_that_do_not_add_up() -> None:
    with pytest.raises(ConfigError, match=r"gpt-5\.4"):
        price_table().find("gpt-5.44")
    with pytest.raises(ConfigError, match="too many"):
        PRICES[0].prompt_usd(100, cached_tokens=80, written_tokens=30)


def test_own_hardware_and_disks_by_hand() -> None:
    assert own_usd_per_million(3.0, 1.0, 30_000) == pytest.approx(3 / 3600 / 30_000 * 1e6)
    assert years_until_worn(1e12, 1200e12, amplification=1.0) == pytest.approx(1200 / 365)
    assert years_until_worn(0, 1e15) == math.inf


def test_users_on_80_gb() -> None:
    """(80 GB x 0.9 - 13.48 GB of weights) over 4,000 x 512 KiB."""
    llama = shape("llama-2-7b")
    memory = MemoryUse(80 * 10**9, llama.weights.size_bytes())
    assert users(llama, FP16, memory, 4000) == (72_000_000_000 - 13_476_831_232) // (4000 * 524_288) == 27
    assert longest_context(llama, FP16, memory, 27) >= 4000 > longest_context(llama, FP16, memory, 28)
    assert MemoryUse(10**9, llama.weights.size_bytes()).kv_bytes == 0


@pytest.mark.parametrize("name", ["llama-2-7b", "gpt-oss-20b", "qwen3.5-27b", "gemma3-270m"])
def test_parity_is_the_first_length_at_which_kv_is_as_large(name: str) -> None:
    found, weights = shape(name), shape(name).weights.size_bytes()
    tokens = parity_tokens(found, FP16, weights)
    assert tokens is not None
    assert found.sequence_bytes(tokens - 1, FP16) < weights <= found.sequence_bytes(tokens, FP16)
    count = parity_users(found, FP16, weights, 2048)
    assert (count - 1) * found.sequence_bytes(2048, FP16) < weights <= count * found.sequence_bytes(2048, FP16)


def test_growth_in_six_directions() -> None:
    rows = {row.direction: row for row in growth(shape("llama-2-7b"), FP16, ServingUse(context=4000, users=200))}
    assert list(rows) == ["length", "reasoning", "users", "hours", "kept sessions", "agents"]
    assert rows["users"].to_bytes / GIB == pytest.approx(391, abs=0.5)
    assert rows["length"].factor == 4
    agents = rows["agents"]
    assert agents.shared_bytes == (4000 + 16 * 2048) * 524_288  # one context and sixteen branches
    assert agents.to_bytes == 16 * (4000 + 2048) * 524_288
    with pytest.raises(ConfigError, match="--users"):
        ServingUse(users=0)


def test_agents_on_one_context_have_states_and_windows_of_their_own() -> None:
    for name in ("qwen3.5-27b", "gpt-oss-20b"):
        found = shape(name)
        agents = growth(found, FP16, ServingUse(agents=16))[-1]
        own = found.state_bytes(FP16) + found.window_bytes(FP16)
        assert agents.shared_bytes is not None
        assert agents.shared_bytes - found.sequence_bytes(8192, FP16) >= 16 * (own + 2048 * found.growing_bytes(FP16))


def report(**row: object) -> dict[str, object]:
    samples = [{"ttft_s": t, "prompt_tokens": 512, "cached_tokens": 496} for t in (1.1, 1.0, 0.9)]
    base = {"workload": "docqa", "state": "R", "context_tokens": 512, "samples": samples}
    return {"schema": "kvire.bench/1", "rows": [{**base, **row}]}


def test_a_check_uses_medians_and_what_was_computed() -> None:
    asked = []

    def predict(state: str, tokens: int, new: int) -> float | None:
        asked.append((state, tokens, new))
        return 1.2

    (row,) = check_times(report(), predict)
    assert asked == [("R", 512, 16)]
    assert row.measured_s == 1.0 and row.error == pytest.approx(0.2) and row.within
    (row,) = check_times(report(), lambda *_: 0.7)
    assert not row.within


def test_a_check_does_not_compare_with_another_model_or_dtype() -> None:
    found = report(arm="A") | {"arms": [{"name": "A", "kind": "kvire", "model": {"layers": 30, "kv_dtype": "float32"}}]}
    (row,) = check_times(found, lambda *_: 1.0, {"layers": 30, "kv_dtype": "float16"})
    assert row.predicted_s is None and "kv_dtype float32, planned for float16" in row.why
    (row,) = check_times(found, lambda *_: 1.0, {"layers": 30, "kv_dtype": "float32"})
    assert row.within


def test_a_check_says_what_it_cannot_predict() -> None:
    (row,) = check_times(report(), lambda *_: None)
    assert row.within is None and "state R" in row.why
    for fields, why in (
        ({"concurrency": 8}, "several requests"),
        ({"state": "unproved"}, "could not prove"),
        ({"arm": "llama.cpp"}, "another server"),
    ):
        arms = {"arms": [{"name": "kvire", "kind": "kvire"}, {"name": "llama.cpp", "kind": "url"}]}
        (row,) = check_times(report(**fields) | arms, lambda *_: 1.0)
        assert row.predicted_s is None and why in row.why


def test_failed_requests_do_not_count() -> None:
    failed = {"ttft_s": 0.001, "error": "timed out"}
    (row,) = check_times(report(samples=[failed, {"ttft_s": 1.0, "error": None}]), lambda *_: 1.0)
    assert (row.samples, row.measured_s) == (1, 1.0)


@pytest.mark.parametrize(
    "broken", [{"schema": "other/1"}, {"schema": "kvire.bench/1", "rows": []}, {**report(state=None)}]
)
def test_reports_that_are_none(broken: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        check_times(broken, lambda *_: 1.0)
