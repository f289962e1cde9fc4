"""Caches of blocks to compare the store's with.

Each keeps whole prefixes: a block is evicted before its parent.

A request's own blocks never make room for one another: blocks without room are not kept, the end of
the prompt first. Published policies were made for independent objects; each docstring names its
change for chains.
"""

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Sequence

from kvire.replay.trace import Trace
from kvire.store.eviction.policies.lru import LeastRecentlyUsed
from kvire.store.eviction.policy import EvictionPolicy


class ChainCache(ABC):
    """A simulated cache of chains of blocks.

    capacity_blocks: hard limit.

    Call `look` with a request's blocks, then `use` with its answer.
    """

    def __init__(self, trace: Trace, capacity_blocks: int) -> None:
        self.parents, self.depths = trace.parents, trace.depths
        self.capacity_blocks = capacity_blocks
        self.size = 0
        self.now_s = 0.0
        self._held = bytearray(len(trace.parents))
        self._children = [0] * len(trace.parents)  # of those held
        self._turn = [0] * len(trace.parents)  # of the request that used a block last
        self._turns = 0

    def look(self, blocks: Sequence[int], time_s: float) -> int:
        """How many leading blocks are here. Nothing is used by that."""
        self.now_s = time_s
        held = self._held
        for count, block in enumerate(blocks):
            if not held[block]:
                return count
        return len(blocks)

    def use(self, blocks: Sequence[int], hits: int) -> None:
        """A request used its first `hits` blocks and computed the rest, kept while
        there is room.
        """
        self._turns += 1
        for block in blocks:
            self._turn[block] = self._turns
        keep = min(len(blocks), self.capacity_blocks)
        while self.size + keep - hits > self.capacity_blocks:
            if (victim := self._victim()) is None:
                keep = hits + self.capacity_blocks - self.size
                break
            self._drop(victim)
        for block in blocks[hits:keep]:
            self._held[block] = 1
            if (parent := self.parents[block]) >= 0:
                self._children[parent] += 1
        self.size += keep - hits
        self._used(blocks[:keep], hits)

    @abstractmethod
    def _used(self, blocks: Sequence[int], hits: int) -> None:
        """These are in use now; from `hits` on they are new."""

    @abstractmethod
    def _victim(self) -> int | None:
        """The next block to evict, taken out of the queue, that `_free` allows; None
        without any.
        """

    def _free(self, block: int) -> bool:
        """Whether it may be evicted now: it has no child here, and the current request does not use
        it.
        """
        return not self._children[block] and self._turn[block] != self._turns

    def _drop(self, block: int) -> None:
        self._held[block] = 0
        self.size -= 1
        if (parent := self.parents[block]) >= 0:
            self._children[parent] -= 1


class RankCache(ChainCache):
    """The store's order over one policy, for blocks that are always used by whole requests.

    Several times as fast as store_tiers.py, with the same hits (tests/replay).
    """

    def __init__(self, trace: Trace, capacity_blocks: int, policy: EvictionPolicy) -> None:
        super().__init__(trace, capacity_blocks)
        self._rank = policy.rank
        self._block_tokens = trace.block_tokens
        self._order: list[tuple[float, int]] = [(0.0, 0)] * len(trace.parents)
        self._uses = [0] * len(trace.parents)
        self._last_rank = 0.0
        self._heap: list[tuple[tuple[float, int], int, int]] = []  # order, -depth, block
        self._aside: list[int] = []  # out of the heap until the current request is done

    def _used(self, blocks: Sequence[int], hits: int) -> None:
        least = 0.0
        uses, depths, last = self._uses, self.depths, self._last_rank
        for place in range(len(blocks) - 1, -1, -1):
            block = blocks[place]
            uses[block] = uses[block] + 1 if place < hits else 1
            rank = self._rank(uses[block], depths[block] * self._block_tokens, last)
            least = max(least, rank, self._order[block][0] if place < hits else 0.0)
            self._order[block] = (least, self._turns)
            if place >= hits:
                self._queue(block)
        for block in self._aside:
            self._queue(block)
        self._aside.clear()

    def _victim(self) -> int | None:
        while self._heap:
            order, _, block = heapq.heappop(self._heap)
            if not self._held[block]:
                continue
            if self._order[block] > order:
                self._queue(block)
            elif self._free(block):
                self._last_rank = max(self._last_rank, order[0])
                return block
            else:  # of the current request, or before such a block
                self._aside.append(block)
        return None

    def _queue(self, block: int) -> None:
        heapq.heappush(self._heap, (self._order[block], -self.depths[block], block))


class TtlCache(RankCache):
    """Least recently used, and expired ttl_s after its last use."""

    def __init__(self, trace: Trace, capacity_blocks: int, ttl_s: float) -> None:
        super().__init__(trace, capacity_blocks, LeastRecentlyUsed())
        self._ttl_s = ttl_s
        self._uses_at: deque[tuple[float, tuple[int, ...]]] = deque()

    def look(self, blocks: Sequence[int], time_s: float) -> int:
        """See ChainCache."""
        while self._uses_at and self._uses_at[0][0] + self._ttl_s <= time_s:
            turn = self._turns - len(self._uses_at) + 1
            for block in reversed(self._uses_at.popleft()[1]):
                if self._held[block] and self._turn[block] == turn:
                    self._drop(block)
        return super().look(blocks, time_s)

    def _used(self, blocks: Sequence[int], hits: int) -> None:
        super()._used(blocks, hits)
        self._uses_at.append((self.now_s, tuple(blocks)))


class S3FifoCache(ChainCache):
    """S3-FIFO (Yang et al., SOSP 2023): a small queue on trial, a main queue, and a record of
    blocks that left the trial.

    For chains: a prompt's blocks enter last one first, and a block with children goes round once
    more.
    """

    SMALL_SHARE = 0.1
    MOST_USES = 3

    def __init__(self, trace: Trace, capacity_blocks: int) -> None:
        super().__init__(trace, capacity_blocks)
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._uses = [0] * len(trace.parents)

    def _used(self, blocks: Sequence[int], hits: int) -> None:
        for block in blocks[:hits]:
            self._uses[block] = min(self.MOST_USES, self._uses[block] + 1)
        for block in reversed(blocks[hits:]):
            self._uses[block] = 0
            (self._main if block in self._ghosts else self._small).append(block)
            self._ghosts.pop(block, None)

    def _victim(self) -> int | None:
        small_first = len(self._small) > self.SMALL_SHARE * self.capacity_blocks
        queues = (self._from_small, self._from_main) if small_first else (self._from_main, self._from_small)
        return next((block for take in queues if (block := take()) is not None), None)

    def _from_small(self) -> int | None:
        for _ in range(len(self._small)):
            block = self._small.popleft()
            if self._uses[block] > 1:
                self._uses[block] = 0
                self._main.append(block)
            elif self._free(block):
                self._ghosts[block] = None
                if len(self._ghosts) > self.capacity_blocks:
                    self._ghosts.popitem(last=False)
                return block
            else:
                self._small.append(block)
        return None

    def _from_main(self) -> int | None:
        for _ in range((self.MOST_USES + 1) * len(self._main)):
            block = self._main.popleft()
            if not self._uses[block] and self._free(block):
                return block
            self._uses[block] = max(0, self._uses[block] - 1)
            self._main.append(block)
        return None


class SieveCache(ChainCache):
    """SIEVE (Zhang et al., NSDI 2024): one queue in order of arrival, and a hand that spares blocks
    used since it passed.

    For chains: a prompt's blocks enter last one first, and the hand passes over blocks with
    children.
    """

    def __init__(self, trace: Trace, capacity_blocks: int) -> None:
        super().__init__(trace, capacity_blocks)
        self._behind: deque[int] = deque()  # older than the hand, which has passed them
        self._ahead: deque[int] = deque()
        self._visited = bytearray(len(trace.parents))

    def _used(self, blocks: Sequence[int], hits: int) -> None:
        for block in blocks[:hits]:
            self._visited[block] = 1
        for block in reversed(blocks[hits:]):
            self._visited[block] = 0
            self._ahead.append(block)

    def _victim(self) -> int | None:
        for _ in range(2 * self.size + 1):  # one round may clear every mark, the next finds a block without
            if not self._ahead:
                self._behind, self._ahead = self._ahead, self._behind
            if not self._ahead:
                return None
            block = self._ahead.popleft()
            if not self._visited[block] and self._free(block):
                return block
            if self._turn[block] != self._turns:
                self._visited[block] = 0
            self._behind.append(block)
        return None
