"""A block as everybody outside the device knows it: its name, its place in a sequence, its tokens;
not its KV.
"""

from dataclasses import dataclass
from typing import NamedTuple

from kvire.core.keys import BlockKey

CONTENT_BYTES = 16


class BlockId(NamedTuple):
    """Address of one block below the device: its key (which covers tenant, model and shard) and its
    group.
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
    content: CONTENT_BYTES that stand for all tokens from the sequence's first to this block's last,
        whatever the namespace but the tenant (keys.content_ids).
    tenant: whose it is; "" is the one there is without tenants.
    """

    id: BlockId
    parent: BlockKey
    root: BlockKey
    index: int
    token_ids: tuple[int, ...]
    kv_bytes: int
    content: bytes
    tenant: str = ""
