"""What the tier knows of vLLM's requests: the names of their blocks, and which of them are worth a
load.

vLLM names a block for its CPU tier by a hash of its own, which depends on an algorithm, a seed and
a process. That hash only says here which block of which request is meant; the name in the store is
made of the request's token ids.
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
ANSWER_S = 0.25  # what the tiers said of a request's blocks is believed for so long


@dataclass(slots=True)
class Known:
    """One request.

    first: the first block that vLLM has neither on the device nor in its CPU tier, as far as it
        said.
    found: what tiers hold from there on, and looked_s: when they said so.
    hoped: whether to ask remote tiers; None while there was no need. Decided once.
    choice: whether to load what was found; None while nothing was. Decided once.
    failed: blocks that could not be loaded, so that they are not asked for again.
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
        self.counts: Counter[tuple[str, str]] = Counter()  # (what, label) since it was last emptied

    def meet(self, request: Any) -> None:
        """A new request of vLLM's; what depends on more than its token ids is not kept."""
        identity = self._reuse.name(cache_salt=request.cache_salt or "")
        reason = exclusion(request) or (None if identity.kept else "no_keys")
        if reason is not None:
            self.counts["excluded_requests", reason] += 1
            return
        self._known[request.request_id] = Known(Chain(identity, request.all_token_ids, self._reuse.block_size))

    def begins(self, request_id: str, device_tokens: int) -> None:
        """Blocks of a request are about to be looked for, after those that the device has."""
        if (known := self._known.get(request_id)) is not None:
            known.first = device_tokens // self._reuse.block_size

    def record(self, key: bytes, context: Any) -> BlockRecord | None:
        """The block that vLLM means by a key and the request it asks for; None if it is none of
        ours.
        """
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
        """Whether a block of a request is to be loaded, as far as is known; None: ask
        again later.
        """
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
        """The longest that a load for the request is waited for."""
        known = self._known.get(request_id)
        return inf if known is None or known.choice is None else known.choice.compute_s

    def failed(self, request_id: str, ids: Sequence[BlockId]) -> None:
        """Blocks could not be loaded for a request: for this one they are not there, so that it
        goes on without.
        """
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
        """From now on nothing that was stored before is found, and nothing kept of requests that
        began before: the model may have other weights now.
        """
        for request_id in list(self._known):
            self.finished(request_id)
        self._reuse.names.reset()

    def _look(self, known: Known, request_id: str) -> Found | None:
        """What tiers hold of a request's blocks, lately or now; None if they cannot be asked."""
        blocks, now = len(known.chain.keys), monotonic()
        found = known.found
        if found is None or blocks > len(found.rows) or known.looked_s < now - ANSWER_S:
            try:
                found = self._reuse.look(known.chain, known.first, start=0)
            except Exception:  # whatever it is: it must not come up in vLLM's scheduler, which would end the engine
                log.exception("looking for stored blocks failed")
                return None
            known.found, known.looked_s = found, now
        if self._probe is not None and found.word is not Word.SURE:
            found = self._ask(known, request_id, found, self._probe)
            if found.word is Word.SURE:  # until the next look: vLLM asks block by block
                known.found = found
        return found

    def _ask(self, known: Known, request_id: str, found: Found, probe: Probe) -> Found:
        """Remote tiers too, if what they may have would be worth a load."""
        if known.hoped is None:
            known.hoped = self._reuse.worth(self._reuse.hope(found), can_meet=False)
        if known.hoped.way is Way.COMPUTE:
            return self._reuse.heard(known.chain, found, {})
        return probe.ask(request_id, known.chain, found)

    def _is_worth_it(self, known: Known, found: Found) -> bool:
        """Whether to load what is stored of a request; decided when some of it is found, and then
        it stays so.
        """
        if found.is_empty:
            return True
        if known.choice is None:
            known.choice = self._reuse.worth(found, can_meet=False)
            self._reuse.decided(known.choice)
            if known.choice.way is Way.COMPUTE:
                self.counts["slower_tokens", ""] += (found.stop - found.first) * self._reuse.block_size
        return known.choice.way is not Way.COMPUTE
