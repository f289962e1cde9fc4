"""Deliberately broken builds of the planner's reading of configs; tests/plan/test_hub_configs.py
must notice each.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvire.plan import read_shape
from kvire.plan.families.fields import Fields
from kvire.plan.families.mixers import Attention, Latent
from kvire.plan.families.table import FAMILIES

Mutant = Callable[[pytest.MonkeyPatch], None]


def nested_windows_ignored(patch: pytest.MonkeyPatch) -> None:
    """What stands in text_config about windows is lost."""
    find = read_shape.language_model

    def broken(config):
        text, wrapped = find(config)
        return {**text, "sliding_window": 10**6} if wrapped and text.get("sliding_window") else text, wrapped

    patch.setattr(read_shape, "language_model", broken)


def windows_ignored(patch: pytest.MonkeyPatch) -> None:
    """Sliding layers count as if they kept everything."""
    group = Attention.group
    patch.setattr(Attention, "group", lambda self, layers: group(replace(self, window=None), layers))


def no_window_is_a_window(patch: pytest.MonkeyPatch) -> None:
    """-1 is taken for a length."""
    patch.setattr(Fields, "window", lambda self, name="sliding_window": abs(self.get(name) or 1))


def latents_expanded(patch: pytest.MonkeyPatch) -> None:
    """A latent counts as the heads that it stands for."""

    def broken(self, layers):
        return Attention(self.heads, self.heads, self.nope_width + self.rope_width, self.value_width).group(layers)

    patch.setattr(Latent, "group", broken)


def heads_of_queries(patch: pytest.MonkeyPatch) -> None:
    """Grouped heads are taken for as many as those of the queries."""
    whole = Fields.whole

    def broken(self, name, default=None):
        return whole(self, "num_attention_heads" if name == "num_key_value_heads" else name, default)

    patch.setattr(Fields, "whole", broken)


def class_defaults_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Fields that a config leaves to its class are not filled in."""
    patch.setitem(FAMILIES, "gemma3_text", replace(FAMILIES["gemma3_text"], defaults={}))


ALL: list[Mutant] = [
    nested_windows_ignored,
    windows_ignored,
    no_window_is_a_window,
    latents_expanded,
    heads_of_queries,
    class_defaults_forgotten,
]
