"""Which groups each family gets, held against the transformers classes, and what is refused in which words."""

from typing import Any

import pytest
from transformers import AutoConfig

from kvire.core.errors import UnsupportedModelError
from kvire.core.spec import KVGroup, KVSpec, LayerKind
from kvire.models.families import (
    SUPPORTED,
    expanded_elements_per_token,
    hidden_layers,
    kv_groups,
    max_positions,
)

from .tiny import FAMILIES

FULL, SLIDING, LATENT = LayerKind.FULL, LayerKind.SLIDING, LayerKind.LATENT

# config.json as it might be on the hub -> groups
KNOWN: list[tuple[dict[str, Any], list[KVGroup]]] = [
    (
        {
            "model_type": "llama",
            "hidden_size": 576,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "num_hidden_layers": 2,
        },
        [KVGroup(FULL, (0, 1), 3, 64, 64)],
    ),
    ({"model_type": "llama"}, [KVGroup(FULL, tuple(range(32)), 32, 128, 128)]),
    (
        {"model_type": "llama", "num_key_value_heads": None, "num_attention_heads": 16, "head_dim": 96},
        [KVGroup(FULL, tuple(range(32)), 16, 96, 96)],
    ),
    # Llama attention ignores a window, whatever the config says.
    ({"model_type": "llama", "sliding_window": 512}, [KVGroup(FULL, tuple(range(32)), 32, 128, 128)]),
    ({"model_type": "mistral"}, [KVGroup(SLIDING, tuple(range(32)), 8, 128, 128, window=4096)]),
    ({"model_type": "mistral", "sliding_window": None}, [KVGroup(FULL, tuple(range(32)), 8, 128, 128)]),
    (
        {"model_type": "mistral", "sliding_window": 24, "num_hidden_layers": 2},
        [KVGroup(SLIDING, (0, 1), 8, 128, 128, window=24)],
    ),
    ({"model_type": "qwen2"}, [KVGroup(FULL, tuple(range(32)), 32, 128, 128)]),
    ({"model_type": "qwen2", "sliding_window": 4096}, [KVGroup(FULL, tuple(range(32)), 32, 128, 128)]),
    (
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 100, "num_hidden_layers": 30},
        [
            KVGroup(FULL, tuple(range(28)), 32, 128, 128),
            KVGroup(SLIDING, (28, 29), 32, 128, 128, window=100),
        ],
    ),
    (
        {"model_type": "qwen3", "num_key_value_heads": 8, "hidden_size": 1024, "num_attention_heads": 16},
        [KVGroup(FULL, tuple(range(32)), 8, 128, 128)],
    ),
    (
        {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 0, "num_hidden_layers": 2},
        [KVGroup(SLIDING, (0, 1), 32, 128, 128, window=4096)],
    ),
    (
        {"model_type": "gemma3_text", "num_hidden_layers": 18, "num_key_value_heads": 1, "sliding_window": 512},
        [
            KVGroup(FULL, (5, 11, 17), 1, 256, 256),
            KVGroup(SLIDING, tuple(i for i in range(18) if (i + 1) % 6), 1, 256, 256, window=512),
        ],
    ),
    (
        {"model_type": "gemma3_text", "num_hidden_layers": 4, "sliding_window_pattern": 2},
        [KVGroup(FULL, (1, 3), 4, 256, 256), KVGroup(SLIDING, (0, 2), 4, 256, 256, window=4096)],
    ),
    (
        {
            "model_type": "gemma3_text",
            "num_hidden_layers": 2,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        [KVGroup(FULL, (0,), 4, 256, 256), KVGroup(SLIDING, (1,), 4, 256, 256, window=4096)],
    ),
    (
        {"model_type": "gpt_oss", "num_hidden_layers": 4},
        [KVGroup(FULL, (1, 3), 8, 64, 64), KVGroup(SLIDING, (0, 2), 8, 64, 64, window=128)],
    ),
    ({"model_type": "deepseek_v3"}, [KVGroup(LATENT, tuple(range(61)), 1, 512, 64)]),
    (
        {"model_type": "deepseek_v3", "num_hidden_layers": 2, "kv_lora_rank": 32, "qk_rope_head_dim": 8},
        [KVGroup(LATENT, (0, 1), 1, 32, 8)],
    ),
    (
        {"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
         "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}, "max_position_embeddings": 131072},
        [KVGroup(FULL, tuple(range(32)), 32, 128, 128)],
    ),
    ({"model_type": "qwen3_moe", "sliding_window": 24}, [KVGroup(FULL, tuple(range(24)), 4, 64, 64)]),
    (
        {"model_type": "qwen3_moe", "sliding_window": 24, "use_sliding_window": True, "num_hidden_layers": 2},
        [KVGroup(SLIDING, (0, 1), 4, 64, 64, window=24)],
    ),
    (
        {"model_type": "qwen2_moe", "num_hidden_layers": 6, "sliding_window": 24, "use_sliding_window": True,
         "max_window_layers": 4},
        [KVGroup(FULL, (1, 3, 4, 5), 16, 128, 128), KVGroup(SLIDING, (0, 2), 16, 128, 128, window=24)],
    ),
    ({"model_type": "mixtral", "num_hidden_layers": 2}, [KVGroup(FULL, (0, 1), 8, 128, 128)]),
    (
        {"model_type": "phi3", "num_hidden_layers": 2, "sliding_window": 2047, "num_key_value_heads": 8},
        [KVGroup(SLIDING, (0, 1), 8, 96, 96, window=2047)],
    ),
    (
        {"model_type": "gemma2", "num_hidden_layers": 4},
        [KVGroup(FULL, (1, 3), 4, 256, 256), KVGroup(SLIDING, (0, 2), 4, 256, 256, window=4096)],
    ),
    (
        {"model_type": "olmo3", "num_hidden_layers": 4, "num_attention_heads": 64},
        [KVGroup(FULL, (3,), 64, 64, 64), KVGroup(SLIDING, (0, 1, 2), 64, 64, 64, window=4096)],
    ),
    (
        {"model_type": "cohere2", "num_hidden_layers": 4, "sliding_window_pattern": 2, "num_key_value_heads": 8},
        [KVGroup(FULL, (1, 3), 8, 128, 128), KVGroup(SLIDING, (0, 2), 8, 128, 128, window=4096)],
    ),
    (
        {"model_type": "cwm", "num_hidden_layers": 5},
        [KVGroup(FULL, (0, 4), 8, 128, 128), KVGroup(SLIDING, (1, 2, 3), 8, 128, 128, window=8192)],
    ),
    (
        {"model_type": "exaone4", "num_hidden_layers": 4},
        [KVGroup(FULL, (3,), 32, 128, 128), KVGroup(SLIDING, (0, 1, 2), 32, 128, 128, window=4096)],
    ),
    (
        {"model_type": "dots1", "num_hidden_layers": 3, "max_window_layers": 2, "sliding_window": 24},
        [KVGroup(FULL, (0, 1), 32, 144, 144), KVGroup(SLIDING, (2,), 32, 144, 144, window=24)],
    ),
    ({"model_type": "smollm3", "num_hidden_layers": 4}, [KVGroup(FULL, (0, 1, 2, 3), 4, 128, 128)]),
    (
        {"model_type": "smollm3", "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 24},
        [KVGroup(FULL, (0, 1, 2), 4, 128, 128), KVGroup(SLIDING, (3,), 4, 128, 128, window=24)],
    ),
    (
        {"model_type": "smollm3", "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 24,
         "no_rope_layers": [0, 1, 0]},
        [KVGroup(FULL, (1,), 4, 128, 128), KVGroup(SLIDING, (0, 2), 4, 128, 128, window=24)],
    ),
    (
        {"model_type": "ministral", "num_hidden_layers": 2, "head_dim": 128},
        [KVGroup(SLIDING, (0, 1), 8, 128, 128, window=4096)],
    ),
    ({"model_type": "gpt2", "n_layer": 2, "n_embd": 1024, "n_head": 16}, [KVGroup(FULL, (0, 1), 16, 64, 64)]),
    ({"model_type": "gpt2", "num_hidden_layers": 1, "hidden_size": 96}, [KVGroup(FULL, (0,), 12, 8, 8)]),
    ({"model_type": "gpt_neox", "num_hidden_layers": 1}, [KVGroup(FULL, (0,), 64, 96, 96)]),
    # As released: full layers have heads of their own, and the last ones keep nothing.
    (
        {"model_type": "gemma4_text", "num_hidden_layers": 12, "num_kv_shared_layers": 6, "num_key_value_heads": 1},
        [KVGroup(FULL, (5,), 1, 512, 512), KVGroup(SLIDING, (0, 1, 2, 3, 4), 1, 256, 256, window=512)],
    ),
    (
        {"model_type": "gemma4_text", "num_hidden_layers": 6, "num_key_value_heads": 16, "attention_k_eq_v": True,
         "num_global_key_value_heads": 4, "sliding_window": 1024},
        [KVGroup(FULL, (5,), 4, 512, 512), KVGroup(SLIDING, (0, 1, 2, 3, 4), 16, 256, 256, window=1024)],
    ),
    (
        {"model_type": "gemma4_text", "num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"],
         "global_head_dim": 128},
        [KVGroup(FULL, (0, 1), 4, 128, 128)],
    ),
    (
        {"model_type": "deepseek_v2", "num_hidden_layers": 2, "head_dim": 192},
        [KVGroup(LATENT, (0, 1), 1, 512, 64)],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("config", "groups"), KNOWN)
def test_groups_of_a_config_as_it_stands(config: dict[str, Any], groups: list[KVGroup]) -> None:
    assert kv_groups(config) == tuple(groups)


@pytest.mark.parametrize(("config", "groups"), KNOWN)
def test_the_config_class_gives_the_same(config: dict[str, Any], groups: list[KVGroup]) -> None:
    """The defaults in families.py are the classes' own."""
    built = AutoConfig.for_model(**config)
    assert kv_groups(built) == tuple(groups)
    assert max_positions(built) == max_positions(config) == built.max_position_embeddings


@pytest.mark.parametrize("family", SUPPORTED)
def test_defaults_are_the_classes_own(family: str) -> None:
    config, built = {"model_type": family}, AutoConfig.for_model(family)
    assert kv_groups(config) == kv_groups(built)
    assert max_positions(config) == max_positions(built) == built.max_position_embeddings
    assert hidden_layers(config) == built.num_hidden_layers
    assert expanded_elements_per_token(config) == expanded_elements_per_token(built)


def test_deepseek_v3_keeps_a_71st_of_what_its_heads_would() -> None:
    """61 layers of 128 heads of 128 + 64 and 128 numbers, against a latent of 512 + 64 a layer."""
    config = {"model_type": "deepseek_v3"}
    (group,) = kv_groups(config)
    assert expanded_elements_per_token(config) == 61 * 128 * (192 + 128)
    assert group.elements_per_token == 61 * (512 + 64)
    assert expanded_elements_per_token({"model_type": "llama"}) is None


def test_smollm2_takes_11520_numbers_per_token() -> None:
    """2 x 30 layers x 3 heads x 64."""
    config = {"model_type": "llama", "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}
    groups = kv_groups(config | {"num_hidden_layers": 30})
    assert KVSpec(groups, "float16").bytes_per_token == 2 * 30 * 3 * 64 * 2


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "no model_type"),
    ({"model_type": "bloom"}, "bloom is not supported.*Supported families: apertus, arcee"),
    ({"model_type": "phimoe"}, "phimoe is not supported"),
    ({"model_type": "gemma4", "vision_config": {}}, "images are not supported.*gemma4_text"),
    ({"model_type": "gemma3", "vision_config": {}}, "images are not supported.*gemma3_text"),
    ({"model_type": "llava", "vision_config": {"a": 1}}, "text only"),
    ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
    ({"model_type": "mamba2", "state_size": 64}, "running state"),
    ({"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}, "running state"),
    ({"model_type": "llama", "auto_map": {"AutoModel": "x.Y"}}, "auto_map.*never"),
    ({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}, "gptq.*unquantised"),
    ({"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
    ({"model_type": "deepseek_v3", "quantization_config": {"quant_method": "fp8"}}, "fp8"),
    ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, "does not generate text"),
    ({"model_type": "phi3", "rope_scaling": {"type": "su"}}, "su is an old name of longrope.*current config.json"),
    ({"model_type": "qwen2", "rope_scaling": {"type": "mrope"}}, "mrope"),
    (
        {"model_type": "gemma3_text", "rope_parameters": {"full_attention": {"rope_type": "axial"}}},
        "axial is not known.*one of default",
    ),
    ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "looks ahead"),
    ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "gemma2.*not for gemma3_text"),
    ({"model_type": "gemma4_text", "use_bidirectional_attention": "all"}, "looks ahead"),
    ({"model_type": "gemma2", "use_bidirectional_attention": "vision"}, "looks ahead"),
    ({"model_type": "gemma4_text", "num_kv_shared_layers": 30}, "share KV that no layer before them keeps"),
    ({"model_type": "gemma4_text", "num_hidden_layers": 6, "num_kv_shared_layers": 1}, "no layer before them"),
    (
        {"model_type": "gemma4_text", "num_hidden_layers": 6, "per_layer_config": {"5": {"sliding_window": 9}}},
        "same head_dim and num_key_value_heads, not for anything else",
    ),
    ({"model_type": "gemma4_text", "num_hidden_layers": 6, "per_layer_config": {"4": {"head_dim": 9}}}, "other layers"),
    (
        {"model_type": "gemma4_text", "num_hidden_layers": 12,
         "per_layer_config": {"05": {"head_dim": 64}, "11": {"head_dim": 32}}},
        "every full layer the same",
    ),
    ({"model_type": "gpt2", "add_cross_attention": True}, "decoder-only"),
    ({"model_type": "gpt2", "architectures": ["GPT2DoubleHeadsModel"]}, "does not generate text"),
    ({"model_type": "mixtral", "layer_types": ["sliding_attention"] * 32}, "which the mixtral class ignores"),
    ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "2 no_rope_layers for 36"),
    ({"model_type": "gpt2", "n_embd": 8}, "hidden_size 8 for 12 heads"),
    ({"model_type": "mistral", "layer_types": ["full_attention"] * 32}, "ministral"),
    ({"model_type": "mistral", "sliding_window": -1}, "sliding_window -1, which is no window: write null"),
    ({"model_type": "gemma2", "sliding_window": 0}, "sliding_window 0, which is no window: write null"),
    ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 32}, "no sliding_window"),
    ({"model_type": "qwen3", "layer_types": ["full_attention"] * 3}, "3 layer_types for 32"),
    ({"model_type": "qwen3", "layer_types": ["chunked_attention"] * 32}, "chunked_attention"),
    ({"model_type": "llama", "num_hidden_layers": 10**9}, "damaged"),
    ({"model_type": "llama", "num_hidden_layers": "many"}, "num_hidden_layers 'many'"),
    ({"model_type": "llama", "num_attention_heads": 0}, "num_attention_heads 0"),
    ({"model_type": "llama", "transformers_weights": "other.bin"}, "transformers_weights"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "words"), REFUSED)
def test_refusals_say_what_and_why(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        kv_groups(config)


def test_every_supported_family_is_in_the_matrix() -> None:
    assert set(FAMILIES) == set(SUPPORTED)
