"""The families: the rules that each follows, and what its config class fills in for fields left
out.

The defaults are the classes' own (models/*/configuration_*.py of transformers 5.24), so that a
config.json that leaves a field out gives the same groups as the config object made from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvire.plan.families import blocks, layouts
from kvire.plan.families.blocks import ModelBlock, dense, experts, shared_by_count, shared_by_width
from kvire.plan.families.fields import Fields
from kvire.plan.families.layouts import Layout


@dataclass(frozen=True, slots=True)
class Family:
    """One model_type.

    layout: what its layers keep.
    block: their parameters beside the projections.
    defaults: by field.
    names: present names of fields by the older ones that its config class also takes.
    runs: the engine is known to cache it right; False: it can only be planned.
    """

    layout: Layout
    block: ModelBlock
    defaults: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    runs: bool = True

    def fields(self, config: Mapping[str, Any], without: tuple[str, ...] = ()) -> Fields:
        """A config of this family.

        without: fields whose defaults do not count.
        """
        defaults = {name: value for name, value in self.defaults.items() if name not in without}
        return Fields(config, str(config.get("model_type")), defaults, self.names)


def _family(
    layout: Layout,
    block: ModelBlock,
    positions: int,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int | None,
    head_dim: int | None = None,
    *,
    tied: bool = False,
    names: Mapping[str, str] | None = None,
    **more: Any,
) -> Family:
    """kv_heads None: one per query head. head_dim None: hidden over heads.

    tied: no output matrix of its own.
    """
    defaults = {
        "max_position_embeddings": positions,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "tie_word_embeddings": tied,
    }
    return Family(layout, block, defaults | more, names or {})


def _latent(positions: int, layers: int, heads: int, block: ModelBlock, *, nope: int, value: int, query: int) -> Family:
    widths = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": nope, "v_head_dim": value}
    sizes = {"max_position_embeddings": positions, "num_hidden_layers": layers, "num_attention_heads": heads}
    return Family(layouts.latent, block, sizes | widths | {"q_lora_rank": query})


def _planned(layout: Layout, block: ModelBlock, **defaults: Any) -> Family:
    return Family(layout, block, defaults, runs=False)


def _pattern(nth: int) -> Layout:
    return layouts.full_every(nth, field="sliding_window_pattern")


def _after(layer: int) -> dict[str, Any]:
    return {"sliding_window": 4096, "max_window_layers": layer}


_full, _window = layouts.full, layouts.one_window
_every = layouts.full_every
_ERNIE: dict[str, Any] = {"moe_layer_start_index": 1, "moe_layer_end_index": -1}
_GEMMA3: dict[str, Any] = {"sliding_window": 4096, "vocab_size": 262208}
_GEMMA4: dict[str, Any] = {"sliding_window": 512, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 256}
_INDEX: dict[str, Any] = {"index_head_dim": 128, "index_topk": 2048}
_PATTERN = {"_sliding_window_pattern": "sliding_window_pattern"}
_GPT2_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}

# Parameters beside the projections, by their fields. Biases: the fields that switch them.
_gated = ModelBlock(dense())
_biased = ModelBlock(dense(), bias="attention_bias")
_llama = ModelBlock(dense(bias="mlp_bias"), bias="attention_bias")
_cwm = ModelBlock(dense(bias="mlp_bias"))
_helium = ModelBlock(dense(bias="mlp_bias"), bias="attention_bias", out_bias=False)
_seed_oss = ModelBlock(dense(bias="mlp_bias"), bias="attention_bias", out_bias="attention_out_bias")
_arcee = ModelBlock(dense(2, bias="mlp_bias"), bias="attention_bias")
_nemotron = ModelBlock(dense(2, bias="mlp_bias"), norm_bias=True, bias="attention_bias")
_ernie = ModelBlock(dense(bias="use_bias"), bias="use_bias")
_starcoder2 = ModelBlock(dense(2, bias="use_bias"), norm_bias=True, bias="use_bias")
_glm = ModelBlock(dense(), bias="attention_bias", out_bias=False)
_glm4 = ModelBlock(dense(), norms=4, bias="attention_bias", out_bias=False)
_olmo = ModelBlock(dense(), norms=0, bias="attention_bias")
_olmo2 = ModelBlock(dense(), bias="attention_bias", qk_norm="all")
_cohere = ModelBlock(dense(), norms=1, bias="attention_bias", qk_norm="all", qk_flag="use_qk_norm")
_cohere2 = ModelBlock(dense(), norms=1, bias="attention_bias")
_stablelm = ModelBlock(
    dense(), norm_bias=True, bias="use_qkv_bias", out_bias=False, qk_norm="all", qk_flag="qk_layernorm"
)
_qwen2 = ModelBlock(dense(), bias=True, out_bias=False)
_qwen3 = ModelBlock(dense(), bias="attention_bias", qk_norm="head")
_exaone4 = ModelBlock(dense(), qk_norm="head")
_apertus = ModelBlock(dense(2), bias="attention_bias", qk_norm="head", more=blocks.xielu)
_gemma2 = ModelBlock(dense(), norms=4, bias="attention_bias")
_gemma3 = ModelBlock(dense(), norms=4, bias="attention_bias", qk_norm="head")
_gemma4 = ModelBlock(
    blocks.gemma4_feed, norms=4, bias="attention_bias", more=blocks.gemma4_more, beside=blocks.gemma4_beside
)
_phi = ModelBlock(dense(2, bias=True), norms=1, norm_bias=True, bias=True, beside=blocks.head_bias)
_gpt2 = ModelBlock(dense(2, bias=True, width="n_inner", widening=4), norm_bias=True, bias=True, beside=blocks.positions)
_gpt_neox = ModelBlock(dense(2, bias=True), norm_bias=True, bias="attention_bias")
# With experts.
_mixtral = ModelBlock(experts("num_local_experts"))
_minimax = ModelBlock(experts("num_local_experts"), qk_norm="all")
_granite_shared = shared_by_width("shared_intermediate_size")
_granitemoe = ModelBlock(experts("num_local_experts", shared=_granite_shared), bias="attention_bias")
_olmoe = ModelBlock(experts("num_experts"), bias="attention_bias", qk_norm="all")
_qwen3_moe = ModelBlock(experts("num_experts", is_dense=blocks.qwen_dense), bias="attention_bias", qk_norm="head")
_qwen2_shared = shared_by_width("shared_expert_intermediate_size", gate=True)
_qwen2_moe = ModelBlock(
    experts("num_experts", shared=_qwen2_shared, is_dense=blocks.qwen_dense), bias="qkv_bias", out_bias=False
)
_ernie_shared = shared_by_count("moe_num_shared_experts")
_ernie_moe = ModelBlock(
    experts("moe_num_experts", "moe_k", shared=_ernie_shared, is_dense=blocks.ernie_dense, router=1), bias="use_bias"
)
_hunyuan_moe = ModelBlock(
    experts("num_experts", "moe_topk", shared=blocks.shared_like_dense), bias="attention_bias", qk_norm="head"
)
_gpt_oss = ModelBlock(blocks.gpt_oss, bias="attention_bias", more=blocks.sinks)
_shared = shared_by_count("n_shared_experts")
_routed = experts("n_routed_experts", shared=_shared, is_dense=blocks.first_dense, router=1)
_deepseek_v2 = ModelBlock(experts("n_routed_experts", shared=_shared, is_dense=blocks.first_dense))
_deepseek = ModelBlock(_routed, bias="attention_bias")
_dots1 = ModelBlock(_routed, bias="attention_bias", qk_norm="head")
_glm4_moe = ModelBlock(_routed, bias="attention_bias", out_bias=False, qk_norm="head", qk_flag="use_qk_norm")
_mimo = ModelBlock(experts("n_routed_experts", is_dense=lambda _, layer: layer == 0, router=1), more=blocks.sinks)
_llama4 = ModelBlock(blocks.llama4_feed, bias="attention_bias")
_qwen_hybrid = ModelBlock(blocks.experts_if_any, bias="attention_bias", qk_norm="head")
_nemotron_h = ModelBlock(blocks.nemotron_h_feed, norms=1, bias="attention_bias")

# layout, block, positions, layers, hidden size, heads, KV heads, head width
FAMILIES: dict[str, Family] = {
    # Every layer sees everything.
    "llama": _family(_full, _llama, 2048, 32, 4096, 32, None),
    "apertus": _family(_full, _apertus, 65536, 32, 4096, 32, None),
    "arcee": _family(_full, _arcee, 4096, 32, 2560, 32, None),
    "cohere": _family(_full, _cohere, 8192, 40, 8192, 64, None, tied=True),
    "ernie4_5": _family(_full, _ernie, 131072, 18, 1024, 16, 2, 128, tied=True),
    "ernie4_5_moe": _family(_full, _ernie_moe, 131072, 28, 2560, 20, 4, tied=True, **_ERNIE),
    "gemma": _family(_full, _biased, 8192, 28, 3072, 16, 16, 256, tied=True),
    "glm": _family(_full, _glm, 131072, 40, 4096, 32, 2, 128),
    "glm4": _family(_full, _glm4, 131072, 40, 4096, 32, 2, 128),
    "glm4_moe": _family(_full, _glm4_moe, 131072, 46, 4096, 96, 8),
    "granite": _family(_full, _llama, 2048, 32, 4096, 32, None),
    "granitemoe": _family(_full, _granitemoe, 2048, 32, 4096, 32, None),
    "granitemoeshared": _family(_full, _granitemoe, 2048, 32, 4096, 32, None),
    "helium": _family(_full, _helium, 4096, 24, 2560, 20, 20, 128),
    "hunyuan_v1_dense": _family(layouts.hunyuan, _qwen3, 2048, 32, 4096, 32, None),
    "hunyuan_v1_moe": _family(layouts.hunyuan, _hunyuan_moe, 2048, 32, 4096, 32, None),
    "minimax_m2": _family(layouts.full_if_softmax, _minimax, 196608, 62, 3072, 48, 8, 128),
    "nemotron": _family(_full, _nemotron, 4096, 32, 6144, 48, None),
    "olmo": _family(_full, _olmo, 2048, 32, 4096, 32, None),
    "olmo2": _family(_full, _olmo2, 2048, 32, 4096, 32, None),
    "olmoe": _family(_full, _olmoe, 4096, 16, 2048, 16, None),
    "phi": _family(_full, _phi, 2048, 24, 2048, 32, None),
    "seed_oss": _family(_full, _seed_oss, 524288, 64, 4096, 80, 8, 128, attention_bias=True),
    "stablelm": _family(_full, _stablelm, 4096, 32, 2560, 32, 32),
    "gpt2": _family(layouts.one_head_per_query, _gpt2, 1024, 12, 768, 12, None, tied=True, names=_GPT2_NAMES),
    "gpt_neox": _family(layouts.one_head_per_query, _gpt_neox, 2048, 44, 6144, 64, None, attention_bias=True),
    # One window, or none, for every layer.
    "mistral": _family(_window, _gated, 131072, 32, 4096, 32, 8, sliding_window=4096),
    "ministral3": _family(_window, _gated, 262144, 34, 4096, 32, 8, 128),
    "mixtral": _family(_window, _mixtral, 131072, 32, 4096, 32, 8),
    "phi3": _family(_window, _gated, 4096, 32, 3072, 32, None),
    "starcoder2": _family(_window, _starcoder2, 4096, 30, 3072, 24, 2, tied=True, use_bias=True),
    "qwen3_moe": _family(layouts.one_window_if_used, _qwen3_moe, 32768, 24, 2048, 32, 4, sliding_window=4096),
    # Some layers slide.
    "cohere2": _family(_pattern(4), _cohere2, 8192, 40, 8192, 64, None, tied=True, sliding_window=4096),
    "cwm": _family(_every(4, first=True), _cwm, 131072, 64, 6144, 48, 8, 128, sliding_window=8192),
    "dots1": _family(layouts.window_after_always, _dots1, 2048, 62, 4608, 32, 32, **_after(62)),
    "exaone4": _family(layouts.exaone4, _exaone4, 2048, 32, 4096, 32, 32, sliding_window=4096),
    "gemma2": _family(_every(2), _gemma2, 8192, 26, 2304, 8, 4, 256, tied=True, sliding_window=4096),
    "gemma3_text": _family(_pattern(6), _gemma3, 131072, 26, 2304, 8, 4, 256, tied=True, names=_PATTERN, **_GEMMA3),
    "gemma4_text": _family(layouts.gemma4, _gemma4, 131072, 30, 2304, 8, 4, 256, tied=True, **_GEMMA4),
    "gpt_oss": _family(_every(2), _gpt_oss, 131072, 36, 2880, 64, 8, 64, sliding_window=128, attention_bias=True),
    "ministral": _family(layouts.all_or_none, _gated, 131072, 32, 4096, 32, 8, sliding_window=4096),
    "olmo3": _family(_every(4), _olmo2, 2048, 32, 4096, 32, None, sliding_window=4096),
    "qwen2": _family(layouts.window_after, _qwen2, 32768, 32, 4096, 32, 32, **_after(28)),
    "qwen2_moe": _family(layouts.window_before, _qwen2_moe, 32768, 24, 2048, 16, 16, qkv_bias=True, **_after(28)),
    "qwen3": _family(layouts.window_after, _qwen3, 32768, 32, 4096, 32, 32, 128, **_after(28)),
    "smollm3": _family(layouts.smollm3, _llama, 32768, 36, 2048, 16, 4, tied=True, no_rope_layer_interval=4),
    "vaultgemma": _family(_every(2), _biased, 8192, 26, 2304, 8, 4, 256, tied=True, sliding_window=4096),
    # Multi-head latent attention.
    "deepseek_v2": _latent(2048, 32, 32, _deepseek_v2, nope=128, value=128, query=1536),
    "deepseek_v3": _latent(4096, 61, 128, _deepseek, nope=128, value=128, query=1536),
    "glm4_moe_lite": _latent(202752, 47, 20, _deepseek, nope=192, value=256, query=768),
    # Planned for only: the engine does not run them.
    "kimi_k2": _planned(layouts.latent, _deepseek),
    "deepseek_v32": _planned(layouts.sparse_latent, _deepseek, index_n_heads=64, **_INDEX),
    "glm_moe_dsa": _planned(layouts.sparse_latent, _deepseek, index_n_heads=32, **_INDEX),
    "llama4_text": _planned(layouts.llama4, _llama4),
    "mimo_v2_flash": _planned(layouts.mimo_v2, _mimo),
    "qwen3_next": _planned(layouts.gated_delta_net, _qwen_hybrid, head_dim=256),
    "qwen3_5_text": _planned(layouts.gated_delta_net, _qwen_hybrid, head_dim=256),
    "qwen3_5_moe_text": _planned(layouts.gated_delta_net, _qwen_hybrid, head_dim=256),
    "nemotron_h": _planned(layouts.nemotron_h, _nemotron_h, head_dim=128),
}


def running() -> tuple[str, ...]:
    """Families that the engine is known to cache right, by name."""
    return tuple(sorted(kind for kind, family in FAMILIES.items() if family.runs))
