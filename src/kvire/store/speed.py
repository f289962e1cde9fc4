"""Speed of a tier, measured during use."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvire.plan.cost import Speed

# Each new read counts this much against all before it: the last few dozen decide, and a tier that
# dies shows at once.
WEIGHT = 1 / 32


@dataclass(slots=True)
class _Mean:
    """Exponentially weighted mean; the first 1 / WEIGHT values have equal weight."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float, times: int = 1) -> None:
        self.count += times
        weight = max(1 - (1 - WEIGHT) ** times, times / self.count)
        self.value += weight * (value - self.value)


class SpeedMeter:
    """Bytes over the time in which at least one read was under way, however many at once.

    Thread-safe.
    """

    def __init__(self, prior: Speed, clock: Callable[[], float] = time.perf_counter) -> None:
        self._prior = prior
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way = 0
        self._since = 0.0  # up to here, time is accounted for
        self._bytes = _Mean()
        self._seconds = _Mean()
        self._latency = _Mean()

    def begin(self) -> None:
        """A read begins."""
        with self._lock:
            if self._under_way == 0:
                self._since = self._clock()
            self._under_way += 1

    def end(self, read_bytes: int, blocks: int = 1) -> None:
        """A read of that many blocks ended.

        0 bytes if it failed; its time counts all the same.
        """
        blocks = max(1, blocks)
        with self._lock:
            now = self._clock()
            self._under_way -= 1
            self._bytes.add(read_bytes / blocks, blocks)
            self._seconds.add((now - self._since) / blocks, blocks)
            self._since = now

    def first_block(self, waited_s: float, read_bytes: int) -> None:
        """The first block of a load came this long after it was asked for."""
        bytes_per_s = self.speed().bytes_per_s
        with self._lock:
            self._latency.add(max(0.0, waited_s - read_bytes / bytes_per_s))

    def speed(self) -> Speed:
        """The speed measured so far."""
        with self._lock:
            if not self._bytes.count:
                return self._prior
            latency_s = self._latency.value if self._latency.count else self._prior.latency_s
            return Speed(latency_s, max(self._bytes.value, 1.0) / max(self._seconds.value, 1e-9), self._bytes.count)
