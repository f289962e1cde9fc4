"""Any call to the system may fail, once or for a while: a call of the tier fails in one way only, and never lies."""

import errno
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.waiting import until
from store.disk_cases import (
    MIB,
    ROOT,
    Clocks,
    FaultyFiles,
    check_index,
    get,
    held,
    in_memory,
    put,
    record_of,
    records_of,
)

from kvire.core.errors import BlockMissing, TierUnavailable
from kvire.store.disk.tier import DiskTier

NUMBERS = (errno.ENOSPC, errno.EIO, errno.EMFILE, errno.EROFS, errno.EACCES)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    yield from in_memory()


class Script:
    """Everything a tier does, each call allowed to fail; what the blocks may be afterwards."""

    def __init__(self, tier: DiskTier) -> None:
        self.tier = tier
        self.possible: dict[int, set[int | None]] = {number: {None} for number in range(6)}
        self.failures = 0

    def run(self) -> None:
        tier = self.tier
        for number in range(5):
            self.put(number, number)
        self.put(1, 10)
        self.put(5, 11, size=60_000)
        self.attempt(lambda: tier.touch([record_of(2).id]))
        self.attempt(lambda: tier.pin([record_of(2).id], pinned=True))
        self.attempt(lambda: tier.note_namespace(ROOT, {"model": "m"}))
        self.attempt(lambda: held(tier, records_of(1, 3)))
        self.attempt(lambda: tier.children(ROOT, 0, 3))
        self.attempt(lambda: list(tier.entries()))
        self.look()
        self.possible[0].add(None)
        self.attempt(lambda: tier.delete([record_of(0).id], "damaged"))
        self.attempt(tier._upkeep.round)
        self.attempt(tier.stats)
        self.look()

    def put(self, number: int, version: int, size: int = 20_000) -> None:
        self.possible[number].add(version)
        if self.attempt(lambda: put(self.tier, record_of(number), version, size=size)):
            self.possible[number] = {version}

    def look(self) -> None:
        for number in self.possible:
            self.attempt(lambda number=number: self.check(number))

    def check(self, number: int) -> None:
        try:
            version = get(self.tier, record_of(number), 60_000)
            assert version is not None, "wrong bytes"
        except BlockMissing:
            version = None
        assert version in self.possible[number] | {None}

    def attempt(self, call):
        try:
            return call()
        except TierUnavailable:
            self.failures += 1
            return None


def run(folder: Path, files: FaultyFiles) -> Script:
    clocks = Clocks()
    tier = DiskTier(folder, 16 * MIB, files=files, wall=clocks.wall, elapsed=clocks.elapsed)
    tier._upkeep.start = lambda: None  # by hand, so that calls come in the same order
    script = Script(tier)
    script.run()
    files.mend()
    clocks.wait(10)
    for number in script.possible:  # it is as if nothing had happened
        script.check(number)
        assert put(tier, record_of(number), 100 + number)
        assert get(tier, record_of(number)) == 100 + number
    assert tier.degraded == ""
    tier._upkeep._next_sync = 0.0
    while tier._upkeep.round():
        pass
    tier.close()
    check_index(folder)
    return script


@pytest.mark.parametrize("number", NUMBERS)
def test_each_call_in_turn_fails_once(tmp_path: Path, number: int) -> None:
    first, met, failures = 1, set(), 0
    while True:
        files = FaultyFiles(first, 1, number)
        failures += run(tmp_path / str(first), files).failures
        if not files.failed:
            break
        met |= set(files.failed)
        first += 1 if first < 120 else 3
    assert first > 150 and failures > 20
    assert {"open_folder", "create", "allocate", "write", "execute", "connect", "identity", "lock", "read"} <= met


@pytest.mark.parametrize("number", NUMBERS)
def test_all_calls_fail_from_some_moment_on(tmp_path: Path, number: int) -> None:
    for first in range(1, 260, 11):
        files = FaultyFiles(first, 1 << 60, number)
        script = run(tmp_path / str(first), files)
        assert files.failed and script.failures


def test_a_tier_that_fails_says_so_at_once_and_is_back_by_itself(tmp_path: Path) -> None:
    files = FaultyFiles()
    with DiskTier(tmp_path, 16 * MIB, files=files) as tier:
        put(tier, record_of(1))
        files.fail_from_now(errno.EIO)
        started = time.monotonic()
        for _ in range(3):
            with pytest.raises(TierUnavailable):
                get(tier, record_of(1))
        assert "EIO" in tier.degraded or "Input/output" in tier.degraded or "disk I/O" in tier.degraded
        assert time.monotonic() - started < 1
        calls = files.calls
        for _ in range(20):
            with pytest.raises(TierUnavailable, match="left alone"):
                get(tier, record_of(1))
        assert files.calls - calls < 20, "those calls were not tried"
        files.mend()
        until(lambda: works(tier))
        assert tier.degraded == "" and tier.stats().unavailable >= 3


def works(tier: DiskTier) -> bool:
    try:
        return get(tier, record_of(1)) == 0 and put(tier, record_of(2))
    except TierUnavailable:
        return False


def test_a_disk_that_cannot_be_written_can_still_be_read(tmp_path: Path) -> None:
    files = FaultyFiles()
    with DiskTier(tmp_path, 16 * MIB, files=files) as tier:
        put(tier, record_of(1))
        files.fail_from_now(errno.EROFS, only=("write", "allocate", "create"))
        for _ in range(10):
            with pytest.raises(TierUnavailable):
                put(tier, record_of(2))
            assert get(tier, record_of(1)) == 0
        assert tier.stats().refused["unavailable"] == 10


def test_a_folder_that_cannot_be_entered_is_no_error_of_a_request(tmp_path: Path) -> None:
    """S44, as for a user who is not root."""
    files = FaultyFiles()
    with DiskTier(tmp_path, 16 * MIB, files=files) as tier:
        put(tier, record_of(1))
        files.fail_from_now(errno.EACCES, only=("identity", "open_folder", "open"))
        with pytest.raises(TierUnavailable, match="denied"):
            held(tier, [record_of(1)])
        tier.touch([record_of(1).id])
        tier.prefetch([record_of(1).id])
        assert tier.stats().limit_bytes == 16 * MIB
        files.mend()
        until(lambda: works(tier))
