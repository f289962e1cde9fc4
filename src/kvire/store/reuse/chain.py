"""Names of an engine's blocks: their owner, the root of each key chain, and each block's record."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from secrets import token_hex
from typing import NamedTuple, Protocol, TypeVar

from kvire.core.errors import StoreError
from kvire.core.keys import (
    BlockKey,
    ContentChain,
    Namespace,
    block_keys,
    divided,
    page_content,
    page_key,
    page_words,
)
from kvire.core.record import BlockId, BlockRecord
from kvire.store.explain import COMPARED_CONTENTS, MissQuery

# Clients choose cache_salt, and a fresh one with each request must not fill the memory.
MOST_IDENTITIES = 1024
MOST_NOTED_SALTS = 16  # salts whose namespaces are noted in the tiers: half of the notes of a disk tier

log = logging.getLogger(__name__)

K = TypeVar("K")
V = TypeVar("V")


class Identity(NamedTuple):
    """Owner of blocks.

    tenant: its name.
    salt: part of the namespace and of the content ids.
    root: parent of every first block.
    kept: False if the tenant has no key now: its blocks can be shared on the device, but not
        stored.
    """

    tenant: str
    salt: str
    root: BlockKey
    kept: bool = True


class Names:
    """Roots of one engine's key chains: namespace, tenant, cache_salt, and an epoch after each
    reset.

    namespace: without a salt.
    tenant_salt: salt of a tenant by name; raises StoreError or OSError.
    note: called with each new root and the public fields of its namespace, once.
    """

    def __init__(
        self,
        namespace: Namespace,
        tenant_salt: Callable[[str], str],
        note: Callable[[BlockKey, Mapping[str, str]], None],
    ) -> None:
        self.namespace = namespace
        self._tenant_salt = tenant_salt
        self._note = note
        self._epoch = ""
        self._known: OrderedDict[tuple[str, str], Identity] = OrderedDict()  # by tenant and cache_salt
        self._salts: OrderedDict[str, str] = OrderedDict()  # by tenant, the last one there was
        self._noted: set[BlockKey] = set()  # roots with a cache_salt

    def of(self, tenant: str = "", cache_salt: str = "") -> Identity:
        """Identity of a tenant's requests with this cache_salt.

        The same until the tenant is forgotten or everything is reset.
        """
        own, kept = self._own_salt(tenant)
        salt = divided(own, cache_salt=cache_salt, epoch=self._epoch)
        known = self._known.get((tenant, cache_salt))
        if known is None or (known.salt, known.kept) != (salt, kept):
            known = Identity(tenant, salt, self.namespace.with_salt(salt).root, kept)
            self._tell(known, cache_salt)
        _remember(self._known, (tenant, cache_salt), known)
        return known

    def reset(self) -> None:
        """Earlier blocks are no longer found: the model may have other weights."""
        self._epoch = token_hex(16)

    def _own_salt(self, tenant: str) -> tuple[str, bool]:
        """The tenant's salt, and whether it has a key; without one, it is served all the same."""
        try:
            salt, kept = self._tenant_salt(tenant), True
        except (StoreError, OSError) as error:
            log.warning("no keys for a tenant, so nothing of it is kept: %s", error)
            salt, kept = self._salts.get(tenant) or f"unkept/{token_hex(16)}", False
        _remember(self._salts, tenant, salt)
        return salt, kept

    def _tell(self, identity: Identity, cache_salt: str) -> None:
        """Note the namespace of a new root.

        Clients make up cache_salts, so only the first few are noted.
        """
        if cache_salt:
            if identity.root in self._noted or len(self._noted) >= MOST_NOTED_SALTS:
                return
            self._noted.add(identity.root)
        if identity.kept:
            self._note(identity.root, self.namespace.public_fields())


class Blocks(Protocol):
    """Blocks of one prompt by name, in order."""

    @property
    def identity(self) -> Identity:
        """Their owner."""

    @property
    def keys(self) -> Sequence[BlockKey]:
        """Keys of the blocks named so far."""

    def record(self, index: int, part: int, kv_bytes: int) -> BlockRecord:
        """The store's record of one part of block `index`."""


class Chain:
    """The full blocks of a sequence, each named by all tokens up to its end.

    token_ids: may grow at its end; read only.
    keys: of the blocks named so far: see `extend`.
    """

    def __init__(self, identity: Identity, token_ids: Sequence[int], block_size: int) -> None:
        self.identity = identity
        self.token_ids = token_ids
        self.block_size = block_size
        self.keys: list[BlockKey] = []
        self._contents: list[bytes] = []  # as far as they were asked for
        self._content = ContentChain(identity.salt)

    @property
    def root(self) -> BlockKey:
        """Parent of the first block."""
        return self.identity.root

    def extend(self) -> list[BlockKey]:
        """Name the blocks that became full since the last call; returns the keys of all."""
        if len(self.token_ids) // self.block_size > len(self.keys):
            self.keys = block_keys(self.root, self.token_ids, self.block_size, self.keys)
        return self.keys

    def parent(self, index: int) -> BlockKey:
        """Key of the block before block `index`, or the root."""
        return self.keys[index - 1] if index else self.root

    def tokens(self, index: int) -> tuple[int, ...]:
        """Token ids of block `index`."""
        return tuple(self.token_ids[index * self.block_size : (index + 1) * self.block_size])

    def content(self, index: int) -> bytes:
        """Content id (keys.content_ids) of block `index`."""
        for number in range(len(self._contents), index + 1):
            self._contents.append(self._content.add(self.tokens(number)))
        return self._contents[index]

    def record(self, index: int, part: int, kv_bytes: int) -> BlockRecord:
        """The store's record of one part of block `index`: a group's, or a worker's share of
        one.
        """
        return BlockRecord(
            id=BlockId(self.keys[index], part),
            parent=self.parent(index),
            root=self.root,
            index=index,
            token_ids=self.tokens(index),
            kv_bytes=kv_bytes,
            content=self.content(index),
            tenant=self.identity.tenant,
        )

    def query(self, index: int, stop_tokens: int) -> MissQuery:
        """The query why block `index`, of the first `stop_tokens` tokens, is stored nowhere."""
        start, stop = index * self.block_size, min((index + 1) * self.block_size, stop_tokens)
        full = stop_tokens // self.block_size
        later = range(index + 1, min(full, index + 1 + COMPARED_CONTENTS))
        return MissQuery(
            parent=self.parent(index),
            root=self.root,
            token_ids=tuple(self.token_ids[start:stop]),
            tenant=self.identity.tenant,
            id=BlockId(self.keys[index], 0) if index < full else None,
            content=self.content(index) if index < full else None,
            later=tuple(self.content(number) for number in later),
        )

    def fork(self, token_ids: Sequence[int]) -> "Chain":
        """A separate chain of these tokens, longer or shorter, that shares the names of common
        blocks.
        """
        forked = Chain(self.identity, token_ids, self.block_size)
        full = len(token_ids) // self.block_size
        forked.keys = self.keys[:full]
        if len(self._contents) <= full:
            forked._contents, forked._content = list(self._contents), self._content.copy()
        return forked


class Pages:
    """Blocks that another engine names by hashes over their tokens and all before them.

    Each stands alone.
    """

    def __init__(self, identity: Identity, names: Sequence[bytes]) -> None:
        self.identity = identity
        self.names = names
        self.keys = [page_key(identity.root, name) for name in names]

    def record(self, index: int, part: int, kv_bytes: int) -> BlockRecord:
        """See Blocks."""
        root, salt = self.identity.root, self.identity.salt
        return BlockRecord(
            id=BlockId(self.keys[index], part),
            parent=root,
            root=root,
            index=0,
            token_ids=page_words(self.names[index]),
            kv_bytes=kv_bytes,
            content=page_content(salt, self.names[index]),
            tenant=self.identity.tenant,
        )


def _remember(memory: OrderedDict[K, V], key: K, value: V) -> None:
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > MOST_IDENTITIES:
        memory.popitem(last=False)
