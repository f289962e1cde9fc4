"""Memory that a load may still write into: nobody else gets it, and all of it comes back."""

import random
import threading
import time
from itertools import count
from pathlib import Path

import pytest
from harness.differential import poison_blank_blocks
from harness.engines import BLOCK, oracle, request, words
from harness.loads import (
    BLOCK_BYTES,
    HASTY_S,
    PATIENT_S,
    assert_untouched,
    at_rest,
    blank_blocks,
    engine_over,
    finish,
    keep,
    say_how_fast,
)
from harness.stored import say_what_prefill_costs
from harness.waiting import PATIENCE_S, until
from store.stores import BentTier, open_store

from kvire.core.report import MissReason
from kvire.core.tier_kind import TierKind
from kvire.engine.engine import Engine
from kvire.store.ticket import LoadState

B = BLOCK
BLOCKS = 10
PROMPT = words(1, BLOCKS * B + 3)


def step_until(engine: Engine, done: threading.Event) -> None:
    def step() -> bool:
        engine.step()
        return done.is_set()

    until(step, every_s=0)


def hang_after(tier: BentTier, reads: int) -> None:
    """The next read but so many hangs, and has not written anything, until the gate is opened."""
    tier.log.clear()
    tier.waiting.clear()

    def close(block_id, buffers, length):
        if len(tier.log) == reads:
            tier.gate.clear()
        return length

    if reads:
        tier.bend = close
    else:
        tier.gate.clear()


@pytest.mark.parametrize("after", [0, 3])
def test_a_read_that_hangs_holds_its_block_and_nothing_else(tmp_path: Path, after: int) -> None:
    tier = BentTier()
    with open_store(tmp_path, tier, readers=1) as store:
        keep(store, PROMPT)
        hang_after(tier, after)
        engine = engine_over(store)
        engine.submit(one := request(PROMPT))
        step_until(engine, tier.waiting)
        say_what_prefill_costs(engine, HASTY_S)
        answer = finish(engine, one)
        assert answer.token_ids == oracle(PROMPT).token_ids
        assert (answer.cache.miss, answer.cache.disk_tokens) == (MissReason.SLOWER, after * B)
        engine.poll()
        assert engine.pool.num_free == engine.pool.num_blocks - 1, "the block that is being read into"
        engine.submit(other := request(words(9, 20)))
        assert finish(engine, other).token_ids == oracle(words(9, 20)).token_ids, "everybody else goes on"
        poison_blank_blocks(engine)
        given_back = blank_blocks(engine)
        tier.gate.set()
        at_rest(engine)
        assert_untouched(engine, given_back)


@pytest.mark.parametrize("how", ["abort", "preempt"])
@pytest.mark.parametrize("after", [0, 4])
def test_leaving_during_a_load(tmp_path: Path, how: str, after: int) -> None:
    """G8: memory that a read may still write into is given to nobody; all of it comes back when the read has ended."""
    tier = BentTier()
    with open_store(tmp_path, tier, readers=1) as store:
        keep(store, PROMPT)
        hang_after(tier, after)
        engine = engine_over(store)
        engine.submit(one := request(PROMPT))
        step_until(engine, tier.waiting)
        (seq,) = engine.scheduler.running
        if how == "abort":
            engine.abort(one.request_id)
        else:
            engine.scheduler.preempt(seq)
            engine.scheduler.waiting.remove(seq)
        outputs = engine.step()
        assert [output.finish_reason for output in outputs] == ["abort"] * (how == "abort")
        engine.poll()
        assert engine.pool.num_free < engine.pool.num_blocks, "a read is under way"
        poison_blank_blocks(engine)
        given_back = blank_blocks(engine)
        tier.bend = None
        tier.gate.set()
        at_rest(engine)
        assert_untouched(engine, given_back)
        if how == "preempt":
            engine.scheduler.add(seq)
            answer = finish(engine, one)
            assert answer.token_ids == oracle(PROMPT).token_ids
            report = answer.cache
            assert report.disk_tokens + report.device_tokens == BLOCKS * B and report.preemptions == 1
            assert report.recomputed_tokens == 0
        at_rest(engine)


def test_a_storm_of_leaving_and_coming_back(tmp_path: Path) -> None:
    """Nothing is ever written into memory that nobody holds; whoever stays gets the right answer."""
    rng, tier = random.Random(8), BentTier()
    prompts = [words(i, rng.randrange(2 * B, 7 * B)) for i in range(8)]
    with open_store(tmp_path, tier) as store:
        keep(store, *prompts)
        engine = engine_over(store, num_blocks=40, max_num_seqs=4)
        tier.slow_s = 0.002
        open_, answers, aborted = {}, {}, 0
        loaded_blocks = lambda: store.stats().handles["bent"].counts.loaded_blocks
        end = time.monotonic() + PATIENCE_S
        for round_ in count():
            if (round_ >= 300 and loaded_blocks() > 50) or time.monotonic() > end:
                break
            if round_ % 4 == 0 and len(open_) < 6:
                one = request(rng.choice(prompts), max_tokens=4)
                engine.submit(one)
                open_[one.request_id], answers[one.request_id] = one, []
            if open_ and rng.random() < 0.1:
                engine.abort(gone := rng.choice(list(open_)))
                del open_[gone]
                aborted += 1
            if engine.scheduler.running and rng.random() < 0.1:
                engine.scheduler.preempt(engine.scheduler.running[-1])
            if rng.random() < 0.5:
                engine.clear()
            say_what_prefill_costs(engine, rng.choice([PATIENT_S, 2e-4]))
            poison_blank_blocks(engine)
            given_back = blank_blocks(engine)
            time.sleep(rng.choice([0, 0.0003, 0.001]))
            assert_untouched(engine, given_back)
            for output in engine.step():
                answers[output.request_id] += output.token_ids
                if output.finish_reason is not None and (one := open_.pop(output.request_id, None)) is not None:
                    assert answers[one.request_id] == oracle(list(one.token_ids), max_tokens=4).token_ids
            engine.pool.check()
        for one in open_.values():
            engine.abort(one.request_id)
        engine.step()
        at_rest(engine)
        assert aborted > 10 and engine.scheduler.preemptions > 10
        assert loaded_blocks() > 50


def test_a_block_computed_while_a_remote_tier_reads_it_goes_back_once_that_has_come(tmp_path: Path) -> None:
    """What a remote tier gives is copied when all of it is there: until then nothing seems to be under way."""
    prompt, tier = words(3, 3 * B + 3), BentTier(TierKind.REMOTE)
    with open_store(tmp_path, tier, load_timeout_s=2 * PATIENCE_S) as store:
        keep(store, prompt)
        token_s = 100 * PATIENT_S  # it takes its share of three blocks before it looks whether any has come
        say_how_fast(store, BLOCK_BYTES / (B * token_s))
        tier.gate.clear()
        engine = engine_over(store, token_s=token_s)
        engine.submit(one := request(prompt))
        engine.poll()
        engine.scheduler.admit()
        load = engine.scheduler.running[0].reuse.load
        until(lambda: set(load.ticket.states()) == {LoadState.READING})
        until(lambda: engine.step() or engine.scheduler.running[0].num_computed >= 2 * B)
        assert engine.scheduler.running[0].reuse.load is load and engine.scheduler.prefetcher.draining
        tier.gate.set()
        assert load.ticket.wait(PATIENCE_S)
        answer = finish(engine, one)
        assert answer.token_ids == oracle(prompt).token_ids
        assert answer.cache.computed_tokens >= 2 * B
        at_rest(engine)


def test_waiting_for_memory_that_is_read_into_does_not_keep_the_machine_busy(tmp_path: Path) -> None:
    tier = BentTier()
    with open_store(tmp_path, tier) as store:
        keep(store, PROMPT)
        hang_after(tier, 0)
        engine = engine_over(store, num_blocks=BLOCKS + 2)
        engine.submit(one := request(PROMPT))
        step_until(engine, tier.waiting)
        engine.abort(one.request_id)
        engine.submit(other := request(words(5, BLOCKS * B)))
        steps, end = 0, time.monotonic() + 0.2
        while time.monotonic() < end:
            assert not [output for output in engine.step() if output.request_id == other.request_id]
            steps += 1
        assert steps < 500, "it sleeps between looks"
        tier.gate.set()
        assert finish(engine, other).token_ids == oracle(words(5, BLOCKS * B)).token_ids
