"""Identity: the only place where a block gets its name.

A key is a SHA-256 chain over full blocks, started by the root of a namespace. Every field is tagged
and length-framed, so that two different inputs never produce the same bytes. The same inputs give
the same key in every process, on every machine; tests/golden/keys.json holds published vectors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from itertools import pairwise
from typing import Any, NewType, Self

import numpy as np

BlockKey = NewType("BlockKey", bytes)  # 32 bytes

LAYOUT_VERSION = 1  # raise when the meaning of a stored block or of a key changes


def field(tag: str, payload: bytes) -> bytes:
    """One tagged, length-framed field: u8 tag length, tag, u64 payload length, payload."""
    name = tag.encode("ascii")
    return len(name).to_bytes(1, "little") + name + len(payload).to_bytes(8, "little") + payload


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything besides tokens that decides KV. Two namespaces never share a block.

    weights: digest of the weight files.
    config: digest of the whole model config that can change KV.
    numerics: compute dtype, weight form and kernel family.
    kv_dtype: dtype of the pool.
    spec: text of the block's shape.
    adapter: digest of an adapter, or empty.
    salt: the tenant.
    shard: which part of a split model.
    layout_version: meaning of the bytes.
    build: versions and digests of the software that computes; empty where nothing is said of it.
    """

    weights: str
    config: str
    numerics: str
    kv_dtype: str
    spec: str
    block_size: int
    adapter: str = ""
    salt: str = ""
    shard: str = ""
    layout_version: int = LAYOUT_VERSION
    build: str = ""

    @property
    def root(self) -> BlockKey:
        """Parent of every sequence's first block."""
        digest = sha256(field("kvire", b"namespace"))
        for f in fields(self):
            if f.name != "build" or self.build:  # keys older than this field stay the same
                digest.update(field(f.name, str(getattr(self, f.name)).encode("utf-8")))
        return BlockKey(digest.digest())

    def public_fields(self) -> dict[str, str]:
        """Fields stored beside the blocks, to explain later why others do not match.

        All but the salt.
        """
        return {f.name: str(getattr(self, f.name)) for f in fields(self) if f.name != "salt"}

    def with_salt(self, salt: str) -> Self:
        """The same model for another tenant: no key in common."""
        return replace(self, salt=salt)


def block_key(parent: BlockKey, token_ids: Sequence[int]) -> BlockKey:
    """Key of the full block that holds `token_ids`, after `parent` (a block's key or a root)."""
    ids = np.asarray(token_ids, dtype="<i4").tobytes()
    return BlockKey(sha256(field("parent", parent) + field("ids", ids)).digest())


def block_keys(
    root: BlockKey, token_ids: Sequence[int], block_size: int, known: Sequence[BlockKey] = ()
) -> list[BlockKey]:
    """Keys of the full blocks of `token_ids`, in order; `known` are the first ones, if at hand."""
    keys = list(known)
    parent = keys[-1] if keys else root
    for start in range(len(keys) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = block_key(parent, token_ids[start : start + block_size])
        keys.append(parent)
    return keys


def divided(salt: str, *, cache_salt: str = "", epoch: str = "") -> str:
    """A tenant's salt, divided by the values that separate requests within the tenant.

    cache_salt: the request's.
    epoch: blocks stored under another epoch are no longer found.
    """
    if cache_salt:
        salt += "/" + sha256(cache_salt.encode("utf-8")).hexdigest()
    return f"{salt}/{epoch}" if epoch else salt


def unsealed_salt(tenant: str) -> str:
    """A tenant's salt in a process without a store's random one.

    It tells tenants' blocks apart; they never leave the process.
    """
    return sha256(tenant.encode("utf-8")).hexdigest() if tenant else ""


def page_key(root: BlockKey, name: bytes) -> BlockKey:
    """Key of a block that another engine names by a hash over its tokens and all tokens before."""
    return BlockKey(sha256(field("parent", root) + field("page", name)).digest())


def page_words(name: bytes) -> tuple[int, ...]:
    """Eight int32 in place of such a block's token ids; a reader compares them instead."""
    return tuple(np.frombuffer(sha256(field("sglang page", name)).digest(), "<i4").tolist())


def page_content(salt: str, name: bytes) -> bytes:
    """Such a block's content id (see content_ids)."""
    told = field("kvire", b"sglang content") + field("salt", salt.encode("utf-8")) + field("page", name)
    return sha256(told).digest()[:16]


def content_ids(salt: str, token_ids: Sequence[int], ends: Sequence[int]) -> list[bytes]:
    """16 bytes for each of token_ids[:end]; ends ascend.

    They recognise the same tokens under another namespace. Nothing is ever loaded by them: they
    only explain why a key was not found.

    salt: the tenant's.
    """
    chain = ContentChain(salt)
    return [chain.add(token_ids[start:end]) for start, end in pairwise([0, *ends])]


class ContentChain:
    """Content ids of tokens that arrive gradually; only new tokens are hashed.

    salt: the tenant's.
    begun: the SHA-256 of all earlier tokens, if there are any.
    """

    def __init__(self, salt: str, begun: Any = None) -> None:
        self._digest = begun or sha256(field("kvire", b"content") + field("salt", salt.encode("utf-8")))
        self._salt = salt

    def add(self, token_ids: Sequence[int]) -> bytes:
        """The content id of all tokens so far, `token_ids` included."""
        self._digest.update(np.asarray(token_ids, dtype="<i4").tobytes())
        return self._digest.copy().digest()[:16]

    def copy(self) -> "ContentChain":
        """An independent chain that continues from here."""
        return ContentChain(self._salt, self._digest.copy())
