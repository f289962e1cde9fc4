"""What mixes tokens in one layer: attention, latent attention, a recurrent state. Widths, and parameters by formula."""

from dataclasses import dataclass

from kvire.core.spec import KVGroup, LayerKind


@dataclass(frozen=True, slots=True)
class Attention:
    """heads: of queries. gate: the output is gated, with as many parameters as the queries. extra: further parameters
    (biases, norms of Q and K, sinks).
    """

    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    window: int | None = None
    gate: bool = False
    shared_kv: bool = False  # V is made from K's projection
    extra: int = 0

    @property
    def pair_flops(self) -> int:
        """Of one query token against one key token, all heads: a product for the score and one for the sum."""
        return 2 * self.heads * (self.key_width + self.value_width)

    @property
    def attended(self) -> int | None:
        """The most tokens that a query attends to."""
        return self.window

    def parameters(self, hidden: int) -> int:
        """Of the projections."""
        queries = self.heads * self.key_width * (2 if self.gate else 1)
        keys_values = self.kv_heads * (self.key_width + (0 if self.shared_kv else self.value_width))
        return hidden * (queries + keys_values + self.heads * self.value_width) + self.extra

    def group(self, layers: tuple[int, ...]) -> KVGroup:
        """What these layers keep."""
        kind = LayerKind.FULL if self.window is None else LayerKind.SLIDING
        return KVGroup(kind, layers, self.kv_heads, self.key_width, self.value_width, self.window)


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). rank: of the latent that is kept. query_rank: 0 for
    queries without one. index_*: of a sparse indexer; 0 without. index_own: this layer keeps index keys of its own.
    """

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
        """What these layers keep: the latent and the rotated key that all heads share."""
        return KVGroup(LayerKind.LATENT, layers, 1, self.rank, self.rope_width)


@dataclass(frozen=True, slots=True)
class State:
    """A recurrent layer. elements: of the state. conv_elements: inputs that its convolution looks back at.
    weights: parameters per unit of hidden size; extra: those beside.
    """

    heads: int
    elements: int
    conv_elements: int
    weights: int
    extra: int

    def parameters(self, hidden: int) -> int:
        """Of the projections and the convolution."""
        return hidden * self.weights + self.extra


def delta_net(key_heads: int, value_heads: int, key_width: int, value_width: int, kernel: int) -> State:
    """Gated DeltaNet (arXiv 2412.06464): a matrix key_width x value_width per value head."""
    keys, values = key_heads * key_width, value_heads * value_width
    conv = 2 * keys + values
    return State(
        heads=value_heads,
        elements=value_heads * key_width * value_width,
        conv_elements=conv * (kernel - 1),
        weights=conv + 2 * values + 2 * value_heads,
        extra=conv * kernel + 2 * value_heads + value_width,
    )


def mamba2(heads: int, head_width: int, state_size: int, groups: int, kernel: int) -> State:
    """Mamba-2 (arXiv 2405.21060): a matrix head_width x state_size per head."""
    inner = heads * head_width
    conv = inner + 2 * groups * state_size
    return State(
        heads=heads,
        elements=heads * head_width * state_size,
        conv_elements=conv * (kernel - 1),
        weights=inner + conv + heads + inner,
        extra=conv * (kernel + 1) + 3 * heads + inner,
    )
