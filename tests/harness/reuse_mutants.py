"""Deliberately broken builds of the planner of reuse, for the claim that every path makes: never
slower than no cache.

As in harness/mutants.py, a mutant patches one function of Kvire for the length of a test.
"""

from dataclasses import replace

import pytest

from kvire.plan.cost import Way
from kvire.store.reuse import planner
from kvire.store.reuse.planner import Reuse


def everything_stored_is_worth_a_load(patch: pytest.MonkeyPatch) -> None:
    """Nobody asks whether a tier is slower than computing."""
    worth = Reuse.worth
    patch.setattr(Reuse, "worth", lambda self, found, **how: replace(worth(self, found, **how), way=Way.LOAD))


def a_slow_tier_is_never_tried_again(patch: pytest.MonkeyPatch) -> None:
    """What was too slow once is left alone for ever."""
    patch.setattr(Reuse, "decided", lambda self, choice: None)


def nothing_is_worth_a_load(patch: pytest.MonkeyPatch) -> None:
    """Whatever is stored is computed."""
    worth = Reuse.worth
    patch.setattr(Reuse, "worth", lambda self, found, **how: replace(worth(self, found, **how), way=Way.COMPUTE))


def slow_tiers_are_always_tried(patch: pytest.MonkeyPatch) -> None:
    """Every load is made, to see whether the tier is still so slow."""
    patch.setattr(planner, "TRY_AFTER", 1)


def a_try_leads_to_the_next(patch: pytest.MonkeyPatch) -> None:
    """Once a slow tier was tried, it is tried each time."""
    decided = Reuse.decided
    patch.setattr(Reuse, "decided", lambda self, choice: None if choice.is_try else decided(self, choice))
