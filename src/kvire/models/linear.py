"""Linear layers for the few rows of a decode step: bound by reading weights, which torch does at half speed.

The model's classes stay what they are; its nn.Linear modules get a forward that hands few rows to the
native kernel and everything else to torch. Both read the same weights.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from kvire.attention.cpu import native_module

# From here on torch's blocked matrix product is faster (docs/benchmarks.md).
MAX_NATIVE_ROWS = 16


class FewRowsLinear(nn.Linear):
    """nn.Linear for float32 on the CPU. A row's result does not depend on how many others there are."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] -> [..., out_features]."""
        rows = x.numel() // self.in_features
        if not 0 < rows <= MAX_NATIVE_ROWS or x.dtype != torch.float32 or not self.weight.is_contiguous():
            return linear(x, self.weight, self.bias)
        native: Any = native_module()
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self.out_features)
        native.linear_rows(
            x=x.data_ptr(),
            rows=rows,
            width=self.in_features,
            weights=self.weight.data_ptr(),
            out_width=self.out_features,
            bias=0 if self.bias is None else self.bias.data_ptr(),
            out=out.data_ptr(),
            threads=torch.get_num_threads(),
        )
        return out


def use_native_linears(model: nn.Module) -> None:
    """Let every plain float32 nn.Linear of `model` run its few-row products natively."""
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype == torch.float32 and module.weight.device.type == "cpu":
            module.__class__ = FewRowsLinear
