"""Operations on a row against numpy, and the same bits on every instruction set."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from step.forms import Array
from step.programs import KINDS, Constants, dense, operate, run, words_of

native = pytest.importorskip("kvire._native")
F = torch.nn.functional


def x_of(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * np.float32(3)


def t(x: Array) -> torch.Tensor:
    return torch.from_numpy(x.copy()).double()


ONE = {
    "copy": lambda x: x,
    "negative": lambda x: -x,
    "square": lambda x: x * x,
    "exponential": torch.exp,
    "sine": torch.sin,
    "cosine": torch.cos,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_erf": F.gelu,
    "relu": torch.relu,
    "magnitude": torch.abs,
}
TWO = {
    "add": torch.add,
    "subtract": torch.sub,
    "multiply": torch.mul,
    "divide": torch.div,
    "larger": torch.maximum,
    "smaller": torch.minimum,
    "silu_times": lambda x, y: F.silu(x) * y,
    "gelu_tanh_times": lambda x, y: F.gelu(x, approximate="tanh") * y,
    "gelu_erf_times": lambda x, y: F.gelu(x) * y,
}


@pytest.mark.parametrize("width", [1, 7, 16, 40])
@pytest.mark.parametrize("kind", ONE)
def test_one_source(kind: str, width: int) -> None:
    x = x_of(width)
    np.testing.assert_allclose(operate(kind, x), ONE[kind](t(x)).numpy(), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["root", "inverse_root"])
def test_roots(kind: str) -> None:
    x = np.abs(x_of(40)) + np.float32(0.1)
    np.testing.assert_allclose(operate(kind, x), {"root": x**0.5, "inverse_root": x**-0.5}[kind], rtol=1e-6)


@pytest.mark.parametrize("width", [1, 7, 16, 40])
@pytest.mark.parametrize("kind", TWO)
def test_two_sources(kind: str, width: int) -> None:
    x, y = x_of(width), x_of(width, seed=1)
    np.testing.assert_allclose(operate(kind, x, y), TWO[kind](t(x), t(y)).numpy(), rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["sigmoid", "silu", "tanh", "gelu_tanh", "exponential"])
def test_extremes_stay_finite(kind: str) -> None:
    x = np.array([-3e38, -100, -88, -50, 0, 50, 80], np.float32)
    np.testing.assert_allclose(operate(kind, x), ONE[kind](t(x)).float().numpy(), rtol=1e-5, atol=1e-35)


def test_strides_are_views() -> None:
    """Broadcasting, transposing, slicing and every other number, without copies."""
    x, y = x_of(3, 40), x_of(40, seed=1)
    np.testing.assert_array_equal(operate("add", x, y, shape=(3, 40), strides=[(40, 1), (0, 1)]).reshape(3, 40), x + y)
    np.testing.assert_array_equal(operate("copy", x, shape=(40, 3), strides=[(1, 40)]).reshape(40, 3), x.T)
    np.testing.assert_array_equal(operate("copy", x, shape=(3, 20), strides=[(40, 2)]).reshape(3, 20), x[:, ::2])
    np.testing.assert_array_equal(
        operate("multiply", x, x_of(3), shape=(3, 40), strides=[(40, 1), (1, 0)]).reshape(3, 40), x * x_of(3)[:, None]
    )


@pytest.mark.parametrize("shape", [(1,), (40,), (3, 5), (2, 3, 17)])
def test_reductions(shape: tuple[int, ...]) -> None:
    x = x_of(*shape)
    for kind, expected in (("sum", x.sum(-1)), ("mean", x.mean(-1)), ("largest", x.max(-1))):
        np.testing.assert_allclose(operate(kind, x), expected.reshape(-1), rtol=1e-5, atol=1e-5)
    softmax = torch.softmax(t(x), -1).numpy().reshape(-1)
    np.testing.assert_allclose(operate("softmax", x), softmax, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("width", [8, 40, 64])
def test_norms(width: int) -> None:
    x, w, b = x_of(3, width), x_of(width, seed=1), x_of(width, seed=2)
    root = 1 / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5)
    by_weight = [dense(x.shape), (0, 1), (0, 1)]
    plain = operate("rms_norm", x, numbers=(1e-5, 0.0)).reshape(3, width)
    np.testing.assert_allclose(plain, x * root, rtol=1e-5, atol=1e-6)
    weighted = operate("rms_norm", x, w, shape=x.shape, strides=by_weight, numbers=(1e-5, 0.0)).reshape(3, width)
    np.testing.assert_allclose(weighted, x * root * w, rtol=1e-5, atol=1e-5)
    gemma = operate("rms_norm", x, w, shape=x.shape, strides=by_weight, numbers=(1e-5, 1.0)).reshape(3, width)
    np.testing.assert_allclose(gemma, x * root * (1 + w), rtol=1e-5, atol=1e-5)
    layer = operate("layer_norm", x, w, b, shape=x.shape, strides=by_weight, numbers=(1e-5, 0.0)).reshape(3, width)
    expected = F.layer_norm(t(x), (width,), t(w), t(b), 1e-5).numpy()
    np.testing.assert_allclose(layer, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [8, 40, 64])
def test_rotary_turns_halves(width: int) -> None:
    x, c, s = x_of(3, width), x_of(width, seed=1), x_of(width, seed=2)
    turned = np.concatenate([-x[:, width // 2 :], x[:, : width // 2]], -1)
    found = operate("rotary", x, c, s, shape=x.shape, strides=[(width, 1), (0, 1), (0, 1)]).reshape(3, width)
    np.testing.assert_allclose(found, x * c + turned * s, rtol=1e-5, atol=1e-5)


def test_a_wrong_operation_is_refused_when_it_is_told() -> None:
    made = Constants()
    value, constant = made.program.value(8), made.constant(x_of(8))
    source = ((1, constant, 0), (1,))
    with pytest.raises(ValueError, match="another number of sources"):
        made.program.row_step(words_of("add", (8,), ((0, value, 0), (1,)), [source], (0, 0)))
    with pytest.raises(ValueError, match="even"):
        made.program.row_step(words_of("rotary", (7,), ((0, value, 0), (1,)), [source] * 3, (0, 0)))
    with pytest.raises(ValueError, match="ends too early"):
        made.program.row_step([0, 1, 2])


@pytest.mark.parametrize("fault", ["source", "result", "value"])
def test_an_operand_beyond_its_memory_is_refused_when_the_program_is_finished(fault: str) -> None:
    made = Constants()
    value, constant = made.program.value(8), made.constant(x_of(8))
    width = 9 if fault == "source" else 8
    to = (0, value + (fault == "value"), int(fault == "result"))
    step = made.program.row_step(words_of("copy", (width,), (to, (1,)), [((1, constant, 0), (1,))], (0, 0)))
    made.program.rows(1, [0, step, *[0] * 6])
    with pytest.raises((ValueError, IndexError)):
        made.program.finish(16, value)


DIGEST = """
import sys; sys.path.insert(0, "tests")
from step.test_row_ops import digest
print(digest())
"""


def digest() -> str:
    """Of the bits of every operation's results."""
    found = hashlib.sha256()
    x, y = x_of(3, 40), x_of(40, seed=1)
    for kind in KINDS:
        sources = 3 if kind in {"layer_norm", "rotary"} else 2 if kind in {*TWO, "rms_norm"} else 1
        strides = [dense(x.shape), (0, 1), (0, 1)][:sources]
        given = np.abs(x) if "root" in kind else x
        found.update(
            operate(kind, given, *[y] * (sources - 1), shape=x.shape, strides=strides, numbers=(1e-5, 0)).tobytes()
        )
    return found.hexdigest()


@pytest.mark.parametrize("isa", ["avx2", "baseline"])
def test_every_instruction_set_has_the_same_bits(isa: str) -> None:
    environment = os.environ | {"KVIRE_ISA": isa}
    told = subprocess.run([sys.executable, "-c", DIGEST], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == digest()


def test_a_program_runs_again_with_the_same_bits_on_any_number_of_threads() -> None:
    made = Constants()
    value = made.program.value(40)
    step = made.program.row_step(
        words_of("softmax", (40,), ((0, value, 0), (1,)), [((1, made.constant(x_of(40)), 0), (1,))], (0, 0))
    )
    made.program.rows(1, [0, step, *[0] * 6])
    made.program.finish(16, value)
    first = run(made.program, 40)
    for threads in (1, 2, 3, 7):
        np.testing.assert_array_equal(run(made.program, 40, threads), first)


def copied(to: tuple, source: tuple, stride: int = 1) -> list:
    return words_of("copy", (3, 1), (to, (stride, 1)), [(source, (1, 1))], (0, 0))


def test_a_result_is_never_a_constant() -> None:
    made = Constants()
    value, constant = made.program.value(8), made.constant(x_of(8))
    made.program.rows(1, [0, made.program.row_step(copied((1, constant, 0), (0, value, 0))), *[0] * 6])
    with pytest.raises(ValueError, match="a value or scratch"):
        made.program.finish(16, value)


def test_a_stride_beyond_any_row_is_refused() -> None:
    made = Constants()
    value, constant = made.program.value(8), made.constant(x_of(8))
    made.program.rows(1, [0, made.program.row_step(copied((0, value, 0), (1, constant, 0), 1 << 62)), *[0] * 6])
    with pytest.raises(ValueError, match="stride"):
        made.program.finish(16, value)


def test_only_wanted_rows_are_selected() -> None:
    made = Constants()
    value = made.program.value(8)
    made.program.rows(0, [0, made.program.row_step(copied((0, value, 0), (3, value, 0))), *[0] * 6])
    with pytest.raises(ValueError, match="only stages of wanted rows"):
        made.program.finish(16, value)


def test_a_wanted_row_has_the_position_of_its_token() -> None:
    made = Constants()
    value = made.program.value(1)
    step = made.program.row_step(words_of("copy", (1,), ((0, value, 0), (1,)), [((2, 0, 0), (1,))], (0, 0)))
    made.program.rows(1, [0, step, *[0] * 6])
    made.program.finish(16, value)
    ids, positions = np.zeros(3, np.int64), np.array([10, 11, 12], np.int64)
    ends, length, wanted = np.array([0, 3], np.int64), np.array([13], np.int64), np.array([2, 0], np.int64)
    out = np.zeros((2, 1), np.float32)
    addresses = (ids.ctypes.data, positions.ctypes.data, 1, ends.ctypes.data, length.ctypes.data)
    made.program.run(*addresses, [], [], [], wanted.ctypes.data, 2, out.ctypes.data, 1)
    assert out.tolist() == [[12.0], [10.0]]
