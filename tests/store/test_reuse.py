"""One planner for every engine: it looks without a trace, loads only what is worth it, and says why not."""

import threading
from pathlib import Path

import pytest
from harness.loads import Steady
from harness.waiting import PATIENCE_S, until
from store.blocks import KV_BYTES, TOKENS, kv_of, namespace
from store.stores import BentTier, open_store

from kvire.core.report import MissReason
from kvire.core.tier_kind import TierKind
from kvire.plan.cost import LEAST_GAIN, PrefillSpeed, Way
from kvire.store.explain import Explanation, StoreMiss
from kvire.store.reuse.chain import Chain, Pages
from kvire.store.reuse.load import Miss, explained, reason_of
from kvire.store.reuse.look import Found, Part, Word
from kvire.store.reuse.no_reuse import NoReuse
from kvire.store.reuse.planner import TRY_AFTER, Reuse
from kvire.store.reuse.probe import Probe
from kvire.store.reuse.reused import Reused
from kvire.store.ticket import FailureReason, LoadState
from kvire.store.tiered import TieredStore

BLOCKS = 8
WHOLE = (Part(KV_BYTES),)
WINDOWED = (Part(KV_BYTES), Part(KV_BYTES, window=2 * TOKENS))


def reuse_of(store: TieredStore, parts=WHOLE, token_s: float | None = 1.0) -> Reuse:
    return Reuse(store, namespace(), parts, TOKENS, prefill=PrefillSpeed(token_s))


def prompt(reuse: Reuse | NoReuse, blocks: int = BLOCKS, seed: int = 0) -> Chain:
    chain = Chain(reuse.name(), [seed * 10_000 + i for i in range(blocks * TOKENS + 3)], TOKENS)
    chain.extend()
    return chain


def keep(reuse: Reuse, chain: Chain, indices=range(BLOCKS)) -> None:
    def memory(index: int, part: int) -> memoryview:
        return kv_of(chain.record(index, part, KV_BYTES))

    assert reuse.save(chain, indices, memory)
    assert reuse.store.flush(PATIENCE_S)


def fetch(reuse: Reuse, chain: Chain, found: Found, way: Way = Way.LOAD):
    """A finished load; what is ready is what was saved."""
    rooms = {place: memoryview(bytearray(KV_BYTES)) for place in found.needed}
    load = reuse.load(chain, found, lambda index, part: rooms[index, part], way)
    assert load.ticket.wait(PATIENCE_S)
    for i, (index, part) in enumerate(found.needed):
        if load.ticket.state(i) is LoadState.READY:
            assert rooms[index, part] == kv_of(chain.record(index, part, KV_BYTES))
    return load


def say_how_fast(store: TieredStore, bytes_per_s: float) -> None:
    for handle in store._handles:
        handle.meter = Steady(bytes_per_s)


# Looking


def test_what_was_saved_is_found_and_loaded(tmp_path: Path) -> None:
    with open_store(tmp_path, BentTier()) as store:
        reuse = reuse_of(store)
        chain = prompt(reuse)
        assert reuse.look(chain, 0).is_empty
        keep(reuse, chain, range(6))
        found = reuse.look(chain, 2)
        assert (found.first, found.known, found.stop, found.word) == (2, 6, 6, Word.SURE)
        assert found.needed == [(index, 0) for index in range(2, 6)] and found.size_bytes == 4 * KV_BYTES
        assert found.blocks_by_tier() == {"bent": 4}
        load = fetch(reuse, chain, found)
        assert load.frontier(2) == 6 and load.source(2) is TierKind.DISK
        assert reuse.look(chain, 2, 4).stop == 4, "no more than is of use"
        assert reuse.look(chain, 7).is_empty, "the device has more than the store"


def test_a_look_changes_nothing(tmp_path: Path) -> None:
    tier = BentTier()
    with open_store(tmp_path, tier) as store:
        reuse = reuse_of(store)
        chain = prompt(reuse)
        keep(reuse, chain)
        used = {entry.id: entry.used for entry in tier.entries()}
        threads, saves = threading.active_count(), store.stats().saves
        for first in range(BLOCKS):
            reuse.worth(reuse.hope(reuse.look(chain, first)))
        assert threading.active_count() == threads and store.stats().saves == saves
        assert {entry.id: entry.used for entry in tier.entries()} == used
        assert not tier.log and not tier.touched


def test_windows_are_loaded_no_further_back_than_they_reach(tmp_path: Path) -> None:
    with open_store(tmp_path, BentTier()) as store:
        reuse = reuse_of(store, WINDOWED)
        chain = prompt(reuse)
        keep(reuse, chain)
        found = reuse.look(chain, 0)
        assert [index for index, part in found.needed if part == 1] == [6, 7]
        assert [index for index, part in found.needed if part == 0] == list(range(8))
        load = fetch(reuse, chain, found)
        assert load.all_or_nothing and load.frontier(0) == 8


def test_rows_tell_of_blocks_before_and_after(tmp_path: Path) -> None:
    """An engine that keeps what is not stored yet asks about all its blocks at once."""
    with open_store(tmp_path, BentTier()) as store:
        reuse = reuse_of(store, WINDOWED)
        chain = prompt(reuse)
        keep(reuse, chain, [0, 1, 2, 4, 7])
        found = reuse.look(chain, 1, 6, start=0)
        assert [found.whole(index) for index in range(BLOCKS)] == [True] * 3 + [False, True, False, False, True]
        assert (found.first, found.stop) == (1, 3)


def test_a_remote_tier_is_counted_on_only_where_that_stakes_nothing_certain(tmp_path: Path) -> None:
    with open_store(tmp_path, BentTier(TierKind.DISK, "near"), BentTier(TierKind.REMOTE, "far")) as store:
        for parts, stop in ((WHOLE, BLOCKS), (WINDOWED, 5)):
            reuse = reuse_of(store, parts)
            chain = prompt(reuse, seed=len(parts))
            keep(reuse, chain, range(5))
            found = reuse.look(chain, 0)
            assert (found.known, found.stop, found.word) == (5, 5, Word.OPEN)
            assert (reuse.hope(found).known, reuse.hope(found).stop) == (5, stop)


def test_a_remote_tier_is_asked_beside_and_the_look_says_so(tmp_path: Path) -> None:
    tier, answers = BentTier(TierKind.REMOTE), threading.Event()
    with open_store(tmp_path, tier, load_timeout_s=PATIENCE_S) as store:
        reuse = reuse_of(store)
        chain = prompt(reuse)
        keep(reuse, chain, range(5))
        held, asked = tier.held, []

        def slowly(ids, timeout_s=None):
            asked.append(ids)
            answers.wait(PATIENCE_S)
            return held(ids, timeout_s)

        tier.held = slowly
        probe = Probe(reuse, PATIENCE_S)
        look = lambda: probe.ask("request", chain, reuse.look(chain, 0))
        assert look().word is look().word is Word.ASKING
        answers.set()
        until(lambda: look().word is Word.SURE)
        assert (look().known, look().stop, len(asked)) == (5, 5, 1)
        assert fetch(reuse, chain, look()).frontier(0) == 5
        probe.forget("request")
        assert reuse.ask(chain, reuse.look(chain, 0), 1.0).stop == 5, "or it is waited for"
        probe.close()


def test_a_remote_tier_that_does_not_answer_has_nothing(tmp_path: Path) -> None:
    tier = BentTier(TierKind.REMOTE)
    with open_store(tmp_path, tier) as store:
        reuse = reuse_of(store)
        chain = prompt(reuse)
        tier.held, go = lambda ids, timeout_s=None: go.wait(PATIENCE_S) and [], threading.Event()
        probe = Probe(reuse, 0.05)
        until(lambda: probe.ask("request", chain, reuse.look(chain, 0)).word is Word.SURE)
        assert probe.ask("request", chain, reuse.look(chain, 0)).is_empty
        go.set()
        probe.close()


def test_pages_are_found_up_to_the_first_that_is_missing(tmp_path: Path) -> None:
    with open_store(tmp_path, BentTier()) as store:
        reuse = reuse_of(store)
        pages = Pages(reuse.name(), [bytes([number]) for number in range(6)])
        keep(reuse, pages, [0, 1, 2, 4])
        found = reuse.look(pages, 0)
        assert found.stop == 3 and reuse.worth(found).way is Way.LOAD
        fetch(reuse, pages, found)


def test_no_store_finds_nothing_and_keeps_nothing() -> None:
    reuse = NoReuse(namespace())
    chain = prompt(reuse)
    assert not reuse.save(chain, range(BLOCKS), lambda index, part: memoryview(b""))
    found = reuse.hope(reuse.look(chain, 2))
    assert found.is_empty and (found.known, found.stop) == (2, 2)
    assert reuse.worth(found).way is Way.COMPUTE
    assert reuse.why(chain, 2, 100) is None and reuse.stats().handles == {} and reuse.flush(0)
    reuse.finished(chain, 2, keep=True)
    reuse.discard(chain.keys)
    reuse.close()


# Judging


def speed_for(share: float, token_s: float = 1.0) -> float:
    """Bytes per second of a tier that takes `share` of what computing takes."""
    return KV_BYTES / (share * TOKENS * token_s)


@pytest.mark.parametrize("parts", [WHOLE, WINDOWED])
@pytest.mark.parametrize("can_meet", [True, False])
@pytest.mark.parametrize("share", [0.01, 0.2, 0.3, 0.94, 0.96, 1.1, 100.0])
def test_never_slower_than_no_cache(tmp_path: Path, share: float, parts, can_meet) -> None:
    """A load is made where it gains at least LEAST_GAIN; of those that would not, one in TRY_AFTER is tried."""
    with open_store(tmp_path, BentTier()) as store:
        reuse = reuse_of(store, parts)
        chain = prompt(reuse)
        keep(reuse, chain)
        found = reuse.look(chain, 0)
        say_how_fast(store, speed_for(share) * found.size_bytes / (BLOCKS * KV_BYTES))
        compute_s, tries = reuse.prefill.seconds(0, BLOCKS * TOKENS), 0
        for _ in range(10 * TRY_AFTER):
            found = reuse.look(chain, 0)
            choice = reuse.worth(found, can_meet=can_meet)
            reuse.decided(choice)
            tries += choice.is_try
            if choice.way is not Way.COMPUTE and not choice.is_try:
                assert choice.seconds <= (1 - LEAST_GAIN) * compute_s
            if choice.way is Way.BOTH:
                assert can_meet and parts is WHOLE, "what is all or nothing is not met in the middle"
        meets = can_meet and parts is WHOLE
        worth_it = share <= 1 - LEAST_GAIN or (meets and share < 2)
        assert tries == (0 if worth_it else 10)


def test_a_try_is_not_used_up_by_looks_or_by_other_loads(tmp_path: Path) -> None:
    with open_store(tmp_path, BentTier()) as store:
        reuse = reuse_of(store)
        slow, fast = prompt(reuse, seed=1), prompt(reuse, seed=2)
        keep(reuse, slow)
        say_how_fast(store, speed_for(100))
        for _ in range(TRY_AFTER - 1):
            for prompt_ in (slow, fast):  # nothing of the other is stored, so that nothing of it is refused
                found = reuse.look(prompt_, 0)
                choice = reuse.worth(found, can_meet=False)
                assert choice.way is Way.COMPUTE
                reuse.decided(choice)
        for _ in range(3):
            assert reuse.worth(reuse.look(slow, 0), can_meet=False).is_try
        assert not reuse.worth(reuse.look(fast, 0), can_meet=False).is_try, "nothing of it is stored"
        say_how_fast(store, speed_for(0.01))
        keep(reuse, fast)
        reuse.decided(reuse.worth(reuse.look(fast, 0), can_meet=False))
        say_how_fast(store, speed_for(100))
        assert reuse.worth(reuse.look(slow, 0), can_meet=False).is_try, "a load that was worth it is no try"


def test_whatever_is_stored_is_loaded_as_long_as_nobody_knows_how_fast_computing_is(tmp_path: Path) -> None:
    with open_store(tmp_path, BentTier()) as store:
        reuse = reuse_of(store, token_s=None)
        chain = prompt(reuse)
        keep(reuse, chain)
        say_how_fast(store, 1.0)
        assert reuse.worth(reuse.look(chain, 0)).way is Way.LOAD
        reuse.prefill.step(0, 64, 64, 0.001)
        assert reuse.worth(reuse.look(chain, 0)).way is Way.COMPUTE


def test_another_process_says_how_fast_its_tiers_are(tmp_path: Path) -> None:
    with open_store(tmp_path, BentTier()) as store:
        reuse = reuse_of(store)
        chain = prompt(reuse)
        keep(reuse, chain)
        say_how_fast(store, speed_for(100))
        assert reuse.worth(reuse.look(chain, 0)).way is Way.COMPUTE
        reuse.measured({"bent": Steady(speed_for(0.01)).speed()})
        assert reuse.worth(reuse.look(chain, 0)).way is Way.LOAD


@pytest.mark.parametrize(("count", "step_tokens", "counts"), [(31, 31, False), (64, 128, False), (64, 70, True)])
def test_only_a_step_of_one_prompt_says_how_fast_prefill_is(count: int, step_tokens: int, counts) -> None:
    prefill = PrefillSpeed()
    prefill.step(0, count, step_tokens, 1.0)
    assert prefill.known is counts


# Why not


@pytest.mark.parametrize(
    ("failure", "was_there", "reason"),
    [
        (FailureReason.DAMAGED, True, MissReason.DAMAGED),
        (FailureReason.UNAVAILABLE, False, MissReason.UNAVAILABLE),
        (FailureReason.MISSING, True, MissReason.EVICTED),
        (FailureReason.MISSING, False, None),
        (FailureReason.FOREIGN, True, MissReason.EVICTED),
    ],
)
def test_what_a_failed_load_means(failure: FailureReason, was_there, reason: MissReason | None) -> None:
    assert reason_of(failure, was_there=was_there) is reason


def test_every_miss_of_the_store_is_one_of_the_report() -> None:
    for miss in StoreMiss:
        found = explained(Miss(MissReason.NEVER_STORED, 16), Explanation(miss, ("kv_dtype",)), 16)
        assert str(found.reason) == str(miss)


def test_the_store_is_believed_where_it_knows_more() -> None:
    device = Miss(MissReason.NEVER_STORED, 32)
    assert explained(device, None, 32) == device
    assert explained(device, Explanation(StoreMiss.NEVER_STORED, (), 5), 32) == Miss(MissReason.DIVERGED, 37)
    assert explained(Miss(MissReason.EVICTED, 40), Explanation(None, (), 5), 32) == Miss(MissReason.EVICTED, 40)
    diverged = Miss(MissReason.DIVERGED, 32)
    assert explained(diverged, Explanation(StoreMiss.EVICTED), 32) == diverged, "part of it was reused"


def test_a_report_sums_to_the_prompt_and_a_second_answer_shares_it() -> None:
    reused = Reused()
    reused.device_tokens = 16
    reused.take(TierKind.DISK, 32)
    reused.missed(48, MissReason.SLOWER)
    reused.missed(64, MissReason.DAMAGED)
    for one in (reused, reused.share()):
        report = one.report(100)
        assert (report.device_tokens, report.disk_tokens, report.computed_tokens) == (16, 32, 52)
        assert (report.miss, report.miss_token) == (MissReason.SLOWER, 48), "the first one counts"


def test_a_look_is_believed_for_a_while_and_for_as_many_blocks() -> None:
    looks, reused = [], Reused()
    look = lambda: looks.append(1)
    for first in (0, 0, 1, 1):
        reused.seen(first, look)
    assert len(looks) == 2
    reused.forget_look()
    reused.seen(1, look)
    assert len(looks) == 3
