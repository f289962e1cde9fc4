"""A load that meets a computation, and tiers that stall, die or lie in the middle of one."""

import threading
from pathlib import Path

import pytest
from harness.engines import BLOCK, drive, oracle, request, words
from harness.loads import (
    BLOCK_BYTES,
    HASTY_S,
    PATIENT_S,
    ask_as,
    at_rest,
    engine_over,
    finish,
    ids_of,
    keep,
    say_how_fast,
)
from harness.stored import say_what_prefill_costs
from harness.waiting import PATIENCE_S, until
from store.stores import BentTier, open_store

from kvire.core.report import MissReason
from kvire.core.tier_kind import TierKind
from kvire.store.reuse.planner import TRY_AFTER
from kvire.store.ticket import LoadState

B = BLOCK
BLOCKS = 10
PROMPT = words(1, BLOCKS * B + 3)


def test_never_slower_than_no_cache(tmp_path: Path) -> None:
    """A tier is used where loading is sooner than computing, left alone where it is not, and tried again then."""
    prompts = [words(seed, 4 * B + 3) for seed in range(TRY_AFTER + 1)]
    with open_store(tmp_path, BentTier()) as store:
        keep(store, *prompts)
        engine = engine_over(store, token_s=HASTY_S)
        loads, load = [], engine.reuse.load
        engine.reuse.load = lambda *arguments: loads.append(1) or load(*arguments)
        say_how_fast(store, BLOCK_BYTES / (100 * B * HASTY_S))
        for number, prompt in enumerate(prompts[:TRY_AFTER], 1):
            answer = ask_as(engine, prompt, max_tokens=1)
            assert answer.token_ids == oracle(prompt, max_tokens=1).token_ids
            if number < TRY_AFTER:
                report = answer.cache
                assert (report.miss, report.miss_token, report.reused_tokens) == (MissReason.SLOWER, 0, 0)
            assert len(loads) == (number == TRY_AFTER), "a hundred times as slow as computing"
        say_how_fast(store, 1e3 * BLOCK_BYTES / (B * HASTY_S))
        say_what_prefill_costs(engine, PATIENT_S)
        assert ask_as(engine, prompts[-1], max_tokens=1).cache.disk_tokens == 4 * B, "a thousand times faster"


@pytest.mark.parametrize("kind", [TierKind.DISK, TierKind.REMOTE])
def test_computing_from_the_front_meets_loading_from_the_back(tmp_path: Path, kind: TierKind) -> None:
    prompt, tier = words(2, 40 * B + 3), BentTier(kind)
    with open_store(tmp_path, tier, load_timeout_s=PATIENCE_S) as store:
        keep(store, prompt)
        say_how_fast(store, BLOCK_BYTES / (B * PATIENT_S))
        tier.gate.clear()
        engine = engine_over(store)
        engine.submit(one := request(prompt))
        until(lambda: engine.step() or any(seq.num_computed for seq in engine.scheduler.running))
        (load,) = [seq.reuse.load for seq in engine.scheduler.running]
        assert load is not None
        tier.slow_s = 0.002
        tier.gate.set()
        until(lambda: load.ticket.states().count(LoadState.READY) >= 4)
        answer = drive(engine, [], exact=False)[one.request_id, 0]
        report = answer.cache
        loaded = report.disk_tokens + report.remote_tokens
        assert loaded >= 4 * B and report.computed_tokens >= 4 * B, "both"
        assert loaded + report.computed_tokens == len(prompt)
        assert engine.scheduler.prefetcher.met == 1
        assert answer.token_ids == oracle(prompt).token_ids
        order = ids_of(engine, prompt)
        assert order[-1] in tier.log[:5], "from the back"


def test_what_is_computed_is_not_read(tmp_path: Path) -> None:
    prompt, tier = words(2, 40 * B + 3), BentTier()
    with open_store(tmp_path, tier) as store:
        keep(store, prompt)
        say_how_fast(store, BLOCK_BYTES / (B * PATIENT_S))
        tier.gate.clear()
        engine = engine_over(store)
        engine.submit(one := request(prompt))
        engine.step()
        (seq,) = engine.scheduler.running
        computed = seq.num_computed // B
        assert 0 < computed < 40, "it did not wait for the last block, which cannot be read yet"
        tier.gate.set()
        assert seq.reuse.load.ticket.wait(PATIENCE_S)
        assert sorted(tier.log) == sorted(ids_of(engine, prompt)[computed:])
        assert finish(engine, one).token_ids == oracle(prompt).token_ids


def test_loading_alone_computes_nothing_meanwhile(tmp_path: Path) -> None:
    tier = BentTier()
    with open_store(tmp_path, tier) as store:
        keep(store, PROMPT)
        tier.slow_s = 0.02
        engine = engine_over(store)
        engine.submit(one := request(PROMPT))
        answer = finish(engine, one)
        assert answer.cache.computed_tokens == 3
        assert engine.stats.steps == 16, "one for the rest of the prompt and the first token, then one for each"


@pytest.mark.parametrize("kind", [TierKind.DISK, TierKind.REMOTE])
@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_tier_that_dies_in_the_middle(tmp_path: Path, after: int, kind: TierKind) -> None:
    tier = BentTier(kind)
    with open_store(tmp_path, tier, readers=1, load_timeout_s=PATIENCE_S) as store:
        keep(store, PROMPT)

        def die(block_id, buffers, length):
            tier.dead = len(tier.log) >= after
            return length

        tier.bend, tier.dead = die, after == 0
        tier.held = lambda ids, timeout_s=None: tier.inner.held(ids)  # its index still says that it has them
        engine = engine_over(store)
        one = request(PROMPT)
        answer = drive(engine, [one])[one.request_id, 0]
        report = answer.cache
        assert answer.token_ids == oracle(PROMPT).token_ids
        loaded = report.disk_tokens + report.remote_tokens
        assert loaded <= (after + 3) * B, "what several threads had begun may still come"
        assert report.miss is MissReason.UNAVAILABLE
        if kind is TierKind.DISK:
            assert report.miss_token == loaded == after * B


def test_a_tier_with_a_bug_is_a_tier_that_does_not_answer(tmp_path: Path) -> None:
    tier = BentTier()
    with open_store(tmp_path, tier) as store:
        keep(store, PROMPT)

        def fault(block_id, buffers, length):
            raise ZeroDivisionError

        tier.bend = fault
        one = request(PROMPT)
        answer = drive(engine_over(store), [one])[one.request_id, 0]
        assert answer.token_ids == oracle(PROMPT).token_ids
        assert (answer.cache.miss, answer.cache.reused_tokens) == (MissReason.UNAVAILABLE, 0)


@pytest.mark.parametrize("damaged", [[0], [4], [9], [3, 4, 7], list(range(10))])
def test_damaged_blocks_are_computed_and_the_others_loaded(tmp_path: Path, damaged: list[int]) -> None:
    tier = BentTier()
    with open_store(tmp_path, tier) as store:
        keep(store, PROMPT)
        engine = engine_over(store)
        ids = {ids_of(engine, PROMPT)[index] for index in damaged}

        def flip(block_id, buffers, length):
            if block_id in ids:
                buffers[-1][-1] ^= 1
            return length

        tier.bend = flip
        one = request(PROMPT)
        answer = drive(engine, [one])[one.request_id, 0]
        report = answer.cache
        assert answer.token_ids == oracle(PROMPT).token_ids
        assert report.disk_tokens == (BLOCKS - len(damaged)) * B, "only what is damaged is computed"
        assert (report.miss, report.miss_token) == (MissReason.DAMAGED, damaged[0] * B)
        tier.bend = None
        assert store.flush(10)
        again = drive(after := engine_over(store), [one])[one.request_id, 0].cache
        assert again.disk_tokens == BLOCKS * B, "what was computed again was kept again"
        assert after.stats.disk_tokens == BLOCKS * B


def test_a_tier_that_stalls_is_given_up(tmp_path: Path) -> None:
    tier, go = BentTier(), threading.Event()
    with open_store(tmp_path, tier, readers=1) as store:
        keep(store, PROMPT)

        def stall(block_id, buffers, length):
            if len(tier.log) > 3:
                go.wait(PATIENCE_S)
            return length

        tier.bend = stall
        engine = engine_over(store, token_s=HASTY_S)
        engine.submit(one := request(PROMPT))
        answer = finish(engine, one)
        assert answer.token_ids == oracle(PROMPT).token_ids
        assert answer.cache.miss is MissReason.SLOWER
        assert answer.cache.miss_token == answer.cache.disk_tokens <= 4 * B
        go.set()
        at_rest(engine)
        assert len(tier.log) <= 5, "nothing more was read once it was given up"


def test_a_block_begun_by_a_copy_is_finished_and_not_read(tmp_path: Path) -> None:
    """The device knows the first tokens of a block that only a remote tier may have: it is computed on from there."""
    tier = BentTier(TierKind.REMOTE)
    with open_store(tmp_path, tier, load_timeout_s=PATIENCE_S) as store:
        keep(store, PROMPT)
        engine = engine_over(store)
        begun = request([*PROMPT[: 3 * B + 5], 7], max_tokens=1)
        drive(engine, [begun])
        tier.log.clear()
        copy_block, read_before = engine.scheduler.copy_block, []
        engine.scheduler.copy_block = lambda *copy: read_before.append(list(tier.log)) or copy_block(*copy)
        engine.submit(one := request(PROMPT))
        engine.step()
        assert read_before == [[]], "a load may write into what was to be copied"
        answer = finish(engine, one)
        assert answer.token_ids == oracle(PROMPT).token_ids
        report = answer.cache
        assert (report.device_tokens, report.computed_tokens) == (3 * B + 5, B - 5 + 3)
        assert report.remote_tokens == 6 * B
        assert sorted(tier.log) == sorted(ids_of(engine, PROMPT)[4:])


def test_a_load_is_no_reason_to_let_others_wait(tmp_path: Path) -> None:
    tier = BentTier()
    with open_store(tmp_path, tier) as store:
        keep(store, PROMPT)
        tier.gate.clear()
        engine = engine_over(store)
        engine.submit(waits := request(PROMPT))
        engine.submit(goes_on := request(words(7, 30)))
        assert finish(engine, goes_on).token_ids == oracle(words(7, 30)).token_ids
        tier.gate.set()
        assert finish(engine, waits).cache.disk_tokens == BLOCKS * B


def test_what_is_waited_for_counts_as_loading_and_the_rest_as_prefill(tmp_path: Path) -> None:
    tier = BentTier()
    with open_store(tmp_path, tier, load_timeout_s=PATIENCE_S) as store:
        keep(store, PROMPT)
        tier.slow_s = 0.02  # each of ten blocks, by two readers
        engine = engine_over(store)
        engine.submit(request(PROMPT, max_tokens=2))
        outputs = []
        until(lambda: outputs.extend(engine.step()) or len(outputs) == 2)
        first, second = outputs
        assert first.cache.disk_tokens == BLOCKS * B
        assert first.load_s > 0.05 and first.prefill_s > 0
        assert (second.load_s, second.prefill_s) == (0, 0), "told once, with the first token"
        engine.submit(request(PROMPT, max_tokens=1))
        until(lambda: outputs.extend(engine.step()) or len(outputs) == 3)
        assert outputs[2].cache.device_tokens > 0 and outputs[2].load_s == 0 and outputs[2].prefill_s > 0
