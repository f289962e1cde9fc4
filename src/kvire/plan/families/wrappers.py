"""Finding the language model in a config that holds more than one: those of models that read images
or sound.
"""

from collections.abc import Mapping
from typing import Any

from kvire.core.errors import UnsupportedModelError
from kvire.plan.families.table import FAMILIES

# Where the language model's fields stand, outermost first.
INNER = ("thinker_config", "text_config", "language_config", "llm_config")
# What they leave to the config around them.
_ABOVE = ("quantization_config", "dtype", "torch_dtype", "tie_word_embeddings")

# The same layers under another name, inside such a model or, in older checkpoints, beside its image
# part.
ALIASES = {
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
    "phi3_v": "phi3",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_5_omni_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_omni_moe_text": "qwen3_moe",
}
# The language model of families whose text_config may not name it.
LANGUAGE_MODELS = {
    "aya_vision": "cohere2",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "internvl": "qwen2",
    "kimi_k25": "kimi_k2",
    "kimi_vl": "deepseek_v3",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "paligemma": "gemma",
    "qwen2_audio": "qwen2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_omni_moe": "qwen3_moe",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "smolvlm": "llama",
    "voxtral": "llama",
}


def language_model(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """The fields of the language model, its model_type a key of FAMILIES, and whether the config
    holds more than it.

    Raises UnsupportedModelError naming a model_type that is not known.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise UnsupportedModelError("the config has no model_type, so the model's family is not known")
    inner = next((config[name] for name in INNER if isinstance(config.get(name), Mapping)), None)
    if inner is not None and kind not in FAMILIES:
        above = {name: config[name] for name in _ABOVE if config.get(name) is not None}
        nulls = {name for name in (*above, "model_type") if inner.get(name) is None}
        stated = {name: value for name, value in inner.items() if name not in nulls}
        named = {"model_type": LANGUAGE_MODELS[kind]} if kind in LANGUAGE_MODELS else {}
        return language_model({**above, **named, **stated})[0], True
    if kind in LANGUAGE_MODELS:
        raise UnsupportedModelError(
            f"the config of this {kind} model has no text_config, where its language model stands"
        )
    family = ALIASES.get(kind, kind)
    if family not in FAMILIES:
        known = ", ".join(sorted({*FAMILIES, *ALIASES, *LANGUAGE_MODELS}))
        raise UnsupportedModelError(f"what {kind} models keep is not known here, so nothing is planned. Known: {known}")
    return {**config, "model_type": family}, kind != family and not kind.endswith("_text")
