"""The scheduler's side: the blocks to load for a prompt, and the blocks to keep.

Token ids and keys only.

Runs in vLLM's scheduler between two steps. Nothing here touches KV, and nothing waits for a tier:
local tiers answer from their index, remote ones are asked in the background (store/reuse/probe.py)
while vLLM repeats its question.
"""

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from time import monotonic
from typing import Any

from kvire.connectors.vllm.events import Announcer
from kvire.connectors.vllm.groups import Group
from kvire.connectors.vllm.messages import Facts, LoadOrder, Move, Outcome, StepPlan
from kvire.connectors.vllm.requests import Tracked, exclusion
from kvire.connectors.vllm.steps import Steps
from kvire.core.keys import BlockKey, Namespace
from kvire.core.record import BlockRecord
from kvire.core.tier_kind import TierKind
from kvire.plan.cost import Way
from kvire.store.explain import MissAnswer, StoreMiss
from kvire.store.reuse.look import Found, Part, Word, needed
from kvire.store.reuse.planner import Reuse
from kvire.store.reuse.probe import Probe
from kvire.store.tiered import TieredStore

log = logging.getLogger(__name__)

OFFERED_S = 5.0  # a block handed to the store is not handed over again for so long: it is being written
MOST_OFFERED = 1 << 16
MOST_FAILURES = 2  # failed loads after which a request is computed
MOST_ASKED = 256  # misses explained by the store at once; older ones are not counted
NULL_BLOCK = 0  # vLLM's id for "no block here", where a window has moved on


class SchedulerSide:
    """Bookkeeping for one engine.

    namespace: without salt.
    workers: their number; each keeps its share of a block.
    facts: of one worker's cache.
    probe_s: time for a remote tier's answer to a lookup.
    tells: whether added and removed blocks are announced as KV events.
    """

    def __init__(
        self, store: TieredStore, groups: Sequence[Group], block_size: int,
        *, namespace: Namespace, facts: Facts, workers: int = 1, probe_s: float = 0.5, tells: bool = False,
    ) -> None:  # fmt: skip
        self.announcer = Announcer(len(groups), on=tells)
        self._counts: Counter[tuple[str, str]] = Counter()  # (counter, label) since the last report
        self._shares = tuple(Part(size, group.window) for group, size in zip(groups, facts.block_bytes, strict=True))
        self._reuse = Reuse(store, namespace, self._shares * workers, block_size)
        self._block_size = block_size
        self._steps = Steps(self._reuse.prefill)
        self._kinds = {name: level.kind for name, level in store.stats().handles.items()}
        self._missed: deque[MissAnswer] = deque(maxlen=MOST_ASKED)
        self._probe = Probe(self._reuse, probe_s) if store.remote_speed() is not None else None
        self._tracked: dict[str, Tracked] = {}
        self._excluded: set[str] = set()
        self._loads: list[LoadOrder] = []
        self._used: list[BlockKey] = []
        self._offered: OrderedDict[BlockKey, float] = OrderedDict()

    def match(self, request: Any, num_computed_tokens: int) -> int | None:
        """Loadable tokens after the device's first `num_computed_tokens`; None: ask again.

        It changes nothing that a second call could notice. At least one token is left to compute.
        """
        tracked = self._track(request)
        if tracked is None:
            return 0
        tracked.found = tracked.choice = None
        tracked.chain.extend()
        limit = (request.num_tokens - 1) // self._block_size
        if tracked.barred is not None:
            limit = min(limit, tracked.barred)
        found = self._look(tracked, num_computed_tokens // self._block_size, limit)
        if found is None:
            return 0
        if found.word is Word.ASKING:
            return None
        tracked.found = found
        self.announcer.found(tracked, found.rows)
        if found.is_empty:
            return 0
        tracked.choice = self._reuse.worth(found, can_meet=False)
        return 0 if tracked.choice.way is Way.COMPUTE else self._tokens(found)

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], num_external_tokens: int) -> None:
        """The request has blocks now, into which `num_external_tokens` matched tokens are to be
        loaded.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        if not tracked.told:
            tracked.told = True
            self._tell(tracked)
        if num_external_tokens == 0:
            return
        found, choice = tracked.found, tracked.choice
        assert found is not None and choice is not None, "vLLM loads what it was told can be loaded"
        stop = min(found.stop, found.first + num_external_tokens // self._block_size)
        tracked.loading = True
        places = needed(self._shares, self._block_size, found.first, stop)
        moves = [
            Move(self._record(tracked, index, group), block_ids[group][index])
            for group in range(len(self._shares))
            for index, of in places
            if of == group
        ]
        self._loads.append(LoadOrder(request.request_id, moves, choice.compute_s))

    def sources(self, request: Any) -> dict[TierKind, int]:
        """Matched tokens by the kind of their tier."""
        tracked = self._tracked.get(request.request_id)
        kinds: Counter[TierKind] = Counter()
        for name, tokens in ({} if tracked is None else self._tokens_by_tier(tracked)).items():
            kinds[self._kinds[name]] += tokens
        return kinds

    def plan(self, scheduler_output: Any) -> StepPlan:
        """The workers' tasks in this step.

        Reads vLLM's SchedulerOutput, changes nothing in it.
        """
        plan = StepPlan(self._loads, [], self._used, scheduler_output.total_num_scheduled_tokens == 0)
        self._loads, self._used = [], []
        starts = {}
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            if tracked.loading:  # it is scheduled, so the load is over and succeeded
                tracked.loading = False
                for tier, tokens in self._tokens_by_tier(tracked).items():
                    self._counts["matched_tokens", tier] += tokens
            starts[request_id] = tracked.request.num_computed_tokens
            full = self._full_blocks(tracked, starts[request_id] + count)
            if full > tracked.done:
                block_ids = scheduler_output.kv_connector_block_state.get_block_ids(request_id)
                plan.saves += self._to_save(tracked, full, block_ids)
        plan.step = self._steps.planned(starts, scheduler_output.num_scheduled_tokens)
        return plan

    def stepped(self, outcome: Outcome | None) -> None:
        """The workers did a step."""
        self._steps.ended(None if outcome is None else outcome.step)
        if outcome is None:
            return
        self._reuse.measured(outcome.speeds)
        self.announcer.saved(outcome.saved)
        for request_id, index in outcome.failed.items():
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            tracked.loading = False
            tracked.failures += 1
            is_late = request_id in outcome.late
            tracked.barred = 0 if is_late or tracked.failures >= MOST_FAILURES else index
            if not is_late:
                self.announcer.gone(tracked.chain.keys[index])

    def finished(self, request: Any) -> None:
        """The request is over; vLLM may reuse its blocks after this call."""
        self._excluded.discard(request.request_id)
        if self._probe is not None:
            self._probe.forget(request.request_id)
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is not None:
            self._used += tracked.chain.keys[: tracked.done]

    def reset(self) -> None:
        """Hide all blocks stored before: the model may have other weights now."""
        self._reuse.names.reset()
        self._tracked.clear()
        self._offered.clear()
        self.announcer.clear()

    def take_counts(self) -> Counter[tuple[str, str]]:
        """(counter, label) counted since the last call."""
        counts, self._counts = self._counts, Counter()
        for _ in range(len(self._missed)):
            answer = self._missed.popleft()
            if (explanation := answer.poll()) is None:
                self._missed.append(answer)
            elif explanation.reason is StoreMiss.OTHER_NAMESPACE:
                counts["foreign_requests", ",".join(explanation.fields) or "unknown"] += 1
        return counts

    def close(self) -> None:
        """End background work."""
        if self._probe is not None:
            self._probe.close()

    def _track(self, request: Any) -> Tracked | None:
        if request.request_id in self._excluded:
            return None
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            identity = self._reuse.name(cache_salt=request.cache_salt or "")
            why = exclusion(request) or (None if identity.kept else "no_keys")
            if why is not None:
                self._excluded.add(request.request_id)
                self._counts["excluded_requests", why] += 1
                return None
            tracked = self._tracked[request.request_id] = Tracked(request, identity, self._block_size)
        return tracked

    def _look(self, tracked: Tracked, first: int, limit: int) -> Found | None:
        """The tiers' result for all named blocks; None if they cannot be asked.

        Remote tiers are asked if a load of their possible blocks would be worth it (the choice).
        """
        try:
            found = self._reuse.look(tracked.chain, first, limit, start=0)
        except Exception:  # any error: in vLLM's scheduler it would end the engine
            log.exception("looking for stored blocks failed")
            return None
        if self._probe is None or found.word is Word.SURE:
            return found
        tracked.choice = self._reuse.worth(self._reuse.hope(found), can_meet=False)
        if tracked.choice.way is Way.COMPUTE:
            return self._reuse.heard(tracked.chain, found, {})
        return self._probe.ask(tracked.request.request_id, tracked.chain, found)

    def _tell(self, tracked: Tracked) -> None:
        """Count a request's lookup, and ask the store about the first block that it missed."""
        request, found, choice = tracked.request, tracked.found, tracked.choice
        self._counts["looked_up_tokens", ""] += request.num_tokens
        if choice is not None:
            self._reuse.decided(choice)
        if found is None:
            return
        if choice is not None and choice.way is Way.COMPUTE:
            self._counts["slower_tokens", ""] += self._tokens(found)
        missed = next((index for index in range(found.stop, found.limit) if not found.whole(index)), None)
        if missed is not None and (answer := self._reuse.why(tracked.chain, missed, request.num_tokens)) is not None:
            self._missed.append(answer)

    def _tokens(self, found: Found) -> int:
        """Tokens that a load of it brings."""
        return (found.stop - found.first) * self._block_size

    def _tokens_by_tier(self, tracked: Tracked) -> dict[str, int]:
        """Matched tokens by the tiers' names."""
        if tracked.found is None or tracked.choice is None or tracked.choice.way is Way.COMPUTE:
            return {}
        return {name: count * self._block_size for name, count in tracked.found.blocks_by_tier().items()}

    def _record(self, tracked: Tracked, index: int, group: int) -> BlockRecord:
        return tracked.chain.record(index, group, self._shares[group].size_bytes)

    def _full_blocks(self, tracked: Tracked, stop_tokens: int) -> int:
        """Blocks that are complete after a step that computes up to `stop_tokens`.

        Tokens past the request's own do not count: drafts, whose KV is overwritten if they are
        rejected, and tokens unknown to vLLM when it schedules ahead.
        """
        return min(stop_tokens, int(tracked.request.num_tokens)) // self._block_size

    def _to_save(self, tracked: Tracked, full: int, block_ids: Sequence[Sequence[int]]) -> list[Move]:
        """Blocks up to `full` that the store lacks, and was not offered lately."""
        keys = tracked.chain.extend()
        now = monotonic()
        moves = []
        for index in range(tracked.done, full):
            if tracked.is_stored(index) or now - self._offered.get(keys[index], -OFFERED_S) < OFFERED_S:
                continue
            self._offered[keys[index]] = now
            self._offered.move_to_end(keys[index])  # the oldest are forgotten first
            here = [group for group, table in enumerate(block_ids) if table[index] != NULL_BLOCK]
            self.announcer.offered(tracked, index, here)
            moves += [Move(self._record(tracked, index, group), block_ids[group][index]) for group in here]
        while len(self._offered) > MOST_OFFERED:
            self._offered.popitem(last=False)
        tracked.done = full
        return moves
