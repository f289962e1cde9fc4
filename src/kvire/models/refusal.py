"""What is refused, and in which words. Each check looks at one thing and says what to do instead.

A model that is not known to be cached right is refused here, before any weight is read: a refusal
costs the user a minute, a cache that is silently wrong costs more.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from kvire.core.errors import UnsupportedModelError

Config = Mapping[str, Any]

# Factors that are the same whatever else runs in the batch. `dynamic` and `longrope` choose theirs by
# the longest sequence at hand (transformers/modeling_rope_utils.py, dynamic_rope_update), so a cached
# block would depend on who computed it.
STEADY_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

IMAGE_FIELDS = ("vision_config", "audio_config", "image_token_id", "image_token_index")
STATE_FIELDS = (
    "ssm_cfg",
    "ssm_state_size",
    "state_size",
    "mamba_d_state",
    "linear_conv_kernel_dim",
    "conv_L_cache",
)

# Fields by which a config.json can make from_pretrained load or patch something other than the plain
# class and the files beside it.
STEERING_FIELDS = ("transformers_weights", "fusion_config")


def refuse_unknown(config: Config, supported: tuple[str, ...]) -> None:
    """Raise UnsupportedModelError unless `config` is of a supported family, in a form known to be right."""
    _refuse_family(config, supported)
    _refuse_code(config)
    _refuse_quantised(config)
    _refuse_heads_other_than_causal(config)
    _refuse_unsteady_rope(config)
    _refuse_gemma3_variants(config)


def _refuse_family(config: Config, supported: tuple[str, ...]) -> None:
    kind = config.get("model_type")
    if kind in supported:
        return
    known = f"Supported families: {', '.join(supported)}."
    if not isinstance(kind, str):
        raise UnsupportedModelError(f"config.json has no model_type, so the family is unknown. {known}")
    if kind == "gemma3":
        raise UnsupportedModelError(
            "gemma3 here is the multimodal checkpoint, and images are not supported. Use a text-only checkpoint "
            f"(model_type gemma3_text, such as gemma-3-270m or gemma-3-1b). {known}"
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
    if names and not any(str(name).endswith("ForCausalLM") for name in names):
        raise UnsupportedModelError(f"{', '.join(map(str, names))} does not generate text: a ...ForCausalLM does")


def _refuse_unsteady_rope(config: Config) -> None:
    for rope in _rope_settings(config):
        kind = str(rope.get("rope_type", rope.get("type", "default")))
        if kind in STEADY_ROPE_TYPES:
            continue
        if "dynamic" in kind or kind in ("longrope", "su"):
            raise UnsupportedModelError(
                f"rotary type {kind} takes its factors from the longest sequence in the batch, so KV would depend on "
                "who else is served. Use a checkpoint with a fixed type (default, linear, llama3, yarn)."
            )
        raise UnsupportedModelError(f"rotary type {kind} is not known to be right here: {', '.join(STEADY_ROPE_TYPES)}")


def _rope_settings(config: Config) -> Iterator[Mapping[str, Any]]:
    """Every rotary setting: one for all layers, or one per kind of layer; old and new field name."""
    for name in ("rope_parameters", "rope_scaling"):
        settings = config.get(name)
        if isinstance(settings, Mapping):
            yield settings
            yield from (value for value in settings.values() if isinstance(value, Mapping))


def _refuse_gemma3_variants(config: Config) -> None:
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModelError(
            "bidirectional attention looks ahead: KV of a prefix would change with what follows"
        )
    if config.get("attn_logit_softcapping") is not None:
        raise UnsupportedModelError("soft-capped attention scores (attn_logit_softcapping) are not supported yet")
