"""What a block costs to compute and to load, measured as the engine runs, and which of the two to
do.

Computing starts at the front of a prompt and can only go on from there; loading may start at the
back. So there are three ways to get the KV of a span of stored blocks: load it all, compute it all,
or both at once until they meet.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

# Loading alone is preferred to both at once from here on: what computing would add is less than
# what it would delay.
LOAD_ALONE = 0.25
# Below this gain a load is not worth its risk (a tier may slow down), nor the bytes on the wire.
LEAST_GAIN = 0.05
# Of earlier measurements, the share that still counts when the next one comes.
MEMORY = 0.95
# A step says how fast prefill is if it computes at least so many tokens of one prompt, and few
# others beside them.
LEAST_STEP_TOKENS, LEAST_STEP_SHARE = 32, 7 / 8


class Way(StrEnum):
    """How the KV of stored blocks comes into the pool."""

    LOAD = "load"
    BOTH = "both"
    COMPUTE = "compute"


class Speed(NamedTuple):
    """How fast a tier gives blocks.

    latency_s: until the first block of a load, beyond what its bytes take.
    samples: reads it was measured from; 0 for a guess.
    """

    latency_s: float
    bytes_per_s: float
    samples: int = 0

    def seconds(self, size_bytes: int) -> float:
        """Until so many bytes have arrived."""
        return self.latency_s + size_bytes / self.bytes_per_s


class PrefillSpeed:
    """Seconds of prefill, as token_s per token and context_s per token and token of context before
    it.

    Both are fitted to the measured steps, by least squares in which old steps fade.

    token_s: a guess before the first measurement; None: nothing is known until then.
    """

    def __init__(self, token_s: float | None = None) -> None:
        self.token_s = token_s or 0.0
        self.context_s = 0.0
        self.samples = 0
        self._guessed = token_s is not None
        self._sums = [0.0] * 5  # of n*n, n*c, c*c, n*t, c*t

    @property
    def known(self) -> bool:
        """Whether there is a guess, or a measurement."""
        return self._guessed or self.samples > 0

    def step(self, start: int, count: int, step_tokens: int, seconds: float) -> None:
        """A step took `seconds` for `step_tokens`, `count` of them of the prompt with most of them,
        from `start` on.

        Measured only if nearly all of it was that prompt's.
        """
        if count >= LEAST_STEP_TOKENS and count > LEAST_STEP_SHARE * step_tokens:
            self.measured(start, count, seconds)

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
    """What to do about a span of stored blocks.

    way: to do it.
    seconds: until the whole span is there.
    load_s, compute_s: of either way alone. An engine waits for a load no longer than compute_s.
    is_try: computing seems faster, and the load is made to see whether that is still so.
    """

    way: Way
    seconds: float
    load_s: float
    compute_s: float
    is_try: bool = False

    @property
    def saved_s(self) -> float:
        """Against computing everything."""
        return self.compute_s - self.seconds


def choose(
    speed: Speed, prefill: PrefillSpeed, start: int, stop: int, size_bytes: int, *, can_meet: bool = True
) -> Choice:
    """Whether to load the tokens from `start` to `stop`, which are stored in `size_bytes`, to
    compute them, or both.

    can_meet: whether an engine that computes from the front can take over blocks loaded from the
        back. Otherwise it waits for the load, which is worth it if that is sooner.
    """
    load_s = speed.seconds(size_bytes)
    compute_s = prefill.seconds(start, stop)
    if load_s <= (LOAD_ALONE if can_meet else 1 - LEAST_GAIN) * compute_s:
        return Choice(Way.LOAD, load_s, load_s, compute_s)
    if can_meet:
        meet_s = _meet(speed, prefill, start, stop, size_bytes)
        if meet_s <= (1 - LEAST_GAIN) * compute_s:
            return Choice(Way.BOTH, meet_s, load_s, compute_s)
    return Choice(Way.COMPUTE, compute_s, load_s, compute_s)


def _meet(speed: Speed, prefill: PrefillSpeed, start: int, stop: int, size_bytes: int) -> float:
    """Seconds until computing from the front and loading from the back have met, by bisection over
    where.
    """
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
