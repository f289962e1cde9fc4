"""The engine over a store: restarts, tenants, queues, herds and preemptions, with the accounts of every request."""

import fcntl
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from harness.engines import BLOCK, ask, drive, oracle, request, words
from harness.loads import BUSY_S, HASTY_S, PATIENT_S, ask_as, engine_over, finish, ids_of, keep
from harness.stored import disk, memory, memory_and_disk, say_what_prefill_costs, shared_folder, store_over
from harness.waiting import PATIENCE_S, until
from store.stores import BentTier, open_store
from store.test_keyring import without_locks
from store.test_lookup_thread import StallingFiles, soon

from kvire.core.report import MissReason
from kvire.engine.engine import Engine
from kvire.engine.prefetch import MAX_PREPARED
from kvire.store.disk.tier import DiskTier

B = BLOCK


@pytest.mark.parametrize("length", [9 * B - 1, 9 * B, 9 * B + 1, 9 * B + 5])
def test_a_restart_finds_every_full_block_on_the_disk(tmp_path: Path, length: int) -> None:
    prompt = words(1, length)
    expected = oracle(prompt).token_ids
    for life in range(3):
        with store_over(disk, tmp_path) as store:
            answer = ask(engine_over(store), prompt)
            assert store.flush(10)
        assert answer.token_ids == expected
        loaded = (length - 1) // B * B if life else 0
        report = answer.cache
        assert (report.disk_tokens, report.device_tokens, report.computed_tokens) == (loaded, 0, length - loaded)
        assert (report.memory_tokens, report.remote_tokens) == (0, 0)


def test_blocks_of_the_answer_make_the_next_turn_warm(tmp_path: Path) -> None:
    prompt = words(1, 3 * B + 5)
    with store_over(disk, tmp_path) as store:
        answer = ask(engine_over(store), prompt, max_tokens=3 * B)
    turn = [*prompt, *answer.token_ids, *words(2, 7)]
    with store_over(disk, tmp_path) as store:
        second = ask(engine_over(store), turn)
    assert second.cache.disk_tokens == (len(prompt) + 3 * B - 1) // B * B, "the last token of an answer is never run"
    assert second.token_ids == oracle(turn).token_ids


def test_the_fastest_tier_that_has_a_block_gives_it_and_the_report_says_which(tmp_path: Path) -> None:
    prompt = words(1, 6 * B + 1)
    with store_over(lambda *at: [*memory(*at), *disk(*at), *shared_folder(*at)], tmp_path) as store:
        keep(store, prompt)
        found = []
        for handle in store._handles:
            engine = engine_over(store)
            report, stats = ask(engine, prompt).cache, engine.stats
            found.append((report.memory_tokens, report.disk_tokens, report.remote_tokens))
            assert found[-1] == (stats.memory_tokens, stats.disk_tokens, stats.remote_tokens)
            assert store.flush(10)
            for faster in store._handles[: store._handles.index(handle) + 1]:
                faster.tier.clear()
        assert found == [(6 * B, 0, 0), (0, 6 * B, 0), (0, 0, 6 * B)]


def test_time_saved_is_what_computing_would_have_taken(tmp_path: Path) -> None:
    prompt = words(1, 8 * B + 1)
    with store_over(disk, tmp_path) as store:
        keep(store, prompt)
        engine = engine_over(store)
        assert ask(engine, words(2, 3), max_tokens=1).cache.saved_s is None, "nothing is measured yet"
        ask(engine, words(3, 4 * B), max_tokens=1)
        saved_s = ask(engine, prompt).cache.saved_s
        assert 0.95 * 8 * B * PATIENT_S < saved_s <= 8 * B * PATIENT_S
        assert engine.stats.saved_s == pytest.approx(saved_s)


def test_a_request_that_wants_nothing_kept_leaves_nothing_and_takes_what_is_there(tmp_path: Path) -> None:
    kept, secret = words(1, 5 * B + 2), words(2, 5 * B + 2)
    with store_over(disk, tmp_path) as store:
        ask_as(engine_over(store), secret, store=False)
        assert store.flush(10)
        assert (store.stats().saves, store.stats().handles["disk"].tier.writes) == (0, 0)
        keep(store, kept)
        writes = store.stats().handles["disk"].tier.writes
        report = ask_as(engine_over(store), [*kept, *words(3, 2 * B)], store=False).cache
        assert report.disk_tokens == 5 * B
        assert ask(engine_over(store), secret).cache.reused_tokens == 0
        assert store.flush(10)
        assert store.stats().handles["disk"].tier.writes == writes + (len(secret) + 15) // B, (
            "only what was asked to be"
        )


def test_a_second_engine_finds_what_the_first_computed_before_the_end_of_its_answer(tmp_path: Path) -> None:
    prompt = words(1, 8 * B + 3)
    with store_over(disk, tmp_path) as mine, store_over(disk, tmp_path) as theirs:
        first, second = engine_over(mine), engine_over(theirs)
        first.submit(request(prompt))
        while not first.step():
            pass
        until(lambda: all(theirs.held(ids_of(second, prompt))))
        assert ask(second, prompt).cache.disk_tokens == 8 * B
        drive(first, [], exact=False)


@pytest.mark.parametrize("tiers", [memory, disk, shared_folder])
def test_tenants_and_salts_share_nothing_in_any_tier(tmp_path: Path, tiers) -> None:
    """S20, with its other half: whoever comes back finds everything."""
    prompt = words(20, 20 * B + 1)
    owners = [("", ""), ("a", ""), ("b", ""), ("a", "x"), ("b", "x"), ("", "x")]
    with store_over(tiers, tmp_path) as store:
        for loaded in (0, 20 * B):
            for tenant, cache_salt in owners:
                engine = engine_over(store)  # the device is empty, so that the tier alone answers
                report = ask_as(engine, prompt, tenant=tenant, cache_salt=cache_salt, max_tokens=1).cache
                assert report.reused_tokens == loaded, (tenant, cache_salt)
                assert report.miss is (MissReason.COMPLETE if loaded else MissReason.NEVER_STORED), "no word of others"
                assert store.flush(10)


@pytest.mark.parametrize("tiers", [memory, disk, shared_folder])
def test_a_forgotten_tenant_finds_nothing_and_the_others_everything(tmp_path: Path, tiers) -> None:
    prompt = words(20, 6 * B + 1)
    with store_over(tiers, tmp_path) as store:
        engine = engine_over(store)
        for tenant in ("gone", "stays"):
            for cache_salt in ("", "x"):
                ask_as(engine, prompt, tenant=tenant, cache_salt=cache_salt)
        assert store.flush(10)
        assert store.forget("gone") >= 12
        for where in (engine, engine_over(store)):
            for cache_salt in ("", "x"):
                gone = ask_as(where, prompt, tenant="gone", cache_salt=cache_salt, store=False).cache
                assert (gone.reused_tokens, gone.miss) == (0, MissReason.NEVER_STORED)
                stays = ask_as(where, prompt, tenant="stays", cache_salt=cache_salt).cache
                assert stays.reused_tokens == 6 * B


def test_a_herd_reads_each_block_once(tmp_path: Path) -> None:
    """S35: fifty requests begin with what only the disk has."""
    shared, tier = words(35, 8 * B), BentTier()
    with open_store(tmp_path, tier) as store:
        keep(store, shared)
        tier.slow_s = 0.002
        engine = engine_over(store, num_blocks=512)
        requests = [request([*shared, i, *words(i, 5)], max_tokens=2) for i in range(50)]
        answers = drive(engine, requests)
        assert sorted(tier.log) == sorted(ids_of(engine, shared))
        reports = [answers[one.request_id, 0].cache for one in requests]
        assert sum(report.disk_tokens for report in reports) == 8 * B
        assert {report.computed_tokens for report in reports} == {6}
        for one in requests[::16]:
            assert answers[one.request_id, 0].token_ids == oracle(list(one.token_ids), max_tokens=2).token_ids


def test_blocks_are_loaded_while_their_request_waits_for_a_seat(tmp_path: Path) -> None:
    prompts = [words(i, 4 * B + 1) for i in range(8)]
    with store_over(disk, tmp_path) as store:
        keep(store, *prompts)
        engine = engine_over(store, max_num_seqs=1)
        long = request(words(100, 5), max_tokens=400)
        engine.submit(long)
        engine.step()
        queued = [request(prompt, max_tokens=3) for prompt in prompts]
        for one in queued:
            engine.submit(one)
        for _ in range(300):
            assert {output.request_id for output in engine.step()} == {long.request_id}, "there is one seat"
            prepared = engine.scheduler.running[1:]
            assert all(seq.reuse.load is None or seq.reuse.load.ticket.wait(PATIENCE_S) for seq in prepared)
            if [seq.num_computed for seq in prepared] == [4 * B] * MAX_PREPARED:
                break
        else:
            pytest.fail("nothing is loaded in advance")
        assert [seq.request.request_id for seq in prepared] == [one.request_id for one in queued[:MAX_PREPARED]]
        engine.abort(long.request_id)
        answers = drive(engine, [], exact=False)
        for one in queued:
            answer = answers[one.request_id, 0]
            assert answer.cache.disk_tokens == 4 * B
            assert answer.token_ids == oracle(list(one.token_ids), max_tokens=3).token_ids


def preempted_once(engine: Engine, prompt: list[int]):
    """The answer of a request that loses its blocks, and the device its memory of them, in the middle."""
    one = request(prompt, max_tokens=20)
    engine.submit(one)
    for _ in range(6):
        outputs = engine.step()
    assert outputs, "it is decoding"
    assert engine.reuse.flush(10)
    (victim,) = engine.scheduler.running
    before = list(victim.token_ids[victim.num_prompt :])
    engine.scheduler.preempt(victim)
    engine.pool.clear()
    answer = drive(engine, [], exact=False)[one.request_id, 0]
    assert before + answer.token_ids == oracle(prompt, max_tokens=20).token_ids
    report = answer.cache
    assert report.preemptions == 1
    assert report.computed_tokens + report.recomputed_tokens + 19 == engine.stats.forward_tokens
    return report


def test_a_preempted_sequence_comes_back_from_the_store(tmp_path: Path) -> None:
    prompt = words(1, 10 * B + 3)
    with store_over(memory_and_disk, tmp_path) as store:
        report = preempted_once(engine_over(store), prompt)
    assert report.recomputed_tokens < B, "only what was in the block that was not full"
    assert (report.computed_tokens, report.reused_tokens) == (len(prompt), 0), "it had computed them itself"


def test_a_preempted_sequence_is_computed_where_that_is_faster(tmp_path: Path) -> None:
    prompt = words(1, 10 * B + 3)
    with store_over(disk, tmp_path) as store:
        report = preempted_once(engine_over(store, token_s=BUSY_S), prompt)
        assert store.stats().handles["disk"].tier.reads == 0
    assert report.recomputed_tokens >= 10 * B


@pytest.mark.slow
def test_many_preemptions_over_a_store_change_no_answer(tmp_path: Path) -> None:
    with store_over(memory_and_disk, tmp_path) as store:
        for token_s in (PATIENT_S, HASTY_S, 1e-4):
            engine = engine_over(store, num_blocks=14)
            say_what_prefill_costs(engine, token_s)
            requests = [request(words(i % 7, 2 * B + i), max_tokens=4 * B) for i in range(9)]
            answers = drive(engine, requests)
            assert engine.scheduler.preemptions > 3
            for one in requests[::3]:
                answer = answers[one.request_id, 0]
                assert answer.token_ids == oracle(list(one.token_ids), max_tokens=4 * B).token_ids
        assert sum(handle.counts.loaded_blocks for handle in store.stats().handles.values()) > 0


def test_without_keys_requests_are_served_and_nothing_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prompt = words(1, 4 * B)
    with store_over(disk, tmp_path) as store:
        store._keyring.path.parent.mkdir(parents=True)
        store._keyring.path.write_text("damaged")
        store._keyring.path.chmod(0o600)
        engine = engine_over(store)
        for reused in (0, 4 * B - 1):
            answer = ask_as(engine, prompt, tenant="somebody")
            assert answer.token_ids == oracle(prompt).token_ids
            assert answer.cache.reused_tokens == reused, "the device remembers all the same"
        assert store.stats().handles["disk"].tier.writes == 0
    assert "somebody" not in caplog.text


def test_without_locks_requests_are_served_and_nothing_is_kept(tmp_path: Path) -> None:
    """The key file lies on a file system that has none, so that no tenant gets a key."""
    prompt = words(1, 4 * B)
    with store_over(disk, tmp_path) as store, pytest.MonkeyPatch.context() as patched:
        patched.setattr(fcntl, "flock", without_locks)
        engine = engine_over(store)
        for _ in range(2):
            assert ask_as(engine, prompt, tenant="somebody").token_ids == oracle(prompt).token_ids
        assert store.stats().handles["disk"].tier.writes == 0


def test_a_stalled_index_holds_up_no_answer(tmp_path: Path) -> None:
    """One answer is under way when another request asks for what is stored; this thread is the engine's."""
    running, asking = request(words(1, 3 * B), max_tokens=24), request(words(2, 4 * B + 1), max_tokens=4)
    files = StallingFiles()
    with open_store(tmp_path, DiskTier(tmp_path / "disk", 64 << 20, files=files)) as store:
        keep(store, words(2, 4 * B + 1))
        engine = engine_over(store)
        engine.submit(running)
        engine.step()
        with files.stall(), soon():
            engine.submit(asking)
            assert finish(engine, asking).token_ids == oracle(words(2, 4 * B + 1), max_tokens=4).token_ids
            finish(engine, running)
            assert store.stats().handles["disk"].late
        assert files.stalled


@pytest.mark.parametrize("in_use", [False, True])
def test_a_damaged_index_ends_no_engine_and_is_made_again(tmp_path: Path, *, in_use: bool) -> None:
    """SQLite sees nothing wrong with a number that is text now: so did every start of an engine."""

    def damage() -> None:
        [index] = tmp_path.rglob("index.db")
        with closing(sqlite3.connect(index)) as connection, connection:
            connection.execute("UPDATE blocks SET slot_bytes = 'text'")

    prompt = words(1, 6 * B + 1)
    expected = oracle(prompt).token_ids
    with store_over(disk, tmp_path) as store:
        keep(store, prompt)
    if not in_use:
        damage()
    with store_over(disk, tmp_path) as store:
        if in_use:
            assert ask(engine_over(store), prompt).cache.disk_tokens == 6 * B
            damage()
        assert ask(engine_over(store), prompt).token_ids == expected
        until(lambda: ask(engine_over(store), prompt).cache.disk_tokens == 6 * B)


def test_a_tenants_blocks_are_not_known_by_its_name(tmp_path: Path) -> None:
    """The salt is random: who knows model, prompt and name cannot compute a key."""
    with store_over(disk, tmp_path / "one") as one, store_over(disk, tmp_path / "other") as other:
        (mine, theirs) = (engine_over(store).reuse.name("name", "salt") for store in (one, other))
        assert mine != theirs
        plain = engine_over(one)
        assert replace(plain.namespace, salt="name").root != plain.reuse.name("name").root
