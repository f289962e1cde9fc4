"""Every prompt so far, as a radix tree over bytes: shared beginnings are kept once, and found to
the byte.

It takes at most the memory it is given; then the ends that nobody came by for longest are forgotten
first.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

# What a node takes beside its text: measured on CPython 3.11, rounded up.
NODE_BYTES = 500


class Node:
    """A run of bytes after its parent's. Everybody who came by came by all of it.

    used_s: when the last one did;
    used_before_s: the one before, None if there was none.
    line: in which line of the log the last one was.
    turn: as which of all prompts, from 1.
    kept_until_s, kept_for_s: when the provider's entry that ends here expires, and how long a read
        prolongs it; 0 if nobody had one written here.
    mended: by which rules (bits) a prompt that ends here would be in the cache if causes were
        mended.
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
        """The rules (bits) by which this prompt, or one that it begins with, would be
        in the cache.
        """
        mended = self.mended
        node = self.parent
        while node is not None:
            mended |= node.mended
            node = node.parent
        return mended

    def latest(self, before_turn: int) -> "Node":
        """The end of the last prompt that went on from here, of those before another."""
        node = self
        while earlier := [child for child in node.children.values() if child.turn < before_turn]:
            node = max(earlier, key=lambda child: child.turn)
        return node


class TreeStep(NamedTuple):
    """A node on a prompt's way as it was before.

    end: how far the prompt agrees with the tree, at most its end.
    """

    end: int
    used_s: float
    used_before_s: float | None
    kept_until_s: float


@dataclass(frozen=True, slots=True)
class Match:
    """What the tree knew of a prompt: steps from the root on.

    node: where the prompt ends in the tree now.
    beside: the end of the last prompt that left this one's way where this one left the tree, or
        None.
    """

    steps: tuple[TreeStep, ...]
    node: Node
    beside: Node | None

    @property
    def depth(self) -> int:
        """Bytes that some earlier prompt began with as well."""
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
        """Bytes of the text that are known in a scope, and the node that the last of them lies in;
        changes nothing.
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
        """Those that have prompts."""
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
        """The node of the first bytes of another, which keeps the rest (and so stays the end of its
        prompts).
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
        """Forget what nobody came by for longest, but not the prompt that ends at `kept`."""
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
    """Bytes that two texts share from the given places on."""
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
