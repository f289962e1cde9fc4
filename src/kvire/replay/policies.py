"""Policies by name. A policy is a function from a trace and a capacity in blocks to what it hits."""

from collections.abc import Callable

from kvire.core.errors import ConfigError
from kvire.replay.caches import Rank, RankCache, S3FifoCache, SieveCache, TtlCache
from kvire.replay.optimum import ceiling_tokens
from kvire.replay.simulate import Hits, Progress, run, run_store
from kvire.replay.store_tiers import MemoryTier, StoreTiers, records_of
from kvire.replay.trace import Trace

Policy = Callable[[Trace, int, Progress], Hits]

# A token's attention costs as much as its linear layers at this position of Llama-3.1-8B: 2 x 8.0e9 parameters over
# 4 x 32 layers x 4096 (FLOPs per earlier token), after the prefill formula of docs/plan.md.
PARITY_TOKENS = 30_500


def _store(trace: Trace, blocks: int, progress: Progress) -> Hits:
    return run_store(trace, StoreTiers([MemoryTier(trace, blocks, records_of(trace))]), progress)


def _optimum(trace: Trace, blocks: int, progress: Progress) -> Hits:
    return Hits(ceiling_tokens(trace, blocks, progress))


def _ranked(rank: Rank) -> Policy:
    return lambda trace, blocks, progress: run(trace, RankCache(trace, blocks, rank), progress)


def _cost_aware(trace: Trace, blocks: int, progress: Progress) -> Hits:
    parity_blocks = PARITY_TOKENS / trace.block_tokens
    cache = RankCache(trace, blocks, lambda uses, depth, last: last + uses * (1 + depth / parity_blocks))
    return run(trace, cache, progress)


POLICIES: dict[str, tuple[str, Policy]] = {
    "lru": ("least recently used, the end of a prompt first: what the store does", _ranked(lambda *_: 0.0)),
    "store": ("the code of the store's memory tier itself; slower to replay than lru", _store),
    "lfu": ("least often used since it came", _ranked(lambda uses, *_: float(uses))),
    "gdsf": ("uses over size, aging as others go; blocks are of one size", _ranked(lambda uses, _, last: last + uses)),
    "cost-aware": ("gdsf with the cost of recomputing, which grows along a prompt", _cost_aware),
    "s3-fifo": ("S3-FIFO, adapted to chains", lambda t, blocks, p: run(t, S3FifoCache(t, blocks), p)),
    "sieve": ("SIEVE, adapted to chains", lambda t, blocks, p: run(t, SieveCache(t, blocks), p)),
    "optimum": ("knows the future: a ceiling for all others", _optimum),
}
DEFAULT_POLICIES = ("lru", "optimum")
TTL = "ttl="


def policy_named(name: str) -> Policy:
    """Of POLICIES, or "ttl=SECONDS": lru whose blocks go so long after their last use. Raises ConfigError."""
    if name in POLICIES:
        return POLICIES[name][1]
    if name.startswith(TTL):
        try:
            ttl_s = float(name[len(TTL) :])
        except ValueError:
            ttl_s = 0.0
        if 0 < ttl_s < float("inf"):
            return lambda trace, blocks, progress: run(trace, TtlCache(trace, blocks, ttl_s), progress)
        raise ConfigError(f"{name} is no lifetime: write ttl=300 for 300 seconds")
    raise ConfigError(f"there is no policy {name!r}: choose from {', '.join(POLICIES)} and ttl=SECONDS")
