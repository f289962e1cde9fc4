"""How much of the prompts a cache of a given size finds again: a curve from `kvire replay`, or an
assumption.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvire.core.errors import ConfigError

SCHEMA = "kvire.replay/1"


@dataclass(frozen=True, slots=True)
class HitCurve:
    """Hit rates by capacity.

    points: (capacity in tokens, share of prompt tokens found), ascending in both.
    ideal: with room for everything.
    assumed: not from a trace.
    """

    policy: str
    points: tuple[tuple[float, float], ...]
    ideal: float
    assumed: bool = False

    def __post_init__(self) -> None:
        rates = [rate for _, rate in self.points]
        sizes = [size for size, _ in self.points]
        if not self.points or sizes != sorted(set(sizes)) or min(sizes) < 0:
            raise ConfigError("a hit curve needs points of ascending, different capacities")
        if rates != sorted(rates) or not 0 <= rates[0] <= rates[-1] <= self.ideal <= 1:
            raise ConfigError(
                "hit rates lie between 0 and the ideal, which is at most 1, and do not fall with capacity"
            )

    def hit_rate(self, tokens: float) -> float:
        """With room for so many tokens: linear between points, from nothing at no room; flat beyond
        the last.
        """
        points = self.points if self.points[0][0] == 0 else ((0.0, 0.0), *self.points)
        after = bisect_right(points, tokens, key=lambda point: point[0])
        if after == len(points):
            return points[-1][1]
        (x0, y0), (x1, y1) = points[after - 1], points[after]
        return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)


def assumed_reuse(reuse: float, working_set_tokens: int) -> HitCurve:
    """That share of every prompt is found again once the cache holds the working set; less in
    proportion before.

    Raises ConfigError for a share outside 0 to 1, or no working set.
    """
    if not 0 <= reuse < 1:
        raise ConfigError(f"--reuse is the share of prompt tokens seen before, from 0 to below 1, got {reuse}")
    if working_set_tokens < 1:
        raise ConfigError("the working set has at least one token: see --sessions and --context")
    return HitCurve("assumed", ((0.0, 0.0), (float(working_set_tokens), reuse)), reuse, assumed=True)


def read_curve(report: Mapping[str, Any], policy: str | None = None) -> HitCurve:
    """The curve of one policy from `kvire replay --json`; by default lru, else the first.

    A rate that dips by noise is taken as the best of all smaller capacities. Raises ConfigError for
    another schema, a policy that is not in it, or missing fields.
    """
    if report.get("schema") != SCHEMA:
        raise ConfigError(f"the hit curve has schema {report.get('schema')!r}, not {SCHEMA}: see kvire replay --json")
    try:
        curves = {curve["policy"]: curve["points"] for curve in report["curves"]}
        chosen = policy or ("lru" if "lru" in curves else next(iter(curves)))
        if chosen not in curves:
            raise ConfigError(f"the hit curve has no policy {chosen!r}: it has {', '.join(curves)}")
        points = sorted((float(p["capacity_tokens"]), float(p["hit_rate"])) for p in curves[chosen])
        ideal = float(report["ideal_hit_rate"])
    except (KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
        raise ConfigError(f"the hit curve is not as kvire replay --json writes it: {error!r}") from error
    best, rising = 0.0, []
    for size, rate in points:
        best = max(best, rate)
        rising.append((size, best))
    return HitCurve(chosen, tuple(rising), max(ideal, best))
