"""From a config's fields to its layers: which see everything, which slide, which share, how wide
they are.

One function per rule, as the transformers classes apply it (models/*/configuration_*.py and
modeling_*.py of 5.24), or the published checkpoints' own fields where transformers renames them
(hybrid_override_pattern, hybrid_layer_pattern). table.py says which family follows which.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kvire.core.errors import UnsupportedModelError
from kvire.plan.families.fields import Fields
from kvire.plan.families.mixers import Attention, Latent, Mixer, delta_net, mamba2

# One mixer for each layer. Raises UnsupportedModelError naming a field that cannot be followed.
Layout = Callable[[Fields], list[Mixer]]

FULL, SLIDING, CHUNKED, LINEAR = "full_attention", "sliding_attention", "chunked_attention", "linear_attention"


def attention(f: Fields, window: int | None = None) -> Attention:
    """The usual fields.

    Heads of KV left out are as many as queries'; a width left out is its share of the hidden.
    """
    heads = f.whole("num_attention_heads")
    width = hidden_share(f) if f.get("head_dim") is None else f.whole("head_dim")
    return Attention(heads, f.whole("num_key_value_heads", heads), width, width, window)


def hidden_share(f: Fields) -> int:
    """hidden_size over query heads, whatever head_dim says: some classes know no other width."""
    hidden, heads = f.whole("hidden_size"), f.whole("num_attention_heads")
    if hidden < heads:
        raise UnsupportedModelError(f"the config has hidden_size {hidden} for {heads} heads: the file is damaged")
    return hidden // heads


def full(f: Fields) -> list[Mixer]:
    """Every layer sees everything, whatever the config says of windows."""
    return [attention(f)] * f.layers()


def full_if_softmax(f: Fields) -> list[Mixer]:
    """The same for MiniMax, whose earlier models had linear attention in some layers."""
    f.per_layer("attn_type_list", (1,), [1] * f.layers())
    return full(f)


def hunyuan(f: Fields) -> list[Mixer]:
    """The same, unless what its configs have switches for is in use: KV shared across layers,
    latents.
    """
    for switch in ("use_cla", "use_mla"):
        if f.flag(switch):
            raise f.wrong(switch, "so that layers keep KV in a way that is not known here")
    for unused in (
        "cla_share_factor",
        "kv_lora_rank",
        "q_lora_rank",
        "qk_rope_head_dim",
        "qk_nope_head_dim",
        "v_head_dim",
    ):
        f.get(unused)
    whole = attention(f)
    if f.whole("attention_head_dim", whole.key_width) != whole.key_width:
        raise f.wrong("attention_head_dim", f"and heads of {whole.key_width}: which of them counts is not known")
    return [whole] * f.layers()


def one_head_per_query(f: Fields) -> list[Mixer]:
    """One K and V per query head, and no width but hidden_size's share: fused QKV of
    the GPT line.
    """
    heads, width = f.whole("num_attention_heads"), hidden_share(f)
    f.get("num_key_value_heads"), f.get("head_dim")  # the classes take no notice
    return [Attention(heads, heads, width, width)] * f.layers()


def one_window(f: Fields) -> list[Mixer]:
    """The attention class gives every layer the config's window, or none, whatever `layer_types`
    says.
    """
    return _one_window(f, f.window())


def one_window_if_used(f: Fields) -> list[Mixer]:
    """The same, but a window counts only with use_sliding_window."""
    return _one_window(f, _window_in_use(f))


def _one_window(f: Fields, window: int | None) -> list[Mixer]:
    expected = FULL if window is None else SLIDING
    if any(kind != expected for kind in f.get("layer_types") or ()):
        raise UnsupportedModelError(
            f"this {f.model_type} config has layers of several kinds (layer_types), which the {f.model_type} class "
            "ignores. It is probably a ministral model under the wrong model_type: take the model's current "
            "config.json."
        )
    return [attention(f, window)] * f.layers()


def window_after(f: Fields) -> list[Mixer]:
    """Qwen: a window counts only with use_sliding_window, and then from layer
    max_window_layers on.
    """
    window, first = _window_in_use(f), f.count("max_window_layers")
    return _by_type(f, lambda i: window is None or i < first, window)


def window_after_always(f: Fields) -> list[Mixer]:
    """dots.llm1: the same without a switch."""
    window, first = f.window(), f.count("max_window_layers")
    return _by_type(f, lambda i: window is None or i < first, window)


def window_before(f: Fields) -> list[Mixer]:
    """Qwen2-MoE: every other layer slides, up to layer max_window_layers, with
    use_sliding_window.
    """
    window, last = _window_in_use(f), f.count("max_window_layers")
    return _by_type(f, lambda i: window is None or i % 2 == 1 or i >= last, window)


def all_or_none(f: Fields) -> list[Mixer]:
    """Ministral: all layers slide if there is a window, unless layer_types says which."""
    window = f.window()
    return _by_type(f, lambda _: window is None, window)


def full_every(nth: int, *, field: str | None = None, first: bool = False) -> Layout:
    """Every nth layer sees everything: the last of each nth, or the first.

    field: overrides nth where it is there.
    """

    def layout(f: Fields) -> list[Mixer]:
        every = nth
        if field is not None and f.get("layer_types") is None:
            every = f.whole(field, nth)
        return _by_type(f, lambda i: i % every == (0 if first else every - 1), f.window())

    return layout


def exaone4(f: Fields) -> list[Mixer]:
    """Every fourth layer sees everything; without a window all do."""
    return full(f) if f.window() is None else full_every(4, field="sliding_window_pattern")(f)


def smollm3(f: Fields) -> list[Mixer]:
    """A window, where it is in use, belongs to the layers without rotary positions."""
    window, every = _window_in_use(f), f.whole("no_rope_layer_interval")
    rope = f.per_layer("no_rope_layers", (0, 1), [int((i + 1) % every != 0) for i in range(f.layers())])
    return _by_type(f, lambda i: window is None or bool(rope[i]), window)


def gemma4(f: Fields) -> list[Mixer]:
    """Full layers have heads of their own shape; the last num_kv_shared_layers keep nothing and
    read an earlier layer.

    A checkpoint says the shape of its full layers in global_head_dim and
    num_global_key_value_heads; a config that transformers wrote says it again for each of them, in
    per_layer_config.
    """
    layers, shared = f.layers(), f.count("num_kv_shared_layers")
    types = f.per_layer("layer_types", (FULL, SLIDING), [FULL if i % 6 == 5 else SLIDING for i in range(layers)])
    types[-1] = FULL  # the class sees to that
    if shared >= layers or set(types[: layers - shared]) != set(types):
        raise f.wrong(
            "num_kv_shared_layers", f"so the last {shared} of {layers} layers share KV that no layer before them keeps"
        )
    whole = _gemma4_full(f, {i for i, kind in enumerate(types) if kind == FULL})
    sliding = attention(f, f.whole("sliding_window")) if SLIDING in types else whole
    kinds = [whole if kind == FULL else sliding for kind in types]
    return [replace(mixer, keeps=i < layers - shared) for i, mixer in enumerate(kinds)]


def _gemma4_full(f: Fields, full_layers: set[int]) -> Attention:
    usual, overrides = attention(f), f.get("per_layer_config")
    equal, global_heads = f.flag("attention_k_eq_v"), f.get("num_global_key_value_heads")
    if overrides is None:
        width = f.whole("global_head_dim", 512)
        heads = usual.kv_heads if not equal or global_heads is None else f.whole("num_global_key_value_heads")
    else:
        f.get("global_head_dim")
        shape = _shape_of_full_layers(overrides, full_layers)
        width, heads = shape.get("head_dim", usual.key_width), shape.get("num_key_value_heads", usual.kv_heads)
    return Attention(usual.heads, heads, width, width, shared_kv=equal)


def _shape_of_full_layers(overrides: Mapping[Any, Any], full_layers: set[int]) -> dict[str, int]:
    """Fields that differ in full-attention layers.

    overrides: by layer, as a number or as digits ("05").
    """
    shapes = {int(layer): dict(fields) for layer, fields in overrides.items() if str(layer).isdigit()}
    shape: dict[str, Any] = next(iter(shapes.values()), {})
    if len(shapes) != len(overrides) or set(shapes) - full_layers or (shape and full_layers - set(shapes)):
        raise UnsupportedModelError("per_layer_config names other layers than the full ones, which is not supported")
    if any(fields != shape for fields in shapes.values()) or set(shape) - {"head_dim", "num_key_value_heads"}:
        raise UnsupportedModelError(
            "per_layer_config is supported where it gives every full layer the same head_dim and "
            "num_key_value_heads, not for anything else"
        )
    if not all(type(value) is int and value > 0 for value in shape.values()):
        raise UnsupportedModelError(f"per_layer_config has {shape}: these should be whole numbers above zero")
    return shape


def llama4(f: Fields) -> list[Mixer]:
    """Layers without rotary positions see everything, the others their own chunk."""
    layers, every = f.layers(), f.whole("no_rope_layer_interval", 4)
    rope = f.per_layer("no_rope_layers", (0, 1), [int((i + 1) % every != 0) for i in range(layers)])
    types = f.per_layer("layer_types", (FULL, CHUNKED), [CHUNKED if has_rope else FULL for has_rope in rope])
    whole, chunked = attention(f), attention(f, f.whole("attention_chunk_size"))
    return [whole if kind == FULL else chunked for kind in types]


def latent(f: Fields) -> list[Mixer]:
    """Multi-head latent attention, in every layer the same."""
    return [_latent(f)] * f.layers()


def _latent(f: Fields) -> Latent:
    for name in ("num_key_value_heads", "head_dim", "qk_head_dim"):
        f.get(name)  # set by the class, and without effect on a latent
    return Latent(
        heads=f.whole("num_attention_heads"),
        rank=f.whole("kv_lora_rank"),
        rope_width=f.whole("qk_rope_head_dim"),
        nope_width=f.whole("qk_nope_head_dim"),
        value_width=f.whole("v_head_dim"),
        query_rank=f.count("q_lora_rank", 0),
    )


def sparse_latent(f: Fields) -> list[Mixer]:
    """The same, and layers with an indexer keep one more key per token, by which they choose what
    to attend to.
    """
    layers = f.layers()
    own = f.per_layer("indexer_types", ("full", "shared"), ["full"] * layers)
    if f.count("index_topk_freq", 1) > 1 and f.get("indexer_types") is None:
        raise f.wrong("index_topk_freq", "so layers share indexers: state which in indexer_types")
    f.per_layer("layer_types", ("deepseek_sparse_attention", "indexed_attention"), ["indexed_attention"] * layers)
    shape = replace(
        _latent(f), index_heads=f.whole("index_n_heads"), index_width=f.whole("index_head_dim"),
        index_topk=f.whole("index_topk"),
    )  # fmt: skip
    return [replace(shape, index_own=kind == "full") for kind in own]


def mimo_v2(f: Fields) -> list[Mixer]:
    """Full and sliding layers with KV heads and widths of their own."""
    default = [0 if i % 6 == 5 or i == 0 else 1 for i in range(f.layers())]
    kinds = f.per_layer("hybrid_layer_pattern", (0, 1), default)
    whole = Attention(
        f.whole("num_attention_heads"), f.whole("num_key_value_heads"), f.whole("head_dim"), f.whole("v_head_dim")
    )
    sliding = Attention(
        f.whole("swa_num_attention_heads"), f.whole("swa_num_key_value_heads"), f.whole("swa_head_dim"),
        f.whole("swa_v_head_dim"), f.whole("sliding_window"),
    )  # fmt: skip
    f.get("sliding_window_size"), f.get("attention_chunk_size")  # the same number under other engines' names
    return [sliding if kind else whole for kind in kinds]


def gated_delta_net(f: Fields) -> list[Mixer]:
    """Qwen3-Next and Qwen3.5: three layers of linear attention, then one of gated full
    attention.
    """
    layers, every = f.layers(), f.whole("full_attention_interval", 4)
    types = f.per_layer(
        "layer_types", (FULL, LINEAR), [FULL if (i + 1) % every == 0 else LINEAR for i in range(layers)]
    )
    f.flag("attn_output_gate", default=True)
    whole = replace(attention(f), gate=True)
    state = delta_net(
        f.whole("linear_num_key_heads"), f.whole("linear_num_value_heads"), f.whole("linear_key_head_dim"),
        f.whole("linear_value_head_dim"), f.whole("linear_conv_kernel_dim"),
    )  # fmt: skip
    return [whole if kind == FULL else state for kind in types]


def nemotron_h(f: Fields) -> list[Mixer]:
    """Each layer is one thing: Mamba-2 (M), attention (*), experts (E) or a plain feed-forward part
    (-).
    """
    if f.get("sliding_window"):
        raise f.wrong("sliding_window", "which is not planned for")
    whole = attention(f)
    state = mamba2(
        f.whole("mamba_num_heads"), f.whole("mamba_head_dim"), f.whole("ssm_state_size"), f.whole("n_groups"),
        f.whole("conv_kernel"),
    )  # fmt: skip
    f.get("expand")
    mixers: dict[str, Mixer] = {"M": state, "*": whole, "E": None, "-": None}
    return [mixers[kind] for kind in layer_pattern(f)]


def layer_pattern(f: Fields) -> list[str]:
    """What each layer of a Nemotron-H is."""
    name = "hybrid_override_pattern"
    if f.get(name) is None:
        raise f.wrong(name, "without which it is not known which layers attend")
    return f.per_layer(name, ("M", "*", "E", "-"), ["M"] * f.layers())


def _window_in_use(f: Fields) -> int | None:
    in_use = f.flag("use_sliding_window")
    f.get("sliding_window")
    return f.window() if in_use else None


def _by_type(f: Fields, is_full: Callable[[int], bool], window: int | None) -> list[Mixer]:
    """Layers of `layer_types`, or what the class makes of a config without it; they differ in their
    window only.
    """
    types = f.per_layer("layer_types", (FULL, SLIDING), [FULL if is_full(i) else SLIDING for i in range(f.layers())])
    if SLIDING in types and window is None:
        raise UnsupportedModelError(
            f"the config of this {f.model_type} model has sliding layers but no sliding_window in use: its fields "
            "disagree"
        )
    whole = attention(f)
    return [whole if kind == FULL else replace(whole, window=window) for kind in types]
