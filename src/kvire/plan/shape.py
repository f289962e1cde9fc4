"""What a model keeps: for every token, for every sequence, and for its weights.

Exact bytes, FLOPs by formula.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvire.core.dtypes import KV_DTYPES
from kvire.core.errors import ConfigError
from kvire.core.spec import KVGroup, KVSpec, LayerKind

# fp8: e4m3 with one scale per tensor, kept with the weights; so nothing per token beyond the
# numbers themselves.
KEPT_BYTES = {**{name: dtype.element_bytes for name, dtype in KV_DTYPES.items()}, "fp8": 1}
# Bytes a weight takes. int4: one float16 scale per 32 (llama.cpp's Q4_0); mxfp4: one 8-bit scale
# per 32 (OCP MX 1.0).
WEIGHT_BYTES = {
    "float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5625, "mxfp4": 0.53125,
}  # fmt: skip
CONV_BYTES = 2  # the tail of a convolution is kept in the dtype that the model computes in


@dataclass(frozen=True, slots=True)
class Storage:
    """How KV is kept.

    dtype: a key of KEPT_BYTES.
    block_tokens: the unit of allocation; 1 rounds nothing.
    tp: ranks of tensor parallelism.
    index_dtype: of a sparse indexer's keys; None for the same as the KV.
    """

    dtype: str = "float16"
    block_tokens: int = 1
    tp: int = 1
    index_dtype: str | None = None

    def __post_init__(self) -> None:
        for name in (self.dtype, self.index_dtype or self.dtype):
            if name not in KEPT_BYTES:
                raise ConfigError(f"KV is kept as one of {', '.join(KEPT_BYTES)}, not {name!r}")
        if min(self.block_tokens, self.tp) < 1:
            raise ConfigError("a block holds at least one token, and tensor parallelism has at least one rank")


@dataclass(frozen=True, slots=True)
class StateLayers:
    """Layers that keep one state per sequence, however long it is: linear attention, Mamba.

    heads: of the state, shared out under tensor parallelism.
    state_elements, conv_elements: per layer.
    element_bytes: of the state, 4 because engines keep it in float32.
    """

    layers: tuple[int, ...]
    heads: int
    state_elements: int
    conv_elements: int
    element_bytes: int = 4

    @property
    def state_bytes(self) -> int:
        """Per sequence, over all layers, without the convolutions' tails."""
        return len(self.layers) * self.state_elements * self.element_bytes

    @property
    def conv_bytes(self) -> int:
        """Per sequence, over all layers: the inputs that each convolution looks back at."""
        return len(self.layers) * self.conv_elements * CONV_BYTES


@dataclass(frozen=True, slots=True)
class IndexLayers:
    """Layers of sparse attention that keep one more key per token, by which they choose what to
    attend to.

    pair_flops: of one query token against one key token, all layers together.
    """

    layers: tuple[int, ...]
    width: int
    pair_flops: int

    def bytes_per_token(self, dtype: str) -> int:
        """Without scales, if the dtype has any: engines differ in how they keep them."""
        return len(self.layers) * self.width * KEPT_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class Draft:
    """Layers for speculative decoding (MTP), kept only by engines that use them.

    field: of the config that says so.
    """

    field: str
    layers: int
    elements_per_token: int  # 0: not known from the config


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters.

    dense: used for every token.
    experts: all routed ones.
    active_experts: experts that one token uses.
    counted: from the weight files, not by formula.
    dtypes: what the checkpoint keeps ("experts", "dense").
    """

    dense: int
    experts: int = 0
    active_experts: int = 0
    counted: bool = False
    dtypes: Mapping[str, str] = field(default_factory=lambda: {"dense": "bfloat16", "experts": "bfloat16"})

    @property
    def total(self) -> int:
        """All parameters."""
        return self.dense + self.experts

    @property
    def active(self) -> int:
        """Parameters that one token uses."""
        return self.dense + self.active_experts

    def size_bytes(self, dtype: str | None = None) -> int:
        """Of all weights in `dtype`, or as the checkpoint keeps them."""
        dense, experts = dtype or self.dtypes["dense"], dtype or self.dtypes["experts"]
        return round(self.dense * WEIGHT_BYTES[dense] + self.experts * WEIGHT_BYTES[experts])

    def read_bytes(self, tokens: int, dtype: str | None = None) -> int:
        """What a step that computes so many tokens reads: of the experts, those that any of them
        uses, as if each token chose evenly among all.
        """
        if not self.experts:
            return self.size_bytes(dtype)
        idle = (1 - self.active_experts / self.experts) ** tokens
        return replace(self, experts=round(self.experts * (1 - idle))).size_bytes(dtype)


@dataclass(frozen=True, slots=True)
class Shape:
    """What one model keeps and computes.

    groups: attention layers by kind, window and widths.
    pair_flops: per group, FLOPs of one query token against one key token, all layers of the group
        together.
    attended: per group, the most tokens a query attends to; None: all.
    context_tokens: the longest sequence it was made for; None where the config does not say.
    notes: remarks that the figures need.
    """

    model_type: str
    layers: int
    groups: tuple[KVGroup, ...]
    pair_flops: tuple[int, ...]
    attended: tuple[int | None, ...]
    weights: Weights
    states: tuple[StateLayers, ...] = ()
    index: IndexLayers | None = None
    draft: Draft | None = None
    context_tokens: int | None = None
    notes: tuple[str, ...] = ()

    def growing_bytes(self, storage: Storage) -> int:
        """Bytes that one more token of one sequence takes on all ranks together, once every window
        is full.

        A block's padding is not in it: that depends on the length (sequence_bytes has it).
        """
        flat = replace(storage, block_tokens=1)
        kept = sum(group_bytes(g, 1, flat) for g in self.groups if g.window is None)
        return storage.tp * (kept + self._index_bytes(storage))

    def window_bytes(self, storage: Storage) -> int:
        """Bytes that the layers with windows keep of a long sequence, on all ranks together,
        without padding.
        """
        windows = ((g, g.window) for g in self.groups if g.window is not None)
        return storage.tp * sum(group_bytes(g, window, replace(storage, block_tokens=1)) for g, window in windows)

    def stored_bytes(self, storage: Storage) -> int:
        """Bytes that a store keeps of one more token of one sequence, all ranks together; a block's
        padding shared out.

        It keeps every block of every layer, also what has left a window: another prompt may part
        anywhere. Recurrent states are not in it.
        """
        block = sum(group_bytes(_whole(g), storage.block_tokens, storage) for g in self.groups)
        return storage.tp * (-(-block // storage.block_tokens) + self._index_bytes(storage))

    def state_bytes(self, storage: Storage) -> int:
        """Bytes that recurrent layers keep per sequence, on all ranks together."""
        return sum(
            storage.tp * -(-(s.state_bytes + s.conv_bytes) // _share(s.heads, storage.tp, "state heads"))
            for s in self.states
        )

    def sequence_bytes(self, tokens: int, storage: Storage) -> int:
        """Bytes that one sequence of so many tokens takes on all ranks together,
        padding included.
        """
        if tokens <= 0:
            return 0
        rounded = storage.block_tokens * -(-tokens // storage.block_tokens)
        kept = sum(group_bytes(g, tokens, storage) for g in self.groups) + rounded * self._index_bytes(storage)
        return storage.tp * kept + self.state_bytes(storage)

    def whole_bytes(self, tokens: int, storage: Storage) -> int:
        """The same as an engine reserves it that keeps every layer's whole context, whatever has
        left a window.
        """
        return replace(self, groups=tuple(_whole(group) for group in self.groups)).sequence_bytes(tokens, storage)

    def _index_bytes(self, storage: Storage) -> int:
        return self.index.bytes_per_token(storage.index_dtype or storage.dtype) if self.index else 0

    def linear_flops(self, tokens: int) -> int:
        """Of the matrix products: two per active parameter and token (Kaplan et al. 2020, section
        2.1).

        Counts the vocabulary's matrix for every token, as the published figures do; engines need it
        for the last only.
        """
        return 2 * self.weights.active * tokens

    def attention_flops(self, start: int, stop: int) -> int:
        """Of the tokens from `start` to `stop` against themselves and all before them, as far as
        windows reach.
        """
        pairs = (_pairs(start, stop, limit) for limit in self.attended)
        attention = sum(flops * count for flops, count in zip(self.pair_flops, pairs, strict=True))
        return attention + (self.index.pair_flops * _pairs(start, stop, None) if self.index else 0)

    def prefill_flops(self, start: int, stop: int) -> int:
        """FLOPs to compute the tokens from `start` to `stop`, with the KV of those
        before at hand.
        """
        return self.linear_flops(stop - start) + self.attention_flops(start, stop)


def group_bytes(group: KVGroup, tokens: int, storage: Storage) -> int:
    """Bytes that one rank keeps of so many tokens, in whole blocks.

    A window needs, at its worst place, one block more than its other tokens fill.
    """
    size = storage.block_tokens
    blocks = -(-tokens // size)
    if group.window is not None:
        blocks = min(blocks, -(-(group.window - 1) // size) + 1)
    # A latent belongs to all heads and counts as one: every rank keeps all of it.
    own = replace(group, kv_heads=group.kv_heads // _share(group.kv_heads, storage.tp, "KV heads"))
    if storage.dtype == "fp8":
        return blocks * size * own.elements_per_token
    return blocks * KVSpec((own,), storage.dtype, size).block_bytes(0)


def _whole(group: KVGroup) -> KVGroup:
    """The same as if nothing left its window."""
    return group if group.window is None else replace(group, kind=LayerKind.FULL, window=None)


def _share(heads: int, tp: int, what: str) -> int:
    """Among how many ranks heads are divided; more ranks than heads keep copies.

    Raises ConfigError if uneven.
    """
    if heads % tp == 0:
        return tp
    if tp % heads == 0:
        return heads
    raise ConfigError(f"{heads} {what} cannot be shared out evenly among {tp} ranks: choose another --tp")


def _pairs(start: int, stop: int, limit: int | None) -> int:
    """Pairs of a query at start..stop-1 and a key at or before it, of which each query takes the
    last `limit`.
    """

    def up_to(n: int) -> int:
        whole = n if limit is None else min(n, limit)
        return whole * (whole + 1) // 2 + (n - whole) * (limit or 0)

    return up_to(stop) - up_to(start)
