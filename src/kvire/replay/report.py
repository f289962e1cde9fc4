"""From a trace and options to the report of `kvire replay --json`, schema kvire.replay/1."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvire.core.errors import ConfigError
from kvire.replay.policies import policy_named
from kvire.replay.simulate import Hits, RequestsDone, ideal, run_store
from kvire.replay.store_tiers import StoreTier, StoreTiers
from kvire.replay.trace import Trace

SCHEMA = "kvire.replay/1"
STEPS = 200  # how often a run reports its progress

StageReport = Callable[[str, int, int], None]  # stage, done, total


@dataclass(frozen=True, slots=True)
class CapacitySize:
    """A capacity.

    bytes: None if the size of a token is unknown.
    """

    tokens: int
    bytes: int | None = None


@dataclass(frozen=True, slots=True)
class TokenKV:
    """The size of a token's KV in a store.

    bytes_per_token: in the store.
    model, kv_dtype: of the KV; None where only the number was given.
    state_bytes_per_sequence: of recurrent layers, which belong to no token and are in no size.
    """

    bytes_per_token: int
    model: str | None = None
    kv_dtype: str | None = None
    state_bytes_per_sequence: int = 0


@dataclass(frozen=True, slots=True)
class TierSize:
    """A tier of the store.

    name: memory, or disk.
    """

    name: str
    size: CapacitySize


def replay_values(
    trace: Trace,
    policies: Sequence[str],
    sizes: Sequence[CapacitySize],
    *,
    spread: bool,
    report: StageReport = lambda *_: None,
) -> dict[str, Any]:
    """Curves of the policies over the sizes.

    Raises ConfigError for a policy that does not exist.
    """
    chosen = [(name, policy_named(name)) for name in policies]
    values = _head(trace, spread=spread)
    for name, policy in chosen:
        points = []
        for number, size in enumerate(sizes, 1):
            progress = _progress(report, f"{name}, size {number} of {len(sizes)}", len(trace.requests))
            hits = policy(trace, _blocks(trace, size), progress)
            points.append(_point(trace, size, hits, requests=name != "optimum"))
        values["curves"].append({"policy": name, "points": points})
    return values


def build_tiers(
    trace: Trace, tiers: Sequence[TierSize], *, spread: bool, report: StageReport = lambda *_: None
) -> dict[str, Any]:
    """The store with these tiers, fastest first, beside the optimum of all their room together."""
    values = _head(trace, spread=spread)
    together = CapacitySize(
        sum(tier.size.tokens for tier in tiers),
        None if any(tier.size.bytes is None for tier in tiers) else sum(tier.size.bytes or 0 for tier in tiers),
    )
    store = StoreTiers([StoreTier(trace, _blocks(trace, tier.size)) for tier in tiers])
    hits = run_store(trace, store, _progress(report, "store", len(trace.requests)))
    point = _point(trace, together, hits)
    point["hit_rate_by_tier"] = {
        tier.name: tokens / trace.input_tokens for tier, tokens in zip(tiers, hits.by_tier, strict=True)
    }
    best = policy_named("optimum")(trace, _blocks(trace, together), _progress(report, "optimum", len(trace.requests)))
    values["tiers"] = [
        {"name": tier.name, "capacity_tokens": tier.size.tokens, "capacity_bytes": tier.size.bytes} for tier in tiers
    ]
    values["curves"] = [
        {"policy": "store", "points": [point]},
        {"policy": "optimum", "points": [_point(trace, together, best, requests=False)]},
    ]
    return values


def _head(trace: Trace, *, spread: bool) -> dict[str, Any]:
    best = ideal(trace)
    return {
        "schema": SCHEMA,
        "trace": {
            "name": trace.name,
            "format": trace.format,
            "requests": len(trace.requests),
            "input_tokens": trace.input_tokens,
            "output_tokens": sum(request.output_tokens for request in trace.requests),
            "working_set_tokens": trace.working_set_tokens,
            "duration_s": trace.duration_s,
            "arrivals": _arrivals(trace, spread=spread),
            "skipped": trace.skipped,
            "notes": trace.notes,
        },
        "block_tokens": trace.block_tokens,
        "requests": len(trace.requests),
        "ideal_hit_rate": best.tokens / trace.input_tokens,
        "ideal_request_hit_rate": best.requests / len(trace.requests),
        "curves": [],
    }


def _arrivals(trace: Trace, *, spread: bool) -> str:
    if not trace.is_timed:
        return "not recorded"
    return "spread until the next time stamp" if spread else "as recorded"


def _point(trace: Trace, size: CapacitySize, hits: Hits, *, requests: bool = True) -> dict[str, Any]:
    point: dict[str, Any] = {"capacity_tokens": size.tokens}
    if size.bytes is not None:
        point["capacity_bytes"] = size.bytes
    point["hit_rate"] = hits.tokens / trace.input_tokens
    if requests:
        point["request_hit_rate"] = hits.requests / len(trace.requests)
    return point


def _blocks(trace: Trace, size: CapacitySize) -> int:
    if size.tokens < trace.block_tokens:
        raise ConfigError(f"a capacity of {size.tokens:,} tokens holds no block: one has {trace.block_tokens} tokens")
    return size.tokens // trace.block_tokens


def _progress(report: StageReport, stage: str, total: int) -> RequestsDone:
    step = max(1, total // STEPS)

    def progress(done: int) -> None:
        if done % step == 0 or done + 1 == total:
            report(stage, done + 1, total)

    return progress
