"""Native forwards of a model's modules: torch's results, and a row's own whatever company it is in."""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness.backends import INNER_RUN, must_pass_on_a_plain_cpu
from torch import nn

from kvire.attention.cpu import native_available
from kvire.models import native_modules
from kvire.models.native_modules import (
    MAX_NATIVE_ROWS,
    NativeGatedMlp,
    NativeLinear,
    NativeRmsNorm,
    use_native_modules,
)

pytestmark = pytest.mark.skipif(not native_available(), reason="installed without the native kernels")


def pair(width: int, out_width: int, *, bias: bool) -> tuple[nn.Linear, nn.Module]:
    torch.manual_seed(width * 1000 + out_width)
    plain = nn.Linear(width, out_width, bias=bias)
    model = nn.Sequential(nn.Linear(width, out_width, bias=bias))
    model[0].load_state_dict(plain.state_dict())
    use_native_modules(model)
    return plain, model[0]


@pytest.mark.parametrize("rows", [*range(1, MAX_NATIVE_ROWS + 2), 63, 64, 100])
@pytest.mark.parametrize(("width", "out_width"), [(576, 1536), (8, 8), (7, 3), (577, 101), (1, 1), (64, 33)])
def test_a_linear_layer_equals_torch(rows: int, width: int, out_width: int) -> None:
    for bias in (False, True):
        plain, native = pair(width, out_width, bias=bias)
        assert isinstance(native, NativeLinear)
        x = torch.randn(1, rows, width)
        with torch.inference_mode():
            torch.testing.assert_close(native(x), plain(x), rtol=1e-4, atol=1e-5)


def test_a_row_does_not_depend_on_its_company_nor_on_threads() -> None:
    _, native = pair(576, 515, bias=True)
    x = torch.randn(MAX_NATIVE_ROWS, 576)
    with torch.inference_mode():
        alone = torch.cat([native(row[None]) for row in x])
        for rows in range(1, MAX_NATIVE_ROWS + 1):
            assert torch.equal(native(x[:rows]), alone[:rows])
        torch.set_num_threads(2)
        assert torch.equal(native(x), alone)


def test_strided_input_and_empty_input() -> None:
    plain, native = pair(16, 24, bias=True)
    with torch.inference_mode():
        strided = torch.randn(16, 3).t()
        torch.testing.assert_close(native(strided), plain(strided))
        assert native(torch.empty(0, 16)).shape == (0, 24)


def test_other_dtypes_and_subclasses_are_left_alone() -> None:
    class Other(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(8, 8, dtype=torch.float64), Other(8, 8))
    use_native_modules(model)
    assert [type(module) for module in model] == [nn.Linear, Other]


FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "granite", "smollm3")


def of_family(family: str, suffix: str) -> Any:
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    return next(
        kind for name, kind in vars(module).items() if name.endswith(suffix) and kind.__module__ == module.__name__
    )


def swapped(module: nn.Module) -> nn.Module:
    use_native_modules(module)
    return module


def random_norm(family: str, width: int) -> nn.Module:
    norm: nn.Module = of_family(family, "RMSNorm")(width, eps=1e-5)
    nn.init.normal_(norm.weight)
    return norm


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("width", [576, 64, 33, 31, 8, 7, 1])
def test_a_norm_equals_transformers(family: str, width: int) -> None:
    norm = random_norm(family, width)
    for shape in ((1, 300, width), (1, 5, 3, width), (2, width), (0, width)):
        x = torch.randn(shape) * 3
        with torch.inference_mode():
            expected = type(norm).forward(norm, x)
            torch.testing.assert_close(swapped(norm)(x), expected, rtol=1e-5, atol=1e-6)
    assert isinstance(norm, NativeRmsNorm) and isinstance(norm, of_family(family, "RMSNorm"))


def test_a_norm_of_tiny_huge_and_strided_rows() -> None:
    norm = random_norm("llama", 24)
    x = torch.randn(24, 5).t() * torch.tensor([1e-15, 1e-3, 0.0, 1e3, 1e15])[:, None]
    with torch.inference_mode():
        expected = norm(x)
        torch.testing.assert_close(swapped(norm)(x), expected, rtol=1e-5, atol=0)


def test_a_normed_row_does_not_depend_on_its_company_nor_on_threads() -> None:
    norm = swapped(random_norm("llama", 577))
    x = torch.randn(100, 577)
    with torch.inference_mode():
        alone = torch.cat([norm(row[None]) for row in x])
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(norm(x), alone)


def test_norms_of_other_formulas_and_dtypes_are_left_alone() -> None:
    for family in ("gemma3", "olmo2", "gpt_oss"):
        assert not isinstance(swapped(of_family(family, "RMSNorm")(8)), NativeRmsNorm)
    norm = random_norm("llama", 8)
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    expected = norm(x)
    assert torch.equal(swapped(norm)(x), expected)


def random_mlp(family: str, *, width: int, hidden: int, act: str = "silu", bias: bool = False) -> nn.Module:
    sizes = {"hidden_size": width, "intermediate_size": hidden}
    mlp: nn.Module = of_family(family, "MLP")(SimpleNamespace(**sizes, hidden_act=act, mlp_bias=bias))
    return mlp


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("width", "hidden"), [(576, 1536), (24, 40), (7, 33)])
def test_a_gated_mlp_equals_transformers(family: str, width: int, hidden: int) -> None:
    for bias in (False, True):
        mlp = random_mlp(family, width=width, hidden=hidden, bias=bias)
        with torch.inference_mode():
            for rows in (1, 16, 63, 64, 201):
                x = torch.randn(1, rows, width)
                expected = of_family(family, "MLP").forward(mlp, x)
                torch.testing.assert_close(swapped(mlp)(x), expected, rtol=1e-4, atol=1e-5)
        assert isinstance(mlp, NativeGatedMlp)
        assert not [name for name, _ in mlp.named_parameters() if "proj" not in name]


def test_mlps_with_another_activation_are_left_alone() -> None:
    mlp = swapped(random_mlp("llama", width=8, hidden=16, act="gelu"))
    assert not isinstance(mlp, NativeGatedMlp) and isinstance(mlp.up_proj, NativeLinear)


def test_without_onednn_everything_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_modules._onednn, "available", False)
    mlp = random_mlp("llama", width=24, hidden=40)
    x = torch.randn(1, 100, 24)
    with torch.inference_mode():
        expected = mlp(x)
        assert torch.equal(swapped(mlp)(x), expected)


@INNER_RUN
def test_all_of_this_holds_on_a_plain_cpu_and_without_openmp() -> None:
    must_pass_on_a_plain_cpu(__file__)
