"""Refusals of models, and their messages. Each check looks at one property and gives advice.

A model that is not known to be cached right is refused here, before any weight is read: a refusal
costs the user a minute, a cache that is silently wrong costs more.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from kvire.core.errors import UnsupportedModelError

Config = Mapping[str, Any]

# Factors that do not depend on the rest of the batch. `dynamic` chooses its own by the longest
# sequence at hand (transformers/modeling_rope_utils.py, dynamic_rope_update), but only beyond
# max_position_embeddings, a limit of the engine. `longrope` does so earlier; rope.py stops it.
KNOWN_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional", "dynamic", "longrope")

# Their attention passes attn_logit_softcapping on. Others have the field from their ancestors, and
# whether it counts depends on the attention that runs.
SOFTCAPPED = ("gemma2", "vaultgemma")

IMAGE_FIELDS = ("vision_config", "audio_config", "image_token_id", "image_token_index")
STATE_FIELDS = (
    "ssm_cfg",
    "ssm_state_size",
    "state_size",
    "mamba_d_state",
    "linear_conv_kernel_dim",
    "conv_L_cache",
)

# Fields by which a config.json can make from_pretrained load or patch something other than the
# plain class and the files beside it.
STEERING_FIELDS = ("transformers_weights", "fusion_config")


def refuse_unknown(config: Config, supported: tuple[str, ...]) -> None:
    """Raise UnsupportedModelError unless `config` is of a supported family and form."""
    _refuse_family(config, supported)
    _refuse_code(config)
    _refuse_quantised(config)
    _refuse_heads_other_than_causal(config)
    _refuse_unknown_rope(config)
    _refuse_looking_elsewhere(config)
    _refuse_softcap(config)


def _refuse_family(config: Config, supported: tuple[str, ...]) -> None:
    kind = config.get("model_type")
    if kind in supported:
        return
    known = f"Supported families: {', '.join(supported)}."
    if not isinstance(kind, str):
        raise UnsupportedModelError(f"config.json has no model_type, so the family is unknown. {known}")
    if kind in ("gemma3", "gemma4"):
        example = ", such as gemma-3-270m or gemma-3-1b" if kind == "gemma3" else ""
        raise UnsupportedModelError(
            f"{kind} here is the multimodal checkpoint, and images are not supported. Use a text-only checkpoint "
            f"(model_type {kind}_text{example}). {known}"
        )
    raise UnsupportedModelError(f"{kind} is not supported{_why(config)}. {known}")


def _why(config: Config) -> str:
    if any(config.get(name) is not None for name in IMAGE_FIELDS):
        return ": it takes images or sound, and Kvire serves text only. Use a text-only checkpoint"
    if config.get("is_encoder_decoder"):
        return ": it is an encoder-decoder model, and Kvire serves decoder-only models"
    if _is_state_space(config):
        return ": it keeps a running state (state-space or linear attention), which cannot be cached by the token"
    return ": its KV is not known to be cached right in this version"


def _is_state_space(config: Config) -> bool:
    kinds = config.get("layer_types") or ()
    running = any(str(kind) in ("linear_attention", "mamba", "conv", "recurrent") for kind in kinds)
    return running or any(config.get(name) is not None for name in STATE_FIELDS)


def _refuse_code(config: Config) -> None:
    if config.get("auto_map"):
        raise UnsupportedModelError(
            "config.json asks to run code that comes with the model (auto_map), which Kvire never does. "
            f"If the plain transformers class for {config['model_type']} serves this model, delete auto_map from "
            "config.json."
        )
    for name in STEERING_FIELDS:
        if config.get(name) is not None:
            raise UnsupportedModelError(f"config.json has {name}, which is not supported: take the plain checkpoint")


def _refuse_quantised(config: Config) -> None:
    for name in ("quantization_config", "compression_config"):
        if (settings := config.get(name)) is None:
            continue
        method = settings.get("quant_method", "unknown") if isinstance(settings, Mapping) else "unknown"
        raise UnsupportedModelError(
            f"the weights are quantised ({name}: {method}), which is not supported yet. Use the unquantised "
            "checkpoint (bfloat16, float16 or float32), or a GGUF of the model."
        )


def _refuse_heads_other_than_causal(config: Config) -> None:
    names = config.get("architectures") or ()
    if names and not any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in names):
        raise UnsupportedModelError(f"{', '.join(map(str, names))} does not generate text: a ...ForCausalLM does")


def _refuse_unknown_rope(config: Config) -> None:
    for rope in _rope_settings(config):
        kind = str(rope.get("rope_type", rope.get("type", "default")))
        if kind in KNOWN_ROPE_TYPES:
            continue
        if kind == "su":
            raise UnsupportedModelError(
                "rotary type su is an old name of longrope: take the model's current config.json, which says longrope"
            )
        raise UnsupportedModelError(
            f"rotary type {kind} is not known to be right here. Use a checkpoint with one of "
            f"{', '.join(KNOWN_ROPE_TYPES)}."
        )


def _rope_settings(config: Config) -> Iterator[Mapping[str, Any]]:
    """Every rotary setting, under its old or new field name: one for all layers, or one per
    kind.
    """
    for name in ("rope_parameters", "rope_scaling"):
        settings = config.get(name)
        if isinstance(settings, Mapping):
            yield settings
            yield from (value for value in settings.values() if isinstance(value, Mapping))


def _refuse_looking_elsewhere(config: Config) -> None:
    # Gemma 4's "vision" is about image tokens alone, which a text model has none of.
    of_images = config["model_type"] == "gemma4_text" and config.get("use_bidirectional_attention") == "vision"
    if config.get("use_bidirectional_attention") and not of_images:
        raise UnsupportedModelError(
            "bidirectional attention (use_bidirectional_attention) looks ahead: KV of a prefix would change with what "
            "follows. Use a causal checkpoint of the model; this one is made for embeddings."
        )
    if config.get("add_cross_attention") or config.get("is_encoder_decoder"):
        raise UnsupportedModelError(
            "config.json has cross-attention (add_cross_attention or is_encoder_decoder), and Kvire serves "
            "decoder-only models: use a plain causal checkpoint."
        )


def _refuse_softcap(config: Config) -> None:
    if config.get("attn_logit_softcapping") is not None and config["model_type"] not in SOFTCAPPED:
        raise UnsupportedModelError(
            f"soft-capped attention scores (attn_logit_softcapping) are supported for {', '.join(SOFTCAPPED)}, not for "
            f"{config['model_type']}: use a checkpoint without the field"
        )
