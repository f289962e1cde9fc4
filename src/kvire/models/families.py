"""Which models are known to be right, and what each of their layers keeps per token.

`kv_groups` follows the transformers classes (models/*/configuration_*.py and modeling_*.py of 5.24):
the defaults below are the classes' own, so that a config.json that leaves a field out gives the same
groups as the config object made from it. Everything else is refused by name, by `refusal.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeGuard

from kvire.core.errors import UnsupportedModelError
from kvire.core.spec import KVGroup, LayerKind
from kvire.models.refusal import refuse_unknown

MAX_LAYERS = 4096  # far beyond any model; a damaged config must not make us build a list of 10^9


class HasDict(Protocol):
    """A transformers config, as far as it is needed here."""

    def to_dict(self) -> dict[str, Any]:
        """Every field, defaults included."""


Config = Mapping[str, Any]


def kv_groups(config: Config | HasDict) -> tuple[KVGroup, ...]:
    """Groups of a model, FULL before SLIDING. config: a transformers config, or its config.json as a dict.

    Raises UnsupportedModelError, with what to do, for every model that is not known to be cached right.
    """
    fields = as_dict(config)
    refuse_unknown(fields, supported=SUPPORTED)
    return _GROUPS[fields["model_type"]](fields)


def max_positions(config: Config | HasDict) -> int:
    """The longest sequence, in tokens, that the model was made for."""
    fields = as_dict(config)
    return _positive(fields, "max_position_embeddings", _MAX_POSITIONS[fields["model_type"]])


def as_dict(config: Config | HasDict) -> Config:
    """The config's fields."""
    return config if _is_mapping(config) else config.to_dict()  # type: ignore[union-attr]


def _is_mapping(config: Config | HasDict) -> TypeGuard[Config]:
    return isinstance(config, Mapping)


def _llama(config: Config) -> tuple[KVGroup, ...]:
    layers = _layers(config, 32)
    return (_full(range(layers), _kv_heads(config, 32, None), _head_dim(config, 4096, 32)),)


def _mistral(config: Config) -> tuple[KVGroup, ...]:
    """MistralAttention gives every layer the config's window, whatever `layer_types` says."""
    layers, heads, width = _layers(config, 32), _kv_heads(config, 32, 8), _head_dim(config, 4096, 32)
    window = _window(config, 4096)
    expected = "full_attention" if window is None else "sliding_attention"
    if any(kind != expected for kind in config.get("layer_types") or ()):
        raise UnsupportedModelError(
            "this mistral config has layers of several kinds (layer_types), which the mistral class ignores. "
            "It is probably a ministral model under the wrong model_type: take the model's current config.json."
        )
    if window is None:
        return (_full(range(layers), heads, width),)
    return (_sliding(range(layers), heads, width, window),)


def _qwen2(config: Config) -> tuple[KVGroup, ...]:
    return _qwen(config, _head_dim(config, 4096, 32))


def _qwen3(config: Config) -> tuple[KVGroup, ...]:
    return _qwen(config, _positive(config, "head_dim", 128))


def _qwen(config: Config, width: int) -> tuple[KVGroup, ...]:
    """A window counts only with use_sliding_window, and then from layer max_window_layers on."""
    window = _window(config, 4096) if config.get("use_sliding_window", False) else None
    first = _count(config, "max_window_layers", 28)
    types = [
        "full_attention" if window is None or i < first else "sliding_attention" for i in range(_layers(config, 32))
    ]
    return _by_layer_type(config, types, _kv_heads(config, 32, 32), width, window)


def _gemma3(config: Config) -> tuple[KVGroup, ...]:
    every = _positive(config, "sliding_window_pattern", 6)
    types = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(_layers(config, 26))]
    heads, width = _kv_heads(config, 8, 4), _positive(config, "head_dim", 256)
    return _by_layer_type(config, types, heads, width, _window(config, 4096))


def _gpt_oss(config: Config) -> tuple[KVGroup, ...]:
    types = ["sliding_attention" if (i + 1) % 2 else "full_attention" for i in range(_layers(config, 36))]
    heads, width = _kv_heads(config, 64, 8), _positive(config, "head_dim", 64)
    return _by_layer_type(config, types, heads, width, _window(config, 128))


def _deepseek_v3(config: Config) -> tuple[KVGroup, ...]:
    """The cache gets the normed latent as K and the rotated shared key as V (DeepseekV3Attention.forward)."""
    return (
        KVGroup(
            kind=LayerKind.LATENT,
            layers=tuple(range(_layers(config, 61))),
            kv_heads=1,
            key_width=_positive(config, "kv_lora_rank", 512),
            value_width=_positive(config, "qk_rope_head_dim", 64),
        ),
    )


_GROUPS: dict[str, Callable[[Config], tuple[KVGroup, ...]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mistral": _mistral,
    "gemma3_text": _gemma3,
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek_v3,
}
SUPPORTED = tuple(_GROUPS)

_MAX_POSITIONS = {
    "llama": 2048,
    "qwen2": 32768,
    "qwen3": 32768,
    "mistral": 131072,
    "gemma3_text": 131072,
    "gpt_oss": 131072,
    "deepseek_v3": 4096,
}


def _by_layer_type(
    config: Config, default_types: list[str], heads: int, width: int, window: int | None
) -> tuple[KVGroup, ...]:
    """FULL and SLIDING groups from `layer_types`, or from what the class makes of a config without it."""
    stated = config.get("layer_types")
    types = default_types if stated is None else list(stated)
    if len(types) != len(default_types):
        raise UnsupportedModelError(f"config.json has {len(types)} layer_types for {len(default_types)} layers")
    if unknown := sorted(set(map(str, types)) - {"full_attention", "sliding_attention"}):
        raise UnsupportedModelError(f"layers of kind {', '.join(unknown)} are not supported, only full and sliding")
    full = [i for i, kind in enumerate(types) if kind == "full_attention"]
    sliding = [i for i, kind in enumerate(types) if kind == "sliding_attention"]
    if sliding and window is None:
        raise UnsupportedModelError("config.json has sliding layers but no sliding_window in use: its fields disagree")
    groups = [_full(full, heads, width)] if full else []
    if sliding and window is not None:
        groups.append(_sliding(sliding, heads, width, window))
    return tuple(groups)


def _full(layers: range | list[int], heads: int, width: int) -> KVGroup:
    return KVGroup(LayerKind.FULL, tuple(layers), heads, width, width)


def _sliding(layers: range | list[int], heads: int, width: int, window: int) -> KVGroup:
    return KVGroup(LayerKind.SLIDING, tuple(layers), heads, width, width, window=window)


def _layers(config: Config, default: int) -> int:
    layers = _positive(config, "num_hidden_layers", default)
    if layers > MAX_LAYERS:
        raise UnsupportedModelError(f"config.json claims {layers} layers: the file is damaged")
    return layers


def _window(config: Config, default: int) -> int | None:
    """Tokens a sliding layer looks back, itself included; None: the config switches windows off."""
    return None if config.get("sliding_window", default) is None else _positive(config, "sliding_window", default)


def _kv_heads(config: Config, default_heads: int, default_kv_heads: int | None) -> int:
    """The classes read an explicit null as "as many as query heads"."""
    if config.get("num_key_value_heads", default_kv_heads) is None:
        return _positive(config, "num_attention_heads", default_heads)
    return _positive(config, "num_key_value_heads", default_kv_heads)


def _head_dim(config: Config, default_hidden: int, default_heads: int) -> int:
    if config.get("head_dim") is not None:
        return _positive(config, "head_dim", None)
    hidden = _positive(config, "hidden_size", default_hidden)
    heads = _positive(config, "num_attention_heads", default_heads)
    if hidden < heads:
        raise UnsupportedModelError(f"config.json has hidden_size {hidden} for {heads} heads: the file is damaged")
    return hidden // heads


def _positive(config: Config, name: str, default: int | None) -> int:
    value = _count(config, name, default)
    if value == 0:
        raise UnsupportedModelError(f"config.json has {name} 0, which cannot be")
    return value


def _count(config: Config, name: str, default: int | None) -> int:
    value = config.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UnsupportedModelError(f"config.json has {name} {value!r}, which should be a whole number")
    return value
