"""How a tier fares in use: pauses after failures in a row, and its measured speed (SpeedMeter).

Calls that keep failing pause: to remote tiers by a CircuitBreaker, on this machine by an Outage.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvire.core.errors import TierUnavailable
from kvire.plan.cost import Speed

FAILURES_TO_OPEN = 3
PROBE_AFTER_S = 1.0
PROBE_AT_LEAST_EVERY_S = 30.0
REST_S, LONGEST_REST_S = 0.5, 4.0
# Each new read counts this much against all before it: the last few dozen decide, and a tier that
# dies shows at once.
WEIGHT = 1 / 32

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Health:
    """State for metrics.

    healthy: calls go through.
    failures: in a row.
    outages: how often it stopped being healthy.
    error: message of the last failure; "" if there was none.
    """

    healthy: bool
    failures: int
    outages: int
    error: str


class CircuitBreaker:
    """Counts failures in a row; after `failures_to_open` of them, calls are refused without a try.

    Calls of different kinds are counted apart: a tier that still answers lookups, but fails every
    read, counts as failing.

    While calls are refused, one thread runs `probe` (which raises TierUnavailable and must end by
    itself) after `probe_after_s`, then after twice that and so on, at least every
    `probe_at_least_every_s`. One success and calls go through again, and the thread ends.
    Thread-safe.
    """

    def __init__(
        self,
        name: str,
        probe: Callable[[], None],
        *,
        failures_to_open: int = FAILURES_TO_OPEN,
        probe_after_s: float = PROBE_AFTER_S,
        probe_at_least_every_s: float = PROBE_AT_LEAST_EVERY_S,
    ) -> None:
        self._name = name
        self._probe = probe
        self._failures_to_open = failures_to_open
        self._probe_after_s = probe_after_s
        self._probe_at_least_every_s = probe_at_least_every_s
        self._lock = threading.Lock()
        self._health = Health(healthy=True, failures=0, outages=0, error="")
        self._failures: Counter[str] = Counter()  # in a row, by kind of call
        self._closing = threading.Event()
        self._prober: threading.Thread | None = None

    @property
    def health(self) -> Health:
        """State at this moment. Never waits for the tier."""
        return self._health

    def check(self) -> None:
        """Raises TierUnavailable while calls are refused."""
        if self._closing.is_set():
            raise TierUnavailable(f"{self._name} is closed")
        if not (health := self._health).healthy:
            raise TierUnavailable(f"{self._name} is left alone until it answers again: {health.error}")

    def succeeded(self, kind: str) -> None:
        """A call was answered.

        A call begun before the refusal does not end it; a probe does.
        """
        if self._failures[kind] and self._health.healthy:
            with self._lock:
                if self._health.healthy:
                    del self._failures[kind]
                    most, error = max(self._failures.values(), default=0), self._health.error
                    self._health = replace(self._health, failures=most, error=error if most else "")

    def failed(self, kind: str, error: TierUnavailable) -> None:
        """A call was not answered."""
        with self._lock:
            before = self._health
            self._failures[kind] += 1
            failures = max(self._failures.values())
            opens = before.healthy and failures >= self._failures_to_open and not self._closing.is_set()
            self._health = Health(
                healthy=before.healthy and not opens,
                failures=failures,
                outages=before.outages + opens,
                error=str(error),
            )
            if opens:
                self._prober = threading.Thread(target=self._probe_until_back, name=f"probe {self._name}", daemon=True)
                self._prober.start()
        if opens:
            log.warning("%s failed %d times in a row and is left alone: %s", self._name, failures, error)

    def close(self) -> None:
        """End the probing thread and refuse all calls. Idempotent."""
        self._closing.set()
        with self._lock:
            prober = self._prober
        if prober is not None:
            prober.join()

    def _probe_until_back(self) -> None:
        wait_s = self._probe_after_s
        while not self._closing.wait(wait_s):
            wait_s = min(2 * wait_s, self._probe_at_least_every_s)
            try:
                self._probe()
            except TierUnavailable:
                continue
            with self._lock:
                self._failures.clear()
                self._health = Health(healthy=True, failures=0, outages=self._health.outages, error="")
            log.warning("%s answers again", self._name)
            return


class Outage:
    """Failures in a row of one kind of call; after a few, calls are refused at once.

    Now and then one is tried: on this machine that costs little, and needs no probing thread.

    elapsed: a clock, seconds.
    """

    def __init__(self, name: str, elapsed: Callable[[], float]) -> None:
        self.error = ""  # of the last call, if it failed
        self._name = name
        self._elapsed = elapsed
        self._failures = 0
        self._rest_until = 0.0

    def check(self) -> None:
        """Raises TierUnavailable while calls are refused."""
        if self._failures >= FAILURES_TO_OPEN and self._elapsed() < self._rest_until:
            raise TierUnavailable(f"{self._name} is left alone for a moment: {self.error}")

    def failed(self, error: Exception) -> None:
        """A call failed."""
        self._failures += 1
        self.error = f"{type(error).__name__}: {error}"
        rests = self._failures - FAILURES_TO_OPEN
        if rests >= 0:
            self._rest_until = self._elapsed() + min(LONGEST_REST_S, REST_S * 2 ** min(rests, 10))
        if rests == 0:
            log.warning("%s failed %d times in a row: %s", self._name, self._failures, self.error)

    def passed(self) -> None:
        """A call was answered."""
        if self._failures:
            if self._failures >= FAILURES_TO_OPEN:
                log.warning("%s answers again", self._name)
            self._failures, self.error = 0, ""


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
