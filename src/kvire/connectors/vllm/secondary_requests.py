"""The tier's view of vLLM's requests: the names of their blocks, and the choice to load.

vLLM names a block for its CPU tier by a hash of its own, which depends on an algorithm, a seed and
a process. Here it only identifies a block of a request; the name in the store is made of the
request's token ids.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import Any

from kvire.connectors.vllm.requests import exclusion
from kvire.core.record import BlockId, BlockRecord
from kvire.plan.cost import Choice, Way
from kvire.store.reuse.chain import Chain
from kvire.store.reuse.look import Found, Word
from kvire.store.reuse.planner import Reuse
from kvire.store.reuse.probe import Probe

log = logging.getLogger(__name__)

GROUP_BYTES = 4  # at the end of vLLM's OffloadKey, big-endian
ANSWER_S = 0.25  # validity of the tiers' answer about a request's blocks


@dataclass(slots=True)
class Known:
    """One request.

    first: the first block that is neither on the device nor in vLLM's CPU tier, as far as known.
    found: the tiers' answer from there on.
    looked_s: time of that answer.
    hoped: whether to ask remote tiers, decided once; None before.
    choice: whether to load the found blocks, decided once; None before.
    failed: blocks whose load failed, which are not asked for again.
    """

    chain: Chain
    first: int = 0
    found: Found | None = None
    looked_s: float = -inf
    hoped: Choice | None = None
    choice: Choice | None = None
    failed: set[BlockId] = field(default_factory=set)


class Requests:
    """For vLLM's scheduler thread only.

    reuse: parts are vLLM's groups, blocks those of its CPU tier.
    probe: asks remote tiers, if there are any.
    """

    def __init__(self, reuse: Reuse, probe: Probe | None) -> None:
        self._reuse = reuse
        self._probe = probe
        self._known: dict[str, Known] = {}
        self.counts: Counter[tuple[str, str]] = Counter()  # (counter, label) since it was last emptied

    def meet(self, request: Any) -> None:
        """A new request of vLLM's; one whose KV depends on more than token ids is not kept."""
        identity = self._reuse.name(cache_salt=request.cache_salt or "")
        reason = exclusion(request) or (None if identity.kept else "no_keys")
        if reason is not None:
            self.counts["excluded_requests", reason] += 1
            return
        self._known[request.request_id] = Known(Chain(identity, request.all_token_ids, self._reuse.block_size))

    def begins(self, request_id: str, device_tokens: int) -> None:
        """A request's blocks are about to be looked up, after the device's own."""
        if (known := self._known.get(request_id)) is not None:
            known.first = device_tokens // self._reuse.block_size

    def record(self, key: bytes, context: Any) -> BlockRecord | None:
        """The block of a key of vLLM's and its request; None if it is not ours."""
        known = self._known.get(context.req_id)
        end: int | None = context.get_offload_key_position(key)
        size = self._reuse.block_size
        if known is None or end is None or end % size:
            return None
        index = end // size - 1
        if index >= len(known.chain.extend()):
            return None
        group = int.from_bytes(key[-GROUP_BYTES:], "big")
        return known.chain.record(index, group, self._reuse.parts[group].size_bytes)

    def has(self, record: BlockRecord, request_id: str) -> bool | None:
        """Whether a block of a request is to be loaded; None: ask again later."""
        known = self._known[request_id]
        if record.id in known.failed:
            return False
        if known.found is None and self._reuse.parts[record.id.group].window is None:
            known.first = max(known.first, record.index)  # vLLM asks in order, and its CPU tier has those before
        found = self._look(known, request_id)
        if found is None:
            return False
        if found.word is Word.ASKING:
            return None
        return found.tier(record.index, record.id.group) is not None and self._is_worth_it(known, found)

    def patience_s(self, request_id: str) -> float:
        """The longest wait for a load of the request."""
        known = self._known.get(request_id)
        return inf if known is None or known.choice is None else known.choice.compute_s

    def failed(self, request_id: str, ids: Sequence[BlockId]) -> None:
        """Loads failed: the request treats these blocks as missing and continues."""
        known = self._known.get(request_id)
        if known is not None:
            known.failed.update(ids)

    def finished(self, request_id: str) -> None:
        """Forget a request; its blocks were used now."""
        known = self._known.pop(request_id, None)
        if self._probe is not None:
            self._probe.forget(request_id)
        if known is not None:
            if known.choice is None and known.hoped is not None:
                self._reuse.decided(known.hoped)
            self._reuse.finished(known.chain, len(known.chain.keys), keep=False)

    def reset(self) -> None:
        """Hide all blocks stored before, and keep none of the earlier requests'.

        The model may have other weights now.
        """
        for request_id in list(self._known):
            self.finished(request_id)
        self._reuse.names.reset()

    def _look(self, known: Known, request_id: str) -> Found | None:
        """The tiers' answer about a request's blocks, recent or new; None if they
        cannot be asked.
        """
        blocks, now = len(known.chain.keys), monotonic()
        found = known.found
        if found is None or blocks > len(found.rows) or known.looked_s < now - ANSWER_S:
            try:
                found = self._reuse.look(known.chain, known.first, start=0)
            except Exception:  # any error: in vLLM's scheduler it would end the engine
                log.exception("looking for stored blocks failed")
                return None
            known.found, known.looked_s = found, now
        if self._probe is not None and found.word is not Word.SURE:
            found = self._ask(known, request_id, found, self._probe)
            if found.word is Word.SURE:  # until the next look: vLLM asks block by block
                known.found = found
        return found

    def _ask(self, known: Known, request_id: str, found: Found, probe: Probe) -> Found:
        """Ask remote tiers, too, if a load of their possible blocks would be worth it."""
        if known.hoped is None:
            known.hoped = self._reuse.worth(self._reuse.hope(found), can_meet=False)
        if known.hoped.way is Way.COMPUTE:
            return self._reuse.heard(known.chain, found, {})
        return probe.ask(request_id, known.chain, found)

    def _is_worth_it(self, known: Known, found: Found) -> bool:
        """Whether to load a request's stored blocks; decided once, when some are found."""
        if found.is_empty:
            return True
        if known.choice is None:
            known.choice = self._reuse.worth(found, can_meet=False)
            self._reuse.decided(known.choice)
            if known.choice.way is Way.COMPUTE:
                self.counts["slower_tokens", ""] += (found.stop - found.first) * self._reuse.block_size
        return known.choice.way is not Way.COMPUTE
