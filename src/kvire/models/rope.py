"""LongRoPE without its switch: one set of factors for every sequence, fixed before any run."""

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig


def fix_longrope(config: PreTrainedConfig, longest_tokens: int) -> None:
    """Give every LongRoPE setting of `config` one set of factors, for sequences of
    `longest_tokens`.

    The rotary classes take the long factors as soon as any position of the forward is beyond the
    original context (transformers/modeling_rope_utils.py, longrope_frequency_update), so that K of
    a token would depend on the other requests, and blocks of a short prompt would not fit the
    longer one that begins with it. With equal sets the switch changes nothing. The config records
    the chosen set, and its digest is part of the namespace.
    """
    for settings in _longrope_settings(getattr(config, "rope_parameters", None)):
        is_long = longest_tokens > settings["original_max_position_embeddings"]
        factors = list(settings["long_factor" if is_long else "short_factor"])
        settings["short_factor"], settings["long_factor"] = factors, list(factors)


def _longrope_settings(settings: Any) -> Iterator[dict[str, Any]]:
    """One setting for all layers, or one per kind of layer."""
    if isinstance(settings, dict):
        if settings.get("rope_type") == "longrope":
            yield settings
        for value in settings.values():
            yield from _longrope_settings(value)
