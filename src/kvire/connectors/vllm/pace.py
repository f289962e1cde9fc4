"""Whether loading is faster than computing, from what both took lately."""

from collections.abc import Callable, Mapping
from time import monotonic

from kvire.plan.cost import LEAST_GAIN, PrefillSpeed, Speed

LEAST_TOKENS = 32  # a step with fewer new tokens is a decode step, which says nothing of prefill
LARGEST_SHARE = 0.8  # of a step's tokens that one request must have for the step to count as its
TRY_AGAIN = 16  # after so many loads that were not worth it, one is made to see whether that is still so


class Pace:
    """Prefill speed and tier speeds of one engine. prior: a tier's speed before anybody measured it."""

    def __init__(self, prior: Callable[[str], Speed], clock: Callable[[], float] = monotonic) -> None:
        self._prior = prior
        self._clock = clock
        self._prefill = PrefillSpeed(token_s=0.0)
        self._speeds: dict[str, Speed] = {}
        self._step: tuple[int, int, float] | None = None
        self._refused = 0  # since one was tried all the same

    def step_begins(self, starts: Mapping[str, int], counts: Mapping[str, int]) -> None:
        """A step computes `counts` tokens of each request, from position `starts` on."""
        total = sum(counts.values())
        largest = max(counts, key=counts.__getitem__, default=None)
        self._step = None
        if largest is not None and total >= LEAST_TOKENS and counts[largest] >= LARGEST_SHARE * total:
            self._step = (starts.get(largest, 0), total, self._clock())

    def step_ended(self) -> None:
        """Its output is there."""
        if self._step is not None:
            start, count, began = self._step
            self._prefill.measured(start, count, self._clock() - began)
            self._step = None

    def read(self, speeds: Mapping[str, Speed]) -> None:
        """Workers measured tiers."""
        self._speeds.update(speeds)

    def refused(self) -> None:
        """Something was computed because loading it seemed slower."""
        self._refused += 1

    def loaded(self) -> None:
        """Something is loaded; if a try was due, this is it."""
        if self._refused >= TRY_AGAIN - 1:
            self._refused = 0

    def is_worth_loading(self, start_tokens: int, stop_tokens: int, bytes_by_tier: Mapping[str, int]) -> bool:
        """Whether these bytes come sooner than the tokens could be computed. True as long as nobody knows."""
        if not self._prefill.samples or not bytes_by_tier or self._refused >= TRY_AGAIN - 1:
            return True
        speeds = {tier: self._speeds.get(tier) or self._prior(tier) for tier in bytes_by_tier}
        load_s = max(speed.latency_s for speed in speeds.values()) + sum(
            size / speeds[tier].bytes_per_s for tier, size in bytes_by_tier.items()
        )
        return load_s <= (1 - LEAST_GAIN) * self._prefill.seconds(start_tokens, stop_tokens)
