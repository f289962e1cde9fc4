"""What a family's layers hold beside their projections, in parameters: norms, biases, the
feed-forward part.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvire.plan.families.fields import Fields
from kvire.plan.families.layouts import layer_pattern
from kvire.plan.families.mixers import Attention, Mixer

# True, False, or the field of the config that says which.
Flag = bool | str


@dataclass(frozen=True, slots=True)
class Feed:
    """Parameters of one layer beside its projections.

    dense: used for every token.
    experts, active_experts: number of routed experts, and of those per token.
    """

    dense: int = 0
    experts: int = 0
    active_experts: int = 0


FeedRule = Callable[[Fields, int], Feed]  # of one layer, by its index


@dataclass(frozen=True, slots=True)
class ModelBlock:
    """One family's layers beside their projections.

    norms: vectors as wide as the hidden size in a layer that mixes and feeds forward;
    norm_bias: each has a bias.
    bias, out_bias: on Q, K and V, and on the projection back; None for the same.
    qk_norm: a norm of Q and one of K: over a "head", over "all" heads, or "" for none; qk_flag
        switches it.
    more: further parameters of one layer.
    beside: those outside the layers, but for embeddings and the last norm.
    """

    feed: FeedRule
    norms: int = 2
    norm_bias: bool = False
    bias: Flag = False
    out_bias: Flag | None = None
    qk_norm: str = ""
    qk_flag: Flag = True
    more: Callable[[Fields, int, Mixer], int] = lambda *_: 0
    beside: Callable[[Fields], int] = lambda _: 0

    def layers(self, f: Fields, mixers: Sequence[Mixer]) -> list[Feed]:
        """Of every layer."""
        return [self._layer(f, i, mixer) for i, mixer in enumerate(mixers)]

    def outside(self, f: Fields) -> int:
        """Parameters outside the layers, but for embeddings."""
        return (self._norm(f) if self.norms else 0) + self.beside(f)

    def _layer(self, f: Fields, layer: int, mixer: Mixer) -> Feed:
        fed = self.feed(f, layer)
        more = self.norms * self._norm(f) + self._attention(f, mixer) + self.more(f, layer, mixer)
        return Feed(fed.dense + more, fed.experts, fed.active_experts)

    def _norm(self, f: Fields) -> int:
        return f.whole("hidden_size") * (2 if self.norm_bias else 1)

    def _attention(self, f: Fields, mixer: Mixer) -> int:
        """Biases of the projections, norms of Q and K."""
        bias, normed = on(f, self.bias), on(f, self.qk_flag)
        out_bias = bias if self.out_bias is None else on(f, self.out_bias)
        if not isinstance(mixer, Attention):
            return 0
        queries, kv = mixer.heads * mixer.key_width, mixer.kv_heads * (mixer.key_width + mixer.value_width)
        norms = {"": 0, "head": 2 * mixer.key_width, "all": (mixer.heads + mixer.kv_heads) * mixer.key_width}
        found = norms[self.qk_norm] if normed else 0
        return found + (queries + kv if bias else 0) + (f.whole("hidden_size") if out_bias else 0)


def on(f: Fields, flag: Flag) -> bool:
    """Whether a part is there."""
    return flag if isinstance(flag, bool) else f.flag(flag)


def dense(
    matrices: int = 3, *, bias: Flag = False, width: str = "intermediate_size", widening: int | None = None
) -> FeedRule:
    """Gate, up and down (3), or up and down (2).

    widening: inner over hidden width where the config does not say.
    """

    def feed(f: Fields, _: int) -> Feed:
        hidden = f.whole("hidden_size")
        inner = f.whole(width, None if widening is None else widening * hidden)
        biases = (matrices - 1) * inner + hidden if on(f, bias) else 0
        return Feed(matrices * hidden * inner + biases)

    return feed


def gated(f: Fields, width: int) -> int:
    """Gate, up and down projections."""
    return 3 * f.whole("hidden_size") * width


def routed(
    f: Fields, count: str, used: str = "num_experts_per_tok", *, matrices: int = 3, biases: int = 0, router: int = 0
) -> Feed:
    """Router and experts of one layer.

    biases: of one expert.
    router: its parameters for each expert, but for a row.

    num_local_experts, moe_intermediate_size: what transformers writes, whatever the checkpoint
        called it.
    """
    hidden, inner = f.whole("hidden_size"), f.count("intermediate_size", 0) or None
    each = matrices * hidden * f.alike("moe_intermediate_size", inner) + biases
    experts = f.whole(count, f.count("num_local_experts", 0) or None)
    return Feed((hidden + router) * experts, experts * each, f.alike(used) * each)


def experts(
    count: str,
    used: str = "num_experts_per_tok",
    *,
    shared: Callable[[Fields], int] = lambda _: 0,
    is_dense: Callable[[Fields, int], bool] = lambda *_: False,
    router: int = 0,
) -> FeedRule:
    """Routed experts, gated.

    shared: parameters of the experts that every token uses.
    is_dense: layers without experts.
    """

    def feed(f: Fields, layer: int) -> Feed:
        if is_dense(f, layer):
            return Feed(gated(f, f.whole("intermediate_size")))
        found = routed(f, count, used, router=router)
        return Feed(found.dense + shared(f), found.experts, found.active_experts)

    return feed


def first_dense(f: Fields, layer: int) -> bool:
    """DeepSeek's line: the first layers have no experts."""
    kinds = f.get("mlp_layer_types")
    if kinds is not None:
        return bool(f.per_layer("mlp_layer_types", ("dense", "sparse"), ["sparse"] * f.layers())[layer] == "dense")
    return layer < f.count("first_k_dense_replace", 0)


def qwen_dense(f: Fields, layer: int) -> bool:
    """Qwen: layers that are named, or lie between those with experts."""
    return layer in f.get("mlp_only_layers", ()) or (layer + 1) % f.whole("decoder_sparse_step", 1) != 0


def ernie_dense(f: Fields, layer: int) -> bool:
    """Ernie 4.5: from a first to a last layer, every nth has experts."""
    first, last = f.count("moe_layer_start_index"), f.get("moe_layer_end_index")
    last = f.layers() - 1 if last == -1 else f.count("moe_layer_end_index")
    return not (first <= layer <= last and (layer + 1) % f.whole("moe_layer_interval", 1) == 0)


def shared_by_count(field: str) -> Callable[[Fields], int]:
    """So many more experts, for every token."""
    return lambda f: f.count(field, 0) * gated(f, f.whole("moe_intermediate_size", f.count("intermediate_size", 0)))


def shared_by_width(field: str, *, gate: bool = False) -> Callable[[Fields], int]:
    """One more expert, so wide, for every token.

    gate: its output is gated.
    """

    def shared(f: Fields) -> int:
        width = f.count(field, 0)
        return gated(f, width) + (f.whole("hidden_size") if gate and width else 0)

    return shared


def shared_like_dense(f: Fields) -> int:
    """Hunyuan: experts as wide as a plain feed-forward part, for every token; one, unless the
    config says more.
    """
    return f.alike("num_shared_expert", 1) * gated(f, f.whole("intermediate_size"))


def experts_if_any(f: Fields, _: int) -> Feed:
    """Qwen3-Next and Qwen3.5: experts with a gated shared one, or a plain feed-forward part."""
    if not f.count("num_experts", 0):
        return Feed(gated(f, f.whole("intermediate_size")))
    found = routed(f, "num_experts")
    shared = gated(f, f.whole("shared_expert_intermediate_size")) + f.whole("hidden_size")
    return Feed(found.dense + shared, found.experts, found.active_experts)


def gpt_oss(f: Fields, _: int) -> Feed:
    """Experts and router with biases."""
    return routed(f, "num_local_experts", biases=2 * f.whole("intermediate_size") + f.whole("hidden_size"), router=1)


def xielu(*_: object) -> int:
    """Apertus: two numbers of its activation, xIELU."""
    return 2


def sinks(f: Fields, _: int, mixer: Mixer) -> int:
    """A number for each head that takes attention off the tokens: in all layers, or (MiMo) in those
    with a window.
    """
    there = isinstance(mixer, Attention) and (f.model_type == "gpt_oss" or mixer.window is not None)
    return mixer.heads if there and isinstance(mixer, Attention) else 0


def gemma4_feed(f: Fields, layer: int) -> Feed:
    """A feed-forward part, twice as wide where KV is shared if the config says so, and experts
    beside it.
    """
    shares = layer >= f.layers() - f.count("num_kv_shared_layers", 0)
    times = 2 if f.flag("use_double_wide_mlp") and shares else 1
    own = gated(f, times * f.whole("intermediate_size"))
    if not f.flag("enable_moe_block"):
        return Feed(own)
    found = routed(f, "num_experts", used="top_k_experts", router=1)
    return Feed(own + found.dense + 4 * f.whole("hidden_size"), found.experts, found.active_experts)


def gemma4_more(f: Fields, _: int, mixer: Mixer) -> int:
    """Norms of Q and K, and what adds the layer's own embedding."""
    assert isinstance(mixer, Attention)
    hidden, own = f.whole("hidden_size"), f.count("hidden_size_per_layer_input", 0)
    return mixer.key_width * (2 if mixer.keeps else 1) + (2 * hidden * own + hidden if own else 0)


def gemma4_beside(f: Fields) -> int:
    """An embedding for every layer, its projection and norm."""
    own = f.count("hidden_size_per_layer_input", 0)
    if own == 0:
        return 0
    rows = f.whole("vocab_size_per_layer_input", f.whole("vocab_size")) + f.whole("hidden_size")
    return rows * f.layers() * own + own


def llama4_feed(f: Fields, layer: int) -> Feed:
    """Experts and a shared one in every nth layer."""
    if (layer + 1) % f.whole("interleave_moe_layer_step", 1):
        return Feed(gated(f, f.whole("intermediate_size_mlp")))
    found = routed(f, "num_local_experts")
    return Feed(found.dense + gated(f, f.whole("intermediate_size")), found.experts, found.active_experts)


def nemotron_h_feed(f: Fields, layer: int) -> Feed:
    """One norm, and experts or a plain feed-forward part where the layer is one; squared ReLU, so
    no gate.
    """
    if f.get("moe_latent_size"):
        raise f.wrong("moe_latent_size", "which is not planned for")
    f.flag("mlp_bias")
    hidden, kind = f.whole("hidden_size"), layer_pattern(f)[layer]
    if kind == "E":
        found = routed(f, "n_routed_experts", matrices=2, router=1)
        shared = f.count("n_shared_experts", 1) * 2 * hidden * f.whole("moe_shared_expert_intermediate_size")
        return Feed(found.dense + shared, found.experts, found.active_experts)
    return Feed(2 * hidden * f.whole("intermediate_size") if kind == "-" else 0)


def positions(f: Fields) -> int:
    """GPT-2's table of positions."""
    return f.whole("max_position_embeddings") * f.whole("hidden_size")


def head_bias(f: Fields) -> int:
    """Phi's output matrix has a bias."""
    return f.whole("vocab_size")
