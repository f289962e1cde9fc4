"""Break-even, hardware, calibration: against published figures and against themselves."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvire.core.errors import ConfigError
from kvire.plan.calibration import SCHEMA, Prefill, fit, measured_machine
from kvire.plan.hardware import Machine, break_even_bytes_per_s, hardware_table, machine
from kvire.plan.shape import Storage

from .shapes import shape

FP16 = Storage("float16")
H100 = machine("h100")  # 989 TFLOP/s, half of it reached


@pytest.mark.parametrize(("tokens", "gb_s"), [(2048, 3.9), (8192, 3.6), (32_768, 2.6), (131_072, 1.3)])
def test_break_even_falls_with_the_context(tokens: int, gb_s: float) -> None:
    assert break_even_bytes_per_s(shape("llama-3.1-8b"), FP16, H100, tokens) / 1e9 == pytest.approx(gb_s, abs=0.05)


@pytest.mark.parametrize(
    ("name", "tokens_per_s", "gb_s"),
    [
        ("qwen3-0.6b", 412_000, 47),
        ("llama-3.1-8b", 30_800, 4.0),
        ("qwen3-32b", 7_500, 2.0),
        ("llama-3.1-70b", 3_500, 1.15),
        ("deepseek-v3", 6_700, 0.47),
    ],
)
def test_prefill_and_break_even_of_short_prompts(name: str, tokens_per_s: float, gb_s: float) -> None:
    assert H100.prefill_tokens_per_s(shape(name), 16) == pytest.approx(tokens_per_s, rel=0.02)
    assert break_even_bytes_per_s(shape(name), FP16, H100, 16) / 1e9 == pytest.approx(gb_s, rel=0.02)


@pytest.mark.parametrize(("device", "gb_s"), [("a800", 5.86), ("h800", 18.57)])
def test_mooncakes_equation_two(device: str, gb_s: float) -> None:
    """Llama-3-70B, 8,192 tokens of prefix, eight devices at their peak: 6 and 19 GB/s in the paper (FAST '25).

    B/G > 2ds / (gqa (apd + bd^2)): bandwidth over FLOP/s from which reuse pays; d the model's width, s bytes a number,
    gqa queries per KV head, p the prefix, a and b the paper's constants for attention and for everything else.
    """
    peak = 8 * next(row["peak_flops"] for row in hardware_table()["devices"] if row["name"] == device)
    width, prefix, queries_per_kv_head, a, b = 8192, 8192, 8, 4, 22
    ratio = 2 * width * 2 / (queries_per_kv_head * (a * prefix * width + b * width**2))
    assert ratio * peak / 1e9 == pytest.approx(gb_s, abs=0.005)


def test_eight_devices_are_eight_times_as_fast_and_large() -> None:
    one, eight = machine("h100"), machine("h100", devices=8)
    assert eight.prefill_s(shape("llama-3.1-70b"), 0, 4096) == pytest.approx(
        one.prefill_s(shape("llama-3.1-70b"), 0, 4096) / 8
    )
    assert eight.memory_bytes == 640_000_000_000
    assert machine("h100", mfu=0.25).linear_flops_per_s == one.linear_flops_per_s / 2


def test_decode_reads_weights_and_kv_at_least() -> None:
    llama = shape("llama-3.1-8b")
    least = H100.decode_s(llama, FP16, 8192, 4, None)
    assert least == pytest.approx((2 * 8_030_261_248 + 4 * 8192 * 131_072) / 3.35e12)
    with pytest.raises(ConfigError, match="bandwidth"):
        replace(H100, memory_bytes_per_s=None).decode_s(llama, FP16, 1, 1, None)


@pytest.mark.parametrize(("name", "mfu"), [("h100x", None), ("h100", 0.0), ("h100", 1.5)])
def test_wrong_hardware_is_refused(name: str, mfu: float | None) -> None:
    with pytest.raises(ConfigError, match=r"h100|mfu"):
        machine(name, mfu=mfu)


@given(st.floats(0, 0.1), st.floats(1e9, 1e14), st.floats(1e9, 1e14))
def test_a_fit_finds_the_constants_that_made_the_times(overhead_s: float, linear: float, attention: float) -> None:
    made = Machine("made", "made", linear, attention, overhead_s)
    smollm2 = shape("smollm2")
    spans = [(0, 256), (0, 1024), (0, 4096), (1023, 1024), (4095, 4096)]
    fitted = Machine("fitted", "fitted", *_reordered(fit(smollm2, _measured(made, spans))))
    for start, stop in [(0, 512), (0, 2048), (0, 8192), (2047, 2048)]:
        assert fitted.prefill_s(smollm2, start, stop) == pytest.approx(made.prefill_s(smollm2, start, stop), rel=1e-3)


def _measured(who: Machine, spans: list[tuple[int, int]]) -> list[Prefill]:
    return [Prefill(start, stop, who.prefill_s(shape("smollm2"), start, stop)) for start, stop in spans]


def _reordered(constants: tuple[float, float, float]) -> tuple[float, float, float]:
    overhead_s, linear, attention = constants
    return linear, attention, overhead_s


def test_a_fit_never_gives_a_negative_constant() -> None:
    """Times that fall with the context, as noise makes them, leave attention out instead of predicting the past."""
    times = [Prefill(0, 256, 1.0), Prefill(0, 1024, 3.0), Prefill(0, 4096, 8.0)]
    overhead_s, linear, attention = fit(shape("smollm2"), times)
    assert overhead_s >= 0 and linear > 0 and attention > 0
    with pytest.raises(ConfigError, match="measure again"):
        fit(shape("smollm2"), [Prefill(0, 100, -1.0)])


def test_a_calibration_of_another_schema_is_refused() -> None:
    with pytest.raises(ConfigError, match=SCHEMA):
        measured_machine({"schema": "kvire.calibration/0"})
