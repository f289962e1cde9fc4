"""The shape of a block: which layers share it, how wide K and V are, how many bytes it takes."""

from dataclasses import dataclass
from enum import StrEnum

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class LayerKind(StrEnum):
    """How a layer looks back, and therefore what must be kept for it."""

    FULL = "full"
    SLIDING = "sliding"  # attends to the last `window` tokens, itself included
    LATENT = "latent"  # multi-head latent attention: K is the latent, V the shared rotary key


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers of one kind, window and shape; they share block tables.

    layers: model layer indices, ascending. key_width, value_width: elements per head and token
    (for LATENT: the latent rank and the rotary width, with one head).
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
    """What one model keeps per token. dtype: a key of DTYPE_BYTES; block_size in tokens."""

    groups: tuple[KVGroup, ...]
    dtype: str = "float32"
    block_size: int = 32

    def __post_init__(self) -> None:
        assert self.groups and self.block_size > 0
        assert self.dtype in DTYPE_BYTES, self.dtype

    def block_bytes(self, group: int) -> int:
        """Bytes of one block of `group`: every layer of the group, K and V, `block_size` tokens."""
        return self.block_size * self.groups[group].elements_per_token * DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token takes, over all groups."""
        return sum(g.elements_per_token for g in self.groups) * DTYPE_BYTES[self.dtype]
