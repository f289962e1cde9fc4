"""Why the first token was computed: said truthfully, across restarts, and never anything about another tenant."""

from dataclasses import fields
from pathlib import Path

import pytest
from harness.engines import BLOCK, ask, words
from harness.loads import (
    BUSY_S,
    HASTY_S,
    ask_as,
    engine_over,
    explained,
    flip_bytes_on_disk,
    ids_of,
    keep,
    say_its_namespace_is,
)
from harness.stored import disk, memory, memory_and_disk, store_over
from harness.waiting import PATIENCE_S
from store.stores import BentTier, open_store

from kvire.core.keys import Namespace
from kvire.core.report import CacheReport, MissReason
from kvire.core.tier_kind import TierKind
from kvire.engine.engine import Engine

B = BLOCK
PROMPT = words(1, 6 * B + 3)
OTHERWISE = {
    "weights": "other", "config": "other", "numerics": "bfloat16/native", "kv_dtype": "int8", "spec": "other",
    "block_size": 32, "adapter": "mine", "shard": "1/2", "layout_version": 2, "build": "other",
}  # fmt: skip


def why(engine: Engine, prompt: list[int], **who) -> CacheReport:
    return explained(engine, prompt, **who).cache


def test_what_was_never_stored(tmp_path: Path) -> None:
    with store_over(disk, tmp_path) as store:
        keep(store, words(2, 100))
        report = why(engine_over(store), PROMPT)
        assert (report.miss, report.miss_token, report.miss_detail) == (MissReason.NEVER_STORED, 0, None)


@pytest.mark.parametrize("tiers", [memory, disk])
def test_what_had_to_make_room(tmp_path: Path, tiers) -> None:
    with store_over(tiers, tmp_path) as store:
        keep(store, PROMPT)
        engine = engine_over(store)
        ids = ids_of(engine, PROMPT)
        for handle in store._handles:
            assert handle.tier.delete(ids[4:], "room") == 2
        report = why(engine, PROMPT)
        assert (report.miss, report.miss_token) == (MissReason.DIVERGED, 4 * B)
        store._handles[0].tier.delete(ids, "room")
        report = why(engine_over(store), PROMPT)
        assert (report.miss, report.miss_token, report.reused_tokens) == (MissReason.EVICTED, 0, 0)


@pytest.mark.parametrize("at", [1, B - 1, B, B + 1, 3 * B + 7, 6 * B - 1])
def test_the_token_at_which_a_prompt_leaves_the_closest_stored_one(tmp_path: Path, at: int) -> None:
    """S24, also after a restart: the device knows nothing then, and the store compares real tokens."""
    with store_over(disk, tmp_path) as store:
        keep(store, PROMPT)
    with store_over(disk, tmp_path) as store:
        engine = engine_over(store)
        report = why(engine, [*PROMPT[:at], PROMPT[at] ^ 1, *PROMPT[at + 1 :]])
        assert (report.miss, report.miss_token) == (MissReason.DIVERGED, at)
        assert report.disk_tokens == at // B * B


def test_a_prompt_that_goes_on_where_the_stored_one_ended(tmp_path: Path) -> None:
    with store_over(disk, tmp_path) as store:
        keep(store, PROMPT)
    with store_over(disk, tmp_path) as store:
        report = why(engine_over(store), [*PROMPT[: 6 * B], *words(9, 40)])
        assert (report.miss, report.miss_token, report.disk_tokens) == (MissReason.DIVERGED, 6 * B, 6 * B)
        report = why(engine_over(store), PROMPT[: 6 * B + 1])
        assert (report.miss, report.miss_token) == (MissReason.COMPLETE, None)


@pytest.mark.parametrize("name", OTHERWISE)
def test_the_field_in_which_the_namespace_differs(tmp_path: Path, name: str) -> None:
    """S23: the same tokens are stored, but not computed like this."""
    with store_over(disk, tmp_path) as store:
        keep(store, PROMPT)
    with store_over(memory_and_disk, tmp_path) as store:
        report = why(say_its_namespace_is(engine_over(store), **{name: OTHERWISE[name]}), PROMPT)
        assert (report.miss, report.miss_token, report.miss_detail) == (MissReason.OTHER_NAMESPACE, 0, name)
        assert report.reused_tokens == 0


def test_every_field_of_a_namespace_but_the_salt_can_be_named() -> None:
    assert {field.name for field in fields(Namespace)} - {"salt"} == set(OTHERWISE)


def test_several_fields_are_all_named(tmp_path: Path) -> None:
    with store_over(disk, tmp_path) as store:
        keep(store, PROMPT)
        report = why(say_its_namespace_is(engine_over(store), numerics="x", kv_dtype="y"), PROMPT)
        assert report.miss_detail == "kv_dtype, numerics"


def test_damage_on_the_disk(tmp_path: Path) -> None:
    with store_over(disk, tmp_path) as store:
        keep(store, PROMPT)
    flip_bytes_on_disk(tmp_path)
    with store_over(disk, tmp_path) as store:
        report = why(engine_over(store), PROMPT)
        assert (report.miss, report.miss_token, report.reused_tokens) == (MissReason.DAMAGED, 0, 0)
        assert store.flush(10)
        counts = store.stats().handles["disk"].counts
        assert counts.damaged >= 4 and counts.damaged + counts.missing == 6, "of one not even the place is still known"
        assert why(engine_over(store), PROMPT).disk_tokens == 6 * B, "written again"


@pytest.mark.parametrize("kind", [TierKind.DISK, TierKind.REMOTE])
def test_a_tier_that_does_not_answer(tmp_path: Path, kind: TierKind) -> None:
    tier = BentTier(kind)
    with open_store(tmp_path, tier) as store:
        keep(store, PROMPT)
        tier.dead = True
        if kind is TierKind.DISK:
            tier.held = tier.inner.held
        report = why(engine_over(store), PROMPT)
        assert (report.miss, report.miss_token, report.reused_tokens) == (MissReason.UNAVAILABLE, 0, 0)


def test_a_remote_tier_that_never_answers_costs_its_deadline_and_is_named(tmp_path: Path) -> None:
    tier = BentTier(TierKind.REMOTE)
    with open_store(tmp_path, tier, load_timeout_s=0.2) as store:
        keep(store, PROMPT)
        tier.gate.clear()
        report = why(engine_over(store), PROMPT)
        assert (report.miss, report.miss_token, report.reused_tokens) == (MissReason.UNAVAILABLE, 0, 0)
        tier.gate.set()


def test_what_is_stored_but_faster_to_compute(tmp_path: Path) -> None:
    with store_over(disk, tmp_path) as store:
        keep(store, PROMPT)
        report = why(engine_over(store, token_s=BUSY_S), PROMPT)
        assert (report.miss, report.miss_token, report.reused_tokens) == (MissReason.SLOWER, 0, 0)
        assert store.stats().handles["disk"].tier.reads == 0
        other = why(engine_over(store, token_s=BUSY_S), words(3, 90))
        assert other.miss is MissReason.NEVER_STORED, "only what is there can be slower"


def test_a_remote_tier_that_has_nothing_is_no_reason(tmp_path: Path) -> None:
    with open_store(tmp_path, BentTier(TierKind.REMOTE), load_timeout_s=PATIENCE_S) as store:
        for token_s in (HASTY_S, BUSY_S):
            report = why(engine_over(store, token_s=token_s), words(int(token_s * 1e3), 6 * B + 3))
            assert report.miss is MissReason.NEVER_STORED


def test_nothing_is_ever_said_about_another_tenant(tmp_path: Path) -> None:
    """Neither that the prompt is there, nor where it differs, nor how the other one's model is built."""
    with store_over(disk, tmp_path) as store:
        theirs = engine_over(store)
        for cache_salt in ("", "x"):
            ask_as(theirs, PROMPT, tenant="theirs", cache_salt=cache_salt)
        ask_as(say_its_namespace_is(engine_over(store), kv_dtype="int8"), PROMPT, tenant="theirs")
        assert store.flush(10)
    with store_over(disk, tmp_path) as store:
        for prompt in (PROMPT, [*PROMPT[:20], 1, *PROMPT[21:]], PROMPT[: B + 1]):
            for who in ({"tenant": "mine"}, {"tenant": ""}, {"tenant": "theirs", "cache_salt": "y"}):
                report = why(engine_over(store), prompt, **who, store=False)
                assert (report.miss, report.miss_token, report.reused_tokens) == (MissReason.NEVER_STORED, 0, 0), who
                assert report.miss_detail is None


def test_the_counters_of_misses_add_up(tmp_path: Path) -> None:
    with store_over(disk, tmp_path) as store:
        engine = engine_over(store)
        for seed in (1, 1, 2, 3):
            ask(engine, words(seed, 3 * B))
        assert sum(engine.stats.misses.values()) == engine.stats.requests == 4
        stats = engine.stats
        reused = stats.device_tokens + stats.memory_tokens + stats.disk_tokens + stats.remote_tokens
        assert reused + stats.computed_tokens == stats.prompt_tokens
