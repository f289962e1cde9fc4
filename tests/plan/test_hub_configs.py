"""Configs as the hub has them: nested, quantised, windows and heads in every spelling. Bytes are those of bfloat16."""

from collections.abc import Mapping
from typing import Any

import pytest
from harness import family_mutants

from kvire.core.errors import ConfigError
from kvire.plan.read_shape import read_shape
from kvire.plan.shape import Shape, Storage

from .shapes import GIB, MIB, shape

BF16 = Storage("bfloat16")
Config = dict[str, Any]

GEMMA_3_27B: Config = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "mm_tokens_per_image": 256,
    "image_token_index": 262144,
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 128, "num_hidden_layers": 62, "sliding_window": 1024,
        "vocab_size": 262208, "max_position_embeddings": 131072, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "query_pre_attn_scalar": 168,
    },
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27, "model_type": "siglip_vision_model"},
}  # fmt: skip
# Half of the fields of the 4B model stand nowhere but in the class.
GEMMA_3_4B: Config = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "vision_config": {},
}  # fmt: skip
KIMI_LAYERS: Config = {
    "vocab_size": 163840, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64, "n_shared_experts": 1,
    "n_routed_experts": 384, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "qk_nope_head_dim": 128, "num_experts_per_tok": 8, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "max_position_embeddings": 262144, "num_nextn_predict_layers": 0, "tie_word_embeddings": False,
}  # fmt: skip
KIMI_K25: Config = {
    "model_type": "kimi_k25",
    "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
    "text_config": {
        **KIMI_LAYERS,
        "model_type": "kimi_k2",
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
        },
    },
    "vision_config": {"vt_num_hidden_layers": 27},
}
PHI_3_MINI: Config = {
    "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 32,
    "num_key_value_heads": 32, "num_hidden_layers": 32, "sliding_window": 2047, "vocab_size": 32064,
    "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "rope_scaling": None, "resid_pdrop": 0.0,
}  # fmt: skip
DEEPSEEK_V2_LITE: Config = {
    "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "n_shared_experts": 2,
    "n_routed_experts": 64, "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "qk_nope_head_dim": 128, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "vocab_size": 102400, "max_position_embeddings": 163840, "ep_size": 1, "aux_loss_alpha": 0.001,
}  # fmt: skip
GEMMA_2_9B: Config = {
    "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 256, "num_hidden_layers": 42, "sliding_window": 4096,
    "sliding_window_size": 4096, "cache_implementation": "hybrid", "attn_logit_softcapping": 50.0, "vocab_size": 256000,
    "max_position_embeddings": 8192, "query_pre_attn_scalar": 256,
}  # fmt: skip
COMMAND_R7B: Config = {
    "model_type": "cohere2", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 32, "sliding_window": 4096, "layer_switch": 4,
    "sliding_window_pattern": 4, "order_of_interleaved_layers": "local_attn_first", "cache_implementation": "hybrid",
    "position_embedding_type": "rope_gptj", "rotary_pct": 1.0, "use_embedding_sharing": True, "vocab_size": 256000,
    "use_gated_activation": True, "use_parallel_block": True, "max_position_embeddings": 132096,
}  # fmt: skip
GRANITE_8B: Config = {
    "model_type": "granite", "hidden_size": 4096, "intermediate_size": 12800, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_hidden_layers": 40, "vocab_size": 49155, "tie_word_embeddings": True,
    "attention_multiplier": 0.0078125, "mlp_bias": False, "attention_bias": False, "max_position_embeddings": 131072,
}  # fmt: skip
OLMO_1B: Config = {
    "model_type": "olmo", "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16,
    "num_key_value_heads": 16, "num_hidden_layers": 16, "clip_qkv": 8.0, "vocab_size": 50304,
    "tie_word_embeddings": True, "max_position_embeddings": 2048,
}  # fmt: skip
QWEN_25_7B: Config = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
    "num_key_value_heads": 4, "num_hidden_layers": 28, "vocab_size": 152064, "max_position_embeddings": 32768,
    "sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 28, "tie_word_embeddings": False,
}  # fmt: skip
QWEN_3_8B: Config = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "num_hidden_layers": 36, "vocab_size": 151936, "max_position_embeddings": 262144,
    "attention_bias": False,
}  # fmt: skip
MISTRAL_7B: Config = {
    "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 32768, "max_position_embeddings": 32768,
    "sliding_window": None, "tie_word_embeddings": False,
}  # fmt: skip
GPT_2: Config = {
    "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
    "vocab_size": 50257, "attn_pdrop": 0.1, "layer_norm_epsilon": 1e-05, "summary_type": "cls_index",
    "architectures": ["GPT2LMHeadModel"], "task_specific_params": {"text-generation": {"max_length": 50}},
}  # fmt: skip
PYTHIA: Config = {
    "model_type": "gpt_neox", "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16,
    "num_hidden_layers": 24, "vocab_size": 50304, "max_position_embeddings": 2048, "rotary_pct": 0.25,
    "use_parallel_residual": True, "layer_norm_eps": 1e-05, "tie_word_embeddings": False,
}  # fmt: skip
PHI_2: Config = {
    "model_type": "phi", "hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 32,
    "num_key_value_heads": 32, "num_hidden_layers": 32, "vocab_size": 51200, "max_position_embeddings": 2048,
    "qk_layernorm": False, "partial_rotary_factor": 0.4, "embd_pdrop": 0.0,
}  # fmt: skip
PHI_4_MINI: Config = {
    "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24,
    "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 200064, "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096, "sliding_window": 262144, "partial_rotary_factor": 0.75,
    "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
}  # fmt: skip
STARCODER_2_3B: Config = {
    "model_type": "starcoder2", "hidden_size": 3072, "intermediate_size": 12288, "num_attention_heads": 24,
    "num_key_value_heads": 2, "num_hidden_layers": 30, "vocab_size": 49152, "max_position_embeddings": 16384,
    "sliding_window": 4096, "use_bias": True, "mlp_type": "default", "norm_type": "layer_norm", "norm_epsilon": 1e-05,
}  # fmt: skip
STABLELM_2: Config = {
    "model_type": "stablelm", "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32,
    "num_key_value_heads": 32, "num_hidden_layers": 24, "vocab_size": 100352, "max_position_embeddings": 4096,
    "use_qkv_bias": True, "rope_theta": 10000, "partial_rotary_factor": 0.25, "tie_word_embeddings": False,
}  # fmt: skip
OLMOE: Config = {
    "model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_attention_heads": 16,
    "num_key_value_heads": 16, "num_hidden_layers": 16, "num_experts": 64, "num_experts_per_tok": 8, "clip_qkv": None,
    "vocab_size": 50304, "max_position_embeddings": 4096, "router_aux_loss_coef": 0.01,
}  # fmt: skip
QWEN_15_MOE: Config = {
    "model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16,
    "num_hidden_layers": 24, "num_experts": 60, "num_experts_per_tok": 4, "decoder_sparse_step": 1,
    "vocab_size": 151936, "max_position_embeddings": 8192, "sliding_window": 32768, "use_sliding_window": False,
    "max_window_layers": 21,
}  # fmt: skip
SMOLLM_3: Config = {
    "model_type": "smollm3", "hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16,
    "num_key_value_heads": 4, "num_hidden_layers": 36, "vocab_size": 128256, "max_position_embeddings": 65536,
    "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "layer_types": ["full_attention"] * 36,
    "max_window_layers": 28, "use_sliding_window": False, "sliding_window": None,
}  # fmt: skip
HUNYUAN_A13B: Config = {
    "model_type": "hunyuan_v1_moe", "hidden_size": 4096, "intermediate_size": 3072, "num_attention_heads": 32,
    "num_key_value_heads": 8, "attention_head_dim": 128, "num_hidden_layers": 32, "num_experts": 64,
    "moe_topk": [8] * 32, "moe_intermediate_size": [3072] * 32, "num_shared_expert": [1] * 32, "use_cla": False,
    "cla_share_factor": 2, "use_mla": False, "kv_lora_rank": 512, "v_head_dim": 128, "vocab_size": 128167,
    "max_position_embeddings": 32768, "use_qk_norm": True, "moe_layer_num_skipped": 0, "tie_word_embeddings": True,
}  # fmt: skip
MINIMAX_M2: Config = {
    "model_type": "minimax_m2", "hidden_size": 3072, "intermediate_size": 1536, "num_attention_heads": 48,
    "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 62, "attn_type_list": [1] * 62,
    "num_local_experts": 256, "num_experts_per_tok": 8, "num_mtp_modules": 3, "mtp_transformer_layers": 1,
    "use_mtp": True, "qk_norm_type": "per_layer", "use_qk_norm": True, "rotary_dim": 64, "vocab_size": 200064,
    "max_position_embeddings": 196608, "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip


def _inside(outer: str, field: str, inner: Config, **around: Any) -> Config:
    return {"model_type": outer, field: inner, "vision_config": {"hidden_size": 1280}, **around}


def _without(config: Config, *names: str) -> Config:
    return {name: value for name, value in config.items() if name not in names}


def _bytes(config: Mapping[str, Any]) -> tuple[int, int]:
    """Growing per token, and of full windows."""
    found = read_shape(config)
    return found.growing_bytes(BF16), found.window_bytes(BF16)


# Growing bytes per token; bytes of full windows; parameters where they were published to the last one.
KNOWN: dict[str, tuple[Config, int, int, int | None]] = {
    "gemma-3-27b": (GEMMA_3_27B, 81_920, 52 * 8192 * 1024, 27_009_346_304),
    "gemma-3-4b": (GEMMA_3_4B, 5 * 4096, 29 * 4096 * 1024, 3_880_263_168),
    "kimi-k2.5": (KIMI_K25, 70_272, 0, None),
    "phi-3-mini": (PHI_3_MINI, 0, 393_216 * 2047, 3_821_079_552),
    "deepseek-v2-lite": (DEEPSEEK_V2_LITE, 31_104, 0, 15_706_484_224),
    "gemma-2-9b": (GEMMA_2_9B, 172_032, 21 * 8192 * 4096, 9_241_705_984),
    "command-r7b": (COMMAND_R7B, 32_768, 24 * 4096 * 4096, 8_028_033_024),
    "granite-3-8b": (GRANITE_8B, 163_840, 0, 8_170_848_256),
    "olmo-1b": (OLMO_1B, 131_072, 0, 1_176_764_416),
    "qwen2.5-7b": (QWEN_25_7B, 57_344, 0, 7_615_616_512),
    "mistral-7b-v0.3": (MISTRAL_7B, 131_072, 0, 7_248_023_552),
    "gpt2": (GPT_2, 36_864, 0, 124_439_808),
    "pythia-1.4b": (PYTHIA, 196_608, 0, 1_414_647_808),
    "phi-2": (PHI_2, 327_680, 0, 2_779_683_840),
    "phi-4-mini": (PHI_4_MINI, 0, 131_072 * 262_144, 3_836_021_760),
    "starcoder2-3b": (STARCODER_2_3B, 0, 30_720 * 4096, 3_030_371_328),
    "stablelm-2-1.6b": (STABLELM_2, 196_608, 0, 1_644_515_328),
    "olmoe-1b-7b": (OLMOE, 131_072, 0, 6_919_161_856),
    "qwen1.5-moe-a2.7b": (QWEN_15_MOE, 196_608, 0, 14_315_784_192),
    "smollm3-3b": (SMOLLM_3, 73_728, 0, 3_075_098_624),
    "hunyuan-a13b": (HUNYUAN_A13B, 131_072, 0, None),
    "minimax-m2": (MINIMAX_M2, 253_952, 0, None),
}


@pytest.mark.parametrize("name", KNOWN)
def test_bytes_of_published_configs(name: str) -> None:
    config, growing, windows, parameters = KNOWN[name]
    assert _bytes(config) == (growing, windows)
    assert parameters is None or read_shape(config).weights.total == parameters


def test_totals_that_calculators_get_wrong() -> None:
    """Windows and latents count, and the layers below text_config are found."""
    gemma, kimi = read_shape(GEMMA_3_27B), read_shape(KIMI_K25)
    assert gemma.sequence_bytes(131_072, BF16) / GIB == pytest.approx(10.41, abs=0.005)
    assert kimi.sequence_bytes(262_144, BF16) / GIB == pytest.approx(17.16, abs=0.005)
    assert any("only the language model" in note for note in gemma.notes)
    assert read_shape(QWEN_25_7B).sequence_bytes(3072, BF16) == 168 * MIB


QWEN_3_VL_TEXT = {**QWEN_3_8B, "model_type": "qwen3_vl_text", "rope_scaling": {"mrope_section": [24, 20, 20]}}
MROPE = {"type": "mrope", "mrope_section": [16, 24, 24]}
NESTED: dict[str, tuple[Config, int]] = {
    "text_config": (_inside("qwen3_vl", "text_config", QWEN_3_VL_TEXT), 147_456),
    "without model_type": (_inside("qwen3_vl", "text_config", QWEN_3_8B), 147_456),
    "null model_type": (_inside("qwen3_vl", "text_config", {**QWEN_3_8B, "model_type": None}), 147_456),
    "an unknown wrapper": (_inside("newer_vl", "text_config", QWEN_3_VL_TEXT), 147_456),
    "beside the images": (
        {**QWEN_25_7B, "model_type": "qwen2_5_vl", "vision_config": {}, "rope_scaling": MROPE}, 57_344,
    ),
    "language_config": (_inside("deepseek_vl_v2", "language_config", DEEPSEEK_V2_LITE), 31_104),
    "llm_config": (_inside("internvl_chat", "llm_config", QWEN_25_7B), 57_344),
    "thinker_config": (
        _inside("qwen2_5_omni", "thinker_config", _inside("qwen2_5_omni_thinker", "text_config", QWEN_25_7B)), 57_344,
    ),
    "mistral3": (_inside("mistral3", "text_config", MISTRAL_7B), 131_072),
    "tied outside": (_inside("gemma3", "text_config", GEMMA_3_4B["text_config"], tie_word_embeddings=True), 20_480),
}  # fmt: skip


@pytest.mark.parametrize("name", NESTED)
def test_the_language_model_is_found_inside(name: str) -> None:
    config, growing = NESTED[name]
    assert read_shape(config).growing_bytes(BF16) == growing


WINDOWS: dict[str, tuple[Config, int, int]] = {
    **{f"mistral {value}": ({**MISTRAL_7B, "sliding_window": value}, 131_072, 0) for value in (-1, 0, None)},
    "mistral without": (_without(MISTRAL_7B, "sliding_window"), 131_072, 0),
    "mistral 4096": ({**MISTRAL_7B, "sliding_window": 4096}, 0, 131_072 * 4096),
    "phi3 -1": ({**PHI_3_MINI, "sliding_window": -1}, 393_216, 0),
    "in use": ({**QWEN_25_7B, "use_sliding_window": True, "max_window_layers": 21}, 43_008, 14_336 * 131_072),
    "not in use": ({**QWEN_25_7B, "use_sliding_window": False, "max_window_layers": 0}, 57_344, 0),
    "switch is null": ({**QWEN_25_7B, "use_sliding_window": None}, 57_344, 0),
    "layer_types": (
        {**GEMMA_3_27B["text_config"], "layer_types": ["sliding_attention"] * 61 + ["full_attention"]},
        8192, 61 * 8192 * 1024,
    ),
    "sliding_window_pattern": ({**GEMMA_3_27B["text_config"], "sliding_window_pattern": 2}, 253_952, 31 * 8192 * 1024),
    "_sliding_window_pattern": (
        {**GEMMA_3_27B["text_config"], "_sliding_window_pattern": 2}, 253_952, 31 * 8192 * 1024,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_in_every_spelling(name: str) -> None:
    config, *expected = WINDOWS[name]
    assert _bytes(config) == tuple(expected)


def test_a_window_that_is_left_out_is_named() -> None:
    without = _without(MISTRAL_7B, "sliding_window")
    assert read_shape(without).sequence_bytes(8192, BF16) == GIB
    assert any("counted as none; transformers would take 4,096" in note for note in read_shape(without).notes)
    assert not any("sliding_window" in note for note in read_shape(MISTRAL_7B).notes)


HEADS: dict[str, tuple[Config, int]] = {
    "no num_key_value_heads": (_without(OLMO_1B, "num_key_value_heads"), 131_072),
    "null num_key_value_heads": ({**OLMO_1B, "num_key_value_heads": None}, 131_072),
    "null head_dim": ({**OLMO_1B, "head_dim": None}, 131_072),
    "head_dim that is no share": ({**OLMO_1B, "head_dim": 192}, 196_608),
    "hidden size that does not divide": ({**OLMO_1B, "hidden_size": 2050}, 131_072),
    "rope_parameters": ({**OLMO_1B, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}, 131_072),
    "dtype": ({**OLMO_1B, "dtype": "float32"}, 131_072),
    "torch_dtype": ({**OLMO_1B, "torch_dtype": "torch.float32"}, 131_072),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_and_fields_in_every_spelling(name: str) -> None:
    config, growing = HEADS[name]
    found = read_shape(config)
    assert found.growing_bytes(BF16) == growing
    assert found.weights.dtypes["dense"] == ("float32" if "dtype" in name else "bfloat16")


REFUSED: list[tuple[Config, str]] = [
    ({**OLMO_1B, "num_key_value_heads": [16] * 16}, "num_key_value_heads"),
    ({**GEMMA_2_9B, "sliding_window_size": 1024}, "sliding_window_size"),
    ({**HUNYUAN_A13B, "use_cla": True}, "use_cla"),
    ({**HUNYUAN_A13B, "moe_topk": [8] * 31 + [1]}, "moe_topk"),
    ({**HUNYUAN_A13B, "attention_head_dim": 64}, "attention_head_dim"),
    ({**PHI_4_MINI, "full_attn_mod": 2}, "full_attn_mod"),
    ({**MINIMAX_M2, "attn_type_list": [1] * 61 + [0]}, "attn_type_list"),
    ({**GEMMA_3_27B["text_config"], "sliding_window": None}, "sliding layers but no sliding_window"),
    (_inside("qwen3_vl", "text_config", {**QWEN_3_8B, "model_type": "mamba"}), "mamba"),
    (_inside("qwen3_vl", "text_config", {**QWEN_3_8B, "kv_compression_ratio": 2}), "kv_compression_ratio"),
    (_inside("qwen3_vl", "vision_config", {}), "no text_config"),
    (_inside("llava", "text_config", {"model_type": "llama", "vocab_size": 32064}), "has no hidden_size"),
]


@pytest.mark.parametrize(("config", "named"), REFUSED)
def test_what_cannot_be_known_is_refused_by_name(config: Config, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_shape(config)


def _group(bits: int, kind: str = "int") -> Config:
    return {"config_groups": {"group_0": {"weights": {"num_bits": bits, "type": kind}}}}


QUANTISED: dict[str, tuple[Config, str]] = {
    "gptq": ({"quant_method": "gptq", "bits": 8}, "int8"),
    "awq": ({"quant_method": "awq", "w_bit": 4}, "int4"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}, "int4"),
    "bitsandbytes 8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
    "compressed-tensors": ({"quant_method": "compressed-tensors", **_group(4)}, "int4"),
    "compressed-tensors fp8": ({"quant_method": "compressed-tensors", **_group(8, "float")}, "fp8"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "int4"),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
    "three bits": ({"quant_method": "gptq", "bits": 3}, "bfloat16"),
    "an unknown method": ({"quant_method": "newer"}, "bfloat16"),
    "only a name": ("awq", "bfloat16"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("name", QUANTISED)
def test_kv_does_not_depend_on_how_weights_are_kept(name: str) -> None:
    settings, dtype = QUANTISED[name]
    plain, found = read_shape(QWEN_25_7B), read_shape({**QWEN_25_7B, "quantization_config": settings})
    assert found.sequence_bytes(3072, BF16) == plain.sequence_bytes(3072, BF16) == 168 * MIB
    assert found.weights.total == plain.weights.total
    assert found.weights.dtypes == {"dense": dtype, "experts": dtype}
    assert any("quantised" in note for note in found.notes) == (name != "fp8")
    assert any("--weights-dtype" in note for note in found.notes) == (dtype == "bfloat16")
    assert found.weights.size_bytes("int4") == plain.weights.size_bytes("int4")
    older = read_shape({**QWEN_25_7B, "compression_config": settings})
    assert older.weights == found.weights


def test_whose_allocation_the_bytes_are() -> None:
    """gpt-oss-20b, 32 users of 8,192 tokens: exact, and as an engine reserves it that does not know windows."""
    oss = shape("gpt-oss-20b")
    assert 32 * oss.sequence_bytes(8192, BF16) / GIB == pytest.approx(6.09, abs=0.005)
    assert 32 * oss.whole_bytes(8192, BF16) == 12 * GIB
    llama = shape("llama-3.1-8b")
    assert llama.whole_bytes(8192, BF16) == llama.sequence_bytes(8192, BF16)


@pytest.mark.parametrize("mutant", family_mutants.ALL)
def test_broken_rules_are_noticed(mutant: family_mutants.Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each breaks some of the figures above."""
    before = _all_figures()
    mutant(monkeypatch)
    after = _all_figures()
    assert {name for name in before if before[name] != after[name]}, mutant.__name__


def _all_figures() -> dict[str, Any]:
    configs = {**KNOWN, **NESTED, **WINDOWS, **HEADS}
    return {name: _figures(row[0]) for name, row in configs.items()}


def _figures(config: Config) -> tuple[int, int, int] | str:
    try:
        found: Shape = read_shape(config)
    except ConfigError as error:
        return str(error)
    return found.growing_bytes(BF16), found.window_bytes(BF16), found.weights.total
