"""Tiny random models of every supported family, for tests.

Their weights are large enough that logits depend on all of the KV: with transformers' own initial
weights (std 0.02) a model answers nearly the same whatever the cache holds, and a test sees nothing.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3_text", "gpt_oss", "deepseek_v3")
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
OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": WINDOW},
    "gemma3_text": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "num_hidden_layers": 4,
        "layer_types": MIXED,
    },
    "gpt_oss": {
        "head_dim": 16,
        "sliding_window": WINDOW,
        "num_hidden_layers": 4,
        "layer_types": MIXED,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_mtp_layers": 0,
    },
}


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
    """Norms near 1, biases and sinks near 0.3, matrices with std 0.3 (the router's and the head's less)."""
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            if "norm" in name:
                # gemma's norms multiply by 1 + weight
                value.copy_(noise * 0.1 + (0.0 if model.config.model_type == "gemma3_text" else 1.0))
            else:
                value.copy_(noise * 0.3)
