"""The limit: what `du` says, at every moment, with several processes; and on a file system that is full."""

import subprocess
import sys
import time
from pathlib import Path

from harness.full_disk import fill_up
from harness.waiting import until
from store.disk_cases import MIB, WatchedFiles, disk_usage, get, held, put, record_of

from kvire.core.errors import TierUnavailable
from kvire.store.disk.allocator import MIN_CAPACITY_BYTES, spare_bytes
from kvire.store.disk.index import BASE_INDEX_BYTES, SLOT_INDEX_BYTES
from kvire.store.disk.tier import DiskTier


def writers(folder: Path, capacity_bytes: int, count: int, blocks: int) -> list["subprocess.Popen[str]"]:
    script = str(Path(__file__).with_name("disk_writer.py"))
    return [
        subprocess.Popen(
            [sys.executable, script, str(folder), str(capacity_bytes), str(seed), str(blocks)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for seed in range(1, count + 1)
    ]  # fmt: skip


def test_du_never_exceeds_the_limit_while_three_processes_write_much_more(tmp_path: Path) -> None:
    """S47."""
    limit = 24 * MIB
    processes = writers(tmp_path, limit, 3, 1200)
    samples = []
    while any(process.poll() is None for process in processes):
        samples.append(disk_usage(tmp_path))
        time.sleep(0.02)
    results = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], results
    assert sum(int(out) for out, _ in results) > 0.9 * 3 * 1200
    assert len(samples) > 20 and 0.8 * limit < max(samples) <= limit
    assert len(list(tmp_path.iterdir())) < 100


def test_a_segment_counts_before_its_file_is_there(tmp_path: Path) -> None:
    """While one process makes a segment, another fills the store."""

    def watch(name: str, _: tuple[object, ...]) -> None:
        if name == "allocate":
            files.watch = lambda *_: None
            for number in range(500):
                put(other, record_of(1000 + number))

    files = WatchedFiles(watch)
    with DiskTier(tmp_path, 8 * MIB) as other, DiskTier(tmp_path, files=files) as tier:
        assert put(tier, record_of(1))
        assert 6 * MIB < disk_usage(tmp_path) <= 8 * MIB
        assert spare_bytes(tier._ask) >= 0


def test_the_smallest_store_works_and_stays_small(tmp_path: Path) -> None:
    with DiskTier(tmp_path, MIN_CAPACITY_BYTES) as tier:
        for number in range(1500):
            assert put(tier, record_of(number), size=3_000)
            if number % 50 == 0:
                assert disk_usage(tmp_path) <= MIN_CAPACITY_BYTES
        assert disk_usage(tmp_path) <= MIN_CAPACITY_BYTES
        assert tier.stats().blocks > 200
        assert tier.stats().used_bytes <= MIN_CAPACITY_BYTES
        assert get(tier, record_of(1499)) == 0


def test_the_index_takes_no_more_than_was_reckoned_with(tmp_path: Path) -> None:
    """The smallest slots, the most entries, all the time others: the worst for the index's size."""
    limit = 16 * MIB
    with DiskTier(tmp_path, limit) as tier:
        for number in range(4500):
            assert put(tier, record_of(number), size=300, ttl_s=1e6)
        assert tier.stats().evictions["room"] > 1000
        tier._upkeep.round()
        blocks = tier.stats().blocks
    index = (tmp_path / "index.db").stat().st_size
    assert index <= BASE_INDEX_BYTES + blocks * SLOT_INDEX_BYTES
    print(f"{blocks} blocks, {index / blocks:.0f} bytes of index each")
    assert disk_usage(tmp_path) <= limit


def test_a_file_system_smaller_than_the_limit_is_used_as_far_as_it_goes(small_file_system: Path) -> None:
    with DiskTier(small_file_system / "store", 512 * MIB) as tier:
        kept = sum(put(tier, record_of(number), size=200_000) for number in range(600))
        assert kept == 600
        assert sum(held(tier, [record_of(number) for number in range(600)])) > 100
        assert get(tier, record_of(599), 200_000) == 0


def test_a_file_system_that_others_fill_costs_writes_and_nothing_else(small_file_system: Path) -> None:
    records = [record_of(number) for number in range(400)]
    with DiskTier(small_file_system / "store", 24 * MIB) as tier:
        for record in records[:200]:
            put(tier, record)
        fill_up(small_file_system / "of somebody else")
        deadline = time.monotonic() + 3
        number, outcomes = 0, {True: 0, False: 0, None: 0}
        while time.monotonic() < deadline:
            record = records[number % 400]
            number += 1
            try:
                outcomes[put(tier, record)] += 1
            except TierUnavailable:
                outcomes[None] += 1
            for record in records[:3]:
                assert get(tier, record) == 0  # reading goes on
        assert number > 20, outcomes
        (small_file_system / "of somebody else").unlink()
        until(lambda: kept(tier))
        assert tier.degraded == ""
        assert all(get(tier, record) == 0 for record, here in zip(records, held(tier, records), strict=True) if here)


def kept(tier: DiskTier) -> bool:
    try:
        return put(tier, record_of(5000))
    except TierUnavailable:
        return False
