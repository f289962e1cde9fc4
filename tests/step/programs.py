"""Small programs of the native step, written by hand."""

import struct
from typing import Any

import numpy as np

from kvire.core.native import native_module
from step.forms import Array

KINDS = {
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
REDUCES = {"sum", "mean", "largest"}


def words_of(kind: str, shape: tuple[int, ...], to: tuple, sources: list[tuple], numbers: tuple[float, float]) -> list:
    """to and sources: ((space, id, offset), strides)."""
    padded = (1,) * (4 - len(shape)) + shape
    words = [KINDS[kind], len(sources), *padded]
    for operand, strides in (to, *sources, *[((0, 0, 0), (0, 0, 0, 0))] * (3 - len(sources))):
        words += [*operand, *(0,) * (4 - len(strides)), *strides]
    return words + [struct.unpack("<q", struct.pack("<d", number))[0] for number in numbers]


def dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides)


class Constants:
    """A program over constants alone: one operation, whose result is the only row of logits."""

    def __init__(self) -> None:
        native: Any = native_module()
        self.program = native.StepProgram()
        self.kept: list[Array] = []

    def constant(self, values: Array) -> int:
        self.kept.append(np.ascontiguousarray(values, np.float32))
        return self.program.constant(self.kept[-1].ctypes.data, self.kept[-1].size)

    def result(self, width: int, stage: list[int], result: int, scratch: int = 16) -> Array:
        self.program.rows(1, stage)
        self.program.finish(scratch, result)
        return run(self.program, width)


def run(program: Any, width: int, threads: int = 1) -> Array:
    """One token, no attention."""
    zero, ends, one = np.zeros(1, np.int64), np.array([0, 1], np.int64), np.ones(1, np.int64)
    out = np.full((1, width), np.nan, np.float32)
    addresses = (zero.ctypes.data, zero.ctypes.data, 1, ends.ctypes.data, one.ctypes.data)
    program.run(*addresses, [], [], [], zero.ctypes.data, 1, out.ctypes.data, threads)
    return out[0]


def operate(
    kind: str, *sources: Array, shape: tuple[int, ...] | None = None, strides: Any = None, numbers: tuple = (0.0, 0.0)
) -> Array:
    """The result of one operation over arrays; strides: of each source, if they are not its own."""
    made = Constants()
    shape = shape or sources[0].shape
    width = int(np.prod(shape[:-1] if kind in REDUCES else shape))
    value = made.program.value(max(width, 1))
    to = (*dense(shape[:-1]), 0) if kind in REDUCES and len(shape) > 1 else dense(shape)
    given = [
        ((1, made.constant(source), 0), strides[i] if strides else dense(source.shape))
        for i, source in enumerate(sources)
    ]
    step = made.program.row_step(words_of(kind, shape, ((0, value, 0), to), given, numbers))
    return made.result(max(width, 1), [0, step, *[0] * 6], value)
