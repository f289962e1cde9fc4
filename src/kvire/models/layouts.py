"""From a config's fields to KV groups: which layers see everything, which slide, which share, how wide they are.

One function per rule, as the transformers classes apply it (models/*/configuration_*.py and
modeling_*.py of 5.24). `family_table.py` says which family follows which.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvire.core.errors import UnsupportedModelError
from kvire.core.spec import KVGroup, LayerKind
from kvire.models.config_fields import Config, count, head_dim, hidden_share, kv_heads, num_layers, positive, window_of

# config: with the class's defaults filled in -> groups, FULL before SLIDING
Layout = Callable[[Config], tuple[KVGroup, ...]]

FULL, SLIDING = "full_attention", "sliding_attention"


def full(config: Config) -> tuple[KVGroup, ...]:
    """Every layer sees everything, whatever the config says of windows."""
    return _groups(config, [FULL] * num_layers(config), None)


def one_head_per_query(config: Config) -> tuple[KVGroup, ...]:
    """The same with one K and V per query head, and no width but hidden_size's share: fused QKV of the GPT line."""
    heads, width = positive(config, "num_attention_heads"), hidden_share(config)
    return (KVGroup(LayerKind.FULL, tuple(range(num_layers(config))), heads, width, width),)


def one_window(config: Config) -> tuple[KVGroup, ...]:
    """The attention class gives every layer the config's window, or none, whatever `layer_types` says."""
    window = window_of(config)
    expected = FULL if window is None else SLIDING
    if any(kind != expected for kind in config.get("layer_types") or ()):
        kind = config["model_type"]
        raise UnsupportedModelError(
            f"this {kind} config has layers of several kinds (layer_types), which the {kind} class ignores. "
            "It is probably a ministral model under the wrong model_type: take the model's current config.json."
        )
    return _groups(config, [expected] * num_layers(config), window)


def one_window_if_used(config: Config) -> tuple[KVGroup, ...]:
    """The same, but a window counts only with use_sliding_window."""
    return one_window({**config, "sliding_window": _window_in_use(config)})


def window_after(config: Config) -> tuple[KVGroup, ...]:
    """Qwen: a window counts only with use_sliding_window, and then from layer max_window_layers on."""
    window, first = _window_in_use(config), count(config, "max_window_layers")
    return _by_type(config, lambda i: window is None or i < first, window)


def window_after_always(config: Config) -> tuple[KVGroup, ...]:
    """dots.llm1: the same without a switch."""
    window, first = window_of(config), count(config, "max_window_layers")
    return _by_type(config, lambda i: window is None or i < first, window)


def window_before(config: Config) -> tuple[KVGroup, ...]:
    """Qwen2-MoE: every other layer slides, up to layer max_window_layers, with use_sliding_window."""
    window, last = _window_in_use(config), count(config, "max_window_layers")
    return _by_type(config, lambda i: window is None or i % 2 == 1 or i >= last, window)


def all_or_none(config: Config) -> tuple[KVGroup, ...]:
    """Ministral: all layers slide if there is a window, unless layer_types says which."""
    window = window_of(config)
    return _by_type(config, lambda _: window is None, window)


def full_every(nth: int, *, field: str | None = None, first: bool = False) -> Layout:
    """Every nth layer sees everything: the last of each nth, or the first. field: overrides nth where it is there."""

    def layout(config: Config) -> tuple[KVGroup, ...]:
        every = nth
        if field is not None and config.get("layer_types") is None and config.get(field) is not None:
            every = positive(config, field)
        return _by_type(config, lambda i: i % every == (0 if first else every - 1), window_of(config))

    return layout


def exaone4(config: Config) -> tuple[KVGroup, ...]:
    """Every fourth layer sees everything; without a window all do."""
    return full(config) if window_of(config) is None else full_every(4, field="sliding_window_pattern")(config)


def smollm3(config: Config) -> tuple[KVGroup, ...]:
    """A window, where it is in use, belongs to the layers without rotary positions."""
    window, stated = _window_in_use(config), config.get("no_rope_layers")
    every = positive(config, "no_rope_layer_interval")
    if stated is not None and len(stated) != num_layers(config):
        raise UnsupportedModelError(f"config.json has {len(stated)} no_rope_layers for {num_layers(config)} layers")

    def has_rope(layer: int) -> bool:
        return bool(stated[layer]) if stated is not None else (layer + 1) % every != 0

    return _by_type(config, lambda i: window is None or has_rope(i), window)


def latent(config: Config) -> tuple[KVGroup, ...]:
    """The cache gets the normed latent as K and the rotated shared key as V (DeepseekV3Attention.forward)."""
    return (
        KVGroup(
            kind=LayerKind.LATENT,
            layers=tuple(range(num_layers(config))),
            kv_heads=1,
            key_width=positive(config, "kv_lora_rank"),
            value_width=positive(config, "qk_rope_head_dim"),
        ),
    )


def gemma4(config: Config) -> tuple[KVGroup, ...]:
    """Full layers have heads of their own shape; the last num_kv_shared_layers keep nothing and read an earlier layer.

    A checkpoint says the shape of its full layers in global_head_dim and num_global_key_value_heads; a config
    that transformers wrote says it again for each of them, in per_layer_config.
    """
    layers, shared = num_layers(config), count(config, "num_kv_shared_layers")
    types = _types(config, lambda i: i % 6 == 5)
    types[-1] = FULL  # the class sees to that
    if shared >= layers or set(types[: layers - shared]) != set(types):
        raise UnsupportedModelError(
            f"config.json lets the last {shared} of {layers} layers share KV that no layer before them keeps"
        )
    own = types[: layers - shared]
    whole = tuple(i for i, kind in enumerate(own) if kind == FULL)
    heads, width = _gemma4_full_shape(config, types)
    groups = [KVGroup(LayerKind.FULL, whole, heads, width, width)]
    if sliding := tuple(i for i, kind in enumerate(own) if kind == SLIDING):
        heads, width = positive(config, "num_key_value_heads"), positive(config, "head_dim")
        window = positive(config, "sliding_window")
        groups.append(KVGroup(LayerKind.SLIDING, sliding, heads, width, width, window=window))
    return tuple(groups)


def _gemma4_full_shape(config: Config, types: list[str]) -> tuple[int, int]:
    """KV heads and width of the full layers."""
    overrides = config.get("per_layer_config")
    if overrides is None:
        shape = {"head_dim": config.get("global_head_dim", 512)}
        if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads") is not None:
            shape["num_key_value_heads"] = config["num_global_key_value_heads"]
    else:
        shape = _shape_of_full_layers(overrides, {i for i, kind in enumerate(types) if kind == FULL})
    fields = {**config, **shape}
    return positive(fields, "num_key_value_heads"), positive(fields, "head_dim")


def _shape_of_full_layers(overrides: Mapping[Any, Any], full_layers: set[int]) -> dict[str, Any]:
    """overrides: by layer, as a number or as digits ("05")."""
    shapes = {int(layer): dict(fields) for layer, fields in overrides.items() if str(layer).isdigit()}
    shape: dict[str, Any] = next(iter(shapes.values()), {})
    if len(shapes) != len(overrides) or set(shapes) - full_layers or (shape and full_layers - set(shapes)):
        raise UnsupportedModelError("per_layer_config names other layers than the full ones, which is not supported")
    if any(fields != shape for fields in shapes.values()) or set(shape) - {"head_dim", "num_key_value_heads"}:
        raise UnsupportedModelError(
            "per_layer_config is supported where it gives every full layer the same head_dim and "
            "num_key_value_heads, not for anything else"
        )
    return shape


def _window_in_use(config: Config) -> int | None:
    return window_of(config) if config.get("use_sliding_window", False) else None


def _by_type(config: Config, is_full: Callable[[int], bool], window: int | None) -> tuple[KVGroup, ...]:
    return _groups(config, _types(config, is_full), window)


def _types(config: Config, is_full: Callable[[int], bool]) -> list[str]:
    """`layer_types`, or what the class makes of a config without it."""
    layers, stated = num_layers(config), config.get("layer_types")
    types: list[Any] = [FULL if is_full(i) else SLIDING for i in range(layers)] if stated is None else list(stated)
    if len(types) != layers:
        raise UnsupportedModelError(f"config.json has {len(types)} layer_types for {layers} layers")
    if unknown := sorted(set(map(str, types)) - {FULL, SLIDING}):
        raise UnsupportedModelError(f"layers of kind {', '.join(unknown)} are not supported, only full and sliding")
    return types


def _groups(config: Config, types: list[str], window: int | None) -> tuple[KVGroup, ...]:
    """FULL and SLIDING groups of layers that all have the same heads."""
    heads, width = kv_heads(config), head_dim(config)
    whole = tuple(i for i, kind in enumerate(types) if kind == FULL)
    sliding = tuple(i for i, kind in enumerate(types) if kind == SLIDING)
    groups = [KVGroup(LayerKind.FULL, whole, heads, width, width)] if whole else []
    if sliding:
        if window is None:
            raise UnsupportedModelError(
                "config.json has sliding layers but no sliding_window in use: its fields disagree"
            )
        groups.append(KVGroup(LayerKind.SLIDING, sliding, heads, width, width, window=window))
    return tuple(groups)
