"""The shape of a block: which layers share it, how wide K and V are, how many bytes it takes."""

from dataclasses import dataclass
from enum import StrEnum

from kvire.core.dtypes import KV_DTYPES

# How K, V and their scales lie in a block. tokens: [token, head, width] and [token, head]. heads: K
# [head, width, token], V [head, token, width] and scales [head, token], as the native step reads
# them.
LAYOUTS = ("tokens", "heads")


def first_needed(window: int | None, position: int, block_size: int) -> int:
    """Index of the first block that the token at `position`, or any later one, looks at.

    window: tokens that a position sees, itself included; None: all before it.
    """
    return 0 if window is None else max(0, position - window + 1) // block_size


class LayerKind(StrEnum):
    """How a layer looks back, which decides the KV that it keeps."""

    FULL = "full"
    SLIDING = "sliding"  # attends to the last `window` tokens, itself included
    LATENT = "latent"  # multi-head latent attention: K is the latent, V the shared rotary key


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers of one kind, window and shape; they share block tables.

    layers: model layer indices, ascending.
    key_width, value_width: elements per head and token (for LATENT: the latent rank and the rotary
        width, with one head).
    """

    kind: LayerKind
    layers: tuple[int, ...]
    kv_heads: int
    key_width: int
    value_width: int
    window: int | None = None

    def __post_init__(self) -> None:
        assert self.layers == tuple(sorted(set(self.layers))), "layers must be ascending and unique"
        assert self.layers, "a group has at least one layer"
        assert min(self.kv_heads, self.key_width, self.value_width) > 0
        assert (self.kind is LayerKind.SLIDING) == (self.window is not None)

    @property
    def elements_per_token(self) -> int:
        """Numbers kept per token, over all layers of the group, K and V together."""
        return len(self.layers) * self.kv_heads * (self.key_width + self.value_width)


@dataclass(frozen=True, slots=True)
class KVSpec:
    """KV of one model per token.

    dtype: a key of KV_DTYPES.
    block_size: in tokens.
    layout: order of a layer's numbers in a block, a key of LAYOUTS.
    """

    groups: tuple[KVGroup, ...]
    dtype: str = "float32"
    block_size: int = 16
    layout: str = "tokens"

    def __post_init__(self) -> None:
        assert self.groups and self.block_size > 0
        assert self.layout in LAYOUTS, self.layout
        assert self.dtype in KV_DTYPES, self.dtype

    def block_bytes(self, group: int) -> int:
        """Bytes of one block of `group`: every layer of the group, K and V, `block_size` tokens."""
        shape = self.groups[group]
        rows = self.rows_bytes(shape, shape.key_width) + self.rows_bytes(shape, shape.value_width)
        return len(shape.layers) * (rows + 2 * self.scales_bytes(shape))

    def rows_bytes(self, group: KVGroup, width: int) -> int:
        """Bytes of one layer's K, or V, in a block, up to where its scales begin."""
        return KV_DTYPES[self.dtype].rows_bytes(self.block_size * group.kv_heads * width)

    def scales_bytes(self, group: KVGroup) -> int:
        """Bytes of the scales of one layer's K, or V, in a block; 0 for dtypes without."""
        return KV_DTYPES[self.dtype].scales_bytes(self.block_size * group.kv_heads)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token takes, over all groups; a block's padding, if it has any,
        shared out.
        """
        return -(-sum(map(self.block_bytes, range(len(self.groups)))) // self.block_size)


def group_text(kind: str, layers: str, rest: str, window: int | None) -> str:
    """One group of layers in a namespace's spec.

    rest: other parts of its memory layout.
    window: in tokens.
    """
    return f"{kind} layers={layers} {rest} window={window or 0}"


def windows_of(spec: str) -> tuple[int | None, ...] | None:
    """The window of each group in a namespace's spec, in tokens; None for a group without.

    None instead of a list: the spec does not say.
    """
    windows: list[int | None] = []
    for group in spec.split(";"):
        head, _, window = group.rpartition(" window=")
        if " layers=" not in head or not (window.isascii() and window.isdecimal()):
            return None
        windows.append(int(window) or None)
    return tuple(windows)
