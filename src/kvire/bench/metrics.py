"""The figures of one row, each as defined in docs/bench.md, from its samples."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from kvire.bench.intervals import median_interval, quantile
from kvire.bench.load import SATURATED
from kvire.bench.states import TIERS
from kvire.core.errors import ConfigError

# A sample or a pass as the report keeps it (results.py).
Record = Mapping[str, Any]
SPLIT = ("queue_s", "load_s", "prefill_s")  # of TTFT, as servers may tell them


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must meet to count as good: seconds to the first token, and per token after
    it.
    """

    ttft_s: float = 1.0
    tpot_s: float = 0.1

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """Of a text such as ttft=1,tpot=0.1. Raises ConfigError."""
        limits = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            try:
                limits[name.strip()] = float(value)
            except ValueError:
                limits[""] = 0.0
        if not set(limits) <= {"ttft", "tpot"} or not all(0 < value < inf for value in limits.values()):
            raise ConfigError(f"--slo is written as ttft=1,tpot=0.1, in seconds; got {text!r}")
        return cls(limits.get("ttft", cls().ttft_s), limits.get("tpot", cls().tpot_s))

    def met_by(self, sample: Record) -> bool:
        """A single token has no time per token, which meets any limit."""
        return bool(sample["ttft_s"] <= self.ttft_s and (sample["tpot_s"] or 0.0) <= self.tpot_s)


def summarise(samples: Sequence[Record], passes: Sequence[Record], slo: Slo) -> dict[str, Any]:
    """All figures of a row that need no other row.

    Requests that failed count as errors and nowhere else.
    """
    good = [sample for sample in samples if sample["error"] is None]
    errors = dict(Counter(sample["error"] for sample in samples if sample["error"] is not None))
    client_cpu = max((one["client_cpu"] for one in passes), default=0.0)
    return {
        "requests": len(samples),
        "answered": len(good),
        "errors": errors,
        "client_cpu": client_cpu,
        "client_saturated": client_cpu > SATURATED,
        "late_s": max((one["late_s"] for one in passes), default=0.0),
        **(_times(good) if good else {}),
        **(_rates(good, passes, slo) if good else {}),
        **(_hits(good) if good else {}),
    }


def by_repeat(samples: Iterable[Record], name: str) -> dict[int, float]:
    """Median of a figure within each repeat; repeats without it are left out."""
    values: dict[int, list[float]] = {}
    for sample in samples:
        if sample["error"] is None and sample[name] is not None:
            values.setdefault(sample["repeat"], []).append(sample[name])
    return {repeat: statistics.median(found) for repeat, found in sorted(values.items())}


def answered_in_both(one: Iterable[Record], other: Iterable[Record]) -> tuple[list[Record], list[Record]]:
    """Of two rows that sent the same prompts, the samples whose prompt was answered in both: where
    requests failed, the rest may be the short ones.
    """
    mine, theirs = ({_place(s): s for s in samples if s["error"] is None} for samples in (one, other))
    both = [place for place in mine if place in theirs]
    return [mine[place] for place in both], [theirs[place] for place in both]


def _place(sample: Record) -> tuple[int, int, int]:
    return sample["repeat"], sample["script"], sample["turn"]


def prefill_tokens_per_s(samples: Sequence[Record]) -> float | None:
    """Prompt tokens computed per second in which some request waited for its first token, from
    requests without reuse; median over repeats.

    Time in which none waited does not count, and time in which several did counts once.
    """
    speeds = []
    for repeat in sorted({sample["repeat"] for sample in samples}):
        mine = [s for s in samples if s["repeat"] == repeat and s["error"] is None and s["prompt_tokens"]]
        tokens = sum(s["prompt_tokens"] - (s["cached_tokens"] or 0) for s in mine)
        seconds = _covered_s((s["sent_s"], s["sent_s"] + s["ttft_s"]) for s in mine)
        if tokens and seconds > 0:
            speeds.append(tokens / seconds)
    return statistics.median(speeds) if speeds else None


def _covered_s(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of them lasted."""
    covered, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered


def _times(good: Sequence[Record]) -> dict[str, Any]:
    gaps = [gap for sample in good for gap in sample["gaps_s"]]
    tokens = sum(sample["output_tokens"] for sample in good)
    pieces = sum(sample["pieces"] for sample in good)
    return {
        **{name: _interval(good, name) for name in ("ttft_s", "tpot_s", "e2e_s")},
        "ttft_p95_s": quantile([sample["ttft_s"] for sample in good], 0.95),
        "itl_s": {"p50": quantile(gaps, 0.5), "p99": quantile(gaps, 0.99), "n": len(gaps)} if gaps else None,
        "tokens_per_piece": tokens / pieces if pieces else None,
        "split": {name: _middle(good, lambda s, name=name: s["server"].get(name)) for name in SPLIT},  # type: ignore[misc]
        "outside_server_s": _middle(good, _outside),
    }


def _rates(good: Sequence[Record], passes: Sequence[Record], slo: Slo) -> dict[str, Any]:
    system, goodput = [], []
    for one in passes:
        mine = [sample for sample in good if sample["repeat"] == one["repeat"]]
        system.append(sum(sample["output_tokens"] for sample in mine) / one["wall_s"])
        goodput.append(sum(slo.met_by(sample) for sample in mine) / one["wall_s"])
    gap = _middle(good, lambda sample: sample["tpot_s"])
    return {
        "tps_system": median_interval(system).as_dict(),
        "tps_user": 1 / gap if gap else None,
        "goodput_per_s": median_interval(goodput).as_dict(),
    }


def _hits(good: Sequence[Record]) -> dict[str, Any]:
    """Token hit rates: reused prompt tokens over all prompt tokens, of requests whose server counts
    both.
    """
    counted = [sample for sample in good if sample["prompt_tokens"] and sample["cached_tokens"] is not None]
    prompt = sum(sample["prompt_tokens"] for sample in counted)
    if not prompt:
        return {"hit_rate": None, "hit_by_tier": None, "ideal_hit_rate": None}
    told = [sample for sample in counted if sample["by_tier"] is not None]
    by_tier = {tier: sum(sample["by_tier"][tier] for sample in told) / prompt for tier in TIERS}
    return {
        "hit_rate": sum(sample["cached_tokens"] for sample in counted) / prompt,
        "hit_by_tier": by_tier if len(told) == len(counted) else None,
        "ideal_hit_rate": sum(sample["ideal_tokens"] for sample in counted) / prompt,
    }


def _interval(samples: Sequence[Record], name: str) -> dict[str, float | None] | None:
    """Of the repeats' medians: within a repeat, requests are not independent."""
    values = list(by_repeat(samples, name).values())
    return median_interval(values).as_dict() if values else None


def _outside(sample: Record) -> float | None:
    """TTFT as the client saw it, less the server's own."""
    inside: float | None = sample["server"].get("ttft_s")
    return None if inside is None else sample["ttft_s"] - inside


def _middle(samples: Sequence[Record], value: Callable[[Record], float | None]) -> float | None:
    found = [one for one in map(value, samples) if one is not None]
    return statistics.median(found) if found else None
