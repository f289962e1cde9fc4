"""Faster linear layers, RMS norms and gated MLPs for a model's own modules: float32 on the CPU.

The model's classes and weights stay the same; single modules get a subclass of their class, whose
forward computes the same formula natively, and passes unsupported inputs to the original. A module
counts as a norm or an MLP if the source of its forward is the formula below, whatever its class is
called.
"""

import ast
import inspect
import platform
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.activations import ACT2FN

from kvire.core.native import native_module

# All linears of SmolLM2, 2 cores, native / oneDNN / MKL, which torch takes: 46 / 58 / 89 ms for 16
# rows, 67 / 73 / 109 for 24, 87 / 79 / 141 for 32, 131 / 116 / 154 for 64.
MAX_NATIVE_ROWS = 24

# oneDNN pays 0.5 ms at the first use of a shape; there are few below a hundred rows, and above it
# does not matter.
MIN_ONEDNN_ROWS = MAX_NATIVE_ROWS + 1

RMS_NORM = """
def forward(self, hidden_states):
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * hidden_states.to(input_dtype)
"""

GATED_MLP = """
def forward(self, x):
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj
"""


def use_native_modules(model: nn.Module) -> None:
    """Let every module of `model` that has a native forward run it."""
    for module in model.modules():
        kind: Any = type(module)
        if type(module) is nn.Linear and _is_cpu_float(module.weight):
            module.__class__ = NativeLinear
        elif _computes(kind, RMS_NORM):
            module.__class__ = _subclass(NativeRmsNorm, kind)
        elif _computes(kind, GATED_MLP) and isinstance(module.act_fn, _SILU):
            module.__class__ = _subclass(NativeGatedMlp, kind)


class NativeLinear(nn.Linear):
    """Linear layer for few rows, as in a decode step.

    Such a step is bound by reading weights, which torch does at half speed. Of few rows, a row's
    result does not depend on how many others there are.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] -> [..., out_features]."""
        rows = x.numel() // self.in_features
        if rows == 0 or not (_is_cpu_float(x) and self.weight.is_contiguous()):
            return linear(x, self.weight, self.bias)
        if rows > MAX_NATIVE_ROWS:
            return _product(x, self)
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


class NativeRmsNorm(nn.Module):
    """RMS_NORM in one pass over memory. A row's result does not depend on the others."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., width] -> the same."""
        width = self.weight.numel()
        if not (_is_cpu_float(hidden_states) and _is_cpu_float(self.weight)) or hidden_states.shape[-1] != width:
            normed: Tensor = super().forward(hidden_states)
            return normed
        native: Any = native_module()
        x = hidden_states.contiguous()
        out = torch.empty_like(x)
        native.rms_norm(
            x=x.data_ptr(),
            rows=x.numel() // width,
            width=width,
            weights=self.weight.contiguous().data_ptr(),
            epsilon=self.variance_epsilon,
            out=out.data_ptr(),
            threads=torch.get_num_threads(),
        )
        return out


class NativeGatedMlp(nn.Module):
    """GATED_MLP with SiLU.

    For many rows, activation and product are part of the matrix products.
    """

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same."""
        projections = (self.gate_proj, self.up_proj)
        if not all(type(layer) is NativeLinear and _runs_on_onednn(x, layer) for layer in projections):
            out: Tensor = super().forward(x)
            return out
        gate = _onednn.linear(x, self.gate_proj.weight, self.gate_proj.bias, "swish", [], "")
        gated = _onednn.linear_times(x, gate, self.up_proj.weight, self.up_proj.bias, "mul")
        down: Tensor = self.down_proj(gated)
        return down


class _OneDnn:
    """torch's private binding of oneDNN's linear layers.

    On AMD a tenth faster than MKL, which torch prefers.
    """

    def __init__(self) -> None:
        operators: Any = torch.ops.mkldnn
        found: Any = getattr(operators, "_linear_pointwise", None)
        self.available = found is not None and platform.machine() in ("x86_64", "AMD64")
        self.linear: Callable[..., Tensor] = found and found.default
        self.linear_times: Callable[..., Tensor] = found and found.binary


_onednn = _OneDnn()
_SILU = (nn.SiLU, type(ACT2FN["silu"]))


def _product(x: Tensor, layer: nn.Linear) -> Tensor:
    if _runs_on_onednn(x, layer):
        return _onednn.linear(x, layer.weight, layer.bias, "none", [], "")
    return linear(x, layer.weight, layer.bias)


def _runs_on_onednn(x: Tensor, layer: nn.Linear) -> bool:
    return (
        _onednn.available
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and x.numel() >= MIN_ONEDNN_ROWS * layer.in_features
        and _is_cpu_float(x)
        and layer.weight.is_contiguous()
    )


def _is_cpu_float(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu"


@cache
def _subclass(native: Any, original: Any) -> Any:
    return type(f"Native{original.__name__}", (native, original), {})


@cache
def _computes(kind: Any, formula: str) -> bool:
    """Whether the source of kind's forward is `formula`, comments and annotations aside."""
    try:
        source = textwrap.dedent(inspect.getsource(kind.forward))
    except (OSError, TypeError):  # made at run time, or not Python
        return False
    function = ast.parse(source).body[0]
    if not isinstance(function, ast.FunctionDef):
        return False
    function.returns = None
    for argument in function.args.args:
        argument.annotation = None
    return ast.dump(function) == ast.dump(ast.parse(formula).body[0])
