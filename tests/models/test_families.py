"""Which groups each family gets, held against the transformers classes, and what is refused in which words."""

from typing import Any

import pytest
from transformers import AutoConfig

from kvire.core.errors import UnsupportedModelError
from kvire.core.spec import KVGroup, KVSpec, LayerKind
from kvire.models.families import SUPPORTED, kv_groups, max_positions

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


def test_smollm2_takes_11520_numbers_per_token() -> None:
    """2 x 30 layers x 3 heads x 64."""
    config = {"model_type": "llama", "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}
    groups = kv_groups(config | {"num_hidden_layers": 30})
    assert KVSpec(groups, "float16").bytes_per_token == 2 * 30 * 3 * 64 * 2


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "no model_type"),
    ({"model_type": "gpt2"}, "gpt2 is not supported.*Supported families: llama, qwen2"),
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
    ({"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic.*longest sequence"),
    ({"model_type": "llama", "rope_parameters": {"rope_type": "longrope"}}, "longrope.*longest sequence"),
    ({"model_type": "qwen2", "rope_scaling": {"type": "mrope"}}, "mrope"),
    (
        {"model_type": "gemma3_text", "rope_parameters": {"full_attention": {"rope_type": "dynamic"}}},
        "dynamic.*longest sequence",
    ),
    ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "looks ahead"),
    ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ({"model_type": "mistral", "layer_types": ["full_attention"] * 32}, "ministral"),
    ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 32}, "no sliding_window"),
    ({"model_type": "qwen3", "layer_types": ["full_attention"] * 3}, "3 layer_types for 32"),
    ({"model_type": "qwen3", "layer_types": ["chunked_attention"] * 32}, "chunked_attention"),
    ({"model_type": "llama", "num_hidden_layers": 10**9}, "damaged"),
    ({"model_type": "llama", "num_hidden_layers": "many"}, "num_hidden_layers 'many'"),
    ({"model_type": "llama", "num_attention_heads": 0}, "num_attention_heads 0"),
    ({"model_type": "llama", "transformers_weights": "other.bin"}, "transformers_weights"),
]


@pytest.mark.parametrize(("config", "words"), REFUSED)
def test_refusals_say_what_and_why(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        kv_groups(config)


def test_every_supported_family_is_in_the_matrix() -> None:
    assert {config["model_type"] for config, _ in KNOWN} == set(SUPPORTED)
