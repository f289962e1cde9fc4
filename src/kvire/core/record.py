"""A block outside the device: its name, its place in a sequence and its tokens, without its KV."""

from dataclasses import dataclass
from typing import NamedTuple

from kvire.core.keys import BlockKey

CONTENT_BYTES = 16


class BlockId(NamedTuple):
    """Address of one block below the device.

    Its key (which covers tenant, model and shard) and its group.
    """

    key: BlockKey
    group: int


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """Everything about a stored block but its KV.

    parent: key of the block before it, or the root.
    root: of its namespace, tenant included.
    index: place in its sequence, from 0.
    token_ids: exactly those of this block.
    kv_bytes: size of its KV.
    content: CONTENT_BYTES that identify all tokens from the sequence's first to this block's last,
        independent of the namespace except for the tenant (keys.content_ids).
    tenant: the block's owner; "" in a store without tenants.
    """

    id: BlockId
    parent: BlockKey
    root: BlockKey
    index: int
    token_ids: tuple[int, ...]
    kv_bytes: int
    content: bytes
    tenant: str = ""
