"""Fetching the longest stored prefix of a prompt, as long as that is faster than computing it."""

import time
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvire.connectors.transformers.blocks import CacheLayout
from kvire.connectors.transformers.chain import Chain
from kvire.core.record import BlockId
from kvire.core.report import CacheReport, MissReason
from kvire.plan.cost import PrefillSpeed, Speed
from kvire.store.explain import Answer, MissQuery, StoreMiss
from kvire.store.ticket import Failure, FailureReason, LoadState, Wanted
from kvire.store.tier import TierKind
from kvire.store.tiered import TieredStore

PATIENCE_S = 60.0  # with a load, before it is known how long computing takes; the loader itself gives up dead tiers
QUEUED_S = 2.0  # with blocks of the call before that are still being written
EXPLAIN_S = 0.1  # what a report waits for the reason of a miss, after the answer was computed

_FAILURES = {FailureReason.DAMAGED: MissReason.DAMAGED, FailureReason.UNAVAILABLE: MissReason.UNAVAILABLE}


@dataclass(slots=True)
class Loaded:
    """stop: blocks of the prompt that are here. slabs: per group, [blocks, block bytes]. sources: where each came from.
    slower: they were left where they are.
    """

    chain: Chain
    slabs: list[Tensor]
    stop: int = 0
    sources: list[TierKind] = field(default_factory=list)
    slower: bool = False
    failure: Failure | None = None
    answer: Answer | None = None

    def report(self) -> CacheReport:
        """Where the prompt's tokens came from."""
        block_size, prompt = self.chain.block_size, len(self.chain.token_ids)
        tokens = dict.fromkeys(TierKind, 0)
        for kind in self.sources:
            tokens[kind] += block_size
        miss, miss_token, detail = self._miss(prompt)
        return CacheReport(
            device_tokens=0,
            memory_tokens=tokens[TierKind.MEMORY],
            disk_tokens=tokens[TierKind.DISK],
            remote_tokens=tokens[TierKind.REMOTE],
            computed_tokens=prompt - self.stop * block_size,
            miss=miss,
            miss_token=miss_token,
            miss_detail=detail,
        )

    def _miss(self, prompt: int) -> tuple[MissReason, int | None, str | None]:
        """Why, the first token that was computed for it, and what else there is to say."""
        begin, most = self.stop * self.chain.block_size, loadable(self.chain)
        if self.stop == most:
            return (MissReason.COMPLETE if most else MissReason.SHORTER_THAN_BLOCK), None, None
        if self.slower:
            return MissReason.SLOWER, begin, None
        if self.failure is not None and self.failure.reason in _FAILURES:
            return _FAILURES[self.failure.reason], begin, None
        found = self.answer.wait(EXPLAIN_S) if self.answer is not None else None
        if found is not None and found.shared_tokens:
            return MissReason.DIVERGED, min(begin + found.shared_tokens, prompt - 1), None
        if found is not None and found.reason not in {None, StoreMiss.NEVER_STORED}:
            return MissReason(str(found.reason)), begin, ", ".join(found.fields) or None
        return (MissReason.DIVERGED if self.stop else MissReason.NEVER_STORED), begin, None


def loadable(chain: Chain) -> int:
    """Full blocks of a prompt before its last token, which is always computed."""
    return (len(chain.token_ids) - 1) // chain.block_size


def load(
    store: TieredStore, layout: CacheLayout, chain: Chain, prefill: PrefillSpeed | None, queued: AbstractSet[BlockId]
) -> Loaded:
    """Load what is stored of a prompt, and wait for it, but no longer than computing it would take. prefill: how long
    that is; None for not known yet. queued: blocks that were saved lately, and may still be on their way.
    """
    most = loadable(chain)
    ids = chain.ids(most)
    tiers = dict(zip(ids, store.held(ids), strict=True))
    if any(tier is None and block in queued for block, tier in tiers.items()):
        store.flush(QUEUED_S)
        tiers = dict(zip(ids, store.held(ids), strict=True))
    remote = store.remote_speed()
    gone = {block for block, tier in tiers.items() if tier is None and remote is None}
    loaded = Loaded(chain, [])
    stop = _longest(layout, chain, most, gone)
    needed = _needed(layout, chain, stop)
    patience_s = PATIENCE_S if prefill is None else prefill.seconds(0, stop * chain.block_size)
    speeds = {block: remote if (name := tiers[block]) is None else store.speed(name) for _, block in needed}
    if prefill is not None and _seconds(layout, speeds) > patience_s:
        loaded.slower = True
    else:
        _fetch(store, layout, loaded, stop, gone, time.monotonic() + patience_s)
    if loaded.stop < most and not loaded.slower:
        loaded.answer = store.explain(_query(loaded))
    return loaded


def _fetch(
    store: TieredStore, layout: CacheLayout, loaded: Loaded, stop: int, gone: set[BlockId], deadline: float
) -> None:
    """Load blocks up to `stop`, or fewer as some turn out not to be there."""
    chain = loaded.chain
    loaded.slabs = [
        torch.empty((stop, layout.spec.block_bytes(group)), dtype=torch.uint8) for group in chain.groups
    ]  # rows of windows that are not needed are never touched, and take no memory
    ready: dict[BlockId, TierKind] = {}
    while stop := _longest(layout, chain, stop, gone):
        missing = [(index, block) for index, block in _needed(layout, chain, stop) if block not in ready]
        if not missing:
            break
        ticket = store.load(
            [
                Wanted(chain.record(index, block.group), loaded.slabs[block.group][index].numpy().data)
                for index, block in missing
            ]
        )
        if not ticket.wait(max(0.0, deadline - time.monotonic())):
            ticket.cancel()  # what is still being read goes to rows that nobody reads
            loaded.slower = True
        for number, state in enumerate(ticket.states()):
            _, block = missing[number]
            kind = ticket.source(number)
            if state is LoadState.READY and kind is not None:
                ready[block] = kind
            else:
                gone.add(block)
        failures = (ticket.failure(number) for number in range(len(missing)))
        loaded.failure = next((failure for failure in failures if failure is not None), loaded.failure)
    loaded.stop = stop
    kinds = {index: ready[block] for index, block in _needed(layout, chain, stop)}
    loaded.sources = [kinds.get(index, kinds[stop - 1]) for index in range(stop)]


def _longest(layout: CacheLayout, chain: Chain, stop: int, gone: set[BlockId]) -> int:
    """The most leading blocks, at most `stop`, after which every group can go on without those that are gone."""
    settled = False
    while not settled:  # a shorter extent moves the windows
        settled = True
        for group in chain.groups:
            indices = range(layout.first_needed(group, stop), stop)
            hole = next((index for index in indices if BlockId(chain.keys[index], group) in gone), None)
            if hole is not None:
                stop, settled = hole, False
    return stop


def _needed(layout: CacheLayout, chain: Chain, stop: int) -> list[tuple[int, BlockId]]:
    """What the state after `stop` blocks is made of, front first."""
    return [
        (index, BlockId(chain.keys[index], group))
        for index in range(stop)
        for group in chain.groups
        if index >= layout.first_needed(group, stop)
    ]


def _seconds(layout: CacheLayout, speeds: dict[BlockId, Speed | None]) -> float:
    """To load blocks one after the other, each at the speed of its tier."""
    known = {block: speed for block, speed in speeds.items() if speed is not None}
    latency_s = max((speed.latency_s for speed in known.values()), default=0.0)
    return latency_s + sum(layout.spec.block_bytes(block.group) / speed.bytes_per_s for block, speed in known.items())


def _query(loaded: Loaded) -> MissQuery:
    """About the first block that was not loaded."""
    chain, index = loaded.chain, loaded.stop
    record = chain.record(index, 0)
    later = tuple(chain.contents[index + 1 :])
    return MissQuery(
        record.parent, record.root, record.token_ids, record.tenant, 0, record.id, record.content, later, loaded.failure
    )
