"""What a block costs to compute and to load, measured as the engine runs, and which of the two to do.

Computing starts at the front of a prompt and can only go on from there; loading may start at the back. So there are
three ways to get the KV of a span of stored blocks: load it all, compute it all, or both at once until they meet.
"""

from dataclasses import dataclass
from enum import StrEnum

# Loading alone is preferred to both at once from here on: what computing would add is less than what it would delay.
LOAD_ALONE = 0.25
# Below this gain a load is not worth its risk (a tier may slow down), nor the bytes on the wire.
LEAST_GAIN = 0.05
# Of earlier measurements, the share that still counts when the next one comes.
MEMORY = 0.95


class Way(StrEnum):
    """How the KV of stored blocks comes into the pool."""

    LOAD = "load"
    BOTH = "both"
    COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class Speed:
    """A tier's speed. samples: loads it was measured from; 0 for a guess."""

    latency_s: float
    bytes_per_s: float
    samples: int = 0

    def seconds(self, size_bytes: int) -> float:
        """Until so many bytes have arrived."""
        return self.latency_s + size_bytes / self.bytes_per_s


class PrefillSpeed:
    """Seconds of prefill, as token_s per token and context_s per token and token of context before it.

    The two are fitted to what was measured, by least squares in which old steps fade. token_s: a guess until then.
    """

    def __init__(self, token_s: float) -> None:
        self.token_s = token_s
        self.context_s = 0.0
        self.samples = 0
        self._sums = [0.0] * 5  # of n*n, n*c, c*c, n*t, c*t

    def measured(self, start: int, count: int, seconds: float) -> None:
        """`count` tokens from position `start` on took `seconds`, alone."""
        context = _context(start, start + count)
        new = (count * count, count * context, context * context, count * seconds, context * seconds)
        self._sums = [MEMORY * old + value for old, value in zip(self._sums, new, strict=True)]
        nn, nc, cc, nt, ct = self._sums
        determinant = nn * cc - nc * nc
        self.samples += 1
        if determinant > 1e-6 * nn * cc:
            token_s, context_s = (nt * cc - ct * nc) / determinant, (ct * nn - nt * nc) / determinant
            if token_s > 0 and context_s >= 0:
                self.token_s, self.context_s = token_s, context_s
                return
        self.token_s, self.context_s = nt / nn, 0.0

    def seconds(self, start: int, stop: int) -> float:
        """To compute the tokens from `start` to `stop`."""
        return (stop - start) * self.token_s + _context(start, stop) * self.context_s

    def tokens_within(self, start: int, seconds: float) -> int:
        """How many tokens from `start` on can be computed in that time; at least one."""
        each = self.token_s + start * self.context_s
        return max(1, int(seconds / each))


@dataclass(frozen=True, slots=True)
class Choice:
    """way: what to do. seconds: until the whole span is there. load_s, compute_s: of either way alone."""

    way: Way
    seconds: float
    load_s: float
    compute_s: float

    @property
    def saved_s(self) -> float:
        """Against computing everything."""
        return self.compute_s - self.seconds


def choose(speed: Speed, prefill: PrefillSpeed, start: int, stop: int, size_bytes: int) -> Choice:
    """Whether to load the tokens from `start` to `stop`, which are stored in `size_bytes`, to compute them, or both."""
    load_s = speed.seconds(size_bytes)
    compute_s = prefill.seconds(start, stop)
    if load_s <= LOAD_ALONE * compute_s:
        return Choice(Way.LOAD, load_s, load_s, compute_s)
    meet_s = _meet(speed, prefill, start, stop, size_bytes)
    if meet_s <= (1 - LEAST_GAIN) * compute_s:
        return Choice(Way.BOTH, meet_s, load_s, compute_s)
    return Choice(Way.COMPUTE, compute_s, load_s, compute_s)


def _meet(speed: Speed, prefill: PrefillSpeed, start: int, stop: int, size_bytes: int) -> float:
    """Seconds until computing from the front and loading from the back have met, by bisection over where."""
    low, high = start, stop
    while high - low > 1:
        middle = (low + high) // 2
        loaded = size_bytes * (stop - middle) // (stop - start)
        if prefill.seconds(start, middle) < speed.seconds(loaded):
            low = middle
        else:
            high = middle
    return prefill.seconds(start, high)


def _context(start: int, stop: int) -> int:
    """Sum over the positions from `start` to `stop` of how many tokens lie before each."""
    return (stop * (stop - 1) - start * (start - 1)) // 2
