"""From a config.json to its layers, family by family. What is not listed here is refused by name.

The rules are those of the transformers classes (models/*/configuration_*.py, modeling_*.py of 5.24), of the published
checkpoints' own fields where transformers renames them (hybrid_override_pattern, hybrid_layer_pattern).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvire.plan.fields import Fields
from kvire.plan.mixers import Attention, Latent, State, delta_net, mamba2

FULL, SLIDING, CHUNKED, LINEAR = "full_attention", "sliding_attention", "chunked_attention", "linear_attention"


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. mixer: None where it only feeds forward. dense: parameters of its feed-forward part that every token
    uses. experts, active_experts: of the routed ones, all and those that one token uses.
    """

    mixer: Attention | Latent | State | None
    dense: int = 0
    experts: int = 0
    active_experts: int = 0


def _attention(f: Fields, *, window: int | None = None, head_dim: int | None = None) -> Attention:
    """The usual fields. head_dim: the class's default; None for hidden size over heads."""
    heads = f.whole("num_attention_heads")
    width = f.whole("head_dim", head_dim or f.whole("hidden_size") // heads)
    return Attention(heads, f.whole("num_key_value_heads", heads), width, width, window)


def _gated(f: Fields, name: str = "intermediate_size") -> int:
    """Gate, up and down projections."""
    return 3 * f.whole("hidden_size") * f.whole(name)


def _experts(f: Fields, count: str, *, used: str = "num_experts_per_tok", matrices: int = 3) -> tuple[int, int, int]:
    """Parameters of the router, of all experts, and of those that one token uses.

    num_local_experts: what transformers writes for the number of experts, whatever the checkpoint called it.
    """
    each = matrices * f.whole("hidden_size") * f.whole("moe_intermediate_size", f.count("intermediate_size", 0) or None)
    experts = f.whole(count, f.count("num_local_experts", 0) or None)
    return f.whole("hidden_size") * experts, experts * each, f.whole(used) * each


def _with(mixers: list[Attention], feed: Callable[[int], Layer]) -> list[Layer]:
    return [replace(feed(i), mixer=mixer) for i, mixer in enumerate(mixers)]


def _by_type(f: Fields, default: list[str], whole: Attention, window: Callable[[], int]) -> list[Attention]:
    """Full and sliding layers that differ in nothing else."""
    types = f.per_layer("layer_types", (FULL, SLIDING), default)
    return [whole if kind == FULL else replace(whole, window=window()) for kind in types]


def _dense(f: Fields) -> Callable[[int], Layer]:
    feed = Layer(None, dense=_gated(f))
    return lambda _: feed


def llama(f: Fields) -> list[Layer]:
    """Llama, and those that differ in nothing that counts here; Mistral with one window for all layers."""
    whole = _attention(f)
    if f.model_type in ("mistral", "mixtral") and f.get("sliding_window") is not None:
        whole = replace(whole, window=f.whole("sliding_window"))
    f.flag("attention_bias")
    mixers = [whole] * f.layers()
    if f.model_type != "mixtral":
        return _with(mixers, _dense(f))
    router, experts, active = _experts(f, "num_local_experts")
    return _with(mixers, lambda _: Layer(None, router, experts, active))


def qwen(f: Fields) -> list[Layer]:
    """Qwen2, Qwen3 and Qwen3-MoE; a window counts only with use_sliding_window."""
    whole = _attention(f, head_dim=128 if f.model_type == "qwen3" else None)
    layers, first = f.layers(), f.count("max_window_layers", 28)
    f.flag("attention_bias")
    if f.model_type == "qwen2":
        whole = replace(whole, extra=(whole.heads + 2 * whole.kv_heads) * whole.key_width)
    else:
        whole = replace(whole, extra=2 * whole.key_width)
    windows = f.flag("use_sliding_window")
    f.get("sliding_window")
    if f.model_type == "qwen3_moe":
        if windows:
            whole = replace(whole, window=f.whole("sliding_window"))
        f.get("shared_expert_intermediate_size")
        router, experts, active = _experts(f, "num_experts")
        return _with([whole] * layers, lambda _: Layer(None, router, experts, active))
    default = [SLIDING if windows and i >= first else FULL for i in range(layers)]
    return _with(_by_type(f, default, whole, lambda: f.whole("sliding_window")), _dense(f))


def minimax_m2(f: Fields) -> list[Layer]:
    """Every layer sees everything; experts in every layer."""
    whole = _attention(f, head_dim=128)
    whole = replace(whole, extra=(whole.heads + whole.kv_heads) * whole.key_width)
    layers = f.layers()
    f.per_layer("attn_type_list", (1,), [1] * layers)
    router, experts, active = _experts(f, "num_local_experts")
    return _with([whole] * layers, lambda _: Layer(None, router, experts, active))


def gpt_oss(f: Fields) -> list[Layer]:
    """Every other layer slides; experts with biases, attention with biases and a sink per head."""
    whole = _attention(f, head_dim=64)
    hidden, layers = f.whole("hidden_size"), f.layers()
    biases = (whole.heads + 2 * whole.kv_heads) * whole.key_width + hidden + whole.heads
    whole = replace(whole, extra=biases)
    f.flag("attention_bias")
    default = [FULL if i % 2 else SLIDING for i in range(layers)]
    router, experts, active = _experts(f, "num_local_experts")
    bias = 2 * f.whole("intermediate_size") + hidden
    count, used = f.whole("num_local_experts"), f.whole("num_experts_per_tok")
    feed = Layer(None, router + count, experts + count * bias, active + used * bias)
    return _with(_by_type(f, default, whole, lambda: f.whole("sliding_window")), lambda _: feed)


def gemma3(f: Fields) -> list[Layer]:
    """Every sixth layer sees everything."""
    whole = _attention(f, head_dim=256)
    whole = replace(whole, extra=2 * whole.key_width + 2 * f.whole("hidden_size"))  # four norms a layer
    every = f.whole("sliding_window_pattern", f.whole("_sliding_window_pattern", 6))
    layers = f.layers()
    default = [FULL if (i + 1) % every == 0 else SLIDING for i in range(layers)]
    return _with(_by_type(f, default, whole, lambda: f.whole("sliding_window", 4096)), _dense(f))


def gemma4(f: Fields) -> list[Layer]:
    """Full layers have heads of their own shape, and with attention_k_eq_v one projection for K and V."""
    layers, hidden = f.layers(), f.whole("hidden_size")
    if f.count("num_kv_shared_layers", 0) or f.count("hidden_size_per_layer_input", 256):
        name = "num_kv_shared_layers" if f.count("num_kv_shared_layers", 0) else "hidden_size_per_layer_input"
        raise f.wrong(name, "which is planned for only where it is 0")
    sliding = replace(_attention(f, head_dim=256), window=f.whole("sliding_window"))
    equal, width = f.flag("attention_k_eq_v"), f.whole("global_head_dim", 512)
    heads = f.whole("num_global_key_value_heads", sliding.kv_heads) if equal else sliding.kv_heads
    f.get("num_global_key_value_heads")
    whole = Attention(sliding.heads, heads, width, width, shared_kv=equal)
    default = [FULL if i % 6 == 5 else SLIDING for i in range(layers)]
    types = f.per_layer("layer_types", (FULL, SLIDING), default)
    feed = Layer(None, dense=_gated(f) + 6 * hidden)
    if f.flag("enable_moe_block"):
        router, experts, active = _experts(f, "num_experts", used="top_k_experts")
        feed = Layer(None, feed.dense + router, experts, active)
    f.flag("use_double_wide_mlp")
    return _with([whole if kind == FULL else sliding for kind in types], lambda _: feed)


def llama4(f: Fields) -> list[Layer]:
    """Layers without rotary positions see everything, the others their own chunk; experts in every nth layer."""
    layers, step = f.layers(), f.whole("interleave_moe_layer_step", 1)
    whole, every = _attention(f), f.whole("no_rope_layer_interval", 4)
    rope = f.per_layer("no_rope_layers", (0, 1), [int((i + 1) % every != 0) for i in range(layers)])
    default = [CHUNKED if has_rope else FULL for has_rope in rope]
    types = f.per_layer("layer_types", (FULL, CHUNKED), default)
    chunked = replace(whole, window=f.whole("attention_chunk_size"))
    router, experts, active = _experts(f, "num_local_experts")
    with_experts = Layer(None, router + _gated(f), experts, active)  # one shared expert of the same size

    def feed(layer: int) -> Layer:
        return with_experts if (layer + 1) % step == 0 else Layer(None, dense=_gated(f, "intermediate_size_mlp"))

    return _with([whole if kind == FULL else chunked for kind in types], feed)


def deepseek(f: Fields) -> list[Layer]:
    """DeepSeek-V3, Kimi-K2, DeepSeek-V3.2, GLM-5: latent attention; the last two with a sparse indexer."""
    layers, sparse = f.layers(), f.model_type in ("deepseek_v32", "glm_moe_dsa")
    latent = Latent(
        heads=f.whole("num_attention_heads"),
        rank=f.whole("kv_lora_rank"),
        rope_width=f.whole("qk_rope_head_dim"),
        nope_width=f.whole("qk_nope_head_dim"),
        value_width=f.whole("v_head_dim"),
        query_rank=f.count("q_lora_rank", 0),
    )
    for name in ("num_key_value_heads", "head_dim", "qk_head_dim", "attention_bias", "mlp_bias"):
        f.get(name)  # set by the class, and without effect on a latent
    owns = [False] * layers
    if sparse:
        heads = 32 if f.model_type == "glm_moe_dsa" else 64
        latent = replace(
            latent, index_heads=f.whole("index_n_heads", heads), index_width=f.whole("index_head_dim", 128),
            index_topk=f.whole("index_topk", 2048),
        )  # fmt: skip
        owns = [kind == "full" for kind in f.per_layer("indexer_types", ("full", "shared"), ["full"] * layers)]
        if f.count("index_topk_freq", 1) > 1 and f.get("indexer_types") is None:
            raise f.wrong("index_topk_freq", "so layers share indexers: state which in indexer_types")
        f.per_layer("layer_types", ("deepseek_sparse_attention", "indexed_attention"), ["indexed_attention"] * layers)
    router, experts, active = _experts(f, "n_routed_experts")
    shared = f.count("n_shared_experts", 0) * _gated(f, "moe_intermediate_size")
    with_experts = Layer(None, router + f.whole("n_routed_experts") + shared, experts, active)
    first = f.count("first_k_dense_replace", 0)
    feeds = [Layer(None, dense=_gated(f)) if i < first else with_experts for i in range(layers)]
    return [replace(feeds[i], mixer=replace(latent, index_own=owns[i])) for i in range(layers)]


def mimo_v2(f: Fields) -> list[Layer]:
    """MiMo-V2-Flash: full and sliding layers with KV heads and widths of their own; the first layer has no experts."""
    layers = f.layers()
    kinds = f.per_layer("hybrid_layer_pattern", (0, 1), [0 if i % 6 == 5 or i == 0 else 1 for i in range(layers)])
    whole = Attention(
        f.whole("num_attention_heads"), f.whole("num_key_value_heads"), f.whole("head_dim"), f.whole("v_head_dim")
    )
    sliding = Attention(
        f.whole("swa_num_attention_heads"), f.whole("swa_num_key_value_heads"), f.whole("swa_head_dim"),
        f.whole("swa_v_head_dim"), f.whole("sliding_window"), extra=f.whole("swa_num_attention_heads"),
    )  # fmt: skip
    f.get("sliding_window_size"), f.get("attention_chunk_size")  # the same number under other engines' names
    router, experts, active = _experts(f, "n_routed_experts")
    with_experts = Layer(None, router + f.whole("n_routed_experts"), experts, active)
    mixers = [sliding if kind else whole for kind in kinds]
    return _with(mixers, lambda i: Layer(None, dense=_gated(f)) if i == 0 else with_experts)


def qwen_hybrid(f: Fields) -> list[Layer]:
    """Qwen3-Next and Qwen3.5: three layers of linear attention, then one of gated full attention."""
    layers, every = f.layers(), f.whole("full_attention_interval", 4)
    default = [FULL if (i + 1) % every == 0 else LINEAR for i in range(layers)]
    types = f.per_layer("layer_types", (FULL, LINEAR), default)
    f.flag("attn_output_gate", default=True)
    f.flag("attention_bias")
    whole = _attention(f, head_dim=256)
    whole = replace(whole, gate=True, extra=2 * whole.key_width)
    state = delta_net(
        f.whole("linear_num_key_heads"), f.whole("linear_num_value_heads"), f.whole("linear_key_head_dim"),
        f.whole("linear_value_head_dim"), f.whole("linear_conv_kernel_dim"),
    )  # fmt: skip
    if f.count("num_experts", 0):
        router, experts, active = _experts(f, "num_experts")
        shared = _gated(f, "shared_expert_intermediate_size") + f.whole("hidden_size")
        feed = Layer(None, router + shared, experts, active)
    else:
        feed = Layer(None, dense=_gated(f))
    return [replace(feed, mixer=whole if kind == FULL else state) for kind in types]


def nemotron_h(f: Fields) -> list[Layer]:
    """Each layer is one thing: Mamba-2 (M), attention (*), experts (E) or a plain feed-forward part (-)."""
    hidden, name = f.whole("hidden_size"), "hybrid_override_pattern"
    if f.get(name) is None:
        raise f.wrong(name, "without which it is not known which layers attend")
    pattern = f.per_layer(name, ("M", "*", "E", "-"), ["M"] * f.layers())
    if f.get("moe_latent_size") or f.get("sliding_window"):
        raise f.wrong("moe_latent_size" if f.get("moe_latent_size") else "sliding_window", "which is not planned for")
    f.flag("attention_bias"), f.get("expand"), f.flag("mlp_bias")
    whole = _attention(f, head_dim=128)
    state = mamba2(
        f.whole("mamba_num_heads"), f.whole("mamba_head_dim"), f.whole("ssm_state_size"), f.whole("n_groups"),
        f.whole("conv_kernel"),
    )  # fmt: skip
    router, experts, active = _experts(f, "n_routed_experts", matrices=2)  # squared ReLU: no gate
    shared = f.count("n_shared_experts", 1) * 2 * hidden * f.whole("moe_shared_expert_intermediate_size")
    kinds = {
        "M": Layer(state),
        "*": Layer(whole),
        "E": Layer(None, router + f.whole("n_routed_experts") + shared, experts, active),
        "-": Layer(None, 2 * hidden * f.whole("intermediate_size")),
    }
    return [kinds[kind] for kind in pattern]


FAMILIES: dict[str, Callable[[Fields], list[Layer]]] = {
    "llama": llama,
    "mistral": llama,
    "mixtral": llama,
    "qwen2": qwen,
    "qwen3": qwen,
    "qwen3_moe": qwen,
    "minimax_m2": minimax_m2,
    "gpt_oss": gpt_oss,
    "gemma3_text": gemma3,
    "gemma4_text": gemma4,
    "llama4_text": llama4,
    "deepseek_v3": deepseek,
    "kimi_k2": deepseek,
    "deepseek_v32": deepseek,
    "glm_moe_dsa": deepseek,
    "mimo_v2_flash": mimo_v2,
    "qwen3_next": qwen_hybrid,
    "qwen3_5_text": qwen_hybrid,
    "qwen3_5_moe_text": qwen_hybrid,
    "nemotron_h": nemotron_h,
}
# Checkpoints that read images too; their language model stands in text_config.
NESTED = {
    "gemma4": "gemma4_text",
    "llama4": "llama4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
