"""Fetching the longest stored prefix of a prompt, as long as that is faster than computing it."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from time import monotonic

import torch
from torch import Tensor

from kvire.core.keys import BlockKey
from kvire.core.report import CacheReport, MissReason
from kvire.core.tier_kind import TierKind
from kvire.plan.cost import Way
from kvire.store.reuse.chain import Chain
from kvire.store.reuse.load import Miss, explained, reason_of
from kvire.store.reuse.look import Found, needed, reach
from kvire.store.reuse.planner import Reuse
from kvire.store.reuse.reused import Reused
from kvire.store.ticket import LoadState

PATIENCE_S = 60.0  # with a load while the speed of computing is unknown; the loader itself gives up dead tiers
QUEUED_S = 2.0  # with blocks of the call before that are still being written
EXPLAIN_S = 0.1  # a report's wait for the reason of a miss, after the answer


BlockPart = tuple[int, int]  # of a block: index, part


@dataclass(slots=True)
class Loaded:
    """The loaded beginning of a prompt.

    stop: leading blocks of the prompt in `slabs`.
    slabs: by group, [blocks, block bytes].
    reused: their sources, and why there are no more.
    """

    chain: Chain
    reused: Reused = field(default_factory=Reused)
    slabs: list[Tensor] = field(default_factory=list)
    stop: int = 0

    def report(self) -> CacheReport:
        """Where the prompt's tokens came from."""
        if self.reused.answer is not None:
            miss = explained(self.reused.miss, self.reused.answer.wait(EXPLAIN_S), self.reused.asked_token)
            if self.stop and miss.reason is MissReason.NEVER_STORED:
                miss = miss._replace(reason=MissReason.DIVERGED)
            self.reused.miss, self.reused.answer = miss, None
        return self.reused.report(len(self.chain.token_ids))


def loadable(chain: Chain) -> int:
    """Full blocks of a prompt before its last token, which is always computed."""
    return (len(chain.token_ids) - 1) // chain.block_size


def load_prefix(reuse: Reuse, chain: Chain, queued: AbstractSet[BlockKey]) -> Loaded:
    """Load a prompt's stored blocks, waiting no longer than computing would take.

    queued: lately saved blocks that may still be in the write queue.
    """
    loaded, most = Loaded(chain), loadable(chain)
    found = reuse.look(chain, 0, most)
    if any(chain.keys[index] in queued and not found.whole(index) for index in range(most)):
        reuse.flush(QUEUED_S)
        found = reuse.look(chain, 0, most)
    found = reuse.hope(found)
    choice = reuse.worth(found, can_meet=False)
    reuse.decided(choice)
    if choice.way is not Way.COMPUTE:
        _fetch(reuse, loaded, found, monotonic() + min(choice.compute_s, PATIENCE_S))
    elif found.known > found.first:  # it is certainly there
        loaded.reused.missed(0, MissReason.SLOWER)
    _ask_why(reuse, loaded, most)
    return loaded


def _fetch(reuse: Reuse, loaded: Loaded, found: Found, deadline: float) -> None:
    """Load the found blocks, or fewer if some are missing."""
    chain, windows = loaded.chain, [part.window for part in reuse.parts]
    loaded.slabs = [
        torch.empty((found.stop, part.size_bytes), dtype=torch.uint8) for part in reuse.parts
    ]  # rows of windows that are not needed are never touched, and take no memory
    ready: dict[BlockPart, TierKind] = {}
    gone: dict[BlockPart, MissReason | None] = {}
    stop = found.stop
    while missing := [place for place in needed(reuse.parts, chain.block_size, 0, stop) if place not in ready]:
        _try(reuse, loaded, replace(found, stop=stop, needed=missing), deadline, ready, gone)
        stop = reach(windows, chain.block_size, 0, stop, lambda index, part: (index, part) not in gone)
    loaded.stop = stop
    kinds = {index: kind for (index, _), kind in ready.items()}
    for index in range(stop):  # a block that no window needs counts for the tier of the last one
        loaded.reused.take(kinds.get(index, kinds[stop - 1]), chain.block_size)
    reason = gone[min(gone)] if gone else None
    if reason is not None:
        loaded.reused.missed(stop * chain.block_size, reason)


def _try(
    reuse: Reuse, loaded: Loaded, found: Found, deadline: float,
    ready: dict[BlockPart, TierKind], gone: dict[BlockPart, MissReason | None],
) -> None:  # fmt: skip
    """One load.

    ready: receives the blocks that arrived in time, with their source. gone: receives the others,
        with the reason.
    """

    def memory(index: int, part: int) -> memoryview:
        return loaded.slabs[part][index].numpy().data

    ticket = reuse.load(loaded.chain, found, memory, Way.LOAD).ticket
    if not ticket.wait(max(0.0, deadline - monotonic())):
        ticket.cancel()  # late reads end in rows that are not used
    for number, (place, state) in enumerate(zip(found.needed, ticket.states(), strict=True)):
        kind, failure = ticket.source(number), ticket.failure(number)
        if state is LoadState.READY and kind is not None:
            ready[place] = kind
        elif failure is None:
            gone[place] = MissReason.SLOWER
        else:
            gone[place] = reason_of(failure.reason, was_there=place[0] < found.known)


def _ask_why(reuse: Reuse, loaded: Loaded, most: int) -> None:
    """Note why the hit ends where it does, and ask the store if it is unknown."""
    chain, reused = loaded.chain, loaded.reused
    if loaded.stop == most:
        reused.miss = Miss(MissReason.COMPLETE if most else MissReason.SHORTER_THAN_BLOCK)
    elif reused.load_miss is None:
        reused.asked_token = loaded.stop * chain.block_size
        reused.miss = Miss(MissReason.NEVER_STORED, reused.asked_token)
        reused.answer = reuse.why(chain, loaded.stop, len(chain.token_ids) - 1)
