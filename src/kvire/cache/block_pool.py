"""Who owns which block of one group: allocation, sharing, and the index of remembered prefixes.

A block is in one of three states: leased (ref_count > 0), remembered (free, but its KV is in the
index and can be leased again), or blank. The pool hands out blank blocks first, then evicts the
remembered one that was used longest ago; since a lease gives its blocks back last one first, a leaf
always goes before its parent.

The index is closed under prefixes: a key is in it only if its parent is, or if it starts a sequence.
So a hit never has a hole, and evicting a block forgets whatever hangs below it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from kvire.core.keys import BlockKey

# How many children of a block `closest` compares; the newest ones are the likeliest relatives.
COMPARED_CHILDREN = 64
# Evicted keys remembered per block of the pool, 32 bytes each, to tell "evicted" from "never stored".
EVICTED_PER_BLOCK = 4


@dataclass(slots=True, eq=False)
class Block:
    """One block. key, parent and token_ids are set while the block is in the index."""

    id: int
    ref_count: int = 0
    key: BlockKey | None = None
    parent: BlockKey | None = None
    token_ids: tuple[int, ...] = ()


class Lease:
    """Blocks held by one owner, in token order; released exactly once, as a context or by hand."""

    def __init__(self, pool: "BlockPool", blocks: list[Block]) -> None:
        self._pool = pool
        self.blocks = blocks
        self.released = False

    def __len__(self) -> int:
        return len(self.blocks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    @property
    def block_ids(self) -> list[int]:
        """The block table."""
        return [block.id for block in self.blocks]

    def extend(self, other: "Lease") -> None:
        """Take over the blocks of `other`, which holds nothing afterwards."""
        assert not self.released and not other.released and other._pool is self._pool
        self.blocks += other.blocks
        other.blocks, other.released = [], True

    def release(self) -> None:
        """Give all blocks back, last one first. Raises RuntimeError the second time."""
        if self.released:
            raise RuntimeError("this lease was released before")
        self.released = True
        for block in reversed(self.blocks):
            self._pool._unref(block)
        self.blocks = []


@dataclass(slots=True)
class PoolStats:
    """Counters since the pool was made; they only grow."""

    evictions: int = 0
    collisions: int = 0
    copies_on_write: int = 0


class BlockPool:
    """The blocks of one group. All methods belong to one thread; none of them waits.

    num_blocks: how many there are. block_size: tokens in each.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0 and block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.stats = PoolStats()
        self._blocks = [Block(i) for i in range(num_blocks)]
        self._blank = list(reversed(self._blocks))  # a stack: the block used last is warm in the caches
        self._remembered: OrderedDict[int, Block] = OrderedDict()  # by id, longest unused first
        self._index: dict[BlockKey, Block] = {}
        self._children: dict[BlockKey, dict[BlockKey, None]] = {}  # parent or root -> indexed keys, in order
        self._evicted: OrderedDict[BlockKey, None] = OrderedDict()  # what evictions forgot, newest last

    @property
    def num_free(self) -> int:
        """Blocks that `try_allocate` can hand out: blank or remembered."""
        return len(self._blank) + len(self._remembered)

    @property
    def num_remembered(self) -> int:
        """Free blocks whose KV can still be hit."""
        return len(self._remembered)

    def match_length(self, root: BlockKey, keys: Sequence[BlockKey], token_ids: Sequence[int]) -> int:
        """How many leading blocks of `token_ids` are in the index. Changes nothing.

        A hit needs the key, the parent and the real token ids to agree: two prompts whose keys
        collide are a miss, counted.
        """
        parent = root
        for i, key in enumerate(keys):
            block = self._index.get(key)
            if block is None:
                return i
            ids = token_ids[i * self.block_size : (i + 1) * self.block_size]
            if block.parent != parent or block.token_ids != tuple(ids):
                self.stats.collisions += 1
                return i
            parent = key
        return len(keys)

    def match(self, root: BlockKey, keys: Sequence[BlockKey], token_ids: Sequence[int]) -> Lease:
        """Lease the leading blocks of `token_ids` that are in the index (perhaps none)."""
        count = self.match_length(root, keys, token_ids)
        blocks = [self._index[key] for key in keys[:count]]
        for block in blocks:
            self._ref(block)
        return Lease(self, blocks)

    def contains(self, key: BlockKey) -> bool:
        """Whether a block is in the index under `key`. Changes nothing."""
        return key in self._index

    def was_evicted(self, key: BlockKey) -> bool:
        """Whether `key` was in the index not long ago and had to make room."""
        return key in self._evicted

    def closest(self, parent: BlockKey, token_ids: Sequence[int]) -> int:
        """Leading tokens of `token_ids` that the most similar block below `parent` shares."""
        best = 0
        for key in list(reversed(self._children.get(parent, {})))[:COMPARED_CHILDREN]:
            best = max(best, _common_prefix(self._index[key].token_ids, token_ids))
        return best

    def try_allocate(self, count: int) -> Lease | None:
        """`count` blocks with unknown content, or None and no change if so many are not free."""
        if count > self.num_free:
            return None
        blocks = []
        for _ in range(count):
            block = self._blank.pop() if self._blank else self._evict()
            block.ref_count = 1
            blocks.append(block)
        return Lease(self, blocks)

    def publish(self, block: Block, key: BlockKey, parent: BlockKey, root: BlockKey, token_ids: Sequence[int]) -> bool:
        """Put a leased, completely computed block into the index; True if it went in.

        Not if the key is taken (the first one stays: others may hold it) or the parent is not in
        the index (nothing could find the block).
        """
        assert block.ref_count > 0 and len(token_ids) == self.block_size
        if block.key is not None:
            assert block.key == key, "a block's key is written once"
            return False
        if (twin := self._index.get(key)) is not None:
            self._touch(twin)
            return False
        if parent != root and parent not in self._index:
            return False
        block.key, block.parent, block.token_ids = key, parent, tuple(token_ids)
        self._index[key] = block
        self._children.setdefault(parent, {})[key] = None
        self._evicted.pop(key, None)
        return True

    def fork(self, lease: Lease) -> Lease:
        """A second owner of the same blocks; whoever writes into one of them copies it first."""
        assert not lease.released
        for block in lease.blocks:
            self._ref(block)
        return Lease(self, list(lease.blocks))

    def make_writable(self, lease: Lease, index: int) -> tuple[int, int] | None:
        """Give `lease` a block of its own at `index` if others hold or can find it.

        Returns (source, target) block ids to copy, or None if nothing needs copying. Raises
        MemoryError, with no change, if no block is free.
        """
        block = lease.blocks[index]
        if block.ref_count == 1 and block.key is None:
            return None
        own = self.try_allocate(1)
        if own is None:
            raise MemoryError("no free block for copy-on-write")
        lease.blocks[index] = own.blocks[0]
        own.blocks, own.released = [], True
        self._unref(block)
        self.stats.copies_on_write += 1
        return block.id, lease.blocks[index].id

    def forget(self, key: BlockKey) -> int:
        """Take a block and all below it out of the index; how many. Leased ones stay with their owners."""
        if key not in self._index:
            return 0
        family = self._with_descendants(key)
        for member in reversed(family):
            self._unindex(member)
        return len(family)

    def clear(self) -> int:
        """Forget every prefix; how many blocks that were."""
        before = len(self._index)
        for key in list(self._index):
            self.forget(key)
        return before

    def _ref(self, block: Block) -> None:
        if block.ref_count == 0:
            del self._remembered[block.id]
        block.ref_count += 1

    def _unref(self, block: Block) -> None:
        assert block.ref_count > 0, "released more often than leased"
        block.ref_count -= 1
        if block.ref_count == 0:
            if block.key is None:
                self._blank.append(block)
            else:
                self._remembered[block.id] = block

    def _touch(self, block: Block) -> None:
        """Make a remembered block the one used last."""
        if block.id in self._remembered:
            self._remembered.move_to_end(block.id)

    def _evict(self) -> Block:
        """Forget the leaf unused for longest and hand out its block.

        A remembered parent can be older than its children: a sequence that computed the parent's
        tokens once more holds a twin of it. Such a parent counts as used when it comes up here.
        """
        for _ in range(len(self._remembered)):
            block = next(iter(self._remembered.values()))
            assert block.key is not None
            if block.key not in self._children:
                break
            self._touch(block)
        else:  # every remembered block has leased descendants, which keep their KV but are found no more
            block = next(iter(self._remembered.values()))
        assert block.key is not None
        for key in self._with_descendants(block.key):
            self._evicted[key] = None
        while len(self._evicted) > EVICTED_PER_BLOCK * self.num_blocks:
            self._evicted.popitem(last=False)
        self.forget(block.key)
        self.stats.evictions += 1
        return self._blank.pop()

    def _with_descendants(self, key: BlockKey) -> list[BlockKey]:
        """`key` and every indexed key below it, parents before children."""
        family = [key]
        for member in family:  # grows while it is read: a chain can be thousands of blocks deep
            family += self._children.get(member, {})
        return family

    def _unindex(self, key: BlockKey) -> None:
        block = self._index.pop(key)
        assert block.parent is not None
        siblings = self._children[block.parent]
        del siblings[key]
        if not siblings:
            del self._children[block.parent]
        block.key, block.parent, block.token_ids = None, None, ()
        if block.ref_count == 0:
            del self._remembered[block.id]
            self._blank.append(block)

    def check(self) -> None:
        """Raise AssertionError if any promise of this page does not hold."""
        blank = {block.id for block in self._blank}
        assert len(blank) == len(self._blank), "a blank block is listed twice"
        for block in self._blocks:
            places = (block.id in blank) + (block.id in self._remembered) + (block.ref_count > 0)
            assert places == 1, f"block {block.id} is in {places} places"
            assert (block.key is None) == (block.parent is None) == (not block.token_ids)
            if block.key is not None and block.parent is not None:
                assert self._index[block.key] is block
                assert block.key in self._children[block.parent]
            else:
                assert block.id not in self._remembered
        assert all(block.key == key for key, block in self._index.items())
        listed = [key for children in self._children.values() for key in children]
        assert sorted(listed) == sorted(self._index), "children and index disagree"


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
