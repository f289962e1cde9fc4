"""The blocks of one sequence by name."""

from functools import cached_property

from kvire.core.keys import BlockKey, block_keys, content_ids
from kvire.core.record import BlockId, BlockRecord
from kvire.core.spec import KVSpec


class Chain:
    """Full blocks of token_ids under a tenant's root."""

    def __init__(self, spec: KVSpec, root: BlockKey, salt: str, tenant: str, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.block_size = spec.block_size
        self.root = root
        self.tenant = tenant
        self._spec = spec
        self._salt = salt

    @cached_property
    def keys(self) -> list[BlockKey]:
        """Of every full block."""
        return block_keys(self.root, self.token_ids, self.block_size)

    @cached_property
    def contents(self) -> list[bytes]:
        """See keys.content_ids."""
        return content_ids(self._salt, self.token_ids, range(self.block_size, len(self.token_ids) + 1, self.block_size))

    @property
    def groups(self) -> range:
        """Of the layers; each full block is one of each."""
        return range(len(self._spec.groups))

    def extended(self, token_ids: list[int]) -> "Chain":
        """The same sequence, longer or shorter."""
        return Chain(self._spec, self.root, self._salt, self.tenant, token_ids)

    def ids(self, stop: int) -> list[BlockId]:
        """Of the first `stop` blocks, all groups."""
        return [BlockId(key, group) for key in self.keys[:stop] for group in self.groups]

    def parent(self, index: int) -> BlockKey:
        """Key of the block before, or the root."""
        return self.keys[index - 1] if index else self.root

    def record(self, index: int, group: int) -> BlockRecord:
        """Of one group's block."""
        return BlockRecord(
            id=BlockId(self.keys[index], group),
            parent=self.parent(index),
            root=self.root,
            index=index,
            token_ids=tuple(self.token_ids[index * self.block_size : (index + 1) * self.block_size]),
            kv_bytes=self._spec.block_bytes(group),
            content=self.contents[index],
            tenant=self.tenant,
        )
