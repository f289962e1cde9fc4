"""Each broken build of the store is noticed by the test that claims to prove the opposite."""

import inspect
import tempfile
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path

import pytest
from engine import test_store as test_engine_store
from harness import store_mutants as broken
from harness.broken_builds import Cases, Claim, Mutant, each_broken_build, must_notice
from sessions import test_session_file, test_sessions
from store import (
    test_clock,
    test_contract,
    test_disk,
    test_disk_damage,
    test_explain,
    test_keyring,
    test_lookup_thread,
    test_memory,
    test_object_tier,
    test_open,
    test_runs,
    test_survey,
    test_ticket,
    test_tiered,
    test_tiered_writes,
)
from store.blocks import chain, wanted

from kvire.store.disk.tier import DiskTier
from kvire.store.memory.tier import MemoryTier
from kvire.store.ticket import Ticket

MIB = 1 << 20


def claim(test: Callable[..., None], **arguments: object) -> Claim:
    """The test as a claim; a folder of its own, if it wants one."""
    call = partial(test, **arguments)

    @wraps(test)
    def run() -> None:
        if "tmp_path" not in inspect.signature(test).parameters:
            call()
            return
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            call(tmp_path=Path(folder))

    return run


def on_memory(test: Callable[..., None]) -> Claim:
    """A test of the contract, of the memory tier."""

    @wraps(test)
    def run() -> None:
        test(MemoryTier(64 * MIB))

    return run


def on_a_ticket(test: Callable[..., None]) -> Claim:
    @wraps(test)
    def run() -> None:
        test(Ticket(wanted(chain(4)), timeout_s=0.5))

    return run


def evictions_are_told_from_what_was_never_there() -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder)
        with test_explain.open_store(path, DiskTier(path / "disk", 64 * MIB), encrypt=True) as store:
            test_explain.test_what_was_stored_and_had_to_go(store)


def whatever_a_tier_raises_is_a_tier_that_is_unavailable() -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        test_tiered.test_whatever_a_tier_raises_is_a_tier_that_is_unavailable(Path(folder), Log())


class Log:
    """In place of pytest's; what it would hold is not what these claims are about."""

    text = "failed as no tier may"


def namespaces_are_bounded() -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder)
        with test_explain.open_store(path, DiskTier(path / "disk", 64 * MIB)) as store:
            test_explain.test_only_the_last_namespaces_are_remembered(store)


CASES: Cases = [
    (claim(test_survey.test_older_builds_are_those_that_nobody_reads_any_more),
     [broken.what_names_no_build_is_current, broken.the_build_used_first_is_current]),
    (claim(test_tiered.test_a_block_is_nobodys_before_all_of_it_is_there_and_verified),
     [broken.published_before_the_load_ends]),
    (on_a_ticket(test_ticket.test_a_claimed_block_is_never_read), [broken.claim_ignored]),
    (on_a_ticket(test_ticket.test_cancelling_gives_up_all_but_reads_into_the_callers_memory),
     [broken.cancelled_loads_count_as_quiet]),
    (claim(test_tiered.test_claimed_blocks_are_never_written_and_ready_ones_are_right), [broken.claim_ignored]),
    (claim(test_tiered.test_a_slow_remote_tier_costs_the_deadline_and_holds_no_memory),
     [broken.remote_reads_into_the_callers_memory]),
    (claim(test_tiered.test_a_herd_reads_once), [broken.everybody_reads_alone]),
    (claim(test_tiered.test_a_block_given_to_another_load_is_copied_before_anybody_may_change_it),
     [broken.the_first_reader_goes_first]),
    (claim(test_tiered.test_damage_is_found_removed_and_counted, at=-100), [broken.checksum_skipped]),
    *((claim(test_runs.test_damage_in_a_run_is_one_miss_and_no_more, kind=kind, encrypt=False),
       [broken.runs_are_taken_at_their_word]) for kind in ("memory", "disk")),
    (claim(test_runs.test_a_lent_frame_stays_until_it_is_given_back), [broken.lent_frames_are_not_held]),
    (claim(test_tiered.test_damage_without_another_copy_is_a_miss), [broken.damaged_blocks_stay]),
    (claim(test_tiered.test_a_block_replaced_while_it_is_read_is_read_again), [broken.deleted_at_first_sight]),
    (claim(test_tiered.test_another_blocks_frame_is_never_taken_and_stays),
     [broken.foreign_blocks_are_promised_for_ever, broken.any_sound_frame_will_do]),
    (claim(test_tiered.test_keys_that_collide_are_told_apart_by_tokens_and_parents), [broken.address_is_enough]),
    (claim(test_tiered.test_salts_keep_tenants_apart_in_every_tier), [broken.salt_dropped]),
    (claim(test_tiered.test_what_was_handed_out_is_the_callers_and_what_was_handed_in_stays_the_callers),
     [broken.saved_without_a_copy]),
    (claim(test_tiered.test_closing_gives_everything_back), [broken.threads_stay]),
    (claim(test_tiered_writes.test_saving_never_waits_and_what_finds_no_room_is_dropped_and_counted),
     [broken.drops_are_not_counted, broken.queues_without_bounds]),
    (claim(test_tiered_writes.test_blocks_that_a_tier_has_are_touched_and_not_written_again),
     [broken.known_blocks_are_written_again]),
    (claim(test_tiered_writes.test_by_turn_nothing_is_kept_before_its_turn_ends), [broken.turns_do_not_matter]),
    (claim(test_tiered_writes.test_nothing_on_its_way_comes_back, forget="forget"),
     [broken.forgotten_blocks_are_still_written]),
    (claim(test_tiered_writes.test_nothing_on_its_way_comes_back, forget="clear"), [broken.clear_stops_at_the_tiers]),
    (on_memory(test_contract.test_the_newest_frame_counts_whatever_its_length), [broken.stale_index_after_replace]),
    (claim(test_memory.test_readers_keep_their_bytes_while_everything_around_them_changes),
     [broken.slots_reused_under_readers]),
    (claim(test_memory.test_touched_blocks_stay_and_looked_up_ones_do_not), [broken.lookups_count_as_use]),
    (claim(test_memory.test_children_go_before_their_parents_though_parents_are_older), [broken.parents_go_first]),
    (claim(test_memory.test_a_flood_of_one_tenant_leaves_the_others_their_share), [broken.one_tenant_may_evict_all]),
    (claim(test_explain.test_what_is_noted_is_known_after_a_restart), [broken.salts_are_noted]),
    (claim(test_keyring.test_a_file_system_without_locks_is_refused_with_what_to_do), [broken.lock_errors_get_out]),
    (claim(test_engine_store.test_without_locks_requests_are_served_and_nothing_is_kept), [broken.lock_errors_get_out]),
    (claim(test_keyring.test_a_hard_linked_backup_keeps_its_content), [broken.backups_are_wiped]),
    (claim(test_open.test_an_existing_folder_keeps_its_limit, way_in=test_open.library),
     [broken.the_default_size_is_for_all]),
    (claim(test_open.test_a_damaged_index_that_is_made_again_keeps_the_limit),
     [broken.a_damaged_index_takes_the_limit_along]),
    (claim(test_lookup_thread.test_a_look_at_a_stalled_index_ends_and_the_store_says_so),
     [broken.looks_wait_for_the_disk]),
    (claim(test_engine_store.test_a_stalled_index_holds_up_no_answer), [broken.looks_wait_for_the_disk]),
    (claim(test_lookup_thread.test_a_tier_that_is_late_in_a_row_is_left_alone_and_tried_again),
     [broken.late_tiers_are_asked_on]),
    (claim(test_lookup_thread.test_a_look_changes_nothing), [broken.looks_are_remembered]),
    (claim(test_disk_damage.test_what_no_column_can_hold_is_damage_and_mended, table="blocks"),
     [broken.rows_are_not_checked]),
    (claim(test_engine_store.test_a_damaged_index_ends_no_engine_and_is_made_again, in_use=False),
     [broken.rows_are_not_checked]),
    (claim(test_disk_damage.test_a_statement_that_finds_no_end_is_ended), [broken.statements_have_no_end]),
    (claim(test_disk_damage.test_a_lie_that_could_be_true_costs_no_block, lie="free slots that hold blocks"),
     [broken.slots_are_given_away_unseen]),
    (claim(test_disk_damage.test_pins_notes_and_the_limit_outlive_the_index), [broken.pins_go_with_the_index]),
    (claim(test_disk_damage.test_nobody_checkpoints_while_another_commits), [broken.checkpoints_beside_commits]),
    (claim(test_disk_damage.test_what_living_processes_write_is_not_taken_from_them), [broken.everybody_else_is_dead]),
    (claim(test_disk_damage.test_a_head_is_written_when_its_frame_is_there), [broken.heads_come_first]),
    (whatever_a_tier_raises_is_a_tier_that_is_unavailable, [broken.what_a_tier_raises_gets_out]),
    (claim(test_clock.test_a_suspend_counts_as_time), [broken.suspends_take_no_time]),
    (claim(test_clock.test_the_clock_follows_the_wall_clock_by_and_by),
     [broken.clocks_that_are_put_right_stay_wrong]),
    (claim(test_clock.test_a_corrected_clock_neither_takes_fresh_blocks_from_others_nor_loses_them),
     [broken.clocks_that_are_put_right_stay_wrong, broken.others_are_from_the_future]),
    (claim(test_object_tier.test_files_of_a_folder_are_their_owners_alone), [broken.shared_folders_are_open_to_all]),
    (claim(test_disk.test_a_folder_that_others_may_write_to_is_refused, bits=0o020),
     [broken.anybody_may_write_to_the_store]),
    (claim(test_sessions.test_the_first_session_outlives_a_loss_of_power_with_its_folders),
     [broken.new_folders_are_not_synced]),
    (claim(test_session_file.test_the_same_random_bytes_seal_no_two_contents_alike),
     [broken.session_salts_are_random_only]),
    (namespaces_are_bounded, [broken.namespaces_without_bounds]),
    (evictions_are_told_from_what_was_never_there, [broken.misses_are_never_evictions]),
]  # fmt: skip


@pytest.fixture(autouse=True)
def short_of_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim that fails leaves a store in the middle of something; it is not waited for."""
    monkeypatch.setattr("kvire.store.tiered.FLUSH_S", 0.2)
    monkeypatch.setattr("kvire.store.tiered.JOIN_S", 0.2)


@each_broken_build(CASES)
@pytest.mark.timeout(120)
def test_notices_a_broken_build(claim: Claim, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    must_notice(claim, mutant, monkeypatch)
