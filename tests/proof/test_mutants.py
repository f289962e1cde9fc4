"""Each broken build is noticed by the test that claims to prove the opposite, at a smaller size."""

import pytest
from harness import kv_mutants as kv
from harness import mutants
from harness.broken_builds import Cases, Claim, Mutant, each_broken_build, must_notice
from harness.differential import TINY, compare_blocks, judge, run
from proof.test_canaries import run_secret_tokens
from proof.test_soak import soak_cancelled, soak_short_requests
from proof.test_windows import equals_the_uncached_forward

EPISODES = range(40, 80)
REQUESTS = 16


def differential(*, deterministic: bool) -> None:
    for seed in EPISODES:
        tally = judge(run(TINY, seed, REQUESTS, deterministic=deterministic))
        assert not tally.faults, tally.faults[0]


def differential_exact() -> None:
    differential(deterministic=True)


def differential_fast() -> None:
    differential(deterministic=False)


def blocks_exact() -> None:
    for seed in EPISODES:
        compare_blocks(run(TINY, seed, REQUESTS, deterministic=True))


def blocks_fast() -> None:
    for seed in EPISODES:
        compare_blocks(run(TINY, seed, REQUESTS, deterministic=False))


def canaries() -> None:
    tally = run_secret_tokens(turns=4)
    assert (tally.foreign, tally.recalled) == (0, tally.responses)


def cancelled() -> None:
    soak_cancelled(30)


def short_requests() -> None:
    soak_short_requests(2_000, warm_up=500)


CASES: Cases = [
    (differential_exact, [
        mutants.position_off_by_one, mutants.published_when_allocated, mutants.block_in_use_freed,
        mutants.reference_not_taken, mutants.preemption_drops_output, mutants.randomness_by_step,
        mutants.fork_writes_in_place, mutants.copy_on_write_forgets_to_copy, mutants.sequence_reports_nothing_reused,
        kv.block_tables_of_the_neighbour, kv.wrong_slot_after_a_hit, kv.one_token_too_much_counts_as_hit,
        kv.remembered_kv_is_rounded,
        kv.copy_swaps_k_and_v, kv.copy_leaves_a_layer_stale, kv.copies_after_the_step, kv.block_of_somebody_else,
        kv.blocks_published_under_the_last_key, kv.logits_of_the_neighbour,
    ]),
    (differential_fast, [
        mutants.position_off_by_one, kv.block_tables_of_the_neighbour, kv.partial_copy_forgotten,
        kv.partial_hit_one_token_too_long, kv.partial_hit_of_any_relative, kv.tail_holds_a_token_too_many,
        kv.copies_after_the_step, kv.copy_swaps_k_and_v, kv.block_of_somebody_else,
    ]),
    (blocks_exact, [kv.remembered_kv_is_rounded, kv.blocks_published_under_the_last_key]),
    (blocks_fast, [kv.remembered_kv_is_rounded, kv.copy_leaves_a_layer_stale, kv.published_one_token_early]),
    (canaries, [kv.block_of_somebody_else, kv.block_tables_of_the_neighbour, kv.blocks_published_under_the_last_key]),
    (cancelled, [mutants.abort_ignored, mutants.abort_leaks_blocks, mutants.lease_not_released_on_finish,
                 kv.requests_are_kept, kv.a_thread_per_cancellation]),
    (short_requests, [kv.logits_are_kept, mutants.lease_not_released_on_finish,
                      mutants.sequence_reports_nothing_reused, kv.a_file_per_request]),
    (equals_the_uncached_forward, [kv.window_one_too_wide, kv.window_one_too_narrow, kv.sinks_lost,
                                   kv.window_gives_back_too_early]),
]  # fmt: skip


@each_broken_build(CASES)
@pytest.mark.timeout(180)
def test_notices_a_broken_build(claim: Claim, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    must_notice(claim, mutant, monkeypatch)
