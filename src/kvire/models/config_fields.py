"""Reading a config.json: whole numbers that are there, or the class's default; anything else is refused."""

from collections.abc import Mapping
from typing import Any

from kvire.core.errors import UnsupportedModelError

Config = Mapping[str, Any]

MAX_LAYERS = 4096  # far beyond any model; a damaged config must not make us build a list of 10^9


def num_layers(config: Config) -> int:
    """Decoder layers."""
    layers = positive(config, "num_hidden_layers")
    if layers > MAX_LAYERS:
        raise UnsupportedModelError(f"config.json claims {layers} layers: the file is damaged")
    return layers


def window_of(config: Config) -> int | None:
    """Tokens a sliding layer looks back, itself included; None: the config switches windows off."""
    return None if config.get("sliding_window") is None else positive(config, "sliding_window")


def kv_heads(config: Config) -> int:
    """The classes read an explicit null as "as many as query heads"."""
    if config.get("num_key_value_heads") is None:
        return positive(config, "num_attention_heads")
    return positive(config, "num_key_value_heads")


def head_dim(config: Config) -> int:
    """Width of a head where the config says it, else its share of hidden_size."""
    return hidden_share(config) if config.get("head_dim") is None else positive(config, "head_dim")


def hidden_share(config: Config) -> int:
    """hidden_size over query heads, whatever head_dim says: some classes know no other width."""
    hidden, heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    if hidden < heads:
        raise UnsupportedModelError(f"config.json has hidden_size {hidden} for {heads} heads: the file is damaged")
    return hidden // heads


def positive(config: Config, name: str) -> int:
    """A whole number above zero."""
    value = count(config, name)
    if value == 0:
        raise UnsupportedModelError(f"config.json has {name} 0, which cannot be")
    return value


def count(config: Config, name: str) -> int:
    """A whole number, perhaps zero."""
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UnsupportedModelError(f"config.json has {name} {value!r}, which should be a whole number")
    return value
