"""All prompts so far, as a radix tree over bytes: shared prefixes are kept once, and found to the
byte.

It has a limit of memory; beyond it, the least recently used ends are forgotten first.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

# Memory of a node beside its text: measured on CPython 3.11, rounded up.
NODE_BYTES = 500


class Node:
    """A run of bytes after its parent's. Every prompt through a node has all of its bytes.

    used_s: time of the last prompt through it;
    used_before_s: of the one before, None if there was none.
    line: the last prompt's line of the log.
    turn: its number among all prompts, from 1.
    kept_until_s, kept_for_s: expiry of the provider's entry that ends here, and its seconds to live
        after a read; 0 if none was written here.
    mended: rules (bits) by which a prompt ending here would be in the cache if causes were mended.
    """

    __slots__ = (
        "children", "kept_for_s", "kept_until_s", "label", "line", "mended", "parent", "turn", "used_before_s", "used_s"
    )  # fmt: skip

    def __init__(self, label: bytes, parent: "Node | None", used_s: float, line: int, turn: int) -> None:
        self.label = label
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.used_s = used_s
        self.used_before_s: float | None = None
        self.line = line
        self.turn = turn
        self.kept_until_s = 0.0
        self.kept_for_s = 0
        self.mended = 0

    def text(self) -> bytes:
        """All bytes from the root to here."""
        labels = []
        node: Node | None = self
        while node is not None:
            labels.append(node.label)
            node = node.parent
        return b"".join(reversed(labels))

    def mended_on_the_way(self) -> int:
        """Rules (bits) by which this prompt, or another one that is its prefix, would be in the
        cache.
        """
        mended = self.mended
        node = self.parent
        while node is not None:
            mended |= node.mended
            node = node.parent
        return mended

    def latest(self, before_turn: int) -> "Node":
        """End of the latest prompt through this node, of turns below `before_turn`."""
        node = self
        while earlier := [child for child in node.children.values() if child.turn < before_turn]:
            node = max(earlier, key=lambda child: child.turn)
        return node


class TreeStep(NamedTuple):
    """A node on a prompt's way, in its state before the prompt.

    end: end of the common bytes of prompt and tree, at most the node's.
    """

    end: int
    used_s: float
    used_before_s: float | None
    kept_until_s: float


@dataclass(frozen=True, slots=True)
class Match:
    """The tree's earlier knowledge of a prompt: steps from the root on.

    node: end of the prompt in the tree now.
    beside: end of the latest prompt on another way from the place where this one left the tree, or
        None.
    """

    steps: tuple[TreeStep, ...]
    node: Node
    beside: Node | None

    @property
    def depth(self) -> int:
        """Length of the longest prefix shared with an earlier prompt, in bytes."""
        return self.steps[-1].end if self.steps else 0


class PrefixTree:
    """One root per scope (a model: no provider shares a cache between models)."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._roots: dict[str, Node] = {}
        self._leaves: OrderedDict[Node, None] = OrderedDict()  # the one unused for longest first
        self.turns = 0  # prompts so far
        self.used_bytes = 0
        self.forgotten_bytes = 0

    def depth(self, scope: str, text: bytes) -> tuple[int, Node | None]:
        """Length of the text's longest known prefix in a scope, in bytes, and the node of its last
        byte. Changes nothing.
        """
        node, depth = self._roots.get(scope), 0
        if node is None:
            return 0, None
        while (child := node.children.get(text[depth] if depth < len(text) else -1)) is not None:
            common = common_prefix(text, depth, child.label, 0)
            depth += common
            node = child
            if common < len(child.label):
                break
        return depth, node if depth else None

    def scopes(self) -> list[str]:
        """Scopes with prompts."""
        return list(self._roots)

    def observe(self, scope: str, text: bytes, now_s: float, line: int) -> Match:
        """Look a prompt up and keep it."""
        self.turns += 1
        node = self._roots.setdefault(scope, Node(b"", None, now_s, line, self.turns))
        steps = []
        depth = 0
        beside: Node | None = None
        while (child := node.children.get(text[depth] if depth < len(text) else -1)) is not None:
            common = common_prefix(text, depth, child.label, 0)
            whole = common == len(child.label)
            kept_until_s = child.kept_until_s if whole else 0.0
            steps.append(TreeStep(depth + common, child.used_s, child.used_before_s, kept_until_s))
            node = child if whole else self._split(child, common)
            depth += common
            self._came_by(node, now_s, line)
            if not whole:
                break
        if depth < len(text):
            if node.children:
                beside = node.latest(self.turns)
            node = self._add(node, text[depth:], now_s, line)
        self._shrink(node)
        return Match(tuple(steps), node, beside)

    def keep_until(self, end: Node, ends_bytes: list[tuple[int, int]], now_s: float) -> None:
        """A provider's entries for prefixes of a prompt are written, or read again.

        end: the prompt's node.
        ends_bytes: (length of the prefix, seconds to live; 0 if only read), ascending.
        """
        depth = len(end.text())
        node = end
        for length, ttl_s in reversed(ends_bytes):
            while node.parent is not None and depth - len(node.label) >= length:
                depth -= len(node.label)
                node = node.parent
            if node.parent is None:
                return
            if depth > length:
                node = self._split(node, len(node.label) - (depth - length))
                depth = length
            node.kept_for_s = ttl_s or node.kept_for_s
            node.kept_until_s = max(node.kept_until_s, now_s + node.kept_for_s)

    def _came_by(self, node: Node, now_s: float, line: int) -> None:
        node.used_s, node.used_before_s = max(node.used_s, now_s), node.used_s
        node.line, node.turn = line, self.turns
        if node in self._leaves:
            self._leaves.move_to_end(node)

    def _split(self, lower: Node, length: int) -> Node:
        """A new node for the first bytes of another. That one keeps the rest, and stays the end of
        its prompts.
        """
        parent = lower.parent
        assert parent is not None and 0 < length < len(lower.label)
        upper = Node(lower.label[:length], parent, lower.used_s, lower.line, lower.turn)
        upper.used_before_s = lower.used_before_s
        parent.children[upper.label[0]] = upper
        lower.label = lower.label[length:]
        lower.parent = upper
        upper.children[lower.label[0]] = lower
        self.used_bytes += NODE_BYTES
        return upper

    def _add(self, parent: Node, label: bytes, now_s: float, line: int) -> Node:
        leaf = Node(label, parent, now_s, line, self.turns)
        parent.children[label[0]] = leaf
        self._leaves.pop(parent, None)
        self._leaves[leaf] = None
        self.used_bytes += NODE_BYTES + len(label)
        return leaf

    def _shrink(self, kept: Node) -> None:
        """Forget the least recently used ends, but not the prompt that ends at `kept`."""
        while self.used_bytes > self._capacity_bytes:
            leaf = next((one for one in self._leaves if one is not kept), None)
            if leaf is None:
                return
            del self._leaves[leaf]
            parent = leaf.parent
            assert parent is not None
            del parent.children[leaf.label[0]]
            self.used_bytes -= NODE_BYTES + len(leaf.label)
            self.forgotten_bytes += len(leaf.label)
            leaf.label, leaf.parent = b"", None  # a later pointer to it finds nothing, and holds no text
            if not parent.children and parent.parent is not None:
                self._leaves[parent] = None


def common_prefix(a: bytes, a_start: int, b: bytes, b_start: int) -> int:
    """Number of common bytes of two texts from the given places on."""
    most = min(len(a) - a_start, len(b) - b_start)
    low, step = 0, 64
    while low < most:
        high = min(low + step, most)
        if a[a_start + low : a_start + high] == b[b_start + low : b_start + high]:
            low, step = high, step * 2
        elif high - low == 1:
            return low
        else:
            step = (high - low) // 2
            most = high
    return low
