"""From a GGUF's fields to a transformers config.

Every field that affects computation is either translated or checked against the one value that the
transformers class has built in; a file with any other value is refused by that field's name. So a
model with, say, scaled rotary factors is refused rather than converted to another model.
"""

from collections.abc import Callable
from typing import Any

from kvire.core.errors import UnsupportedModelError
from kvire.models.gguf.header import GgufHeader
from kvire.plan.families.fields import MAX_LAYERS

ConfigFields = dict[str, Any]

TOKEN_IDS = {"bos_token_id": "bos_token_id", "pad_token_id": "padding_token_id"}

# End of text, end of turn, end of message: generation stops at any of them.
STOP_FIELDS = ("eos_token_id", "eot_token_id", "eom_token_id")
# The same as files write them that have no field for it (older ones, of chat models with the base
# model's end of text): a turn ends with the one of these that the chat template writes. Names as in
# llama.cpp's vocabulary.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_turn|>", "<end_of_turn>", "<EOT>")

GEMMA3_27B_LAYERS = 62  # the only gemma3 whose score scale is not 1/sqrt(head width), and no field says so


def config_from_gguf(header: GgufHeader) -> ConfigFields:
    """config.json for the model in a GGUF.

    Raises UnsupportedModelError for an unsupported architecture, and for settings that
    transformers' class cannot express or this code does not translate.
    """
    translate = _ARCHITECTURES.get(header.architecture)
    if translate is None:
        raise UnsupportedModelError(
            f"GGUF architecture {header.architecture or 'unknown'} is not supported: {', '.join(_ARCHITECTURES)} are. "
            "Use the model's safetensors checkpoint if its family is supported (kvire models show NAME)."
        )
    config = translate(header)
    _expect_constants(header, config)
    for name in header.unused(f"{header.architecture}."):
        raise UnsupportedModelError(
            f"the GGUF states {name}, which Kvire does not convert, so the model would not be the same. "
            "Use its safetensors checkpoint."
        )
    return config


def _llama(header: GgufHeader) -> ConfigFields:
    config = _common(header, "LlamaForCausalLM", "llama")
    config["head_dim"] = _whole(header, "rope.dimension_count", config["hidden_size"] // config["num_attention_heads"])
    config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    return config


def _qwen2(header: GgufHeader) -> ConfigFields:
    config = _common(header, "Qwen2ForCausalLM", "qwen2")
    return config | {"use_sliding_window": False}


def _qwen3(header: GgufHeader) -> ConfigFields:
    config = _common(header, "Qwen3ForCausalLM", "qwen3")
    return config | {"head_dim": _whole(header, "attention.key_length"), "use_sliding_window": False}


def _gemma3(header: GgufHeader) -> ConfigFields:
    config = _common(header, "Gemma3ForCausalLM", "gemma3_text")
    layers, head_dim = config["num_hidden_layers"], _whole(header, "attention.key_length")
    if layers == GEMMA3_27B_LAYERS:
        raise UnsupportedModelError("gemma3 27B as a GGUF is not supported: use its safetensors checkpoint")
    every = _whole(header, "attention.sliding_window_pattern", 6)
    theta = config.pop("rope_parameters")["rope_theta"]
    local_theta = float(header.get("gemma3.rope.freq_base_swa") or 10_000.0)
    return config | {
        "head_dim": head_dim,
        "query_pre_attn_scalar": head_dim,
        "sliding_window": _whole(header, "attention.sliding_window"),
        "layer_types": ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        },
    }


_ARCHITECTURES: dict[str, Callable[[GgufHeader], ConfigFields]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
}


def _common(header: GgufHeader, class_name: str, model_type: str) -> ConfigFields:
    heads = _whole(header, "attention.head_count")
    hidden = _whole(header, "embedding_length")
    if hidden % heads:
        raise UnsupportedModelError(f"the GGUF claims {heads} heads for a width of {hidden}: it is damaged")
    return {
        "architectures": [class_name],
        "model_type": model_type,
        "dtype": "float32",
        "vocab_size": _vocabulary(header),
        "hidden_size": hidden,
        "intermediate_size": _whole(header, "feed_forward_length"),
        "num_hidden_layers": _layers(header),
        "num_attention_heads": heads,
        "num_key_value_heads": _whole(header, "attention.head_count_kv", heads),
        "max_position_embeddings": _whole(header, "context_length"),
        "rms_norm_eps": _real(header, "attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": _real(header, "rope.freq_base", 10_000.0)},
        # llama.cpp writes the output matrix only where it is not the embedding.
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "eos_token_id": ids[0] if len(ids := stop_ids(header)) == 1 else ids,
    } | {name: header.get(f"tokenizer.ggml.{field}") for name, field in TOKEN_IDS.items()}


def stop_ids(header: GgufHeader) -> list[int]:
    """Ids of the tokens that end an answer, ascending; a model without any is refused."""
    found = {header.get(f"tokenizer.ggml.{field}") for field in STOP_FIELDS} | _turn_ends(header)
    ids = sorted(i for i in found if isinstance(i, int) and not isinstance(i, bool))
    if not ids:
        raise UnsupportedModelError("the GGUF names no end-of-text token, so generation would not end")
    return ids


def _turn_ends(header: GgufHeader) -> set[int]:
    template = header.get("tokenizer.chat_template")
    written = {text for text in TURN_ENDS if isinstance(template, str) and text in template}
    if not written:
        return set()
    return {i for i, token in enumerate(header.get("tokenizer.ggml.tokens") or ()) if token in written}


def _layers(header: GgufHeader) -> int:
    """The claimed number of layers, checked against the tensors.

    Building even an empty model takes time for every layer.
    """
    layers = _whole(header, "block_count")
    present = {name.split(".")[1] for name in header.tensors if name.startswith("blk.")}
    if layers > MAX_LAYERS or layers != len(present):
        raise UnsupportedModelError(f"the GGUF claims {layers} layers and has tensors of {len(present)}: it is damaged")
    return layers


def _vocabulary(header: GgufHeader) -> int:
    """Rows of the embedding: the token list can be shorter, the matrix decides."""
    if "token_embd.weight" not in header.tensors or len(header.shape("token_embd.weight")) != 2:
        raise UnsupportedModelError("the GGUF has no token embedding: it is damaged")
    rows = header.shape("token_embd.weight")[0]
    if header.count("tokenizer.ggml.tokens") > rows:
        raise UnsupportedModelError("the GGUF has more tokens than embeddings: it is damaged")
    return rows


def _expect_constants(header: GgufHeader, config: ConfigFields) -> None:
    """Check fields with one supported value: the one built into the class."""
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    constants = {
        "attention.key_length": width,
        "attention.value_length": width,
        "rope.dimension_count": width,
        "rope.scaling.type": "none",
        "attention.causal": True,
        "attention.sliding_window": config.get("sliding_window", 0),
        "expert_count": 0,
        "expert_used_count": 0,
        "vocab_size": config["vocab_size"],
    }
    for name, expected in constants.items():
        stated = header.get(f"{header.architecture}.{name}")
        if stated is not None and stated != expected:
            raise UnsupportedModelError(
                f"the GGUF has {header.architecture}.{name} = {stated!r}, and only {expected!r} is supported. "
                "Use the model's safetensors checkpoint."
            )


def _whole(header: GgufHeader, name: str, default: int | None = None) -> int:
    value = header.get(f"{header.architecture}.{name}")
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise UnsupportedModelError(f"the GGUF has {header.architecture}.{name} = {value!r}: not a positive number")
    return value


def _real(header: GgufHeader, name: str, default: float | None = None) -> float:
    value = header.get(f"{header.architecture}.{name}")
    value = default if value is None else value
    if not isinstance(value, float | int) or isinstance(value, bool) or not value > 0:
        raise UnsupportedModelError(f"the GGUF has {header.architecture}.{name} = {value!r}: not a positive number")
    return float(value)
