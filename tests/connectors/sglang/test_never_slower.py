"""Never slower than no cache: what computing is faster than is left where it is, and tried again now and then; by what
the option says of SGLang, or by what was measured from outside.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from connectors.sglang.conftest import HostPool
from connectors.sglang.test_storage import KEYS, PAGE, hashes, slots
from harness import waiting
from harness.broken_builds import Cases, Claim, Mutant, each_broken_build, each_claim, must_notice
from harness.loads import folder, say_how_fast
from harness.reuse_mutants import a_slow_tier_is_never_tried_again, everything_stored_is_worth_a_load
from store.blocks import namespace
from store.stores import BentTier, open_store

from kvire.connectors.sglang.pages import PagePool
from kvire.connectors.sglang.prefill import KEPT, LEAST_KEPT, Misses, QuickPrefill
from kvire.core.errors import ConfigError
from kvire.core.tier_kind import TierKind
from kvire.plan.cost import PrefillSpeed
from kvire.store.reuse.planner import TRY_AFTER

COMPUTE_S = 1000.0  # said of all pages, so that no real load comes near
ASK_S = 1.0


class Asked:
    """Pages that are stored, and asked for again and again."""

    def __init__(self, pool: PagePool, tier: BentTier) -> None:
        self.pool, self.tier = pool, tier
        assert pool.write(KEYS, slots(range(len(KEYS))).tolist()[::PAGE]).ok == [True] * len(KEYS)
        assert pool._store.flush(waiting.PATIENCE_S)

    def say_prompts_take(self, seconds: float) -> None:
        """To compute the tokens of all pages."""
        self.pool._reuse.prefill = PrefillSpeed(seconds / (len(KEYS) * PAGE))

    def say_a_load_takes(self, share: float) -> None:
        """This much of what computing takes."""
        say_how_fast(self.pool._store, len(KEYS) * self.pool.page_bytes / (share * COMPUTE_S))

    def loaded(self) -> int:
        """Pages that the next prompt loads."""
        count = self.pool.worth_loading(KEYS, ASK_S)
        return sum(self.pool.read(KEYS[:count], slots(range(count)).tolist()[::PAGE]).ok) if count else 0


@contextmanager
def asked(kind: TierKind = TierKind.DISK) -> Iterator[Asked]:
    tier = BentTier(kind)
    with folder() as path, open_store(path, tier) as store:
        one = Asked(PagePool(HostPool(16).fill(), namespace(), store, "sglang", PrefillSpeed()), tier)
        one.say_prompts_take(COMPUTE_S)
        yield one
        tier.gate.set()


def a_load_is_made_where_it_is_sooner() -> None:
    every = len(KEYS)
    with asked() as one:
        for share, loaded in ((0.01, every), (0.94, every), (0.96, 0), (50.0, 0), (0.01, every)):
            one.say_a_load_takes(share)
            assert one.loaded() == loaded, share


def a_slow_tier_is_tried_again() -> None:
    with asked() as one:
        one.say_a_load_takes(50.0)
        assert [one.loaded() for _ in range(2 * TRY_AFTER)] == ([0] * (TRY_AFTER - 1) + [len(KEYS)]) * 2


def a_remote_tier_that_is_not_worth_a_load_is_not_asked() -> None:
    """It would be waited for; but it is tried again as well."""
    questions = []
    with asked(TierKind.REMOTE) as one:
        held = one.tier.held
        one.tier.held = lambda ids, timeout_s=None: questions.append(ids) or held(ids, timeout_s)
        one.say_a_load_takes(50.0)
        assert [one.loaded() for _ in range(TRY_AFTER - 1)] == [0] * (TRY_AFTER - 1)
        assert not questions
        assert one.loaded() == len(KEYS) and questions


def a_load_is_waited_for_as_long_as_computing_takes() -> None:
    """The tier is said to be fast, and answers nothing."""
    with asked() as one, pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvire.connectors.sglang.pages.READ_S", waiting.PATIENCE_S)
        one.say_prompts_take(0.05)
        say_how_fast(one.pool._store, 1e12)
        one.tier.gate.clear()
        assert one.loaded() == 0
        assert one.tier.waiting.is_set() and not one.tier.gate.is_set()


CASES: Cases = [
    (a_load_is_made_where_it_is_sooner, [everything_stored_is_worth_a_load]),
    (a_slow_tier_is_tried_again, [everything_stored_is_worth_a_load, a_slow_tier_is_never_tried_again]),
    (
        a_remote_tier_that_is_not_worth_a_load_is_not_asked,
        [everything_stored_is_worth_a_load, a_slow_tier_is_never_tried_again],
    ),
]


@each_claim([*CASES, (a_load_is_waited_for_as_long_as_computing_takes, [])])
def test_holds(claim: Claim) -> None:
    claim()


@each_broken_build(CASES)
def test_notices_a_broken_build(claim: Claim, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    must_notice(claim, mutant, monkeypatch)


# How fast SGLang computes


class Watched:
    """Prompts of ten pages that are missed, computed and written, on a clock of the test's own."""

    def __init__(self) -> None:
        self.now, self.number = 0.0, 0
        self.prefill = QuickPrefill()
        self.misses = Misses(self.prefill, 16, clock=lambda: self.now)

    def compute(self, seconds: float, waits: float = 0.0) -> None:
        self.number += 1
        keys = [f"{self.number}/{page}" for page in range(10)]
        self.misses.told(keys[2])
        self.now += waits / 2
        self.misses.told(keys[2])  # it is asked for again while it waits
        self.now += waits / 2 + seconds
        self.misses.written(keys)


def test_a_prompt_is_timed_from_the_miss_until_it_is_written() -> None:
    watched = Watched()
    for _ in range(LEAST_KEPT):
        assert not watched.prefill.known
        watched.compute(8 * 16 * 0.01)
    assert watched.prefill.seconds(0, 100) == pytest.approx(1.0)


def test_waiting_in_a_queue_does_not_count_as_long_as_some_do_not() -> None:
    watched = Watched()
    for number in range(KEPT):
        watched.compute(8 * 16 * 0.01, waits=0.0 if number % 3 == 0 else 50.0)
    assert watched.prefill.seconds(0, 100) == pytest.approx(1.0)


def test_what_nobody_missed_says_nothing() -> None:
    watched = Watched()
    for _ in range(KEPT):
        watched.misses.written(["of somebody else"] * 10)
        watched.misses.told("one page")
        watched.misses.written(["one page"])  # 16 tokens
    assert not watched.prefill.known


def test_the_option_says_it(start, host_pool) -> None:
    first = start()
    first.register_mem_pool_host(host_pool(16).fill())
    first.batch_set_v1(KEYS, slots(range(8)))
    first.close()
    for speed, pages in ((1e12, 0), (1e-3, 8), (1, 8)):
        storage = start(prefill_tokens_per_s=speed)
        storage.register_mem_pool_host(host_pool(16))
        assert storage.batch_exists(KEYS) == storage.batch_exists_v2(KEYS).kv_hit_pages == pages
        assert storage.exists(KEYS[0]), "it is stored all the same"
    for wrong in (0, -1, "fast", float("inf")):
        with pytest.raises(ConfigError, match="prefill_tokens_per_s"):
            start(prefill_tokens_per_s=wrong)


def test_without_it_sglang_is_timed(start, host_pool) -> None:
    storage = start()
    storage.register_mem_pool_host(host_pool(16).fill())
    for number in range(LEAST_KEPT):
        keys = hashes(8, str(number))
        assert storage.batch_exists(keys) == 0
        assert storage.batch_set_v1(keys, slots(range(8))) == [True] * 8
    assert storage._prefill.known
    storage._store.flush(waiting.PATIENCE_S)
    say_how_fast(storage._store, 1.0)
    assert storage.batch_exists(hashes(8, "0")) == 0, "it was computed sooner than a tier would bring it"
