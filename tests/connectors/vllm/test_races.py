"""Reads that come late, requests that are given up under a load, drafts: nobody's block gets anything of another's."""

import threading

import pytest
from connectors.vllm import broken
from connectors.vllm.small_engine import TOKENS, Request, SmallEngine
from harness import waiting
from harness.broken_builds import Cases, Claim, Mutant, each_broken_build, each_claim, must_notice
from harness.loads import folder
from harness.stored import memory, store_over
from harness.waiting import until
from store.stores import BentTier, open_store

from kvire.core.record import BlockId
from kvire.core.tier_kind import TierKind

FIRST, SECOND = list(range(2 * TOKENS + 1)), list(range(100, 102 + 2 * TOKENS))


class StallingTier(BentTier):
    """Reads of `stalled` blocks write nothing until their event is set."""

    def __init__(self, kind: TierKind) -> None:
        super().__init__(kind)
        self.stalled: dict[BlockId, threading.Event] = {}
        self.done: list[BlockId] = []

    def read(self, block_id, buffers, timeout_s=None) -> int:
        self.log.append(block_id)
        if (event := self.stalled.get(block_id)) is not None:
            event.wait(3 * waiting.PATIENCE_S)
        length = self.inner.read(block_id, buffers, timeout_s)
        self.done.append(block_id)
        return length

    def stall(self, block_id: BlockId) -> threading.Event:
        return self.stalled.setdefault(block_id, threading.Event())


def ids_of(engine: SmallEngine, name: str) -> list[BlockId]:
    return [BlockId(key, 0) for key in engine.scheduler._tracked[name].chain.keys]


def late_bytes(kind: TierKind) -> None:
    """A read outlasts what a load may take; its memory would be that of the next load, whose blocks arrive first."""
    tier = StallingTier(kind)
    with folder() as path, pytest.MonkeyPatch.context() as patch, open_store(path, tier, load_timeout_s=0.3) as store:
        patch.setattr("kvire.connectors.vllm.fetch.STALLED_S", 0.3)
        patch.setattr("kvire.connectors.vllm.worker.LOAD_THREADS", 1)
        first = SmallEngine(store)
        for name, prompt in (("a", FIRST), ("b", SECOND)):
            first.run(Request(name, list(prompt)))
        first.close()
        assert store.flush(waiting.PATIENCE_S)

        engine = SmallEngine(store)
        one = engine.add(Request("a", list(FIRST)))
        engine.scheduler.match(one, 0)
        late = ids_of(engine, "a")[0]
        arrives = tier.stall(late)
        until(lambda: engine.step() or one.state == "running", lambda: one.state)
        assert one.stored_tokens == 0, "it was computed instead"
        store._loader._timeout_s = 3 * waiting.PATIENCE_S
        other = engine.add(Request("b", list(SECOND)))
        engine.scheduler.match(other, 0)
        sooner, last = ids_of(engine, "b")[:2]
        completes = tier.stall(last)
        until(lambda: engine.step() or (sooner in tier.done and last in tier.log), lambda: other.state)
        arrives.set()
        until(lambda: late in tier.done)
        completes.set()
        until(lambda: engine.step() or other.state == "running", lambda: other.state)
        assert other.stored_tokens == 2 * TOKENS
        engine.run(other)
        engine.run(one)
        engine.close()


def bytes_that_a_local_tier_brings_late_land_nowhere() -> None:
    late_bytes(TierKind.DISK)


def bytes_that_a_remote_tier_brings_late_land_nowhere() -> None:
    late_bytes(TierKind.REMOTE)


def a_cancelled_load_keeps_its_blocks_until_nobody_writes_there() -> None:
    """The thread that copies what was loaded is held up; meanwhile its request ends, and another needs the blocks."""
    with folder() as path, store_over(memory, path) as store:
        first = SmallEngine(store)
        first.run(Request("a", list(FIRST)))
        first.close()
        assert store.flush(waiting.PATIENCE_S)

        engine = SmallEngine(store, blocks=5)  # four, and vLLM's null block: not enough for both
        scatter = engine.worker._pages[0].scatter
        reached, goes_on, copied = threading.Event(), threading.Event(), threading.Event()

        def held_up(block_ids, rows) -> None:
            reached.set()
            goes_on.wait(3 * waiting.PATIENCE_S)
            scatter(block_ids, rows)
            copied.set()

        engine.worker._pages[0].scatter = held_up
        given_up = engine.add(Request("a", list(FIRST)))
        until(lambda: engine.step() or reached.is_set())
        engine.finish(given_up)
        other = engine.add(Request("b", list(SECOND)))
        for _ in range(2):
            engine.step()
        goes_on.set()
        assert copied.wait(waiting.PATIENCE_S)
        engine.run(other)
        engine.close()


def one_token_is_always_computed() -> None:
    with folder() as path, store_over(memory, path) as store:
        for tokens in (0, 6 * TOKENS):
            engine = SmallEngine(store)
            prompt = list(range(7 * TOKENS))
            assert engine.scheduler.match(Request("a", prompt), 0) == tokens
            engine.run(Request("b", list(prompt)))
            engine.close()
            assert store.flush(waiting.PATIENCE_S)


def drafts_cost_no_block() -> None:
    """Rejected or accepted: every block of the answer is stored, as soon as all of its tokens are known."""
    for seed in range(4):
        with folder() as path, store_over(memory, path) as store:
            engine = SmallEngine(store, seed=seed)
            request = engine.run(Request("a", list(range(10))), answer=40, drafts=3)
            engine.close()
            assert store.flush(waiting.PATIENCE_S)
            assert store.stats().handles["memory"].tier.blocks >= (request.num_tokens - 1 - 3) // TOKENS
            again = SmallEngine(store)
            longer = again.run(Request("b", list(request.all_token_ids)))
            assert longer.stored_tokens >= (request.num_tokens - 1 - 3) // TOKENS * TOKENS
            again.close()


def a_lookup_that_fails_is_a_miss() -> None:
    """Whatever the store raises: in vLLM's scheduler it would end the engine."""

    def failing(_ids):
        raise RuntimeError("no store may raise this")

    with folder() as path, store_over(memory, path) as store:
        engine = SmallEngine(store)
        engine.run(Request("a", list(FIRST)))
        store.held = failing
        assert engine.run(Request("b", list(FIRST))).stored_tokens == 0
        engine.close()
        del store.held
        assert store.flush(waiting.PATIENCE_S)


CASES: Cases = [
    (a_lookup_that_fails_is_a_miss, []),
    (bytes_that_a_local_tier_brings_late_land_nowhere, [broken.memory_is_reused_under_a_read]),
    (bytes_that_a_remote_tier_brings_late_land_nowhere, [broken.late_bytes_go_to_the_callers_memory]),
    (a_cancelled_load_keeps_its_blocks_until_nobody_writes_there, [broken.cancelled_loads_are_over_at_once]),
    (one_token_is_always_computed, [broken.whole_prompts_are_loaded]),
    (drafts_cost_no_block, [broken.drafts_count_as_computed]),
]


@each_claim(CASES)
def test_holds(claim: Claim) -> None:
    claim()


@each_broken_build(CASES)
def test_notices_a_broken_build(claim: Claim, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    must_notice(claim, mutant, monkeypatch)
