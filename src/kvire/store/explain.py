"""Explanations of misses, worked out beside the engine, for people.

They concern the asking tenant's own data only.
"""

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, Self, runtime_checkable

from kvire.codec.frame import prefix_bytes
from kvire.core.errors import BlockMissing, FrameDamaged, FrameForeign, StoreError, TierUnavailable
from kvire.core.keys import BlockKey
from kvire.core.record import BlockId, BlockRecord
from kvire.store.handle import TierHandle
from kvire.store.ticket import FailureReason, LoadFailure
from kvire.store.tier import Buffer

COMPARED_CONTENTS = 64  # blocks may be this many times larger under another namespace
COMPARED_CHILDREN = 16  # of a parent, the newest ones: the likeliest relatives of the missed block
REMEMBERED_IDS = 1 << 16  # stored once, to tell "evicted" from "never stored"
REMEMBERED_NAMESPACES = 1024  # clients' cache_salts make as many as they like; the tiers keep the last few for longer
QUEUED_QUERIES = 256
HEAD_BYTES = prefix_bytes(1024)  # of a frame: up to the end of its token ids, in the largest blocks there are
HIDDEN_FIELDS = frozenset({"salt"})  # of a namespace: its owner, not its content

log = logging.getLogger(__name__)


@runtime_checkable
class Related(Protocol):
    """A tier that finds blocks related to another one. All methods raise TierUnavailable."""

    def children(self, parent: BlockKey, group: int, limit: int) -> list[BlockId]:
        """The newest blocks below `parent` (a block's key or a root), at most `limit`."""

    def roots_of(self, content: bytes) -> list[BlockKey]:
        """Namespaces under which the same tokens (BlockRecord.content) are stored."""

    def peek(self, block_id: BlockId, buffer: Buffer) -> int:
        """Fill `buffer` with the first bytes of the block's frame; returns how many.

        Raises BlockMissing, too.
        """


@runtime_checkable
class KeepsNotes(Protocol):
    """A tier that remembers namespaces beside the blocks. Both methods raise TierUnavailable."""

    def note_namespace(self, root: BlockKey, fields: Mapping[str, str]) -> None:
        """fields: of a namespace, without its salt."""

    def namespaces(self) -> dict[BlockKey, dict[str, str]]:
        """All notes, perhaps old or from other processes."""


class StoreMiss(StrEnum):
    """Why the store did not have a block.

    OTHER_NAMESPACE: the same tokens are stored under another namespace.
    """

    NEVER_STORED = "never_stored"
    EVICTED = "evicted"
    OTHER_NAMESPACE = "other_namespace"
    DAMAGED = "damaged"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class MissQuery:
    """The first block that was missed.

    parent: key of the block before it, or the root.
    token_ids: tokens after the parent, up to a block.
    id, content: of the missed block, None if fewer tokens than a block follow.
    later: contents of the later blocks, since blocks of another size end elsewhere.
    failure: the load's failure, if a load was tried.
    """

    parent: BlockKey
    root: BlockKey
    token_ids: tuple[int, ...]
    tenant: str = ""
    group: int = 0
    id: BlockId | None = None
    content: bytes | None = None
    later: tuple[bytes, ...] = ()
    failure: LoadFailure | None = None

    @classmethod
    def of(cls, record: BlockRecord, failure: LoadFailure | None = None) -> Self:
        """The query for a whole block."""
        return cls(
            record.parent, record.root, record.token_ids, record.tenant, record.id.group, record.id, record.content,
            (), failure,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a query's block was missed.

    reason: None if no whole block was missed.
    fields: names of the namespace fields that differ if the same tokens are stored; empty if not
        known.
    shared_tokens: how many of the query's tokens the closest stored block below the same parent
        begins with; None if there is no such block.
    """

    reason: StoreMiss | None
    fields: tuple[str, ...] = ()
    shared_tokens: int | None = None


class MissAnswer:
    """The answer to a query in progress."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._explanation: Explanation | None = None

    def poll(self) -> Explanation | None:
        """The answer; None while unknown."""
        return self._explanation

    def wait(self, timeout_s: float) -> Explanation | None:
        """As poll, but waits for the answer."""
        self._done.wait(timeout_s)
        return self._explanation

    def give(self, explanation: Explanation) -> None:
        """Called by the answering thread."""
        self._explanation = explanation
        self._done.set()


Question = tuple[MissQuery, StoreMiss | None, MissAnswer]


class Explainer:
    """Answers queries about misses, on one thread, from local tiers.

    Also remembers recently stored and damaged blocks.
    """

    def __init__(self, handles: Sequence[TierHandle]) -> None:
        self._handles = [handle for handle in handles if handle.local]
        self._lock = threading.Lock()
        self._stored: OrderedDict[BlockId, str] = OrderedDict()  # to the tenant
        self._damaged: OrderedDict[BlockId, str] = OrderedDict()
        self._namespaces: OrderedDict[BlockKey, Mapping[str, str]] = OrderedDict()
        self._questions: queue.Queue[tuple[MissQuery, StoreMiss | None, MissAnswer] | None] = queue.Queue(
            QUEUED_QUERIES
        )
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="kvire explain", daemon=True)
        self._thread.start()

    def stop(self, join_s: float) -> None:
        """End the thread, once it has answered all queries."""
        if self._thread is not None:
            self._questions.put(None)
            self._thread.join(join_s)
            self._thread = None

    def ask(self, query: MissQuery) -> MissAnswer:
        """Queue a query.

        Answered at once, without reading tiers, if the queue is full or the thread is not running.
        """
        answer = MissAnswer()
        reason = self._remembered(query)  # now: soon the block will be computed, and stored
        try:
            if self._thread is None:
                raise queue.Full
            self._questions.put_nowait((query, reason, answer))
        except queue.Full:
            answer.give(Explanation(reason))
        return answer

    def note_stored(self, record: BlockRecord) -> None:
        """A tier has the block now."""
        with self._lock:
            self._damaged.pop(record.id, None)
            _remember(self._stored, record.id, record.tenant)

    def note_damaged(self, record: BlockRecord) -> None:
        """The block was found damaged."""
        with self._lock:
            _remember(self._damaged, record.id, record.tenant)

    def note_namespace(self, root: BlockKey, fields: Mapping[str, str]) -> dict[str, str]:
        """Note a namespace; returns the fields that may be kept: all but the salt."""
        shown = {name: value for name, value in fields.items() if name not in HIDDEN_FIELDS}
        with self._lock:
            self._namespaces[root] = shown
            self._namespaces.move_to_end(root)
            if len(self._namespaces) > REMEMBERED_NAMESPACES:
                self._namespaces.popitem(last=False)
        return shown

    def forget(self, tenant: str | None) -> None:
        """Drop all notes about a tenant's blocks, or (None) about all tenants'."""
        with self._lock:
            for memory in (self._stored, self._damaged):
                for block_id in [i for i, owner in memory.items() if tenant in {None, owner}]:
                    del memory[block_id]

    def _explain(self, query: MissQuery, reason: StoreMiss | None) -> Explanation:
        """The answer, by reading local tiers."""
        fields: tuple[str, ...] = ()
        if reason in {StoreMiss.NEVER_STORED, StoreMiss.EVICTED} and query.content is not None:
            roots = self._roots_of((query.content, *query.later[:COMPARED_CONTENTS])) - {query.root}
            if roots:
                reason, fields = StoreMiss.OTHER_NAMESPACE, self._differing(query.root, roots)
        return Explanation(reason, fields, self._shared_tokens(query))

    def _remembered(self, query: MissQuery) -> StoreMiss | None:
        if query.id is None:
            return None
        if query.failure is not None and query.failure.reason is FailureReason.UNAVAILABLE:
            return StoreMiss.UNAVAILABLE
        failed = query.failure is not None and query.failure.reason is FailureReason.DAMAGED
        with self._lock:
            if failed or query.id in self._damaged:
                return StoreMiss.DAMAGED
            return StoreMiss.EVICTED if query.id in self._stored else StoreMiss.NEVER_STORED

    def _roots_of(self, contents: Iterable[bytes]) -> set[BlockKey]:
        roots: set[BlockKey] = set()
        for handle in self._handles:
            if isinstance(tier := handle.tier, Related):
                with suppress(TierUnavailable):
                    for content in contents:
                        roots.update(tier.roots_of(content))
        return roots

    def _differing(self, root: BlockKey, others: Iterable[BlockKey]) -> tuple[str, ...]:
        """Names of the fields in which the closest of the others differs; () if none of them is
        known.
        """
        noted: dict[BlockKey, Mapping[str, str]] = {}
        for handle in self._handles:
            if isinstance(tier := handle.tier, KeepsNotes):
                with suppress(TierUnavailable):
                    noted |= tier.namespaces()
        with self._lock:
            noted |= self._namespaces
        own = noted.get(root)
        known = [fields for other in others if (fields := noted.get(other)) is not None]
        if own is None or not known:
            return ()
        differing = [sorted(n for n in {*own, *fields} if own.get(n) != fields.get(n)) for fields in known]
        closest = min(differing, key=lambda names: (len(names), names))
        # other weights and kernels make another build, too; then the build is not why
        return tuple(name for name in closest if name != "build" or closest == ["build"])

    def _shared_tokens(self, query: MissQuery) -> int | None:
        best: int | None = None
        for handle in self._handles:
            if isinstance(tier := handle.tier, Related):
                try:
                    children = tier.children(query.parent, query.group, COMPARED_CHILDREN)
                except TierUnavailable:
                    continue
                for child in children:
                    if child == query.id:
                        continue  # it has come since
                    if (ids := _token_ids(handle, tier, child, query)) is not None:
                        best = max(best or 0, _common_prefix(ids, query.token_ids))
        return best

    def _run(self) -> None:
        while (question := self._questions.get()) is not None:
            query, reason, answer = question
            try:
                answer.give(self._explain(query, reason))
            except Exception:  # an explanation must never end the thread
                log.exception("explaining a miss failed")
                answer.give(Explanation(reason))


def _remember(memory: OrderedDict[BlockId, str], block_id: BlockId, tenant: str) -> None:
    memory[block_id] = tenant
    memory.move_to_end(block_id)
    if len(memory) > REMEMBERED_IDS:
        memory.popitem(last=False)


def _token_ids(handle: TierHandle, tier: Related, block_id: BlockId, query: MissQuery) -> tuple[int, ...] | None:
    """Token ids of a stored block below the query's parent.

    None if it is another tenant's, or cannot be read.
    """
    head = memoryview(bytearray(HEAD_BYTES))
    try:
        header, ids = handle.frames.token_ids(head[: tier.peek(block_id, head)], query.tenant)
    except (BlockMissing, TierUnavailable, FrameDamaged, FrameForeign, StoreError):
        return None
    return ids if header.parent == query.parent else None


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
