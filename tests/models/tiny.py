"""Tiny random models of every supported family, for tests.

Their weights are large enough that logits depend on all of the KV: with transformers' own initial
weights (std 0.02) a model answers nearly the same whatever the cache holds, and a test sees nothing.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")  # ids 256 to 259, after the 256 bytes
BOS, EOS, IM_START, IM_END = range(256, 260)
WINDOW = 24

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": None,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
WINDOWED: dict[str, Any] = {"sliding_window": WINDOW}
ALTERNATING: dict[str, Any] = {"sliding_window": WINDOW, "num_hidden_layers": 4}
GEMMA: dict[str, Any] = {"head_dim": 16, "query_pre_attn_scalar": 16, **ALTERNATING}
GRANITE: dict[str, Any] = {"attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 2.0}
SWITCHED: dict[str, Any] = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}

OWN: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "cohere": {"logit_scale": 1.0, "use_qk_norm": True},
    "cohere2": {"logit_scale": 1.0, **ALTERNATING},
    "cwm": {"head_dim": 16, **ALTERNATING},
    "deepseek_v2": LATENT | ROUTED,
    "deepseek_v3": LATENT | ROUTED | {"num_mtp_layers": 0},
    "dots1": WINDOWED | ROUTED | {"max_window_layers": 1, "n_shared_experts": 1},
    "ernie4_5": {"head_dim": 16},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "exaone4": ALTERNATING | {"sliding_window_pattern": 2},
    "gemma": {"head_dim": 16},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA | {"layer_types": MIXED},
    "gemma4_text": {
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": WINDOW,
        "num_hidden_layers": 6,
        "layer_types": MIXED + MIXED[:2],
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 320,
        "final_logit_softcapping": 30.0,
    },
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "glm4_moe": ROUTED | {"head_dim": 16, "use_qk_norm": True, "num_mtp_layers": 0},
    "glm4_moe_lite": LATENT | ROUTED,
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
    "gpt_neox": {},
    "gpt_oss": {
        "head_dim": 16,
        "layer_types": MIXED,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        **ALTERNATING,
    },
    "granite": GRANITE,
    "granitemoe": GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoeshared": GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32},
    "helium": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "llama": {},
    "minimax_m2": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "ministral": ALTERNATING | {"head_dim": 16, "layer_types": MIXED},
    "ministral3": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 64.0,
            "original_max_position_embeddings": 32,
            "llama_4_scaling_beta": 0.1,
        },
        **WINDOWED,
    },
    "mistral": WINDOWED,
    "mixtral": WINDOWED | {"num_local_experts": 4},
    "nemotron": {},
    "olmo": {"clip_qkv": 4.0},
    "olmo2": {},
    "olmo3": ALTERNATING,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phi": {},
    "phi3": WINDOWED,
    "qwen2": {},
    "qwen2_moe": EXPERTS | SWITCHED | {"shared_expert_intermediate_size": 32, "max_window_layers": 2},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": EXPERTS | SWITCHED | {"head_dim": 16},
    "seed_oss": {"head_dim": 16},
    "smollm3": ALTERNATING | {"use_sliding_window": True},
    "stablelm": {"qk_layernorm": True},
    "starcoder2": WINDOWED,
    "vaultgemma": GEMMA,
}
FAMILIES = tuple(OWN)

# At least one for every rule in layouts.py and every trap; `make check` runs these alone.
CORE = (
    "deepseek_v2",
    "exaone4",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "gpt2",
    "gpt_oss",
    "llama",
    "mistral",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)
EACH_FAMILY = [pytest.param(family, marks=() if family in CORE else pytest.mark.slow) for family in FAMILIES]


def make_tiny(model_type: str, path: Path, seed: int = 0, *, tokenizer: bool = True, **overrides: Any) -> Path:
    """Write a tiny random float32 model of a supported family into `path`, and return it.

    overrides: fields of the config, such as num_hidden_layers=2. tokenizer: add the byte-level one.
    The same arguments give the same weights.
    """
    path = Path(path)
    config = AutoConfig.for_model(model_type, **(COMMON | OWN[model_type] | overrides))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _randomise(model, torch.Generator().manual_seed(seed))
    model.save_pretrained(path)
    if tokenizer:
        byte_tokenizer().save_pretrained(path)
    return path


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte (ids 0-255 in GPT-2's byte alphabet, sorted), then SPECIAL_TOKENS; with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|bos|>", eos_token="<|eos|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Norms near what they start as, everything else, biases and sinks too, with std 0.3."""
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            if "norm" in name or ".ln_" in name:
                value.add_(noise * 0.1)  # some norms multiply by 1 + weight, and start at 0
            else:
                value.copy_(noise * 0.3)
