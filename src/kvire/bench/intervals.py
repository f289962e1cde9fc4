"""Medians and how sure they are. No assumption about how times are distributed."""

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

CONFIDENCE = 0.95
RESAMPLES = 2000
LEAST_RESAMPLED = (
    5  # values of a bootstrap: with three it holds the true ratio with 89 %, with two with 62 % (simulated)
)


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and its interval.

    coverage: how often such an interval holds the true median; None without one (a single value).
    """

    median: float
    low: float
    high: float
    coverage: float | None
    n: int

    def as_dict(self) -> dict[str, float | None]:
        """Plain values for JSON."""
        return asdict(self)


def median_interval(values: Sequence[float]) -> Interval:
    """By order statistics: between the k-th smallest and the k-th largest value lies the true
    median with a probability that the binomial distribution gives.

    The narrowest such pair that reaches 95 %; with fewer than six values, all of them (five: 93.75
    %).
    """
    ordered, n = sorted(values), len(values)
    outside, k = 0.0, 0  # P(fewer than k + 1 of n values lie below the median)
    while k < n // 2:
        more = outside + math.comb(n, k) / 2**n
        if k and 1 - 2 * more < CONFIDENCE:
            break
        outside, k = more, k + 1
    coverage = 1 - 2 * outside if k else None
    low = max(0, k - 1)
    return Interval(statistics.median(ordered), ordered[low], ordered[n - 1 - low], coverage, n)


def ratio_interval(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> Interval:
    """median(ours) / median(theirs) of two independent sets, by a percentile bootstrap of 95 %;
    with fewer than five values in one of them it holds the true ratio less often, and states no
    coverage.
    """
    rng = random.Random(seed)  # noqa: S311 - resampling
    ratios = sorted(
        statistics.median(rng.choices(ours, k=len(ours))) / statistics.median(rng.choices(theirs, k=len(theirs)))
        for _ in range(RESAMPLES)
    )
    cut = round(RESAMPLES * (1 - CONFIDENCE) / 2)
    ratio = statistics.median(ours) / statistics.median(theirs)
    n = min(len(ours), len(theirs))
    return Interval(ratio, ratios[cut], ratios[-1 - cut], CONFIDENCE if n >= LEAST_RESAMPLED else None, n)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least that share of all does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
