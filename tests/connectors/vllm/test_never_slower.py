"""Never slower than no cache, under both ways into vLLM: what computing is faster than is left where it is, and tried
again now and then; and no load is waited for longer than computing takes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from connectors.vllm import broken
from connectors.vllm.small_engine import BLOCK_BYTES, NAMESPACE, TOKENS, Request, SmallEngine
from harness import waiting
from harness.broken_builds import Cases, Claim, Mutant, each_broken_build, each_claim, must_notice
from harness.loads import folder, say_how_fast
from harness.reuse_mutants import a_slow_tier_is_never_tried_again, everything_stored_is_worth_a_load
from harness.stored import FixedPrefill
from harness.waiting import until
from store.stores import BentTier, open_store

from kvire.connectors.vllm.messages import Move
from kvire.connectors.vllm.secondary_requests import GROUP_BYTES, Requests
from kvire.connectors.vllm.secondary_transfers import Job, Primary, Transfers
from kvire.core.record import BlockId
from kvire.core.tier_kind import TierKind
from kvire.store.reuse.look import Part
from kvire.store.reuse.planner import TRY_AFTER, Reuse
from kvire.store.reuse.probe import Probe
from kvire.store.tiered import TieredStore

BLOCKS = 6
PROMPT = list(range(BLOCKS * TOKENS + 1))
STORED = BLOCKS * TOKENS  # tokens of it
COMPUTE_S = 1000.0  # said of them, so that no real load comes near


class Connector:
    """KvireConnector's two sides, asked for a stored prompt again and again."""

    def __init__(self, store: TieredStore) -> None:
        self.engine = SmallEngine(store)
        self.reuse = self.engine.scheduler._reuse
        self.number = 0
        self.loaded()
        assert store.flush(waiting.PATIENCE_S)

    def say_prompts_take(self, seconds: float) -> None:
        """To compute what is stored."""
        self.reuse.prefill = FixedPrefill(seconds / STORED)

    def loaded(self) -> int:
        """Tokens of the next request that come from the store."""
        self.number += 1
        self.engine.cached.clear()
        return self.engine.run(Request(str(self.number), list(PROMPT))).stored_tokens

    def close(self) -> None:
        self.engine.close()


class SecondaryTier:
    """KvireTier's names and transfers, asked as vLLM's manager of tiers does: block by block, up to the first miss."""

    def __init__(self, store: TieredStore) -> None:
        reuse = Reuse(store, NAMESPACE, [Part(BLOCK_BYTES)], TOKENS)
        self.probe = Probe(reuse, waiting.PATIENCE_S)
        self.requests = Requests(reuse, self.probe)
        self.rows = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        self.transfers = Transfers(store, Primary(memoryview(self.rows)))
        self.reuse = reuse
        self.number = 0
        self.transfers.save(Job(0, self._moves(self._meet())))
        until(self.transfers.finished)
        assert store.flush(waiting.PATIENCE_S)

    def say_prompts_take(self, seconds: float) -> None:
        """To compute what is stored."""
        self.reuse.prefill = FixedPrefill(seconds / STORED)

    def loaded(self) -> int:
        """Tokens of the next request that come from the store."""
        name = self._meet()
        moves = self._moves(name)
        until(lambda: None not in [self.requests.has(move.record, name) for move in moves])
        found = [move for move in moves if self.requests.has(move.record, name)]
        done = 0
        if found:
            self.transfers.load(Job(self.number, found, self.requests.patience_s(name)))
            ended: list[Job] = []
            until(lambda: ended.extend(self.transfers.finished()) or ended)
            done = sum(ended[0].done)
        self.requests.finished(name)
        return done * TOKENS

    def close(self) -> None:
        self.transfers.close()
        self.probe.close()

    def _meet(self) -> str:
        self.number += 1
        self.requests.meet(Request(str(self.number), list(PROMPT)))
        return str(self.number)

    def _moves(self, name: str) -> list[Move]:
        ends = {bytes([index]) + bytes(GROUP_BYTES): (index + 1) * TOKENS for index in range(BLOCKS)}
        context = SimpleNamespace(req_id=name, get_offload_key_position=ends.get)
        records = [self.requests.record(key, context) for key in ends]
        return [Move(record, row) for row, record in enumerate(records) if record is not None]


class Answer:
    """What a tier says of blocks. questions: how often it was asked."""

    def __init__(self, tier: BentTier, *, is_there: bool) -> None:
        self._tier, self._is_there = tier, is_there
        self.questions = 0

    def __call__(self, ids: Sequence[BlockId], timeout_s: float | None = None) -> list[bool]:
        self.questions += 1
        return self._tier.inner.held(ids, timeout_s) if self._is_there else [False] * len(ids)


Ways = Callable[[TieredStore], Connector | SecondaryTier]
BOTH: tuple[Ways, ...] = (Connector, SecondaryTier)


@contextmanager
def asked_over(tier: BentTier, way: Ways) -> Iterator[Connector | SecondaryTier]:
    """Over a store on `tier` that has the prompt."""
    with folder() as path, open_store(Path(path), tier) as store:
        one = way(store)
        one.say_prompts_take(COMPUTE_S)
        yield one
        tier.gate.set()
        one.close()


def say_a_load_takes(one: Connector | SecondaryTier, share: float) -> None:
    """This much of what computing takes."""
    say_how_fast(one.reuse.store, BLOCKS * BLOCK_BYTES / (share * COMPUTE_S))
    one.reuse.measured({"bent": one.reuse.store.speed("bent")})  # as workers say it


def a_load_is_made_where_it_is_sooner() -> None:
    for way in BOTH:
        tier = BentTier()
        with asked_over(tier, way) as one:
            for share, loaded in ((0.01, STORED), (0.94, STORED), (0.96, 0), (50.0, 0), (0.01, STORED)):
                say_a_load_takes(one, share)
                read = len(tier.log)
                assert one.loaded() == loaded, (way, share)
                assert (len(tier.log) > read) == (loaded > 0)


def a_slow_tier_is_tried_again() -> None:
    for way in BOTH:
        with asked_over(BentTier(), way) as one:
            say_a_load_takes(one, 50.0)
            assert [one.loaded() for _ in range(2 * TRY_AFTER)] == ([0] * (TRY_AFTER - 1) + [STORED]) * 2


def a_remote_tier_that_is_not_worth_a_load_is_not_asked() -> None:
    """It would be waited for; but it is tried again as well, whether or not it has anything."""
    for way in BOTH:
        tier = BentTier(TierKind.REMOTE)
        with asked_over(tier, way) as one:
            say_a_load_takes(one, 50.0)
            for is_there in (True, False, True):
                answer = Answer(tier, is_there=is_there)
                tier.held = answer
                assert [one.loaded() for _ in range(TRY_AFTER - 1)] == [0] * (TRY_AFTER - 1)
                assert not answer.questions, way
                assert one.loaded() == (STORED if is_there else 0)
                assert answer.questions, way


def a_load_is_waited_for_as_long_as_computing_takes() -> None:
    """The tier is said to be fast, and answers nothing: the request goes on without it, and does not ask again."""
    for way in BOTH:
        tier = BentTier()
        with pytest.MonkeyPatch.context() as patch, asked_over(tier, way) as one:
            patch.setattr("kvire.connectors.vllm.fetch.STALLED_S", 3 * waiting.PATIENCE_S)
            one.say_prompts_take(0.05)
            say_a_load_takes(one, 1e-9)
            tier.gate.clear()
            one.loaded()
            assert tier.waiting.is_set() and not tier.gate.is_set()


CASES: Cases = [
    (a_load_is_made_where_it_is_sooner, [everything_stored_is_worth_a_load]),
    (a_slow_tier_is_tried_again, [everything_stored_is_worth_a_load, a_slow_tier_is_never_tried_again]),
    (
        a_remote_tier_that_is_not_worth_a_load_is_not_asked,
        [everything_stored_is_worth_a_load, a_slow_tier_is_never_tried_again],
    ),
    (a_load_is_waited_for_as_long_as_computing_takes, [broken.loads_are_waited_for_whatever_computing_takes]),
]


@each_claim(CASES)
def test_holds(claim: Claim) -> None:
    claim()


@each_broken_build(CASES)
def test_notices_a_broken_build(claim: Claim, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    must_notice(claim, mutant, monkeypatch)
