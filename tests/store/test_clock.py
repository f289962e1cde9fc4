"""The disk tier's clock after a suspend, after a correction, and beside a process that was started later."""

import time
from pathlib import Path

from store.disk_cases import MIB, Clocks, held, put, records_of

from kvire.store.disk.access import FOLLOW_PACE, FollowingClock, since_boot
from kvire.store.disk.tier import DiskTier

HOUR_S = 3600.0


def tier_of(folder: Path, clocks: Clocks) -> DiskTier:
    return DiskTier(folder, 16 * MIB, wall=clocks.wall, elapsed=clocks.elapsed)


def rounds(tier: DiskTier, clocks: Clocks, seconds: int) -> None:
    """As the upkeep does by itself, once a second."""
    for _ in range(seconds):
        clocks.wait(1)
        tier._upkeep._next_sync = tier._upkeep._next_expiry = 0.0
        tier._upkeep.round()


def test_a_suspend_counts_as_time() -> None:
    """Of the system's clocks: this one goes on in a suspend, time.monotonic stands still."""
    before = since_boot(), time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before[0] <= before[1] <= since_boot()
    assert DiskTier.__init__.__kwdefaults__["elapsed"] is since_boot


def test_the_clock_follows_the_wall_clock_by_and_by() -> None:
    clocks = Clocks()
    clock = FollowingClock(clocks.wall, clocks.elapsed)
    for error_s in (8 * HOUR_S, -8 * HOUR_S):
        clocks.wall_s += error_s
        assert abs(clock.now() - clocks.wall()) == 8 * HOUR_S, "a jump by itself changes nothing"
        clocks.wait(1)
        assert abs(clock.now() - clocks.wall()) == 8 * HOUR_S - FOLLOW_PACE
        for _ in range(int(8 * HOUR_S / FOLLOW_PACE)):
            clocks.wait(1)
            clock.now()
        assert clock.now() == clocks.wall()


def test_a_corrected_clock_neither_takes_fresh_blocks_from_others_nor_loses_them(tmp_path: Path) -> None:
    """A process runs while its clock is put right by eight hours; another one starts after that. ttl: an hour."""
    early = Clocks()
    late = Clocks(early.wall_s + 8 * HOUR_S)
    with tier_of(tmp_path, early) as first:
        first._upkeep.close()
        early.wall_s += 8 * HOUR_S
        with tier_of(tmp_path, late) as second:
            second._upkeep.close()
            fresh = records_of(1, 20)
            assert all(put(second, record, ttl_s=HOUR_S) for record in fresh)
            for _ in range(60):
                for tier, clocks in ((first, early), (second, late)):
                    rounds(tier, clocks, 1)
            assert held(second, fresh) == [True] * 20, "the first process did not pull them back"
            for _ in range(int(8 * HOUR_S / FOLLOW_PACE)):
                early.wait(1)
                first._access.now()
            late.wait(early.wall_s - late.wall_s)
            own = records_of(2, 20)
            assert all(put(first, record, ttl_s=HOUR_S) for record in own)
            rounds(second, late, 2)
            assert held(second, own) == [True] * 20, "what the first one writes now is as young as it is"
