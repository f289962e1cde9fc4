"""Bug reports about stores below the device, replayed on the engine; as in test_engine_replays.py.

The tiers' side of these and of the cases from S44 on is in tests/store.
"""

import random
import threading

import pytest
from engine import test_store, test_store_kinds
from harness import kv_mutants
from harness import store_engine_mutants as broken
from harness import store_mutants as broken_store
from harness.broken_builds import Cases, Claim, Mutant, each_broken_build, each_claim, must_notice
from harness.canary import SecretTokens, run_canaries, secret_engine, small_pool
from harness.differential import TINY, Episode, compare_blocks
from harness.engines import BLOCK, ask, drive, oracle, request, words
from harness.loads import (
    BLOCK_BYTES,
    BUSY_S,
    PATIENT_S,
    ask_as,
    engine_over,
    explained,
    folder,
    ids_of,
    keep,
)
from harness.stored import disk, memory, say_what_prefill_costs, store_over
from harness.waiting import PATIENCE_S, until
from store.stores import MIB, BentTier, open_store

from kvire.core.errors import BlockMissing
from kvire.core.report import MissReason
from kvire.store.memory.tier import MemoryTier

B = BLOCK


def s03_every_length() -> None:
    lengths = [n + more for n in (B, 2 * B, 4 * B, 16 * B, 64 * B) for more in (-1, 0, 1)]
    with folder() as path:
        with store_over(disk, path) as store:
            cold = [ask(engine_over(store), words(3, n), max_tokens=8) for n in lengths]
            assert store.flush(30)
        with store_over(disk, path) as store:
            for n, first in zip(lengths, cold, strict=True):
                warm = ask(engine_over(store), words(3, n), max_tokens=8)
                assert warm.token_ids == first.token_ids, n
                assert warm.cache.disk_tokens == (n - 1) // B * B, n


def s07_foreign_conversations() -> None:
    """Forty clients with a secret each, over a memory tier and a pool for two."""
    talk = SecretTokens()
    clients, turns = 40, 6
    with folder() as path, store_over(memory, path) as store:
        num_blocks = max(2 * small_pool(talk, 1, turns) + 12, 24)
        engine = secret_engine(num_blocks, store=store, max_num_seqs=2)
        say_what_prefill_costs(engine, PATIENT_S)
        tally = run_canaries(engine, talk, seed=7, clients=clients, turns=turns)
        assert (tally.responses, tally.foreign, tally.recalled) == (clients * turns, 0, clients * turns)
        stats = store.stats().handles["memory"].counts
        assert engine.stats.memory_tokens > 0 and stats.loaded_blocks > 100, "restored, and told"


def s08_a_pool_for_two_and_a_tier_for_all() -> None:
    rng = random.Random(8)
    prompts = [words(800 + i, rng.randrange(2 * B, 6 * B)) for i in range(24)]
    expected = {tuple(prompt): oracle(prompt, max_tokens=4).token_ids for prompt in prompts}
    with folder() as path, store_over(memory, path) as store:
        engine = engine_over(store, num_blocks=14)
        for _ in range(12):
            requests = [request(rng.choice(prompts), max_tokens=4) for _ in range(16)]
            answers = drive(engine, requests)
            for one in requests:
                assert answers[one.request_id, 0].token_ids == expected[one.token_ids]
            assert store.flush(PATIENCE_S), "the tier has all of them from now on"
        assert engine.stats.memory_tokens > 0.3 * engine.stats.prompt_tokens


def s09_copies_that_take_their_time() -> None:
    """Blocks swap constantly, reads and writes are held up: every one that is back is bit for bit what it was."""
    rng, tier = random.Random(9), BentTier()
    prompts = [words(900 + i, rng.randrange(2 * B, 5 * B)) for i in range(8)]
    expected = {tuple(p): oracle(p, max_tokens=4, logprobs=2, prompt_logprobs=None) for p in prompts}
    write, swapped = tier.write, threading.Event()
    tier.write = lambda *arguments, **options: swapped.wait(PATIENCE_S) and write(*arguments, **options)
    with folder() as path, open_store(path, tier) as store:
        tier.slow_s = 0.02
        engine = engine_over(store, num_blocks=12, deterministic=True, token_s=PATIENT_S)
        compared = 0
        for _ in range(4):
            requests = [request(rng.choice(prompts), max_tokens=4) for _ in range(6)]
            swapped.clear()
            answers = drive(engine, requests)
            swapped.set()  # written only now that other blocks lie where these did
            for one in requests:
                assert answers[one.request_id, 0].token_ids == expected[one.token_ids].token_ids
            assert store.flush(30)
            compared += compare_blocks(Episode(TINY, 9, True, {"deterministic": True}, engine))
        assert compared > 20 and len(tier.log) > 20


def s11_read_while_it_is_written() -> None:
    prompt, tier = words(11, 40 * B + 3), BentTier()
    expected = oracle(prompt, max_tokens=4).token_ids
    may_write, written, write = threading.Semaphore(0), [], tier.write

    def when_told(*arguments, **options):
        may_write.acquire(timeout=PATIENCE_S)
        kept = write(*arguments, **options)
        written.append(kept)
        return kept

    tier.write = when_told
    with folder() as path, open_store(path, tier) as store:
        assert ask(engine_over(store), prompt, max_tokens=4).token_ids == expected
        for blocks in (5, 20, 40):
            may_write.release(blocks - len(written))
            until(lambda blocks=blocks: len(written) == blocks)
            answer = ask_as(engine_over(store), prompt, max_tokens=4, store=False)
            assert answer.token_ids == expected
            assert answer.cache.disk_tokens == blocks * B, "what is not written yet is not seen"


def s14_what_is_stored_does_not_grow() -> None:
    prompt, tier = words(14, 5 * B + 3), BentTier()
    with folder() as path, open_store(path, tier) as store:
        keep(store, prompt)
        ids = ids_of(engine_over(store), prompt)

        def stored() -> list[bytes]:
            out = [memoryview(bytearray(2 * BLOCK_BYTES)) for _ in ids]
            return [bytes(o[: tier.inner.read(block_id, [o])]) for block_id, o in zip(ids, out, strict=True)]

        before = stored()
        answers = [ask(engine_over(store), prompt, max_tokens=2 * B) for _ in range(3)]
        assert store.flush(10)
        assert stored() == before
        assert len({tuple(answer.token_ids) for answer in answers}) == 1
        assert [answer.cache.disk_tokens for answer in answers] == [5 * B] * 3


def s15_int8_two_hundred_times() -> None:
    prompt = words(15, 4 * B + 3)
    with folder() as path:
        found = []
        for calls in (40, 10):
            with store_over(disk, path) as store:
                engine = test_store_kinds.int8_engine(store)
                found += [ask(engine, prompt, max_tokens=6, logprobs=2) for _ in range(calls)]
                assert store.flush(10)
        assert found[40].cache.disk_tokens == 4 * B, "after the restart"
        cold, *warm = found
        for answer in warm:
            assert answer.token_ids == cold.token_ids
            assert max(abs(a.logprob - c.logprob) for a, c in zip(answer.logprobs, cold.logprobs, strict=True)) < 1e-3


def s24_a_time_at_the_start_of_every_prompt() -> None:
    system = words(24, 60 * B)
    clock = [list(f"ts=2026-11-29T21:0{turn}:00; id={turn:05x}".encode()) for turn in range(5)]
    differs_at = len("ts=2026-11-29T21:0")
    with folder() as path:
        for turn, header in enumerate(clock):
            with store_over(disk, path) as store:
                report = explained(engine_over(store), [*header, *system]).cache
                assert store.flush(10)
            if turn:
                assert (report.miss, report.miss_token) == (MissReason.DIVERGED, differs_at)
            assert report.reused_tokens == differs_at // B * B * (turn > 0), "honest"


def s34_found_but_never_read() -> None:
    """Between lookup and load, blocks go: each is asked for once, and computed."""
    prompt, tier = words(34, 10 * B + 3), BentTier()
    expected = oracle(prompt).token_ids
    with folder() as path, open_store(path, tier) as store:
        keep(store, prompt)
        for gone in ([0], [9], [3, 4, 5, 6, 7], list(range(10))):
            engine = engine_over(store)
            lost = {ids_of(engine, prompt)[index] for index in gone}

            def vanish(block_id, buffers, length, lost=lost):
                if block_id in lost:
                    raise BlockMissing
                return length

            tier.bend = vanish
            tier.log.clear()
            one = request(prompt)
            answer = drive(engine, [one])[one.request_id, 0]
            assert answer.token_ids == expected
            assert answer.cache.disk_tokens == (10 - len(gone)) * B
            assert (answer.cache.miss, answer.cache.miss_token) == (MissReason.EVICTED, gone[0] * B)
            assert len(tier.log) <= 10, "nobody asks again"


def s35_a_herd() -> None:
    with folder() as path:
        test_store.test_a_herd_reads_each_block_once(path)


def s36_lookups_do_not_hold_anything() -> None:
    """Everything is looked up, nothing read, while new prompts are written into a tier that is full."""
    with folder() as path:
        tier = MemoryTier(MIB)
        with open_store(path, tier) as store:
            engine = engine_over(store, token_s=BUSY_S, num_blocks=64)
            old = [words(3600 + i, 4 * B + 1) for i in range(24)]
            for prompt in old:
                ask(engine, prompt, max_tokens=1)
                assert store.flush(10)
            assert tier.stats().used_bytes > 0.9 * MIB
            everything = [block_id for prompt in old for block_id in ids_of(engine, prompt)]
            for i in range(24):
                for _ in range(20):
                    store.held(everything)
                ask(engine, words(3700 + i, 4 * B + 1), max_tokens=1)
                assert store.flush(10)
            counts, stats = store.stats().handles["memory"].counts, tier.stats()
            assert (counts.refused, counts.dropped, stats.refused) == (0, 0, {})
            newest = [block_id for i in range(19, 24) for block_id in ids_of(engine, words(3700 + i, 4 * B + 1))]
            assert all(store.held(newest)) and not any(store.held(everything[:16])), (
                "what was only looked up went first"
            )


CASES: Cases = [
    (s03_every_length, [broken.neighbour_saved, broken.loaded_into_the_neighbour]),
    (s07_foreign_conversations, [broken.block_saved_before_saved_again, kv_mutants.block_of_somebody_else]),
    (s08_a_pool_for_two_and_a_tier_for_all, [broken.loaded_into_the_neighbour,
                                              broken.block_saved_before_saved_again]),
    (s09_copies_that_take_their_time, [broken.taken_over_before_the_read_ends, broken_store.saved_without_a_copy]),
    (s11_read_while_it_is_written, [broken.saved_before_it_is_computed]),
    (s14_what_is_stored_does_not_grow, [broken.stored_blocks_grow]),
    (s15_int8_two_hundred_times, [broken.neighbour_saved]),
    (s24_a_time_at_the_start_of_every_prompt, [broken.misses_are_not_explained]),
    (s34_found_but_never_read, [broken.front_jumps_over_a_hole]),
    (s35_a_herd, [broken.everybody_loads_alone]),
    (s36_lookups_do_not_hold_anything, [broken_store.lookups_count_as_use]),
]  # fmt: skip


@each_claim(CASES)
def test_holds(claim: Claim) -> None:
    claim()


@each_broken_build(CASES)
@pytest.mark.timeout(180)
def test_notices_a_broken_build(claim: Claim, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    must_notice(claim, mutant, monkeypatch)
