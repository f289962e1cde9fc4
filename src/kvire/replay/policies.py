"""Policies by name.

A policy is a function from a trace and a capacity in blocks to its hits.
"""

from collections.abc import Callable

from kvire.core.errors import ConfigError
from kvire.replay.caches import RankCache, S3FifoCache, SieveCache, TtlCache
from kvire.replay.optimum import ceiling_tokens
from kvire.replay.simulate import Hits, RequestsDone, run_store, simulate
from kvire.replay.store_tiers import StoreTier, StoreTiers
from kvire.replay.trace import Trace
from kvire.store.eviction.policy import EvictionPolicy, policies

Policy = Callable[[Trace, int, RequestsDone], Hits]


def _store(trace: Trace, blocks: int, progress: RequestsDone) -> Hits:
    return run_store(trace, StoreTiers([StoreTier(trace, blocks)]), progress)


def _optimum(trace: Trace, blocks: int, progress: RequestsDone) -> Hits:
    return Hits(ceiling_tokens(trace, blocks, progress))


def _of_the_store(policy: EvictionPolicy) -> Policy:
    return lambda trace, blocks, progress: simulate(trace, RankCache(trace, blocks, policy), progress)


def _lifetime(name: str, ttl_s: float) -> Policy:
    def policy(trace: Trace, blocks: int, progress: RequestsDone) -> Hits:
        if not trace.is_timed:
            raise ConfigError(f"{name} needs times, and {trace.name} has none: choose a policy without a clock")
        return simulate(trace, TtlCache(trace, blocks, ttl_s), progress)

    return policy


# The store's own policies; then caches that only a replay can run.
POLICIES: dict[str, tuple[str, Policy]] = {
    **{
        name: (policy.about, _of_the_store(policy))
        for name, policy in sorted(policies().items(), key=lambda one: one[0] != "lru")  # the store's default first
    },
    "store": ("the code of the store's tiers, with lru; slower to replay", _store),
    "s3-fifo": ("S3-FIFO, adapted to chains", lambda t, blocks, p: simulate(t, S3FifoCache(t, blocks), p)),
    "sieve": ("SIEVE, adapted to chains", lambda t, blocks, p: simulate(t, SieveCache(t, blocks), p)),
    "optimum": ("knows the future: a ceiling for all others", _optimum),
}
DEFAULT_POLICIES = ("lru", "optimum")
TTL = "ttl="


def policy_named(name: str) -> Policy:
    """Of POLICIES, or "ttl=SECONDS": lru whose blocks expire so long after their last use.

    Raises ConfigError.
    """
    if name in POLICIES:
        return POLICIES[name][1]
    if name.startswith(TTL):
        try:
            ttl_s = float(name[len(TTL) :])
        except ValueError:
            ttl_s = 0.0
        if 0 < ttl_s < float("inf"):
            return _lifetime(name, ttl_s)
        raise ConfigError(f"{name} is no lifetime: write ttl=300 for 300 seconds")
    raise ConfigError(f"there is no policy {name!r}: choose from {', '.join(POLICIES)} and ttl=SECONDS")
