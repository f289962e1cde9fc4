"""Bytes per token of every card, against published figures; and against two other ways to know them."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvire.models.families import SUPPORTED, kv_groups
from kvire.plan.cards import card, cards, find_card
from kvire.plan.read_shape import read_shape
from kvire.plan.shape import Storage
from kvire.plan.sizing import CONTEXTS

from .shapes import GIB, MIB, shape

FP16 = Storage("float16")

# Growing bytes per token in 2-byte elements, without a sparse indexer's keys; window bytes; fp32 state bytes.
TABLE = {
    "llama-2-7b": (524_288, 0, 0),
    "llama-3.1-8b": (131_072, 0, 0),
    "llama-3.1-70b": (327_680, 0, 0),
    "llama-3.1-405b": (516_096, 0, 0),
    "qwen2.5-72b": (327_680, 0, 0),
    "mixtral-8x7b": (131_072, 0, 0),
    "qwen3-0.6b": (114_688, 0, 0),
    "qwen3-8b": (147_456, 0, 0),
    "qwen3-32b": (262_144, 0, 0),
    "qwen3-30b-a3b": (98_304, 0, 0),
    "qwen3-235b-a22b": (192_512, 0, 0),
    "qwen3-coder-480b": (253_952, 0, 0),
    "minimax-m2.5": (253_952, 0, 0),
    "deepseek-v3": (70_272, 0, 0),
    "kimi-k2": (70_272, 0, 0),
    "glm-5": (89_856, 0, 0),
    "deepseek-v3.2": (70_272, 0, 0),
    "gpt-oss-120b": (36_864, int(4.5 * MIB), 0),
    "gpt-oss-20b": (24_576, 3 * MIB, 0),
    "gemma-4-26b-a4b": (20_480, 200 * MIB, 0),
    "mimo-v2-flash": (23_040, int(24.375 * MIB), 0),
    "qwen3.5-397b-a17b": (30_720, 0, 180 * MIB),
    "qwen3.5-27b": (65_536, 0, 144 * MIB),
    "nemotron-3-nano": (6_144, 0, 46 * MIB),
    "llama-4-scout": (49_152, 36 * 4096 * 8192, 0),
    "smollm2": (23_040, 0, 0),
    "gemma3-270m": (3_072, 15 * 1024 * 512, 0),
}


def test_the_table_covers_every_card() -> None:
    assert list(TABLE) == list(cards())
    assert len(cards()) >= 25


@pytest.mark.parametrize("name", TABLE)
def test_bytes_per_token_are_exact(name: str) -> None:
    found = shape(name)
    index = found.index.bytes_per_token("float16") if found.index else 0
    states = sum(state.state_bytes for state in found.states)
    assert (found.growing_bytes(FP16) - index, found.window_bytes(FP16), states) == TABLE[name]


def test_published_totals() -> None:
    assert shape("deepseek-v3").sequence_bytes(131_072, FP16) / GIB == pytest.approx(8.58, abs=0.005)
    assert shape("deepseek-v3").sequence_bytes(1 << 20, FP16) / GIB == pytest.approx(68.6, abs=0.05)
    llama = shape("llama-2-7b")
    assert llama.sequence_bytes(4000, FP16) == 2_097_152_000
    assert 200 * llama.sequence_bytes(4000, FP16) / GIB == pytest.approx(391, abs=0.5)


def test_index_keys_depend_on_their_dtype_and_are_counted_apart() -> None:
    sparse = shape("deepseek-v3.2")
    assert sparse.growing_bytes(FP16) == 70_272 + 61 * 128 * 2
    assert sparse.growing_bytes(Storage("float16", index_dtype="fp8")) == 70_272 + 61 * 128
    assert shape("glm-5").growing_bytes(FP16) == 89_856 + 78 * 128 * 2


def test_published_wrong_answers_are_wrong() -> None:
    """Figures found in calculators and on pages, each with the mistake that makes it."""
    llama8, llama70 = shape("llama-3.1-8b").growing_bytes(FP16), shape("llama-3.1-70b").growing_bytes(FP16)
    assert llama8 == 128 * 1024  # "128 bytes per token": the KiB was dropped
    deepseek = shape("deepseek-v3").growing_bytes(FP16)
    assert deepseek < 1_749_384 / 24  # four times layers x hidden size: no latent
    assert 2048 * llama70 / 1e9 == pytest.approx(0.67, abs=0.005)  # "5.4 GB per 2k tokens": eight KV heads, not 64
    assert 2048 * llama70 * 8 / 1e9 == pytest.approx(5.4, abs=0.05)
    for name, naive in (("gpt-oss-120b", 73_728), ("gpt-oss-20b", 49_152), ("llama-4-scout", 196_608)):
        found = shape(name)
        layers = sum(g.elements_per_token * 2 for g in found.groups)
        assert layers == naive  # as if no layer had a window
        assert found.growing_bytes(FP16) in (naive // 2, naive // 4)


@pytest.mark.parametrize("name", TABLE)
def test_the_engine_reads_the_same_groups(name: str) -> None:
    """The planner's rules and the engine's were written apart; where both know a family they must agree."""
    config = dict(card(name).config)
    config = dict(config.get("text_config", config))
    config.pop("quantization_config", None)
    if config["model_type"] not in SUPPORTED:
        pytest.skip("not a family of the engine's")
    assert shape(name).groups == kv_groups(config)


@pytest.mark.parametrize("name", TABLE)
def test_parameters_are_those_of_the_model_class(name: str) -> None:
    """By formula within ten in a million of transformers' own modules, made without memory."""
    config = dict(card(name).config)
    config = dict(config.get("text_config", config))
    config.pop("quantization_config", None)
    kind = {"kimi_k2": "deepseek_v3"}.get(config.pop("model_type"), card(name).config["model_type"])
    kind = kind + "_text" if "text_config" in card(name).config else kind
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**config))
    assert shape(name).weights.total == pytest.approx(sum(p.numel() for p in model.parameters()), rel=1e-5)


def test_mixtures_read_few_of_their_weights() -> None:
    deepseek = shape("deepseek-v3").weights
    assert deepseek.total == pytest.approx(671e9, rel=0.001)
    assert deepseek.active == pytest.approx(37e9, rel=0.02)
    assert shape("mixtral-8x7b").weights.active == pytest.approx(12.9e9, rel=0.01)
    assert shape("llama-3.1-8b").weights.active == shape("llama-3.1-8b").weights.total == 8_030_261_248
    oss = shape("gpt-oss-120b").weights
    assert oss.size_bytes() / GIB == pytest.approx(60.8, abs=0.2)  # of the published checkpoint: experts in mxfp4
    assert oss.size_bytes("bfloat16") == 2 * oss.total


def test_aliases_lead_to_cards_and_nothing_else_does() -> None:
    assert find_card("DeepSeek-R1") is cards()["deepseek-v3"]
    assert find_card("deepseek-v4") is None


def test_every_card_says_where_it_is_from_and_how_far_it_reaches() -> None:
    for found in cards().values():
        assert found.source
        context = read_shape(found.config).context_tokens
        assert context is not None and CONTEXTS[0] <= context
        assert found.verified or "verify" in found.source
