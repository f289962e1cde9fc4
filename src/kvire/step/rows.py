"""Operations on rows: what a recorded model consists of once the dimension of tokens is gone.

Every value has one row per token (or per wanted row of logits). A row is a flat run of floats, and
operands are strided views of such runs, so that reshaping, slicing, transposing and broadcasting
cost nothing.
"""

from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

# Kinds of operations on one row, by the numbers of native/step/row_ops.h.
ROW_KINDS = {
    "copy": 0,
    "negative": 1,
    "square": 2,
    "root": 3,
    "inverse_root": 4,
    "exponential": 5,
    "sine": 6,
    "cosine": 7,
    "tanh": 8,
    "sigmoid": 9,
    "silu": 10,
    "gelu_tanh": 11,
    "gelu_erf": 12,
    "relu": 13,
    "magnitude": 14,
    "add": 20,
    "subtract": 21,
    "multiply": 22,
    "divide": 23,
    "larger": 24,
    "smaller": 25,
    "sum": 30,
    "mean": 31,
    "largest": 32,
    "softmax": 33,
    "rms_norm": 40,
    "layer_norm": 41,
    "rotary": 42,
    "silu_times": 43,
    "gelu_tanh_times": 44,
    "gelu_erf_times": 45,
}
REDUCTIONS = frozenset({"sum", "mean", "largest"})
MOST_DIMENSIONS = 4


@dataclass(eq=False, slots=True)
class RowValue:
    """A row of `width` floats for each token.

    is_wanted: one for each wanted row of logits instead.
    """

    width: int
    is_wanted: bool = False


@dataclass(eq=False, slots=True)
class Constant:
    """Numbers that do not depend on the input, float32 and contiguous."""

    numbers: torch.Tensor


@dataclass(frozen=True, slots=True)
class Position:
    """The token's position, as a float."""


Source = RowValue | Constant | Position


@dataclass(frozen=True, slots=True)
class View:
    """Numbers of one row, or of a constant.

    shape: without the dimension of tokens.
    strides: in floats; 0 where a number is repeated.
    is_selected: of a value with a row per token, the rows whose logits are wanted.
    """

    source: Source
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    is_selected: bool = False

    @property
    def size(self) -> int:
        """Numbers, repeated ones counted."""
        return prod(self.shape)

    @property
    def is_dense(self) -> bool:
        """Whether the numbers follow each other in memory, each once."""
        return all(
            size == 1 or stride == at
            for size, stride, at in zip(self.shape, self.strides, dense(self.shape), strict=True)
        )


@dataclass(eq=False, slots=True)
class Op:
    """One operation; its result is written to `out`.

    kind: of ROW_KINDS, or one of
        embed      out: a token's row of a matrix; module: its number
        linear     sources: one; out: the product; module: its number
        write_kv   sources: K and V; layer
        attend     sources: Q; out; call: its number among the recorded calls
    shape: of the result, of the source for reductions.
    numbers: see row_ops.h.
    """

    kind: str
    out: View | None
    sources: tuple[View, ...]
    shape: tuple[int, ...] = ()
    numbers: tuple[float, float] = (0.0, 0.0)
    number: int = 0
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def is_wanted(self) -> bool:
        """Whether it computes wanted rows alone."""
        return self.out is not None and isinstance(self.out.source, RowValue) and self.out.source.is_wanted


def dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of numbers that follow each other."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def whole(source: RowValue | Constant, shape: tuple[int, ...] | None = None) -> View:
    """All numbers of a source."""
    if shape is None:
        shape = (source.width,) if isinstance(source, RowValue) else tuple(source.numbers.shape)
    return View(source, shape, dense(shape))
