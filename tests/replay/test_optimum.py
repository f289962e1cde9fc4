"""The optimum is a ceiling: of every policy here, and of every policy there could be."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay.traces import random_trace, trace_of

from kvire.replay.optimum import ceiling_tokens
from kvire.replay.policies import POLICIES, policy_named
from kvire.replay.simulate import ideal, run_store
from kvire.replay.store_tiers import StoreTier, StoreTiers

CHAINS = st.lists(
    st.tuples(st.text("abc", min_size=1, max_size=5), st.integers(0, 11)), min_size=1, max_size=30
)  # names, and tokens that the last block lacks (or has beside it)


def made(chains):
    return trace_of([(names, max(1, 10 * len(names) + 2 - short)) for names, short in chains])


@given(CHAINS, st.integers(1, 12))
@settings(max_examples=150, deadline=None)
def test_no_policy_is_above_it(chains, blocks):
    trace = made(chains)
    best = ceiling_tokens(trace, blocks)
    assert best <= ideal(trace).tokens
    for name in [*POLICIES, "ttl=3"]:
        assert policy_named(name)(trace, blocks, lambda _: None).tokens <= best, name
    store = StoreTiers([StoreTier(trace, 1), StoreTier(trace, max(1, blocks - 1))])
    assert run_store(trace, store).tokens <= ceiling_tokens(trace, 1 + max(1, blocks - 1))


def best_of_all(trace, blocks):
    """Every choice of what to keep after each request, whole prefixes only."""

    @cache
    def best(number, held):
        if number == len(trace.requests):
            return 0
        request = trace.requests[number]
        count = next((n for n, b in enumerate(request.blocks) if b not in held), len(request.blocks))
        here = trace.hit_tokens(request, count)
        return here + max(best(number + 1, kept) for kept in choices(held | set(request.blocks)))

    def choices(present):
        """Subsets that are closed under parents and fit."""
        sets = {frozenset()}
        for block in sorted(present):  # parents have smaller numbers
            sets |= {
                s | {block} for s in sets if len(s) < blocks and (trace.parents[block] < 0 or trace.parents[block] in s)
            }
        return sets

    return best(0, frozenset())


@given(st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=6), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_it_is_the_best_possible_where_every_hit_is_worth_the_same(names, blocks):
    trace = trace_of([(chain, 10 * len(chain) + 1) for chain in names])
    assert ceiling_tokens(trace, blocks) == best_of_all(trace, blocks)


@pytest.mark.parametrize("seed", range(3))
def test_more_room_never_hurts_it(seed):
    trace = random_trace(seed, requests=120)
    rates = [ceiling_tokens(trace, blocks) for blocks in range(1, 40)]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]
