"""The scheduler's side: what of a prompt can be loaded, and which blocks are to be kept. Token ids and keys only.

Runs in vLLM's scheduler between two steps. Nothing here touches KV, and nothing waits for a tier: local tiers answer
from their index, remote ones are asked beside (remote.py) while the request is asked about again.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Sequence
from time import monotonic
from typing import Any

from kvire.connectors.vllm.events import Announcer
from kvire.connectors.vllm.groups import Group
from kvire.connectors.vllm.messages import Facts, Load, Move, Outcome, Plan
from kvire.connectors.vllm.misses import ForeignBlocks
from kvire.connectors.vllm.pace import Pace
from kvire.connectors.vllm.remote import RemoteProbe
from kvire.connectors.vllm.requests import Roots, Tracked, exclusion
from kvire.core.keys import BlockKey, Namespace
from kvire.core.record import BlockId
from kvire.plan.cost import Speed
from kvire.store.tier import TierKind
from kvire.store.tiered import TieredStore

log = logging.getLogger(__name__)

OFFERED_S = 5.0  # a block handed to the store is not handed over again for so long: it is on its way
MOST_OFFERED = 1 << 16
MOST_FAILURES = 2  # loads of one request that may fail; then it is computed
NULL_BLOCK = 0  # vLLM's id for "no block here", where a window has moved on


class SchedulerSide:
    """Bookkeeping for one engine. namespace: without salt. parts: workers that each keep their share of a block, and
    facts: what one of them says of its cache. probe_s: how long remote tiers have to say what they hold. tells: of
    blocks that come and go, for KV events.
    """

    def __init__(
        self, store: TieredStore, groups: Sequence[Group], block_size: int,
        *, namespace: Namespace, facts: Facts, parts: int = 1, probe_s: float = 0.5, tells: bool = False,
    ) -> None:  # fmt: skip
        self.store = store
        self.announcer = Announcer(len(groups), on=tells)
        self._counts: Counter[tuple[str, str]] = Counter()  # (what, label) since the last report
        self._groups = groups
        self._block_size = block_size
        self._facts = facts
        self._parts = [part * len(groups) + group for part in range(parts) for group in range(len(groups))]
        self._workers = parts
        self._pace = Pace(lambda tier: Speed(*store.speed(tier)))
        self._kinds = {name: level.kind for name, level in store.stats().levels.items()}
        self._foreign = ForeignBlocks(store)
        self._probe = RemoteProbe(store, probe_s) if store.remote_speed() is not None else None
        self._tracked: dict[str, Tracked] = {}
        self._excluded: set[str] = set()
        self._roots = Roots(store, namespace)
        self._loads: list[Load] = []
        self._used: list[BlockKey] = []
        self._offered: OrderedDict[BlockKey, float] = OrderedDict()

    def match(self, request: Any, num_computed_tokens: int) -> int | None:
        """Tokens that can be loaded after the first `num_computed_tokens`, which the device has; None: ask again.

        Changes nothing that a second call could notice. At least one token is left to compute.
        """
        tracked = self._track(request)
        if tracked is None:
            return 0
        tracked.extend()
        tracked.match = None
        first = num_computed_tokens // self._block_size
        limit = (request.num_tokens - 1) // self._block_size
        tiers = self._held([block.key for block in tracked.blocks])
        if self._probe is not None and first < limit and not self._add_remote(tracked, tiers, limit):
            return None
        tracked.stored = [all(name is not None for name in names) for names in tiers]
        self.announcer.found(tracked, tiers)
        if tracked.barred is not None:
            limit = min(limit, tracked.barred)
        stop = self._stop(tiers, first, limit)
        tracked.slower_tokens = 0
        if stop > first and not self._is_worth_it(tiers, first, stop):
            tracked.slower_tokens, stop = (stop - first) * self._block_size, first
        if stop > first:
            nearest = next(name for name in tiers[stop - 1] if name is not None)  # for blocks that no window needs
            by_tier = Counter(next(filter(None, names), nearest) for names in tiers[first:stop])
            tracked.match = first, stop, {tier: n * self._block_size for tier, n in by_tier.items()}
            return (stop - first) * self._block_size
        return 0

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], num_external_tokens: int) -> None:
        """The request has blocks now, and vLLM wants `num_external_tokens` of what was matched loaded into them."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        if not tracked.told:
            tracked.told = True
            self._counts["looked_up_tokens", ""] += request.num_tokens
            self._foreign.ask(tracked, (request.num_tokens - 1) // self._block_size)
            if tracked.slower_tokens:
                self._counts["slower_tokens", ""] += tracked.slower_tokens
                self._pace.refused()
        if num_external_tokens == 0:
            return
        assert tracked.match is not None, "vLLM loads what it was told can be loaded"
        first, stop, _ = tracked.match
        stop = min(stop, first + num_external_tokens // self._block_size)
        tracked.loading = True
        self._pace.loaded()
        moves = [
            Move(tracked.blocks[index], number, block_ids[number][index])
            for number, group in enumerate(self._groups)
            for index in range(max(first, group.first_needed(stop * self._block_size, self._block_size)), stop)
        ]
        self._loads.append(Load(request.request_id, moves))

    def sources(self, request: Any) -> dict[TierKind, int]:
        """Tokens of what was matched by the kind of tier that has them."""
        tracked = self._tracked.get(request.request_id)
        found: Counter[TierKind] = Counter()
        if tracked is not None and tracked.match is not None:
            for name, tokens in tracked.match[2].items():
                found[self._kinds[name]] += tokens
        return found

    def plan(self, scheduler_output: Any) -> Plan:
        """What the workers have to do in this step. Reads vLLM's SchedulerOutput, changes nothing in it."""
        plan = Plan(self._loads, [], self._used, scheduler_output.total_num_scheduled_tokens == 0)
        self._loads, self._used = [], []
        starts = {}
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            if tracked.loading and tracked.match is not None:  # it is scheduled, so the load is over, and went well
                tracked.loading = False
                for tier, tokens in tracked.match[2].items():
                    self._counts["matched_tokens", tier] += tokens
            starts[request_id] = tracked.request.num_computed_tokens
            full = self._full_blocks(tracked, starts[request_id] + count)
            if full > tracked.done:
                block_ids = scheduler_output.kv_connector_block_state.get_block_ids(request_id)
                plan.saves += self._to_save(tracked, full, block_ids)
        self._pace.step_begins(starts, scheduler_output.num_scheduled_tokens)
        return plan

    def stepped(self, outcome: Outcome | None) -> None:
        """The workers did a step."""
        self._pace.step_ended()
        if outcome is None:
            return
        self._pace.read(outcome.speeds)
        self.announcer.saved(outcome.saved)
        for request_id, index in outcome.failed.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                tracked.loading = False
                tracked.failures += 1
                tracked.barred = index if tracked.failures < MOST_FAILURES else 0
                self.announcer.gone(tracked.blocks[index].key)

    def finished(self, request: Any) -> None:
        """The request is over; its blocks may be gone after this call."""
        self._excluded.discard(request.request_id)
        if self._probe is not None:
            self._probe.forget(request.request_id)
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is not None:
            self._used += [block.key for block in tracked.blocks[: tracked.done]]

    def reset(self) -> None:
        """From now on nothing that was stored before is found: the model may have other weights now."""
        self._roots.reset()
        self._tracked.clear()
        self._offered.clear()
        self.announcer.clear()

    def take_counts(self) -> Counter[tuple[str, str]]:
        """(what, label) counted since the last call."""
        counts, self._counts = self._counts, Counter()
        for fields in self._foreign.told():
            counts["foreign_requests", fields] += 1
        return counts

    def close(self) -> None:
        """End what runs beside."""
        if self._probe is not None:
            self._probe.close()

    def _track(self, request: Any) -> Tracked | None:
        if request.request_id in self._excluded:
            return None
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            why = exclusion(request)
            identity = self._roots.of(request.cache_salt) if why is None else None
            if identity is None:
                self._excluded.add(request.request_id)
                self._counts["excluded_requests", why or "no_keys"] += 1
                return None
            tracked = self._tracked[request.request_id] = Tracked(request, *identity, self._block_size)
        return tracked

    def _held(self, keys: Sequence[BlockKey]) -> list[list[str | None]]:
        """For each key the local tier that has each part of the block."""
        width = len(self._parts)
        ids = [BlockId(key, part) for key in keys for part in self._parts]
        try:
            flat = self.store.held(ids)
        except Exception:  # whatever it is, vLLM's core must not end by it: nothing is there
            log.exception("looking up blocks failed")
            flat = [None] * len(ids)
        return [flat[start : start + width] for start in range(0, len(flat), width)]

    def _add_remote(self, tracked: Tracked, tiers: Sequence[list[str | None]], limit: int) -> bool:
        """Add what remote tiers have after the first block that is not here; False while that is not known."""
        hole = next((index for index in range(limit) if None in tiers[index]), limit)
        ids = [
            BlockId(tracked.blocks[index].key, part)
            for index in range(hole, limit)
            for part, name in zip(self._parts, tiers[index], strict=True)
            if name is None
        ]
        found = self._probe.ask(tracked.request.request_id, ids) if self._probe is not None else {}
        if found is None:
            return False
        for block, names in zip(tracked.blocks, tiers, strict=True):
            names[:] = [
                name or found.get(BlockId(block.key, part)) for part, name in zip(self._parts, names, strict=True)
            ]
        return True

    def _stop(self, tiers: Sequence[Sequence[str | None]], first: int, limit: int) -> int:
        """The most leading blocks after which every group can go on, given the device's first `first`."""
        stop, settled = max(first, limit), False
        while not settled:  # a shorter extent moves the windows
            settled = True
            for number, group in enumerate(self._groups):
                begin = max(first, group.first_needed(stop * self._block_size, self._block_size))
                parts = range(number, len(self._parts), len(self._groups))
                hole = next((i for i in range(begin, stop) if any(tiers[i][part] is None for part in parts)), None)
                if hole is not None:
                    stop, settled = hole, False
        return stop

    def _is_worth_it(self, tiers: Sequence[Sequence[str | None]], first: int, stop: int) -> bool:
        """Whether loading these blocks is faster than computing them."""
        sizes: Counter[str] = Counter()
        for names in tiers[first:stop]:
            for name, size in zip(names, self._facts.block_bytes * self._workers, strict=True):
                sizes[name or ""] += size
        sizes.pop("", None)  # outside a window: not loaded
        return self._pace.is_worth_loading(first * self._block_size, stop * self._block_size, sizes)

    def _full_blocks(self, tracked: Tracked, stop_tokens: int) -> int:
        """Blocks that are complete after a step that computes up to `stop_tokens`.

        What is beyond the request's tokens does not count: drafts, whose KV is overwritten if they are rejected, and
        tokens that vLLM has not seen itself when it schedules ahead.
        """
        return min(stop_tokens, int(tracked.request.num_tokens)) // self._block_size

    def _to_save(self, tracked: Tracked, full: int, block_ids: Sequence[Sequence[int]]) -> list[Move]:
        """Blocks up to `full` that the store has not, and was not offered lately."""
        tracked.extend()
        now = monotonic()
        moves = []
        for block in tracked.blocks[tracked.done : full]:
            if block.index < len(tracked.stored) and tracked.stored[block.index]:
                continue
            if now - self._offered.get(block.key, -OFFERED_S) < OFFERED_S:
                continue
            self._offered[block.key] = now
            self._offered.move_to_end(block.key)  # the oldest are forgotten first
            here = [group for group, table in enumerate(block_ids) if table[block.index] != NULL_BLOCK]
            self.announcer.offered(tracked, block, here)
            moves += [Move(block, group, block_ids[group][block.index]) for group in here]
        while len(self._offered) > MOST_OFFERED:
            self._offered.popitem(last=False)
        tracked.done = full
        return moves
