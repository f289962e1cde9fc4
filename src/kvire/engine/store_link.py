"""The engine's side of the store: names its blocks, hands over what was computed, asks for what is stored.

Everything here runs on the engine's thread between two steps, and none of it waits for a tier.
"""

import logging
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from hashlib import sha256
from secrets import token_hex

from kvire.cache.grouped import GroupedLease, GroupedPool
from kvire.cache.paged import PagedKV
from kvire.core.errors import StoreError
from kvire.core.keys import BlockKey, Namespace
from kvire.core.record import BlockId, BlockRecord
from kvire.engine.loading import Load
from kvire.engine.sequence import Sequence
from kvire.plan.cost import Choice, PrefillSpeed, Speed, Way, choose
from kvire.store.explain import Answer, MissQuery
from kvire.store.ticket import Wanted
from kvire.store.tiered import TieredStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stored:
    """What tiers hold of a prompt beyond the device.

    blocks: (index, group) of those to load, ascending. known: index after the last that is certainly there. stop: index
    after the last; a remote tier has still to say which it has from `known` on. speed: at which they come, all tiers
    together.
    """

    blocks: list[tuple[int, int]]
    known: int
    stop: int
    speed: Speed
    size_bytes: int


class StoreLink:
    """One engine's connection to an open TieredStore."""

    def __init__(self, store: TieredStore, paged: PagedKV, pool: GroupedPool, namespace: Namespace) -> None:
        self.store = store
        self.paged = paged
        self.pool = pool
        self.namespace = namespace
        self._roots: dict[tuple[str, str], tuple[str, BlockKey]] = {}

    def identity(self, tenant: str, cache_salt: str) -> tuple[str, BlockKey]:
        """(salt, root) of a tenant's blocks; a cache_salt separates within the tenant."""
        try:
            salt = self.store.tenant(tenant).salt
        except (StoreError, OSError) as error:  # nothing of this tenant can be kept then, but it can be served
            log.warning("no keys for a tenant: %s", error)
            salt = self._roots[tenant, ""][0] if (tenant, "") in self._roots else f"unkept/{token_hex(16)}"
        if cache_salt:
            salt += "/" + sha256(cache_salt.encode("utf-8")).hexdigest()
        known = self._roots.get((tenant, cache_salt))
        if known is None or known[0] != salt:
            namespace = self.namespace.with_salt(salt)
            self.store.note_namespace(namespace.root, namespace.public_fields())
            known = self._roots[tenant, cache_salt] = (salt, namespace.root)
        return known

    def stored(self, keys: SequenceOf[BlockKey], full: int) -> Stored | None:
        """What can be loaded of the blocks with `keys`, after the first `full`; None for nothing."""
        ids = [BlockId(key, group) for key in keys[full:] for group in range(len(self.paged.slabs))]
        tiers = dict(zip(ids, self.store.held(ids), strict=True))
        known = self._local_stop(keys, full, tiers)
        remote = self.store.remote_speed()
        if self.pool.has_windows and known > full:  # all or nothing: what is certain is not staked on what may be there
            remote = None
        stop = known if remote is None else len(keys)
        blocks = [
            (index, group)
            for index in range(full, stop)
            for group in range(len(self.paged.slabs))
            if index >= self.pool.first_needed(group, stop * self.pool.block_size)
        ]
        if not blocks:
            return None
        latency_s = seconds = 0.0
        size_bytes = 0
        for index, group in blocks:
            name = tiers[BlockId(keys[index], group)]
            speed = remote if name is None else self.store.speed(name)
            assert speed is not None, "what no local tier has is asked of a remote one"
            block_bytes = self.paged.spec.block_bytes(group)
            latency_s = max(latency_s, speed.latency_s)
            seconds += block_bytes / speed.bytes_per_s
            size_bytes += block_bytes
        return Stored(blocks, known, stop, Speed(latency_s, size_bytes / seconds), size_bytes)

    def _local_stop(self, keys: SequenceOf[BlockKey], full: int, tiers: dict[BlockId, str | None]) -> int:
        """The most leading blocks of `keys` after which every group can go on, with the device's first `full`."""
        stop = len(keys)
        groups = range(len(self.paged.slabs))
        settled = False
        while not settled:  # a shorter extent moves the windows
            settled = True
            for group in groups:
                first = max(full, self.pool.first_needed(group, stop * self.pool.block_size))
                hole = next((i for i in range(first, stop) if tiers[BlockId(keys[i], group)] is None), None)
                if hole is not None:
                    stop, settled = hole, False
        return max(stop, full)

    def choice(self, stored: Stored, prefill: PrefillSpeed, start_tokens: int) -> Choice:
        """Whether to load what is stored, to compute it, or both at once."""
        stop_tokens = stored.stop * self.pool.block_size
        return choose(stored.speed, prefill, start_tokens, stop_tokens, stored.size_bytes)

    def copy(self, copies: list[tuple[int, int, int]]) -> None:
        """Make copies (group, source, target) of blocks now that were due before the next step; empties the list."""
        for group, source, target in copies:
            self.paged.copy_block(group, source, target)
        copies.clear()

    def start(self, seq: Sequence, lease: GroupedLease, stored: Stored, way: Way) -> Load:
        """Begin to load into the blocks of `lease`."""
        contents = seq.block_contents(stored.stop)
        wanted = [
            Wanted(self._record(seq, index, group, contents[index]), self._memory(lease, index, group))
            for index, group in stored.blocks
        ]
        ticket = self.store.load(wanted, from_the_back=way is Way.BOTH)
        whole = self.pool.has_windows
        return Load(ticket, stored.blocks, stored.known, stored.stop, stored.speed, all_or_nothing=whole)

    def save(self, seq: Sequence, lease: GroupedLease, indices: Iterable[int]) -> None:
        """Hand over blocks that were computed."""
        indices = list(indices)
        if not indices or not seq.request.store:
            return
        contents = seq.block_contents(indices[-1] + 1)
        for index in indices:
            for group in range(len(self.paged.slabs)):
                record = self._record(seq, index, group, contents[index])
                self.store.save(record, self._memory(lease, index, group))

    def used(self, seq: Sequence, *, finished: bool) -> None:
        """A sequence with these published blocks leaves; only one that finished says that they are worth keeping."""
        ids = [BlockId(key, group) for key in seq.keys[: seq.num_published] for group in range(len(self.paged.slabs))]
        if not ids or not finished:
            return
        self.store.touch(ids)
        if seq.request.store:
            self.store.end_of_turn(ids)

    def discard(self, keys: Iterable[BlockKey]) -> None:
        """Nobody may meet these blocks."""
        self.store.discard([BlockId(key, group) for key in keys for group in range(len(self.paged.slabs))])

    def explain(self, seq: Sequence, index: int) -> Answer:
        """Ask why block `index` of a prompt is stored nowhere, and how far the closest stored prompt agrees."""
        block_size = self.pool.block_size
        start, stop = index * block_size, min((index + 1) * block_size, seq.num_prompt)
        whole = stop - start == block_size
        contents = seq.block_contents(seq.num_prompt // block_size)
        return self.store.explain(
            MissQuery(
                parent=seq.parent_of(index),
                root=seq.root,
                token_ids=tuple(seq.token_ids[start:stop]),
                tenant=seq.request.tenant,
                id=BlockId(seq.keys[index], 0) if whole else None,
                content=contents[index] if whole else None,
                later=tuple(contents[index + 1 : seq.num_prompt // block_size]),
            )
        )

    def _record(self, seq: Sequence, index: int, group: int, content: bytes) -> BlockRecord:
        return BlockRecord(
            id=BlockId(seq.keys[index], group),
            parent=seq.parent_of(index),
            root=seq.root,
            index=index,
            token_ids=tuple(seq.block_tokens(index)),
            kv_bytes=self.paged.spec.block_bytes(group),
            content=content,
            tenant=seq.request.tenant,
        )

    def _memory(self, lease: GroupedLease, index: int, group: int) -> memoryview:
        block = lease.leases[group].blocks[index]
        assert block is not None
        return self.paged.memory(group, block.id)
