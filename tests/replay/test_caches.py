"""Whatever the policy: whole prefixes only, never more than there is room for, what is newest kept first."""

import pytest
from replay.traces import random_trace

from kvire.replay.caches import RankCache, S3FifoCache, SieveCache, TtlCache
from kvire.store.eviction.policy import policies


class DearEnds:
    """A policy to which the end of a prompt is dear."""

    name, about = "dear ends", "a toy"

    def rank(self, uses, start_tokens, last):
        return last + uses * (1 + start_tokens / 10)


CACHES = {
    "lru": lambda trace, blocks: RankCache(trace, blocks, policies()["lru"]),
    "lfu": lambda trace, blocks: RankCache(trace, blocks, policies()["lfu"]),
    "dear ends": lambda trace, blocks: RankCache(trace, blocks, DearEnds()),
    "ttl": lambda trace, blocks: TtlCache(trace, blocks, 9.0),
    "s3-fifo": S3FifoCache,
    "sieve": SieveCache,
}


@pytest.mark.parametrize("blocks", [1, 5, 14, 40])
@pytest.mark.parametrize("name", CACHES)
def test_prefixes_stay_whole_and_the_limit_holds(name, blocks):
    trace = random_trace(blocks, requests=150)
    cache = CACHES[name](trace, blocks)
    full = 0
    for request in trace.requests:
        hits = cache.look(request.blocks, request.time_s)
        cache.use(request.blocks, hits)
        held = {block for block in range(len(trace.parents)) if cache._held[block]}
        assert all(trace.parents[block] < 0 or trace.parents[block] in held for block in held)
        assert len(held) == cache.size <= blocks
        assert held >= set(request.blocks[: min(len(request.blocks), blocks)])  # what fits of the newest is kept
        full += len(held) == blocks
    assert full > 100 or name == "ttl"
