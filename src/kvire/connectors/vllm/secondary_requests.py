"""What the tier knows of vLLM's requests: the names of their blocks, and which of them the store has.

vLLM names a block for its CPU tier by a hash of its own, which depends on an algorithm, a seed and a process. That hash
only says here which block of which request is meant; the name in the store is made of the request's token ids.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, NamedTuple

from kvire.connectors.vllm.remote import RemoteProbe
from kvire.connectors.vllm.requests import Roots, Tracked, exclusion
from kvire.core.keys import Namespace
from kvire.core.record import BlockId, BlockRecord
from kvire.store.tiered import TieredStore

log = logging.getLogger(__name__)

GROUP_BYTES = 4  # at the end of vLLM's OffloadKey, big-endian
ANSWER_S = 0.25  # what the local tiers said of a request's blocks is believed for so long


class Held(NamedTuple):
    """What the local tiers said at `at` of a group's blocks: whether each is there, and those that are not."""

    at: float
    here: list[bool]
    missing: list[BlockId]


@dataclass(slots=True)
class Known:
    """One request. held: by group. failed: blocks that could not be loaded, so that they are not asked for again."""

    tracked: Tracked
    held: dict[int, Held] = field(default_factory=dict)
    failed: set[BlockId] = field(default_factory=set)


class Requests:
    """For vLLM's scheduler thread only. groups: how many vLLM has. chunk_tokens: in one block of its CPU tier.
    row_bytes: of that. probe: asks remote tiers, if there are any.
    """

    def __init__(
        self, store: TieredStore, namespace: Namespace, *, groups: int, chunk_tokens: int, row_bytes: int,
        probe: RemoteProbe | None,
    ) -> None:  # fmt: skip
        self._store = store
        self._groups = groups
        self._chunk_tokens = chunk_tokens
        self._row_bytes = row_bytes
        self._probe = probe
        self._known: dict[str, Known] = {}
        self._roots = Roots(store, namespace)
        self.excluded: Counter[str] = Counter()  # reason -> requests since it was last emptied

    def meet(self, request: Any) -> None:
        """A new request of vLLM's; what depends on more than its token ids is not kept."""
        reason = exclusion(request)
        identity = self._roots.of(request.cache_salt) if reason is None else None
        if identity is None:
            self.excluded[reason or "no_keys"] += 1
            return
        self._known[request.request_id] = Known(Tracked(request, *identity, self._chunk_tokens))

    def record(self, key: bytes, context: Any) -> BlockRecord | None:
        """The block that vLLM means by a key and the request it asks for; None if it is none of ours."""
        known = self._known.get(context.req_id)
        end: int | None = context.get_offload_key_position(key)
        if known is None or end is None or end % self._chunk_tokens:
            return None
        known.tracked.extend()
        index = end // self._chunk_tokens - 1
        if index >= len(known.tracked.blocks):
            return None
        return known.tracked.blocks[index].record(int.from_bytes(key[-GROUP_BYTES:], "big"), self._row_bytes)

    def has(self, record: BlockRecord, request_id: str) -> bool | None:
        """Whether the store has a block of a request, as far as is known; None: ask again later."""
        known = self._known[request_id]
        if record.id in known.failed:
            return False
        group = record.id.group
        held = known.held.get(group)
        if held is None or record.index >= len(held.here) or held.at < monotonic() - ANSWER_S:
            ids = [BlockId(block.key, group) for block in known.tracked.blocks]
            here = [name is not None for name in self._store.held(ids)]
            missing = [block_id for block_id, is_here in zip(ids, here, strict=True) if not is_here]
            held = known.held[group] = Held(monotonic(), here, missing)
        if held.here[record.index]:
            return True
        if self._probe is None:
            return False
        found = self._probe.ask(f"{request_id}/{group}", held.missing)
        return None if found is None else record.id in found

    def failed(self, request_id: str, ids: Sequence[BlockId]) -> None:
        """Blocks could not be loaded for a request: for this one they are not there, so that it goes on without."""
        known = self._known.get(request_id)
        if known is not None:
            known.failed.update(ids)

    def finished(self, request_id: str) -> list[BlockId]:
        """Forget a request; its blocks, which were used now, in order."""
        known = self._known.pop(request_id, None)
        if known is None:
            return []
        if self._probe is not None:
            for group in known.held:
                self._probe.forget(f"{request_id}/{group}")
        return [BlockId(block.key, group) for block in known.tracked.blocks for group in range(self._groups)]

    def reset(self) -> None:
        """From now on nothing that was stored before is found, and nothing kept of requests that began before: the
        model may have other weights now.
        """
        for request_id in list(self._known):
            self.finished(request_id)
        self._roots.reset()
