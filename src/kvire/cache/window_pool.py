"""Blocks of a group whose layers look back over a window of tokens only.

A sequence releases the blocks behind its window while it runs, and a hit needs only the blocks of
the window before its end. So the index is not closed under prefixes: blocks are added and removed
one by one.
"""

from collections.abc import Sequence

from kvire.cache.block_pool import Block, BlockPool, Lease
from kvire.core.keys import BlockKey
from kvire.core.spec import first_needed


class WindowPool(BlockPool):
    """A BlockPool whose hits are trailing windows.

    window: tokens that a position sees, itself included.
    """

    def __init__(self, num_blocks: int, block_size: int, window: int) -> None:
        super().__init__(num_blocks, block_size)
        self.window = window

    def first_needed(self, position: int) -> int:
        """Index of the first block that the token at `position`, or any later one, looks at."""
        return first_needed(self.window, position, self.block_size)

    @property
    def span_blocks(self) -> int:
        """The most blocks that one position looks at."""
        return (self.window - 2) // self.block_size + 2 if self.window > 1 else 1

    def match_length(self, root: BlockKey, keys: Sequence[BlockKey], token_ids: Sequence[int]) -> int:
        """The most leading blocks of `token_ids` whose next token finds its whole window in the
        index.

        Changes nothing. Compares real token ids, as BlockPool does.
        """
        count, held = len(keys), len(keys)  # blocks held .. count - 1 are there
        while held > self.first_needed(count * self.block_size):
            held -= 1
            if not self._holds(root, keys, token_ids, held):
                count = held
        return count

    def match(self, root: BlockKey, keys: Sequence[BlockKey], token_ids: Sequence[int]) -> Lease:
        """Lease the window before the end of the longest match (perhaps nothing)."""
        keys = keys[: self.match_length(root, keys, token_ids)]
        return self._lease(keys, self.first_needed(len(keys) * self.block_size))

    def _can_follow(self, parent: BlockKey, root: BlockKey) -> bool:
        """Parents may have been evicted before."""
        del parent, root
        return True

    def _evict(self) -> Block:
        """Forget the block unused for longest, and only that one."""
        block = next(iter(self._remembered.values()))
        assert block.key is not None
        key = block.key
        self._unindex(key)
        self._note_evicted([key])
        return self._blank.pop()
