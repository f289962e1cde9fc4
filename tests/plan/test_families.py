"""Every family of the table, planned from a config.json alone, as transformers writes it."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from models.tiny import COMMON, OWN
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from kvire.core.spec import KVSpec
from kvire.models.families import SUPPORTED, kv_groups
from kvire.plan.families.blocks import ModelBlock, dense
from kvire.plan.families.layouts import full_every
from kvire.plan.families.table import FAMILIES, _family
from kvire.plan.families.wrappers import ALIASES, LANGUAGE_MODELS
from kvire.plan.read_shape import read_shape
from kvire.plan.shape import Storage

# Where the class's default is no model: fields that its own modules cannot do without.
COMPLETED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 64, "moe_topk": 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
}


def _parameters(config: PreTrainedConfig) -> int:
    """Of transformers' own modules, made without memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(value.numel() for value in model.parameters())


@pytest.mark.parametrize("family", SUPPORTED)
def test_what_the_engine_runs_can_be_planned(family: str) -> None:
    """By its defaults: the same groups as the engine's, the parameters of its modules."""
    config = AutoConfig.for_model(family, **COMPLETED.get(family, {}))
    found = read_shape(config.to_dict())
    groups = kv_groups(config)
    assert found.groups == groups
    assert found.growing_bytes(Storage("float16")) + found.window_bytes(Storage("float16")) == sum(
        KVSpec((group,), "float16").bytes_per_token * (group.window or 1) for group in groups
    )
    assert found.weights.total == pytest.approx(_parameters(config), rel=1e-5)


@pytest.mark.parametrize("family", SUPPORTED)
def test_small_parts_are_counted_too(family: str) -> None:
    """Norms, biases, sinks, routers: of a model of a few thousand parameters, nothing may be missing."""
    config = AutoConfig.for_model(family, **COMMON | OWN[family])
    correction = (
        2 * 4 if family in ("deepseek_v3", "dots1", "glm4_moe", "glm4_moe_lite") else 0
    )  # a buffer to the class
    assert read_shape(config.to_dict()).weights.total == _parameters(config) + correction


def test_only_what_is_only_planned_for_is_not_run() -> None:
    assert set(FAMILIES) - set(SUPPORTED) == {
        "deepseek_v32", "glm_moe_dsa", "kimi_k2", "llama4_text", "mimo_v2_flash", "nemotron_h", "qwen3_5_moe_text",
        "qwen3_5_text", "qwen3_next",
    }  # fmt: skip
    assert {*ALIASES.values(), *LANGUAGE_MODELS.values()} <= set(FAMILIES)
    assert not set(FAMILIES) & {*ALIASES, *LANGUAGE_MODELS}


def test_a_family_of_a_known_layout_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the engine and for the planner."""
    config = {
        "model_type": "toy",
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 96,
        "vocab_size": 320,
    }
    monkeypatch.setitem(
        FAMILIES, "toy", _family(full_every(2), ModelBlock(dense()), 2048, 4, 64, 4, 2, sliding_window=24)
    )
    groups = kv_groups(config)
    assert [(group.layers, group.window) for group in groups] == [((1, 3), None), ((0, 2), 24)]
    found = read_shape(config)
    assert found.groups == groups
    each = 64 * (64 + 2 * 32 + 64) + 3 * 64 * 96 + 2 * 64
    assert found.weights.total == 2 * 320 * 64 + 4 * each + 64


REFERENCE = Path(__file__).parents[2] / "docs" / "reference.md"


def test_the_reference_lists_what_runs_and_what_is_planned() -> None:
    text = REFERENCE.read_text(encoding="utf-8")
    runs, planned = (re.search(rf"{start}([a-z0-9_,\s]+)\.", text) for start in ("warm: ", "[Pp]lanned for only: "))
    assert runs is not None and tuple(re.findall(r"\w+", runs[1])) == SUPPORTED
    assert planned is not None and set(re.findall(r"\w+", planned[1])) == set(FAMILIES) - set(SUPPORTED)
