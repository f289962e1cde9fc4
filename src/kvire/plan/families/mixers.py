"""What mixes tokens in one layer: attention, latent attention, a recurrent state.

Widths, and parameters by formula.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvire.core.spec import KVGroup, LayerKind


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention with K and V of its own, or of an earlier layer.

    heads: of queries.
    window: tokens that a query looks back, itself included; None for all.
    gate: the output is gated, with as many parameters as the queries.
    shared_kv: V is made from K's projection.
    keeps: False for a layer that reads the KV of an earlier one, and has none.
    """

    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    window: int | None = None
    gate: bool = False
    shared_kv: bool = False
    keeps: bool = True

    @property
    def pair_flops(self) -> int:
        """Of one query token against one key token, all heads: a product for the score and one for
        the sum.
        """
        return 2 * self.heads * (self.key_width + self.value_width)

    @property
    def attended(self) -> int | None:
        """The most tokens that a query attends to."""
        return self.window

    def parameters(self, hidden: int) -> int:
        """Of the projections."""
        queries = self.heads * self.key_width * (2 if self.gate else 1)
        keys_values = self.kv_heads * (self.key_width + (0 if self.shared_kv else self.value_width))
        own = keys_values if self.keeps else 0
        return hidden * (queries + own + self.heads * self.value_width)

    def group(self, layers: tuple[int, ...]) -> KVGroup:
        """What these layers keep."""
        kind = LayerKind.FULL if self.window is None else LayerKind.SLIDING
        return KVGroup(kind, layers, self.kv_heads, self.key_width, self.value_width, self.window)


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    rank: of the latent that is kept.
    query_rank: 0 for queries without one.
    index_heads, index_width, index_topk: of a sparse indexer; 0 and None without.
    index_own: this layer keeps index keys of its own.
    """

    keeps: ClassVar[bool] = True
    heads: int
    rank: int
    rope_width: int
    nope_width: int
    value_width: int
    query_rank: int
    index_heads: int = 0
    index_width: int = 0
    index_topk: int | None = None
    index_own: bool = False

    @property
    def pair_flops(self) -> int:
        """Of one query against one key, expanded to heads as prefill does."""
        return 2 * self.heads * (self.nope_width + self.rope_width + self.value_width)

    @property
    def attended(self) -> int | None:
        """The most tokens that a query attends to."""
        return self.index_topk

    def parameters(self, hidden: int) -> int:
        """Of the projections, and of the indexer's."""
        query = self.heads * (self.nope_width + self.rope_width)
        queries = hidden * self.query_rank + self.query_rank * (query + 1) if self.query_rank else hidden * query
        latent = hidden * (self.rank + self.rope_width) + self.rank
        expand = self.rank * self.heads * (self.nope_width + self.value_width)
        return queries + latent + expand + self.heads * self.value_width * hidden + self._index_parameters(hidden)

    def _index_parameters(self, hidden: int) -> int:
        if not self.index_own:
            return 0
        queries = self.query_rank * self.index_heads * self.index_width
        return queries + hidden * (self.index_width + self.index_heads) + 2 * self.index_width

    def group(self, layers: tuple[int, ...]) -> KVGroup:
        """What these layers keep: the latent as K and the rotated key that all heads share as V."""
        return KVGroup(LayerKind.LATENT, layers, 1, self.rank, self.rope_width)


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """A recurrent layer.

    elements: of the state.
    conv_elements: inputs that its convolution looks back at.
    weights: parameters per unit of hidden size.
    extra: parameters beside those.
    """

    heads: int
    elements: int
    conv_elements: int
    weights: int
    extra: int

    def parameters(self, hidden: int) -> int:
        """Of the projections and the convolution."""
        return hidden * self.weights + self.extra


# None: a layer that only feeds forward.
Mixer = Attention | Latent | RecurrentState | None


def attention_kinds(mixers: Sequence[Mixer]) -> list[tuple[int, ...]]:
    """Attention layers that are alike but for keeping, by index; those that see everything before
    those that slide.
    """
    found: dict[tuple[KVGroup, int, int | None], list[int]] = {}
    for layer, mixer in enumerate(mixers):
        if isinstance(mixer, Attention | Latent):
            found.setdefault((mixer.group((0,)), mixer.pair_flops, mixer.attended), []).append(layer)
    return [tuple(found[kind]) for kind in sorted(found, key=lambda kind: kind[0].window is not None)]


def kept_groups(mixers: Sequence[Mixer]) -> tuple[KVGroup, ...]:
    """What the layers keep per token, layer by layer of a kind; FULL before SLIDING."""
    groups = []
    for alike in attention_kinds(mixers):
        mixer = mixers[alike[0]]
        assert isinstance(mixer, Attention | Latent)
        groups.append(mixer.group(tuple(i for i in alike if _keeps(mixers[i]))))
    return tuple(groups)


def _keeps(mixer: Mixer) -> bool:
    return isinstance(mixer, Attention | Latent) and mixer.keeps


def delta_net(key_heads: int, value_heads: int, key_width: int, value_width: int, kernel: int) -> RecurrentState:
    """Gated DeltaNet (arXiv 2412.06464): a matrix key_width x value_width per value head."""
    keys, values = key_heads * key_width, value_heads * value_width
    conv = 2 * keys + values
    return RecurrentState(
        heads=value_heads,
        elements=value_heads * key_width * value_width,
        conv_elements=conv * (kernel - 1),
        weights=conv + 2 * values + 2 * value_heads,
        extra=conv * kernel + 2 * value_heads + value_width,
    )


def mamba2(heads: int, head_width: int, state_size: int, groups: int, kernel: int) -> RecurrentState:
    """Mamba-2 (arXiv 2405.21060): a matrix head_width x state_size per head."""
    inner = heads * head_width
    conv = inner + 2 * groups * state_size
    return RecurrentState(
        heads=heads,
        elements=heads * head_width * state_size,
        conv_elements=conv * (kernel - 1),
        weights=inner + conv + heads + inner,
        extra=conv * (kernel + 1) + 3 * heads + inner,
    )
