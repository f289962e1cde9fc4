"""Files vanish, the index is lost or damaged, clocks jump, one tenant floods: cases S44, S46, S48, S49, S53, S57."""

import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.waiting import until
from store.disk_cases import (
    MIB,
    OTHER_TENANT,
    TENANT,
    Clocks,
    WatchedFiles,
    check_index,
    disk_usage,
    get,
    held,
    in_memory,
    put,
    record_of,
    records_of,
)

from kvire.core.errors import BlockMissing, TierUnavailable
from kvire.store.disk.tier import DiskTier

EACH = [record_of(number) for number in range(300)]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    yield from in_memory()


def hits(tier: DiskTier) -> int:
    """How many of EACH are there; all that are have to be right."""
    count = 0
    for record in EACH:
        try:
            assert get(tier, record) == 0
            count += 1
        except BlockMissing:
            continue
    return count


def fill(tier: DiskTier) -> None:
    for record in EACH:
        assert put(tier, record)


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_segments_that_vanish_are_misses(tmp_path: Path, share: float) -> None:
    """S44."""
    with DiskTier(tmp_path, 16 * MIB) as tier:
        fill(tier)
        assert hits(tier) == 300
        segments = sorted(tmp_path.glob("*.seg"))
        for path in segments[: max(1, round(share * len(segments)))]:
            path.write_bytes(b"")
            path.unlink()
        assert (hits(tier) == 0) == (share == 1.0)
        assert sum(held(tier, EACH)) == hits(tier), "the index knows it now"
        assert put(tier, record_of(1000)) and get(tier, record_of(1000)) == 0
        fill(tier)
        assert hits(tier) == 300
        assert disk_usage(tmp_path) <= 16 * MIB
        while tier._upkeep.round():
            pass
    check_index(tmp_path)


def test_a_folder_that_vanishes_is_an_empty_store_and_made_again(tmp_path: Path) -> None:
    """S44."""
    store = tmp_path / "store"
    with DiskTier(store, 16 * MIB) as tier, DiskTier(store, 16 * MIB) as other:
        fill(tier)
        assert hits(other) == 300
        shutil.rmtree(store)
        for each in (tier, other):
            assert not any(held(each, EACH))
            with pytest.raises(BlockMissing):
                get(each, EACH[0])
            assert each.delete([EACH[0].id], "damaged") == 0 == each.clear() == each.pin([EACH[0].id], pinned=True)
            assert list(each.entries()) == []
        assert not store.exists(), "asking makes nothing"
        assert put(tier, EACH[0]) and get(other, EACH[0]) == 0
        assert put(other, EACH[1]) and get(tier, EACH[1]) == 0


@pytest.mark.parametrize("how", ["removed", "overwritten", "cut", "emptied", "a page zeroed"])
def test_a_lost_index_is_made_again_from_the_segments(tmp_path: Path, how: str) -> None:
    """S48: and everything is found again, in the background, while calls are answered."""
    with DiskTier(tmp_path, 16 * MIB) as tier:
        for record in EACH:
            assert put(tier, record, ttl_s=5000.0, tenant=TENANT)
        before = {entry.id: entry for entry in tier.entries()}
    index = tmp_path / "index.db"
    content = index.read_bytes()
    damages = {
        "removed": None,
        "overwritten": random.Random(1).randbytes(len(content)),
        "cut": content[: len(content) // 2 - 100],
        "emptied": b"",
        "a page zeroed": content[:4096] + bytes(len(content) - 4096),
    }
    if (damaged := damages[how]) is None:
        index.unlink()
    else:
        index.write_bytes(damaged)
    with DiskTier(tmp_path, 16 * MIB) as tier:
        until(lambda: hits_if_available(tier) == 300, lambda: f"{sum(held(tier, EACH))} of 300, {tier.stats()}")
        for entry in tier.entries():
            old = before[entry.id]
            assert (entry.parent, entry.root, entry.tenant_tag, entry.index, entry.frame_bytes, entry.created) == (
                old.parent, old.root, old.tenant_tag, old.index, old.frame_bytes, old.created,
            )  # fmt: skip
            assert entry.expires is not None and entry.expires >= old.created + 5000
        assert disk_usage(tmp_path) <= 16 * MIB
        assert put(tier, record_of(1000)) and get(tier, record_of(1000)) == 0
        while tier._upkeep.round():
            pass
    check_index(tmp_path)


def hits_if_available(tier: DiskTier) -> int:
    try:
        return hits(tier)
    except TierUnavailable:
        return 0


def test_a_lost_index_keeps_parents_before_children(tmp_path: Path) -> None:
    """Also where the child was written later, into a slot that is looked at earlier."""
    fillers, sequences = (
        [record_of(900 + number) for number in range(8)],
        [records_of(number, 2) for number in range(8)],
    )
    with DiskTier(tmp_path, 4 * MIB) as tier:
        for record in (*fillers, *(parent for parent, _ in sequences)):
            put(tier, record)
        tier.delete([record.id for record in fillers], "damaged")
        for _, child in sequences:
            put(tier, child)
    (tmp_path / "index.db").unlink()
    with DiskTier(tmp_path, 4 * MIB) as tier:
        while tier._upkeep.round():
            pass
        for number in range(200):
            put(tier, record_of(1000 + number))
            here = [held(tier, sequence) for sequence in sequences]
            assert [False, True] not in here, "a child without its parent"
            if not any(map(any, here)):
                break
        assert not any(map(any, here))


def test_names_that_are_no_segments_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "0-0.seg").write_text("mine")
    (tmp_path / "x-1000.seg").write_text("mine")
    with DiskTier(tmp_path, 16 * MIB) as tier:
        fill(tier)
        tier.clear()
    assert {path.name for path in tmp_path.iterdir()} >= {"notes.txt", "0-0.seg", "x-1000.seg"}


def test_restarts_with_a_hundred_thousand_blocks_without_reading_them(tmp_path: Path) -> None:
    """S49: usable at once; opening must not look at each block (bench/disk_engines.py measures the time)."""
    calls: list[str] = []
    with DiskTier(tmp_path, 16 * MIB) as tier:
        fill(tier)
    files = WatchedFiles(lambda name, _: calls.append(name))
    tier = DiskTier(tmp_path, files=files)
    tier._upkeep.start = lambda: None
    assert held(tier, EACH[:1]) == [True]
    tier.close()
    assert "read" not in calls and len(calls) < 60


def test_looking_up_takes_no_longer_among_many_and_folders_stay_small(tmp_path: Path) -> None:
    """S46, at the size a test can write; bench/disk_engines.py goes to a million."""

    def lookup_s(tier: DiskTier, count: int) -> float:
        rng = random.Random(1)
        times = []
        for _ in range(30):
            ids = [record_of(rng.randrange(count)).id for _ in range(128)]
            started = time.perf_counter()
            assert all(tier.held(ids))
            times.append(time.perf_counter() - started)
        return sorted(times)[5]

    with DiskTier(tmp_path, 256 * MIB) as tier:
        for number in range(500):
            put(tier, record_of(number), size=200)
        few_s = lookup_s(tier, 500)
        for number in range(500, 5_000):
            put(tier, record_of(number), size=200)
        many_s = lookup_s(tier, 5_000)
        assert many_s < 3 * few_s + 0.001, (few_s, many_s)
        assert len(list(tmp_path.iterdir())) < 20


def test_time_to_live_counts_from_the_last_use(tmp_path: Path) -> None:
    clocks = Clocks()
    tier = DiskTier(tmp_path, 16 * MIB, wall=clocks.wall, elapsed=clocks.elapsed)
    tier._upkeep.start = lambda: None
    first, second, third, fourth = records_of(1, 4)
    for record in (first, second, third):
        put(tier, record, ttl_s=60.0)
    put(tier, fourth)
    tier.pin([third.id], pinned=True)
    clocks.wait(50)
    tier.touch([first.id])
    tier._upkeep.round()
    clocks.wait(50)
    assert held(tier, [first, second, third, fourth]) == [True, False, True, True]
    with pytest.raises(BlockMissing):
        get(tier, second)
    tier._upkeep._next_expiry = 0.0
    tier._upkeep.round()
    assert tier.stats().evictions == {"expired": 1} and tier.stats().blocks == 3
    tier.close()


def test_clocks_that_jump_neither_empty_the_store_nor_keep_it_for_ever(tmp_path: Path) -> None:
    """S53."""
    day_s = 86_400.0
    clocks = Clocks()

    def tier_now() -> DiskTier:
        tier = DiskTier(tmp_path, 16 * MIB, wall=clocks.wall, elapsed=clocks.elapsed)
        tier._upkeep.start = lambda: None
        return tier

    tier = tier_now()
    for record in EACH:
        put(tier, record, ttl_s=60.0)
    clocks.wall_s += day_s  # put forward while it runs: nothing expires
    assert all(held(tier, EACH))
    clocks.wall_s -= 2 * day_s
    assert all(held(tier, EACH))
    tier.close()

    clocks.wall_s += 2 * day_s  # a process that starts with the clock a day ahead
    tier = tier_now()
    assert not any(held(tier, EACH))
    tier._upkeep.round()
    assert tier.stats().blocks >= 300 - 256, "but deletes slowly"
    left = tier.stats().blocks
    tier.close()
    clocks.wall_s -= day_s
    tier = tier_now()
    assert sum(held(tier, EACH)) == left, "and what it did not delete is there again"
    put(tier, record_of(1000), ttl_s=60.0)
    tier.close()

    clocks.wall_s -= day_s  # now those blocks are a day in the future: they must expire all the same
    tier = tier_now()
    tier._upkeep.round()
    assert held(tier, [record_of(1000)]) == [True]
    assert max(entry.used for entry in tier.entries()) <= clocks.wall_s
    clocks.wait(61)
    assert not any(held(tier, [*EACH, record_of(1000)]))
    tier.close()


def test_clocks_of_two_processes_may_differ(tmp_path: Path) -> None:
    """S53: ten minutes apart, on one store without an end to blocks' lives: both find everything, newest last to go."""
    behind, ahead = Clocks(), Clocks(Clocks().wall_s + 600)
    with (
        DiskTier(tmp_path, 4 * MIB, wall=ahead.wall, elapsed=ahead.elapsed) as first,
        DiskTier(tmp_path, 4 * MIB, wall=behind.wall, elapsed=behind.elapsed) as second,
    ):
        for number in range(200):
            put(first if number % 2 else second, record_of(number))
            assert get(second if number % 2 else first, record_of(number)) == 0
            for clocks in (behind, ahead):
                clocks.wait(1)
        second._upkeep._next_sync = 0.0
        second._upkeep.round()
        for number in range(200, 500):
            put(second, record_of(number))
            behind.wait(1)
        here = held(second, [record_of(number) for number in range(500)])
        assert sum(here[:200]) == 0, "what came from the clock ahead does not stay for ever"


def test_one_tenant_that_floods_does_not_flush_another(tmp_path: Path) -> None:
    """S57: the quiet one keeps what it uses; the evictions are the other's."""
    with DiskTier(tmp_path, 8 * MIB) as tier:
        quiet = [record for number in range(20) for record in records_of(number, 4)]
        for record in quiet:
            put(tier, record, tenant=TENANT)
        for number in range(1000):
            assert put(tier, record_of(10_000 + number), tenant=OTHER_TENANT)
        assert all(held(tier, quiet)), sum(held(tier, quiet))
        use = tier.tenants()
        assert use[TENANT].evictions == 0 and use[TENANT].blocks == 80
        assert use[OTHER_TENANT].evictions == 1000 - use[OTHER_TENANT].blocks > 500
        assert tier.stats().evictions == {"quota": use[OTHER_TENANT].evictions}


def test_a_tenant_that_comes_late_gets_its_share(tmp_path: Path) -> None:
    """S57: whoever filled the store first gives way down to an equal share, and no further."""
    with DiskTier(tmp_path, 8 * MIB) as tier:
        for number in range(400):
            put(tier, record_of(number), tenant=TENANT)
        for number in range(600):
            put(tier, record_of(10_000 + number), tenant=OTHER_TENANT)
            tier.touch([record_of(10_000 + number).id])
        use = tier.tenants()
        assert abs(use[TENANT].blocks - use[OTHER_TENANT].blocks) <= 2


def test_a_tenant_with_frames_of_another_size_takes_no_more_than_its_share(tmp_path: Path) -> None:
    with DiskTier(tmp_path, 8 * MIB) as tier:
        quiet = [record_of(number) for number in range(60)]
        for record in quiet:
            put(tier, record, tenant=TENANT)
        for number in range(600):
            put(tier, record_of(10_000 + number), tenant=OTHER_TENANT, size=50_000)
        assert all(held(tier, quiet))
        assert tier.tenants()[OTHER_TENANT].blocks > 60
