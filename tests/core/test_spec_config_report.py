"""Block sizes in bytes, strict options, reports that add up."""

import pytest

from kvire.core.config import EngineConfig
from kvire.core.errors import ConfigError
from kvire.core.report import CacheReport, MissReason
from kvire.core.spec import KVGroup, KVSpec, LayerKind


def test_llama_2_7b_takes_half_a_mebibyte_per_token() -> None:
    group = KVGroup(LayerKind.FULL, tuple(range(32)), 32, 128, 128)
    assert KVSpec((group,), "float16").bytes_per_token == 512 * 1024


def test_int8_takes_a_byte_a_number_and_four_a_scale() -> None:
    """SmolLM2-135M: 30 layers x 3 heads x (64 + 4 + 64 + 4)."""
    assert KVSpec((KVGroup(LayerKind.FULL, tuple(range(30)), 3, 64, 64),), "int8").bytes_per_token == 12_240


def test_int8_counts_the_gap_before_the_scales() -> None:
    """3 x 11 bytes of K, 3 x 6 of V, each up to a multiple of 4, then 3 scales; a token costs a third, rounded up."""
    spec = KVSpec((KVGroup(LayerKind.FULL, (0,), 1, 11, 6),), "int8", block_size=3)
    assert spec.block_bytes(0) == (33 + 3 + 12) + (18 + 2 + 12)
    assert spec.bytes_per_token == 27


def test_latent_attention_keeps_rank_plus_rope_width() -> None:
    """DeepSeek-V3: 61 layers x (512 + 64) numbers a token, not 128 heads x (192 + 128)."""
    group = KVGroup(LayerKind.LATENT, tuple(range(61)), 1, 512, 64)
    spec = KVSpec((group,), "bfloat16", block_size=64)
    assert spec.bytes_per_token == 61 * 576 * 2
    assert spec.block_bytes(0) == 64 * 61 * 576 * 2


def test_groups_add_up() -> None:
    full = KVGroup(LayerKind.FULL, (5, 11), 1, 256, 256)
    sliding = KVGroup(LayerKind.SLIDING, (0, 1, 2), 1, 256, 256, window=512)
    spec = KVSpec((full, sliding))
    assert spec.bytes_per_token * spec.block_size == spec.block_bytes(0) + spec.block_bytes(1)


@pytest.mark.parametrize(
    "options",
    [
        {"kv_dtype": "int3"},
        {"kv_memory": "lots"},
        {"block_size": 0},
        {"block_size": 2.5},
        {"max_num_seqs": True},
        {"max_model_len": -1},
        {"attention": "magic"},
        {"prefix_cache": "off"},
        {"deterministic": "false"},
        {"kv_cache": "big"},
        {"device": "tpu"},
        {"max_batch_tokens": 8, "max_num_seqs": 16},
        {"kv_memroy": "1GiB"},
    ],
)
def test_wrong_options_are_refused_by_name(options: dict) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig.from_options(options)
    assert next(iter(options)) in str(error.value)


def test_reports_add_up() -> None:
    report = CacheReport(device_tokens=64, computed_tokens=3, miss=MissReason.COMPLETE)
    assert report.prompt_tokens == 67
    assert report.as_dict()["reused_tokens"] == 64


def test_a_report_never_claims_the_whole_prompt() -> None:
    with pytest.raises(AssertionError):
        CacheReport(device_tokens=64, computed_tokens=0, miss=MissReason.COMPLETE)
