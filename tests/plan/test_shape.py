"""Bytes and FLOPs of a shape: what must hold for every model, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvire.core.errors import ConfigError
from kvire.core.spec import KVSpec, LayerKind
from kvire.plan.cards import card, cards
from kvire.plan.read_shape import read_shape
from kvire.plan.shape import KEPT_BYTES, Storage, Weights

from .shapes import changed, shape

NAMES = st.sampled_from(list(cards()))
TOKENS = st.integers(1, 200_000)
STORAGES = st.builds(Storage, st.sampled_from(sorted(KEPT_BYTES)), st.sampled_from([1, 16, 64]))


@given(NAMES, TOKENS, TOKENS, STORAGES)
def test_more_tokens_never_take_less(name: str, some: int, more: int, storage: Storage) -> None:
    found = shape(name)
    low, high = sorted((some, more))
    assert found.sequence_bytes(low, storage) <= found.sequence_bytes(high, storage)
    assert found.prefill_flops(0, low) <= found.prefill_flops(0, high)


@given(NAMES, TOKENS, STORAGES)
def test_blocks_cost_less_than_a_block_and_a_window(name: str, tokens: int, storage: Storage) -> None:
    """Padding is real, and bounded: one block of what grows, and two of each window."""
    found, flat = shape(name), replace(storage, block_tokens=1)
    exact, kept = found.sequence_bytes(tokens, flat), found.sequence_bytes(tokens, storage)
    all_grow = replace(found, groups=tuple(replace(g, kind=LayerKind.FULL, window=None) for g in found.groups))
    assert exact <= kept <= exact + 2 * storage.block_tokens * all_grow.growing_bytes(flat)


@given(NAMES, st.integers(300_000, 10**6))
def test_growing_bytes_are_the_slope(name: str, tokens: int) -> None:
    """Beyond every window, a token more costs exactly growing_bytes; before it, the fixed parts and what grew."""
    found, flat = shape(name), Storage("float16")
    assert found.sequence_bytes(tokens + 1, flat) - found.sequence_bytes(tokens, flat) == found.growing_bytes(flat)
    fixed = found.window_bytes(flat) + found.state_bytes(flat)
    assert found.sequence_bytes(tokens, flat) == tokens * found.growing_bytes(flat) + fixed


@given(NAMES, TOKENS)
def test_narrower_numbers_take_their_share(name: str, tokens: int) -> None:
    found = shape(name)
    states = found.state_bytes(Storage())
    wide, half, eighth = (
        found.sequence_bytes(tokens, Storage(dtype)) - states for dtype in ("float32", "float16", "fp8")
    )
    assert wide == 2 * half == 4 * eighth
    assert eighth < found.sequence_bytes(tokens, Storage("int8", 16)) - states + 1  # its scales come on top


def test_int8_is_what_the_pool_keeps() -> None:
    found = shape("smollm2")
    assert found.growing_bytes(Storage("int8")) == 12_240
    spec = KVSpec(found.groups, "int8", 16)
    assert found.sequence_bytes(160, Storage("int8", 16)) == 10 * spec.block_bytes(0)


def test_a_window_spans_one_block_more_at_its_worst() -> None:
    oss = shape("gpt-oss-20b")  # window 128
    window = next(g for g in oss.groups if g.window)
    only = replace(oss, groups=(window,), pair_flops=(0,), attended=(128,))
    blocks = only.sequence_bytes(10_000, Storage("float16", 16)) / KVSpec((window,), "float16", 16).block_bytes(0)
    assert blocks == 9  # 127 tokens before the newest one may touch nine blocks of 16


@pytest.mark.parametrize(("tp", "times"), [(1, 1), (2, 1), (8, 1), (16, 2), (32, 4)])
def test_more_ranks_than_kv_heads_keep_copies(tp: int, times: int) -> None:
    llama = shape("llama-3.1-8b")  # eight KV heads
    assert llama.growing_bytes(Storage("float16", tp=tp)) == times * 131_072


def test_every_rank_keeps_all_of_a_latent_and_its_index() -> None:
    for name in ("deepseek-v3", "deepseek-v3.2"):
        alone = shape(name).growing_bytes(Storage("float16"))
        assert shape(name).growing_bytes(Storage("float16", tp=8)) == 8 * alone


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="8 KV heads cannot be shared out evenly among 3"):
        shape("llama-3.1-8b").growing_bytes(Storage(tp=3))


@given(NAMES, TOKENS, TOKENS)
def test_flops_of_parts_add_up(name: str, one: int, other: int) -> None:
    found = shape(name)
    middle, end = sorted((one, other))
    assert found.prefill_flops(0, middle) + found.prefill_flops(middle, end) == found.prefill_flops(0, end)


def test_flops_follow_the_formula() -> None:
    """2 N n + 2 L H d n^2, whose second part counts half a square; the exact sum has n more pairs."""
    llama, n = shape("llama-3.1-8b"), 8192
    formula = 2 * llama.weights.total * n + 2 * 32 * 32 * 128 * n * n
    assert llama.prefill_flops(0, n) == formula + 2 * 32 * 32 * 128 * n


def test_windows_and_top_k_bound_the_attention() -> None:
    oss, sparse = shape("gpt-oss-120b"), shape("deepseek-v3.2")
    everywhere = replace(oss, attended=(None, None)).attention_flops(0, 65_536)
    assert oss.attention_flops(0, 65_536) == pytest.approx(everywhere / 2, rel=0.01)
    assert sparse.attention_flops(0, 131_072) < shape("deepseek-v3").attention_flops(0, 131_072) / 4


UNKNOWN: list[tuple[str, dict[str, Any], str]] = [
    ("deepseek-v3", {"model_type": "deepseek_v4"}, "deepseek_v4"),
    ("llama-3.1-8b", {"model_type": "mamba"}, "mamba"),
    ("llama-3.1-8b", {"kv_compression_ratio": 4}, "kv_compression_ratio"),
    ("llama-3.1-8b", {"sliding_window": 4096}, "sliding_window"),
    ("llama-3.1-8b", {"num_hidden_layers": None}, "num_hidden_layers"),
    ("llama-3.1-8b", {"num_hidden_layers": -3}, "num_hidden_layers"),
    ("llama-3.1-8b", {"num_key_value_heads": "8"}, "num_key_value_heads"),
    ("llama-3.1-8b", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ("deepseek-v3", {"kv_lora_rank": None}, "kv_lora_rank"),
    ("deepseek-v3", {"compress_ratios": [4, 128]}, "compress_ratios"),
    ("glm-5", {"index_topk_freq": 2}, "index_topk_freq"),
    ("glm-5", {"indexer_types": ["full"] * 77 + ["new"]}, "indexer_types"),
    ("gpt-oss-20b", {"layer_types": ["full_attention"] * 23 + ["lightning_attention"]}, "lightning_attention"),
    ("gpt-oss-20b", {"layer_types": ["full_attention"]}, "layer_types"),
    ("gemma-4-26b-a4b", {"num_kv_shared_layers": 30}, "num_kv_shared_layers"),
    ("mimo-v2-flash", {"swa_v_head_dim": None}, "swa_v_head_dim"),
    ("qwen3.5-27b", {"layer_types": ["linear_attention"] * 63 + ["mamba"]}, "mamba"),
    ("nemotron-3-nano", {"hybrid_override_pattern": None}, "hybrid_override_pattern"),
    ("nemotron-3-nano", {"hybrid_override_pattern": "X" * 52}, "hybrid_override_pattern"),
    ("llama-4-scout", {"attention_chunk_size": None}, "attention_chunk_size"),
    ("llama-3.1-8b", {"torch_dtype": "float8"}, "float8"),
]


@pytest.mark.parametrize(("name", "fields", "named"), UNKNOWN, ids=lambda part: part if isinstance(part, str) else "")
def test_what_is_not_known_is_refused_by_name(name: str, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_shape(changed(name, **fields))


def test_a_config_without_model_type_or_text_config_is_refused() -> None:
    with pytest.raises(ConfigError, match="no model_type"):
        read_shape({})
    with pytest.raises(ConfigError, match="no text_config"):
        read_shape({"model_type": "gemma4"})


def test_fields_that_are_off_or_about_something_else_do_no_harm() -> None:
    plain = read_shape(card("llama-3.1-8b").config)
    harmless = {"sliding_window": None, "use_sliding_window": False, "cross_attention": [], "attention_dropout": 0.1}
    also = {"use_cache": True, "rope_scaling": {"factor": 8}, "bos_token_id": 1, "_attn_implementation": "sdpa"}
    config = {**card("llama-3.1-8b").config, **harmless, **also}
    assert read_shape(config) == plain


def test_draft_layers_are_named_and_not_counted() -> None:
    draft = shape("deepseek-v3").draft
    assert draft is not None
    assert (draft.field, draft.layers, draft.elements_per_token) == ("num_nextn_predict_layers", 1, 576)
    assert shape("llama-3.1-8b").draft is None


def test_weights_take_their_dtype() -> None:
    weights = Weights(dense=1000, experts=9000, active_experts=500)
    assert weights.size_bytes("float32") == 40_000
    assert weights.read_bytes(1, "float16") == 3000
    assert weights.read_bytes(2, "float16") == 2 * (1000 + round(9000 * (1 - (17 / 18) ** 2)))
    assert weights.read_bytes(10_000, "float16") == weights.size_bytes("float16")
    assert weights.size_bytes("int4") == round(10_000 * (4 + 16 / 32) / 8)
