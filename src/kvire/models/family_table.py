"""The families: the rule that each follows, and what its config class fills in for fields left out.

The defaults are the classes' own (models/*/configuration_*.py of transformers 5.24), so that a
config.json that leaves a field out gives the same groups as the config object made from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvire.models import layouts
from kvire.models.layouts import Layout

GPT2_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}


@dataclass(frozen=True, slots=True)
class Family:
    """One model_type. defaults: by field. names: older names of fields that its config class also takes."""

    layout: Layout
    defaults: Mapping[str, Any]
    names: Mapping[str, str]


def _family(
    layout: Layout,
    positions: int,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int | None,
    head_dim: int | None = None,
    *,
    names: Mapping[str, str] | None = None,
    **more: Any,
) -> Family:
    """kv_heads None: one per query head. head_dim None: hidden over heads."""
    defaults = {
        "max_position_embeddings": positions,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }
    return Family(layout, defaults | more, names or {})


def _latent(positions: int, layers: int, heads: int, nope: int, value: int) -> Family:
    widths = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": nope, "v_head_dim": value}
    defaults = {"max_position_embeddings": positions, "num_hidden_layers": layers, "num_attention_heads": heads}
    return Family(layouts.latent, defaults | widths, {})


_full, _window = layouts.full, layouts.one_window

FAMILIES: dict[str, Family] = {
    # Every layer sees everything.
    "llama": _family(_full, 2048, 32, 4096, 32, None),
    "apertus": _family(_full, 65536, 32, 4096, 32, None),
    "arcee": _family(_full, 4096, 32, 2560, 32, None),
    "cohere": _family(_full, 8192, 40, 8192, 64, None),
    "ernie4_5": _family(_full, 131072, 18, 1024, 16, 2, 128),
    "ernie4_5_moe": _family(_full, 131072, 28, 2560, 20, 4),
    "gemma": _family(_full, 8192, 28, 3072, 16, 16, 256),
    "glm": _family(_full, 131072, 40, 4096, 32, 2, 128),
    "glm4": _family(_full, 131072, 40, 4096, 32, 2, 128),
    "glm4_moe": _family(_full, 131072, 46, 4096, 96, 8),
    "granite": _family(_full, 2048, 32, 4096, 32, None),
    "granitemoe": _family(_full, 2048, 32, 4096, 32, None),
    "granitemoeshared": _family(_full, 2048, 32, 4096, 32, None),
    "helium": _family(_full, 4096, 24, 2560, 20, 20, 128),
    "hunyuan_v1_dense": _family(_full, 2048, 32, 4096, 32, None),
    "hunyuan_v1_moe": _family(_full, 2048, 32, 4096, 32, None),
    "minimax_m2": _family(_full, 196608, 62, 3072, 48, 8, 128),
    "nemotron": _family(_full, 4096, 32, 6144, 48, None),
    "olmo": _family(_full, 2048, 32, 4096, 32, None),
    "olmo2": _family(_full, 2048, 32, 4096, 32, None),
    "olmoe": _family(_full, 4096, 16, 2048, 16, None),
    "phi": _family(_full, 2048, 24, 2048, 32, None),
    "seed_oss": _family(_full, 524288, 64, 4096, 80, 8, 128),
    "stablelm": _family(_full, 4096, 32, 2560, 32, 32),
    "gpt2": _family(layouts.one_head_per_query, 1024, 12, 768, 12, None, names=GPT2_NAMES),
    "gpt_neox": _family(layouts.one_head_per_query, 2048, 44, 6144, 64, None),
    # One window, or none, for every layer.
    "mistral": _family(_window, 131072, 32, 4096, 32, 8, sliding_window=4096),
    "ministral3": _family(_window, 262144, 34, 4096, 32, 8, 128),
    "mixtral": _family(_window, 131072, 32, 4096, 32, 8),
    "phi3": _family(_window, 4096, 32, 3072, 32, None),
    "starcoder2": _family(_window, 4096, 30, 3072, 24, 2),
    "qwen3_moe": _family(layouts.one_window_if_used, 32768, 24, 2048, 32, 4, sliding_window=4096),
    # Some layers slide.
    "cohere2": _family(
        layouts.full_every(4, field="sliding_window_pattern"), 8192, 40, 8192, 64, None, sliding_window=4096
    ),
    "cwm": _family(layouts.full_every(4, first=True), 131072, 64, 6144, 48, 8, 128, sliding_window=8192),
    "dots1": _family(layouts.window_after_always, 2048, 62, 4608, 32, 32, sliding_window=4096, max_window_layers=62),
    "exaone4": _family(layouts.exaone4, 2048, 32, 4096, 32, 32, sliding_window=4096),
    "gemma2": _family(layouts.full_every(2), 8192, 26, 2304, 8, 4, 256, sliding_window=4096),
    "gemma3_text": _family(
        layouts.full_every(6, field="sliding_window_pattern"), 131072, 26, 2304, 8, 4, 256, sliding_window=4096
    ),
    "gemma4_text": _family(layouts.gemma4, 131072, 30, 2304, 8, 4, 256, sliding_window=512, num_kv_shared_layers=0),
    "gpt_oss": _family(layouts.full_every(2), 131072, 36, 2880, 64, 8, 64, sliding_window=128),
    "ministral": _family(layouts.all_or_none, 131072, 32, 4096, 32, 8, sliding_window=4096),
    "olmo3": _family(layouts.full_every(4), 2048, 32, 4096, 32, None, sliding_window=4096),
    "qwen2": _family(layouts.window_after, 32768, 32, 4096, 32, 32, sliding_window=4096, max_window_layers=28),
    "qwen2_moe": _family(layouts.window_before, 32768, 24, 2048, 16, 16, sliding_window=4096, max_window_layers=28),
    "qwen3": _family(layouts.window_after, 32768, 32, 4096, 32, 32, 128, sliding_window=4096, max_window_layers=28),
    "smollm3": _family(layouts.smollm3, 32768, 36, 2048, 16, 4, no_rope_layer_interval=4),
    "vaultgemma": _family(layouts.full_every(2), 8192, 26, 2304, 8, 4, 256, sliding_window=4096),
    # Multi-head latent attention.
    "deepseek_v2": _latent(2048, 32, 32, nope=128, value=128),
    "deepseek_v3": _latent(4096, 61, 128, nope=128, value=128),
    "glm4_moe_lite": _latent(202752, 47, 20, nope=192, value=256),
}
