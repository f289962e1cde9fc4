"""Allocation and sharing of one group's blocks, and the index of remembered prefixes.

A block is in one of three states: leased (ref_count > 0), remembered (free, but its KV is in the
index and can be leased again), or blank. The pool hands out blank blocks first, then evicts the
least recently used remembered one; since a lease releases its last block first, a leaf is always
evicted before its parent.

The index is closed under prefixes: a key is in it only if its parent is, or if it starts a
sequence. So a hit never has a hole, and evicting a block also forgets its descendants. (Groups that
look back over a window only need less: window_pool.py.)

A sequence's last block is often not full. It is remembered as well, as a tail: found by its tokens,
below its parent, and copied rather than shared.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Self

from kvire.core.keys import BlockKey, block_key

# How many children of a block `relatives` compares; the newest ones are the likeliest relatives.
COMPARED_CHILDREN = 64
# Evicted keys remembered per block of the pool, 32 bytes each, to tell "evicted" from "never
# stored".
EVICTED_PER_BLOCK = 4


@dataclass(slots=True, eq=False)
class Block:
    """One block. key, parent and token_ids are set while it is in the index; a tail has fewer
    token_ids than fit.
    """

    id: int
    ref_count: int = 0
    key: BlockKey | None = None
    parent: BlockKey | None = None
    token_ids: tuple[int, ...] = ()


class Lease:
    """Blocks held by one owner, in token order; released exactly once, as a context or by hand.

    blocks: None stands for one already released because no later token looks at it.
    """

    def __init__(self, pool: "BlockPool", blocks: list[Block | None]) -> None:
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
    def block_ids(self) -> list[int | None]:
        """The block table; None for blocks that were given back."""
        return [block.id if block else None for block in self.blocks]

    def give_back(self, count: int) -> None:
        """Release the first `count` blocks, as far as they are still held; the others keep their
        places.

        Remembered ones become the first to be evicted: few prompts end in the middle of another.
        """
        for index in range(min(count, len(self.blocks)) - 1, -1, -1):
            if (block := self.blocks[index]) is None:
                break  # so are all before it
            self.blocks[index] = None
            self._pool._unref(block, evict_first=True)

    def skip_to(self, index: int) -> None:
        """Continue at block `index`: release all held blocks, and hold none in between."""
        assert index >= len(self.blocks)
        self.give_back(len(self.blocks))
        self.blocks += [None] * (index - len(self.blocks))

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
            if block is not None:
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

    num_blocks: how many there are.
    block_size: tokens in each.
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
        self._evicted: OrderedDict[BlockKey, None] = OrderedDict()  # evicted keys, newest last

    @property
    def span_blocks(self) -> int | None:
        """The most blocks that one position looks at; None for all before it."""
        return None

    def first_needed(self, position: int) -> int:  # noqa: ARG002  (a window makes the difference)
        """Index of the first block that the token at `position`, or any later one, looks at."""
        return 0

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
        for i in range(len(keys)):
            if not self._holds(root, keys, token_ids, i):
                return i
        return len(keys)

    def match(self, root: BlockKey, keys: Sequence[BlockKey], token_ids: Sequence[int]) -> Lease:
        """Lease the leading blocks of `token_ids` that are in the index (perhaps none)."""
        return self._lease(keys[: self.match_length(root, keys, token_ids)], first=0)

    def contains(self, key: BlockKey) -> bool:
        """Whether a block is in the index under `key`. Changes nothing."""
        return key in self._index

    def was_evicted(self, key: BlockKey) -> bool:
        """Whether `key` was in the index recently and was evicted."""
        return key in self._evicted

    def relatives(self, parent: BlockKey, token_ids: Sequence[int]) -> list[tuple[int, Block]]:
        """Blocks below `parent` that begin like `token_ids`, with the number of tokens shared, most
        first.

        Finds all blocks that hold all of `token_ids`, or end within them; of the others it compares
        the COMPARED_CHILDREN newest. Changes nothing.
        """
        children = self._children.get(parent)
        if not children:
            return []
        exact = [block_key(parent, token_ids[:count]) for count in range(len(token_ids), 0, -1)]
        newest = islice(reversed(children), COMPARED_CHILDREN)
        blocks = [self._index[key] for key in dict.fromkeys([*(key for key in exact if key in children), *newest])]
        found = [(_common_prefix(block.token_ids, token_ids), block) for block in blocks]
        return sorted((pair for pair in found if pair[0]), key=lambda pair: -pair[0])

    def find(self, key: BlockKey, like: Block) -> Block | None:
        """The block under `key`, if it has the parent and tokens of `like`, a block of another
        group's pool.
        """
        block = self._index.get(key)
        if block is None or block.parent != like.parent or block.token_ids != like.token_ids:
            return None
        return block

    def touch(self, block: Block) -> None:
        """`block` was used: of the remembered ones, evict it last."""
        if block.id in self._remembered:
            self._remembered.move_to_end(block.id)

    def touch_chain(self, keys: Sequence[BlockKey]) -> None:
        """A sequence with these blocks, or twins of them, is done.

        Its last block becomes the first of them to be evicted, as after a release.
        """
        for key in reversed(keys):
            if (block := self._index.get(key)) is not None:
                self.touch(block)

    def try_allocate(self, count: int) -> Lease | None:
        """`count` blocks with undefined content, or None and no change if fewer are free."""
        if count > self.num_free:
            return None
        blocks: list[Block | None] = []
        for _ in range(count):
            block = self._blank.pop() if self._blank else self._evict()
            block.ref_count = 1
            blocks.append(block)
        return Lease(self, blocks)

    def publish(self, block: Block, key: BlockKey, parent: BlockKey, root: BlockKey, token_ids: Sequence[int]) -> bool:
        """Put a leased block into the index, all of whose `token_ids` are computed.

        Returns True if they can be found now. If the same tokens are there already, the first block
        stays: others may hold it. False if the key stands for other tokens (a collision, counted)
        or the parent is not in the index: then no later block may be published either, for it would
        be found as the continuation of something else, or not at all.
        """
        assert block.ref_count > 0 and 0 < len(token_ids) <= self.block_size
        if block.key is not None:
            assert block.key == key, "a block's key is written once"
            return True
        if (twin := self._index.get(key)) is not None:
            if twin.parent != parent or twin.token_ids != tuple(token_ids):
                self.stats.collisions += 1
                return False
            return True
        if not self._can_follow(parent, root):
            return False
        if len(token_ids) < self.block_size and self._longer(parent, token_ids):
            return True
        self._drop_shorter_tails(parent, token_ids)
        block.key, block.parent, block.token_ids = key, parent, tuple(token_ids)
        self._index[key] = block
        self._children.setdefault(parent, {})[key] = None
        self._evicted.pop(key, None)
        return True

    def _can_follow(self, parent: BlockKey, root: BlockKey) -> bool:
        return parent == root or parent in self._index

    def _longer(self, parent: BlockKey, tail: Sequence[int]) -> Block | None:
        """A block below `parent` that begins with all of `tail`."""
        return next((block for shared, block in self.relatives(parent, tail) if shared == len(tail)), None)

    def _drop_shorter_tails(self, parent: BlockKey, token_ids: Sequence[int]) -> None:
        """Drop tails that a longer block continues: they hold nothing of their own."""
        children = self._children.get(parent)
        for count in range(1, len(token_ids)) if children else ():
            key = block_key(parent, token_ids[:count])
            tail = self._index.get(key)
            if tail is not None and tail.token_ids == tuple(token_ids[:count]) and tail.ref_count == 0:
                self._unindex(key)

    def fork(self, lease: Lease) -> Lease:
        """A second owner of the same blocks; a writer copies a shared block first."""
        assert not lease.released
        for block in lease.blocks:
            if block is not None:
                self._ref(block)
        return Lease(self, list(lease.blocks))

    def is_shared(self, lease: Lease, index: int) -> bool:
        """Whether others hold block `index` of `lease`, or can find it."""
        block = lease.blocks[index]
        assert block is not None, "a block that was given back is not written again"
        return block.ref_count > 1 or block.key is not None

    def make_writable(self, lease: Lease, index: int) -> tuple[int, int] | None:
        """Give `lease` a block of its own at `index` if others hold or can find it.

        Returns (source, target) block ids to copy, or None if nothing needs copying. Raises
        MemoryError, with no change, if no block is free.
        """
        if not self.is_shared(lease, index):
            return None
        block = lease.blocks[index]
        assert block is not None
        lease_of_one = self.try_allocate(1)
        if lease_of_one is None:
            raise MemoryError("no free block for copy-on-write")
        own = lease_of_one.blocks[0]
        assert own is not None
        lease.blocks[index] = own
        lease_of_one.blocks, lease_of_one.released = [], True
        self._unref(block)
        self.stats.copies_on_write += 1
        return block.id, own.id

    def swap(self, lease: Lease, index: int) -> Lease | None:
        """Give `lease` a blank block at `index`; returns the old one as a lease of its own.

        None if no block is free.
        """
        old = lease.blocks[index]
        assert old is not None and old.key is None and old.ref_count == 1, "only a block that nobody else knows"
        if (fresh := self.try_allocate(1)) is None:
            return None
        lease.blocks[index], fresh.blocks[0] = fresh.blocks[0], old
        return fresh

    def forget(self, key: BlockKey) -> int:
        """Remove a block and its descendants from the index; returns how many blocks."""
        if key not in self._index:
            return 0
        family = self._with_descendants(key)
        for member in reversed(family):
            self._unindex(member)
        return len(family)

    def clear(self) -> int:
        """Forget every prefix; returns how many blocks."""
        before = len(self._index)
        for key in list(self._index):
            self.forget(key)
        return before

    def _holds(self, root: BlockKey, keys: Sequence[BlockKey], token_ids: Sequence[int], index: int) -> bool:
        """Whether block `index` of `token_ids` is in the index: key, parent and real token ids
        agree.
        """
        block = self._index.get(keys[index])
        if block is None:
            return False
        ids = token_ids[index * self.block_size : (index + 1) * self.block_size]
        if block.parent == (keys[index - 1] if index else root) and block.token_ids == tuple(ids):
            return True
        self.stats.collisions += 1
        return False

    def _lease(self, keys: Sequence[BlockKey], first: int) -> Lease:
        """Lease the indexed blocks of `keys` from the `first` one on."""
        blocks = [self._index[key] for key in keys[first:]]
        for block in blocks:
            self._ref(block)
        return Lease(self, [None] * min(first, len(keys)) + blocks)

    def _ref(self, block: Block) -> None:
        if block.ref_count == 0:
            del self._remembered[block.id]
        block.ref_count += 1

    def _unref(self, block: Block, *, evict_first: bool = False) -> None:
        assert block.ref_count > 0, "released more often than leased"
        block.ref_count -= 1
        if block.ref_count == 0:
            if block.key is None:
                self._blank.append(block)
            else:
                self._remembered[block.id] = block
                if evict_first:
                    self._remembered.move_to_end(block.id, last=False)

    def _evict(self) -> Block:
        """Forget the leaf unused for longest and hand out its block.

        A remembered parent can be older than its children, if those were used alone. It counts as
        used when it comes up here.
        """
        for _ in range(len(self._remembered)):
            block = next(iter(self._remembered.values()))
            assert block.key is not None
            if block.key not in self._children:
                break
            self.touch(block)
        else:  # every remembered block has leased descendants, which keep their KV but are found no more
            block = next(iter(self._remembered.values()))
        assert block.key is not None
        family = self._with_descendants(block.key)
        self.forget(block.key)
        self._note_evicted(family)
        return self._blank.pop()

    def _note_evicted(self, keys: Sequence[BlockKey]) -> None:
        self.stats.evictions += 1
        for key in keys:
            self._evicted[key] = None
        while len(self._evicted) > EVICTED_PER_BLOCK * self.num_blocks:
            self._evicted.popitem(last=False)

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
