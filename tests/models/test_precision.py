"""Whether float32 products have all their bits is told, whichever way it was set."""

from collections.abc import Iterator

import pytest
import torch
from harness.families import family_engine

from kvire.models.precision import matmul_precision


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


def test_nothing_is_said_of_full_precision() -> None:
    torch.set_float32_matmul_precision("highest")
    assert [matmul_precision(device) for device in ("cpu", "cuda", "xpu")] == ["", "", ""]


@pytest.mark.parametrize(("setting", "cpu", "cuda"), [("high", "tf32", "tf32"), ("medium", "bf16", "tf32")])
def test_set_for_all_devices(setting: str, cpu: str, cuda: str) -> None:
    torch.set_float32_matmul_precision(setting)
    assert (matmul_precision("cpu"), matmul_precision("cuda"), matmul_precision("xpu")) == (cpu, cuda, setting)


def test_set_for_one_device() -> None:
    """Where torch's older question for all of them raises RuntimeError."""
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    assert (matmul_precision("cpu"), matmul_precision("cuda")) == ("bf16", "")


def test_an_engine_with_fewer_bits_has_another_namespace() -> None:
    exact = family_engine("llama", attention="portable").namespace
    torch.set_float32_matmul_precision("medium")
    rounded = family_engine("llama", attention="portable").namespace
    assert (exact.numerics, rounded.numerics) == ("float32/portable/cpu", "float32/portable/cpu/matmul=bf16")
    assert exact.root != rounded.root
