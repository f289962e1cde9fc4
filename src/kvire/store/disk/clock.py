"""The clock of a disk tier's stamps: it agrees with those of other processes, and is not fooled by a jump."""

import threading
import time
from collections.abc import Callable

# Seconds by which the clock follows the wall clock, per second: eight hours in 48 minutes, so that blocks in use are
# touched meanwhile; a clock that is wrong for a moment hardly matters.
FOLLOW_PACE = 10.0
FOLLOW_AT_MOST_S = 1.0  # since the last look count at most so many seconds: nobody knows when the wall clock was set


def since_boot() -> float:
    """Seconds, those that the machine was suspended among them; time.monotonic leaves them out."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class FollowingClock:
    """What has passed since the start, drawn towards the wall clock by and by. Thread-safe.

    wall: seconds since the epoch, may jump. elapsed: seconds since whenever, steady, also while suspended.
    """

    def __init__(self, wall: Callable[[], float], elapsed: Callable[[], float]) -> None:
        self._wall = wall
        self._elapsed = elapsed
        self._lock = threading.Lock()
        self._now = wall()
        self._at = elapsed()

    def now(self) -> float:
        """Seconds since the epoch."""
        with self._lock:
            at = self._elapsed()
            passed, self._at = at - self._at, at
            self._now += passed
            most = FOLLOW_PACE * min(max(passed, 0.0), FOLLOW_AT_MOST_S)
            self._now += max(-most, min(most, self._wall() - self._now))
            return self._now

    def latest(self) -> float:
        """The time by whichever clock is ahead: what is later than that is from the future for everybody."""
        return max(self.now(), self._wall())
