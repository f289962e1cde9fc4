"""Each broken build of what joins engine and store is noticed by the test that claims to prove the opposite."""

import tempfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path

import pytest
from engine import test_load_memory, test_loads, test_store, test_store_kinds, test_store_misses
from harness import reuse_mutants as rule
from harness import store_engine_mutants as broken
from harness.broken_builds import Cases, Claim, Mutant, each_broken_build, must_notice
from harness.stored import disk, memory
from models import test_precision
from proof import test_restart_matrix, test_store_soak
from store import test_reuse
from store.test_store_mutants import claim

from kvire.core.tier_kind import TierKind


def matrix(test: Callable[..., None], **arguments: object) -> Claim:
    """A test of the restart matrix, with engines of its own."""

    @wraps(test)
    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            test(tmp_path=Path(folder), builder=test_restart_matrix.Builder(Path(folder) / "models"), **arguments)

    return run


DISK, REMOTE = TierKind.DISK, TierKind.REMOTE
restart = claim(test_store.test_a_restart_finds_every_full_block_on_the_disk, length=150)
met = claim(test_loads.test_computing_from_the_front_meets_loading_from_the_back, kind=DISK)
left = claim(test_load_memory.test_leaving_during_a_load, how="abort", after=4)
preempted = claim(test_load_memory.test_leaving_during_a_load, how="preempt", after=4)
hung = claim(test_load_memory.test_a_read_that_hangs_holds_its_block_and_nothing_else, after=3)
damaged = claim(test_loads.test_damaged_blocks_are_computed_and_the_others_loaded, damaged=[3, 4, 7])
died = claim(test_loads.test_a_tier_that_dies_in_the_middle, after=1, kind=DISK)
windows = claim(test_store_kinds.test_a_restart_reads_only_what_the_windows_need, family="gemma3_text", length=165)
failed = claim(test_store_kinds.test_nothing_of_a_request_with_numbers_that_are_not_finite_stays_in_the_store, blocks=3)

restarted = matrix(
    test_restart_matrix.test_nothing_is_taken_over_across_a_change_and_everything_without_one, kind="memory"
)
reached = matrix(test_restart_matrix.test_the_changes_reach_every_field_of_a_namespace)

CASES: Cases = [
    (restarted, [broken.software_is_not_named, broken.software_is_known_by_its_versions,
                 broken.loading_is_not_looked_at, broken.weights_are_known_by_name]),
    (reached, [broken.rotary_is_inert]),
    (claim(test_precision.test_an_engine_with_fewer_bits_has_another_namespace), [broken.precision_is_not_named]),
    (restart, [broken.saved_before_it_is_computed, broken.neighbour_saved, broken.loaded_into_the_neighbour,
               broken.block_saved_before_saved_again, broken.loaded_tokens_counted_twice]),
    (claim(test_store.test_blocks_of_the_answer_make_the_next_turn_warm), [broken.neighbour_saved]),
    (claim(test_store.test_time_saved_is_what_computing_would_have_taken), [broken.waiting_is_not_taken_off]),
    (claim(test_store.test_a_request_that_wants_nothing_kept_leaves_nothing_and_takes_what_is_there),
     [broken.everything_is_kept]),
    (claim(test_store.test_tenants_and_salts_share_nothing_in_any_tier, tiers=disk), [broken.cache_salt_dropped]),
    (claim(test_store.test_a_forgotten_tenant_finds_nothing_and_the_others_everything, tiers=memory),
     [broken.salt_dropped, broken.forgotten_salts_are_remembered]),
    (claim(test_store.test_a_herd_reads_each_block_once), [broken.everybody_loads_alone]),
    (claim(test_store.test_blocks_are_loaded_while_their_request_waits_for_a_seat), [broken.loads_wait_for_a_seat]),
    (claim(test_store.test_a_preempted_sequence_comes_back_from_the_store),
     [broken.preempted_sequences_never_load, broken.loaded_tokens_counted_again_after_preemption]),
    (met, [broken.one_end_only]),
    (claim(test_loads.test_never_slower_than_no_cache),
     [rule.everything_stored_is_worth_a_load, rule.nothing_is_worth_a_load, rule.a_slow_tier_is_never_tried_again,
      rule.slow_tiers_are_always_tried]),
    (claim(test_reuse.test_never_slower_than_no_cache, share=1.1, parts=test_reuse.WHOLE, can_meet=False),
     [rule.everything_stored_is_worth_a_load, rule.a_slow_tier_is_never_tried_again,
      rule.slow_tiers_are_always_tried, rule.a_try_leads_to_the_next]),
    (claim(test_loads.test_what_is_computed_is_not_read), [broken.computed_blocks_are_still_read]),
    (damaged, [broken.front_jumps_over_a_hole, broken.failures_of_loads_are_not_told,
               broken.every_failure_is_slowness]),
    (died, [broken.failures_of_loads_are_not_told, broken.every_failure_is_slowness]),
    (hung, [broken.dead_reads_are_waited_for, broken.taken_over_before_the_read_ends]),
    (left, [broken.memory_given_back_under_a_read]),
    (preempted, [broken.memory_given_back_under_a_read]),
    (claim(test_load_memory.test_a_block_computed_while_a_remote_tier_reads_it_goes_back_once_that_has_come),
     [broken.memory_given_back_before_a_copy]),
    (claim(test_loads.test_a_block_begun_by_a_copy_is_finished_and_not_read), [broken.copies_wait_for_the_next_step]),
    (claim(test_store_soak.test_cancelled_loads), [broken.memory_is_given_back_at_the_next_request]),
    (claim(test_store_misses.test_what_is_stored_but_faster_to_compute), [rule.everything_stored_is_worth_a_load]),
    (claim(test_store_misses.test_the_token_at_which_a_prompt_leaves_the_closest_stored_one, at=23),
     [broken.misses_are_not_explained]),
    (claim(test_store_misses.test_the_field_in_which_the_namespace_differs, name="kv_dtype"),
     [broken.misses_are_not_explained]),
    (windows, [broken.window_loaded_one_block_short, broken.groups_mixed_up]),
    (claim(test_store_kinds.test_a_load_that_fails_is_computed_from_the_start, family="gemma3_text", trouble="damaged"),
     [broken.parts_of_windows_are_taken]),
    (failed, [broken.failed_requests_stay_stored]),
]  # fmt: skip


@each_broken_build(CASES)
@pytest.mark.timeout(120)
def test_notices_a_broken_build(claim: Claim, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    must_notice(claim, mutant, monkeypatch)
