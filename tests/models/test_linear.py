"""Few-row linear layers: torch's results, and a row's own whatever company it is in."""

import pytest
import torch
from torch import nn

from kvire.attention.cpu import native_available
from kvire.models.linear import MAX_NATIVE_ROWS, FewRowsLinear, use_native_linears

pytestmark = pytest.mark.skipif(not native_available(), reason="installed without the native kernels")


def pair(width: int, out_width: int, *, bias: bool) -> tuple[nn.Linear, nn.Module]:
    torch.manual_seed(width * 1000 + out_width)
    plain = nn.Linear(width, out_width, bias=bias)
    model = nn.Sequential(nn.Linear(width, out_width, bias=bias))
    model[0].load_state_dict(plain.state_dict())
    use_native_linears(model)
    return plain, model[0]


@pytest.mark.parametrize("rows", [*range(1, MAX_NATIVE_ROWS + 2), 100])
@pytest.mark.parametrize(("width", "out_width"), [(576, 1536), (8, 8), (7, 3), (577, 101), (1, 1), (64, 33)])
def test_equals_torch(rows: int, width: int, out_width: int) -> None:
    for bias in (False, True):
        plain, native = pair(width, out_width, bias=bias)
        assert isinstance(native, FewRowsLinear)
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
    use_native_linears(model)
    assert [type(module) for module in model] == [nn.Linear, Other]
