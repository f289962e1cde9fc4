"""The most hits of any cache of a size that knows the future.

Belady's rule (1966) with the choice not to keep a block: when there is no room, the block whose
next hit is farthest away is evicted. A block's parent is hit whenever the block is, so among equals
the deeper one is evicted and prefixes stay whole: the rule needs no change for chains. It maximises
the number of hits, and so of tokens while every hit is worth the same. The last block of a prompt
may be worth less: it is partly filled, or the token that is always computed is in it. Such hits are
left out of the rule and added in full, as if they cost no room. So the result is a ceiling: no
policy is above it, and it is above the best possible by no more than those tokens (0.0002 of the
Mooncake conversation trace's).
"""

import heapq
from collections.abc import Callable

from kvire.replay.trace import Trace

NEVER = 1 << 60


def ceiling_tokens(trace: Trace, capacity_blocks: int, report: Callable[[int], None] = lambda _: None) -> int:
    """Tokens that a cache of this size hits at most.

    report: called with the number of requests done so far.
    """
    following = _next_hits(trace)
    held = bytearray(len(trace.parents))
    due = [0] * len(trace.parents)
    heap: list[tuple[int, int, int]] = []  # -request of the next hit, -depth, block
    size = tokens = 0
    for number, request in enumerate(trace.requests):
        whole = _whole(trace, request.input_tokens, len(request.blocks))
        for depth, block in enumerate(request.blocks):
            if held[block]:
                tokens += trace.block_tokens if depth < whole else 0
            elif following[number][depth] == NEVER:
                continue
            else:
                held[block] = 1
                size += 1
            due[block] = following[number][depth]
            heapq.heappush(heap, (-due[block], -depth, block))
            while size > capacity_blocks:
                next_hit, _, victim = heapq.heappop(heap)
                if held[victim] and due[victim] == -next_hit:
                    held[victim] = 0
                    size -= 1
        report(number)
    return tokens + _ends(trace)


def _whole(trace: Trace, input_tokens: int, blocks: int) -> int:
    """Leading blocks that are worth all their tokens when they are hit."""
    return min(blocks, (input_tokens - 1) // trace.block_tokens)


def _next_hits(trace: Trace) -> list[list[int]]:
    """For each request and block, the next request in which a hit of the block is worth a whole
    block.
    """
    coming = [NEVER] * len(trace.parents)
    following: list[list[int]] = [[] for _ in trace.requests]
    for number in range(len(trace.requests) - 1, -1, -1):
        request = trace.requests[number]
        following[number] = [coming[block] for block in request.blocks]
        for block in request.blocks[: _whole(trace, request.input_tokens, len(request.blocks))]:
            coming[block] = number
    return following


def _ends(trace: Trace) -> int:
    """Tokens of hits that are worth less than a block, with room for everything."""
    seen = bytearray(len(trace.parents))
    tokens = 0
    for request in trace.requests:
        whole = _whole(trace, request.input_tokens, len(request.blocks))
        if whole < len(request.blocks) and seen[request.blocks[-1]]:
            tokens += trace.hit_tokens(request, len(request.blocks)) - whole * trace.block_tokens
        for block in request.blocks:
            seen[block] = 1
    return tokens
