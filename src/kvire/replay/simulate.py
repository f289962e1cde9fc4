"""Runs a trace through caches and counts its hits.

The report's schema is kvire.replay/1 (docs/replay.md).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvire.replay.caches import ChainCache
from kvire.replay.store_tiers import StoreTiers
from kvire.replay.trace import Trace

RequestsDone = Callable[[int], None]  # requests done so far


@dataclass(slots=True)
class Hits:
    """The hits of a run.

    requests: with at least one hit block.
    by_tier: tokens, fastest tier first.
    """

    tokens: int = 0
    requests: int = 0
    by_tier: list[int] = field(default_factory=list)


def ideal(trace: Trace) -> Hits:
    """With room for everything, for ever."""
    hits = Hits()
    seen = bytearray(len(trace.parents))
    for request in trace.requests:
        count = next((n for n, block in enumerate(request.blocks) if not seen[block]), len(request.blocks))
        hits.tokens += trace.hit_tokens(request, count)
        hits.requests += count > 0
        for block in request.blocks[count:]:
            seen[block] = 1
    return hits


def simulate(trace: Trace, cache: ChainCache, progress: RequestsDone = lambda _: None) -> Hits:
    """One cache."""
    hits = Hits()
    for number, request in enumerate(trace.requests):
        count = cache.look(request.blocks, request.time_s)
        hits.tokens += trace.hit_tokens(request, count)
        hits.requests += count > 0
        cache.use(request.blocks, count)
        progress(number)
    return hits


def run_store(trace: Trace, store: StoreTiers, progress: RequestsDone = lambda _: None) -> Hits:
    """The store's own tiers; each block counts for the fastest tier that had it."""
    hits = Hits(by_tier=[0] * len(store.tiers))
    for number, request in enumerate(trace.requests):
        found = store.look(request.blocks)
        tokens = trace.hit_tokens(request, len(found))
        hits.tokens += tokens
        hits.requests += bool(found)
        _split(hits.by_tier, found, trace.block_tokens, tokens)
        store.use(request.blocks, found)
        progress(number)
    return hits


def _split(by_tier: list[int], found: Sequence[int], block_tokens: int, tokens: int) -> None:
    """Add `tokens` to the tiers of the blocks that hold them; the last block holds the rest."""
    for tier in found:
        taken = min(block_tokens, tokens)
        by_tier[tier] += taken
        tokens -= taken
