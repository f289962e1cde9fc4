"""Never slower than no cache: what computing is faster than is left where it is, and tried again now and then."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from harness.broken_builds import Cases, Claim, Mutant, each_broken_build, each_claim, must_notice
from harness.loads import say_how_fast
from harness.plain_generate import greedy, prompt, tiny
from harness.reuse_mutants import a_slow_tier_is_never_tried_again, everything_stored_is_worth_a_load
from harness.stored import FixedPrefill
from store.stores import BentTier, open_store

from kvire.connectors.transformers import StoredCache
from kvire.core.report import MissReason
from kvire.store.reuse.planner import TRY_AFTER

TOKENS = 96  # of the prompt, that can be loaded
IDS = prompt(TOKENS + 4)
COMPUTE_S = TOKENS * 10.0  # said of them, so that no real load comes near


@pytest.fixture(autouse=True)
def loading_pays() -> None:
    """Not here: what computing takes is said below."""


class Calls:
    """A stored prompt that is asked for again and again. tier: has its blocks."""

    def __init__(self, stored: StoredCache, tier: BentTier) -> None:
        self.stored, self.tier = stored, tier
        self.answer = stored.generate(IDS, **greedy(4))
        assert stored.store.flush(10)
        self.stored_bytes = TOKENS // stored._reuse.block_size * stored._reuse.parts[0].size_bytes
        stored._reuse.prefill = FixedPrefill(COMPUTE_S / TOKENS)

    def say_a_load_takes(self, share: float) -> None:
        """This much of what computing takes."""
        say_how_fast(self.stored.store, self.stored_bytes / (share * COMPUTE_S))

    def reused(self) -> int:
        """Tokens that the next call loads; if it loads none, nothing was read, and it says why."""
        read = len(self.tier.log)
        assert torch.equal(self.stored.generate(IDS, **greedy(4)), self.answer)
        report = self.stored.report
        assert report is not None
        if not report.reused_tokens:
            assert len(self.tier.log) == read
            assert (report.miss, report.miss_token) == (MissReason.SLOWER, 0)
        return report.reused_tokens


@contextmanager
def calls() -> Iterator[Calls]:
    tier = BentTier()
    with tempfile.TemporaryDirectory() as place, open_store(Path(place), tier) as store:
        model = tiny("llama", Path(place) / "model")
        with StoredCache.open(model, store) as stored:
            yield Calls(stored, tier)


def a_load_is_made_where_it_is_sooner() -> None:
    with calls() as made:
        for share, loaded in ((0.01, TOKENS), (0.94, TOKENS), (0.96, 0), (50.0, 0), (0.01, TOKENS)):
            made.say_a_load_takes(share)
            assert made.reused() == loaded, share


def a_slow_tier_is_tried_again() -> None:
    with calls() as made:
        made.say_a_load_takes(50.0)
        assert [made.reused() for _ in range(2 * TRY_AFTER)] == ([0] * (TRY_AFTER - 1) + [TOKENS]) * 2


CASES: Cases = [
    (a_load_is_made_where_it_is_sooner, [everything_stored_is_worth_a_load]),
    (a_slow_tier_is_tried_again, [everything_stored_is_worth_a_load, a_slow_tier_is_never_tried_again]),
]


@each_claim(CASES)
def test_holds(claim: Claim) -> None:
    claim()


@each_broken_build(CASES)
def test_notices_a_broken_build(claim: Claim, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    must_notice(claim, mutant, monkeypatch)
