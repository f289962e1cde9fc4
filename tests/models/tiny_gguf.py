"""Tiny GGUF files, sound and hostile, for tests."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import pre_tokenizers

HIDDEN, LAYERS, HEADS, KV_HEADS, INNER = 64, 2, 4, 2, 96
TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġt", "ĠĠ", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]

# A SentencePiece vocabulary: special tokens, bytes, then pieces, the longer the likelier.
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "t", "▁a", "▁t", "at", "▁at"]

TENSORS: dict[str, dict[str, tuple[int, ...]]] = {
    "llama": {
        "attn_norm.weight": (HIDDEN,),
        "attn_q.weight": (HIDDEN, HIDDEN),
        "attn_k.weight": (HIDDEN // 2, HIDDEN),
        "attn_v.weight": (HIDDEN // 2, HIDDEN),
        "attn_output.weight": (HIDDEN, HIDDEN),
        "ffn_norm.weight": (HIDDEN,),
        "ffn_gate.weight": (INNER, HIDDEN),
        "ffn_up.weight": (INNER, HIDDEN),
        "ffn_down.weight": (HIDDEN, INNER),
    }
}
TENSORS["qwen2"] = TENSORS["llama"] | {
    "attn_q.bias": (HIDDEN,),
    "attn_k.bias": (HIDDEN // 2,),
    "attn_v.bias": (HIDDEN // 2,),
}
TENSORS["qwen3"] = TENSORS["llama"] | {"attn_q_norm.weight": (16,), "attn_k_norm.weight": (16,)}
TENSORS["gemma3"] = TENSORS["qwen3"] | {"post_attention_norm.weight": (HIDDEN,), "post_ffw_norm.weight": (HIDDEN,)}


def make_gguf(
    path: Path,
    arch: str = "llama",
    seed: int = 0,
    fields: dict[str, Any] | None = None,
    drop: str = "",
    pre: str = "",
    *,
    tokenizer: dict[str, Any] | None = None,
    head: bool = False,
    tensors_per_part: int = 0,
) -> Path:
    """A tiny GGUF: Q8_0 matrices, float32 vectors.

    fields: added, or put in place of others, below `arch`. drop: a tensor to leave out. pre: splitting rules;
    "pieces" for a SentencePiece vocabulary.
    tokenizer: the same as fields, below tokenizer; None leaves one out. head: an output matrix of its own.
    tensors_per_part: 0 for one file; else the parts lie beside `path`, which is not written.
    """
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=tensors_per_part)
    settings: dict[str, Any] = {
        "block_count": LAYERS,
        "context_length": 512,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    if arch in ("qwen3", "gemma3"):
        settings |= {"attention.key_length": 16, "attention.value_length": 16}
    if arch == "gemma3":
        settings |= {"attention.sliding_window": 24}
    for name, value in (settings | (fields or {})).items():
        _add(writer, f"{arch}.{name}", value)
    _add_tokenizer(writer, pre or {"llama": "smollm", "gemma3": "smollm"}.get(arch, "qwen2"), tokenizer or {})
    rng = np.random.default_rng(seed)
    rows = len(PIECES if pre == "pieces" else TOKENS)
    tensors = {"token_embd.weight": (rows, HIDDEN), "output_norm.weight": (HIDDEN,)}
    tensors |= {f"blk.{i}.{name}": shape for i in range(LAYERS) for name, shape in TENSORS[arch].items()}
    if head:
        tensors["output.weight"] = (rows, HIDDEN)
    for name, shape in tensors.items():
        if name != drop:
            _add_tensor(writer, name, rng.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(name, value)
        case int():
            writer.add_uint32(name, value)
        case float():
            writer.add_float32(name, value)
        case str():
            writer.add_string(name, value)


def _add_tokenizer(writer: gguf.GGUFWriter, pre: str, fields: dict[str, Any]) -> None:
    usual = _add_pieces(writer) if pre == "pieces" else _add_bytes(writer, pre)
    for name, value in (usual | fields).items():
        _add(writer, f"tokenizer.{name}", value)


def _add_bytes(writer: gguf.GGUFWriter, pre: str) -> dict[str, Any]:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * (len(TOKENS) - 3) + [3] * 3)
    writer.add_token_merges(["Ġ t", "Ġ Ġ"])
    return {
        "ggml.bos_token_id": len(TOKENS) - 2,
        "ggml.eos_token_id": len(TOKENS) - 1,
        "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }


def _add_pieces(writer: gguf.GGUFWriter) -> dict[str, Any]:
    rest = len(PIECES) - 259
    writer.add_tokenizer_model("llama")
    writer.add_token_list(PIECES)
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * rest)
    writer.add_token_scores([0.0] * 259 + [float(i - rest) for i in range(rest)])
    return {"ggml.bos_token_id": 1, "ggml.eos_token_id": 2, "ggml.unknown_token_id": 0}


def _add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray) -> None:
    if values.ndim == 1:
        writer.add_tensor(name, values)
    else:
        packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
