"""Operations on rows in plain torch: slow, obvious, and what the kernels are tested against."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from kvire.models.packed import PackedModule
from kvire.step.lower import Lowered
from kvire.step.rows import Constant, Op, Position, RowValue, View

# (number of the call, Q, K, V, each [T, numbers of a row]) -> [T, numbers of a row]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]

_ONE: dict[str, Callable[[Tensor], Tensor]] = {
    "copy": lambda x: x,
    "negative": torch.neg,
    "square": torch.square,
    "root": torch.sqrt,
    "inverse_root": torch.rsqrt,
    "exponential": torch.exp,
    "sine": torch.sin,
    "cosine": torch.cos,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": silu,
    "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
    "gelu_erf": gelu,
    "relu": torch.relu,
    "magnitude": torch.abs,
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1),
    "largest": lambda x: x.amax(-1),
    "softmax": lambda x: x.softmax(-1),
}
_TWO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "subtract": torch.sub,
    "multiply": torch.mul,
    "divide": torch.div,
    "larger": torch.maximum,
    "smaller": torch.minimum,
    "silu_times": lambda x, y: silu(x) * y,
    "gelu_tanh_times": lambda x, y: gelu(x, approximate="tanh") * y,
    "gelu_erf_times": lambda x, y: gelu(x) * y,
}


def compute(lowered: Lowered, ids: Tensor, positions: Tensor, rows: Tensor, attend: Attend) -> Tensor:
    """float32 logits [R, vocabulary] of token ids [T] at positions [T], for the wanted rows [R]."""
    memory: dict[RowValue, Tensor] = {}
    written: dict[int, tuple[Tensor, Tensor]] = {}

    def read(view: View, *, is_wanted: bool = False) -> Tensor:
        """[rows, *shape of the view]."""
        if isinstance(view.source, Position):
            found = positions[rows] if is_wanted else positions
            return found.float().view(-1, *[1] * len(view.shape)).expand(-1, *view.shape)
        if isinstance(view.source, Constant):
            return view.source.numbers.flatten().as_strided(view.shape, view.strides, view.offset)[None]
        stored = memory[view.source]
        stored = stored[rows] if view.is_selected else stored
        return stored.as_strided((len(stored), *view.shape), (view.source.width, *view.strides), view.offset)

    def write(view: View, numbers: Tensor) -> None:
        assert isinstance(view.source, RowValue)
        count = len(rows) if view.source.is_wanted else len(ids)
        if view.source not in memory:
            memory[view.source] = torch.full((count, view.source.width), torch.nan)
        to = memory[view.source].as_strided((count, *view.shape), (view.source.width, *view.strides), view.offset)
        to.copy_(numbers.expand(count, *numbers.shape[1:]))

    for op in lowered.ops:
        sources = [read(view, is_wanted=op.is_wanted) for view in op.sources]
        if op.kind == "write_kv":
            written[op.number] = (sources[0], sources[1])
            continue
        assert op.out is not None
        if op.kind == "attend":
            write(op.out, attend(op.number, sources[0], *written[op.number]))
        else:
            write(op.out, _result(op, sources, lowered.recording.modules, ids))
    return read(lowered.logits)


def _result(op: Op, sources: list[Tensor], modules: tuple[PackedModule, ...], ids: Tensor) -> Tensor:
    made: Tensor
    if op.kind == "embed":
        embedding: Any = modules[op.number]
        made = embedding.exact(ids)
    elif op.kind == "linear":
        made = modules[op.number](sources[0].contiguous())
    elif op.kind in _ONE:
        made = _ONE[op.kind](sources[0])
    elif op.kind in _TWO:
        made = _TWO[op.kind](sources[0], sources[1])
    else:
        made = _FUSED[op.kind](op, *sources)
    return made


def _rms_norm(op: Op, x: Tensor, weight: Tensor | None = None) -> Tensor:
    epsilon, plus = op.numbers
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    return y if weight is None else y * (weight + plus)


def _layer_norm(op: Op, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    variance, mean = torch.var_mean(x, -1, keepdim=True, correction=0)
    return (x - mean) * torch.rsqrt(variance + op.numbers[0]) * weight + bias


def _rotary(_: Op, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cosines + torch.cat((-high, low), -1) * sines


_FUSED: dict[str, Callable[..., Tensor]] = {"rms_norm": _rms_norm, "layer_norm": _layer_norm, "rotary": _rotary}
