"""Products with packed weights: the bits of the book, on every instruction set that runs here."""

import numpy as np
import pytest

from step.forms import FORMS, SCALED, Array, Form, as_float_form, exact, fma, product, quantise, random_rows, weights_of

native = pytest.importorskip("kvire._native")

ISAS = {"avx512-vnni": ("baseline", "avx2", "avx512"), "avx2": ("baseline", "avx2")}.get(
    native.step_isa(), ("baseline",)
)


class Packed:
    """A packed matrix; keeps its memory."""

    def __init__(self, form: Form, rows: np.ndarray, width: int) -> None:
        self.form, self.outputs, self.width = form, len(rows), width
        size = native.packed_bytes(form.code, self.outputs, width)
        memory = np.zeros(size + 64, np.uint8)
        self.bytes = memory[-memory.ctypes.data % 64 :][:size]
        rows = np.ascontiguousarray(rows)
        native.pack_weights(form.code, self.outputs, width, rows.ctypes.data, self.bytes.ctypes.data, 2)
        self.weights = native.PackedWeights(form.code, self.outputs, width, self.bytes.ctypes.data)

    def unpacked(self) -> Array:
        out = np.full((self.outputs, self.width), np.nan, np.float32)
        native.unpack_weights(self.weights, out.ctypes.data, 0, self.outputs, 2)
        return out

    def times(self, x: Array, bias: Array | None = None, *, isa: str = "", threads: int = 1) -> Array:
        x = np.ascontiguousarray(x, np.float32)
        out = np.full((len(x), self.outputs), np.nan, np.float32)
        address = 0 if bias is None else bias.ctypes.data
        native.packed_linear(self.weights, x.ctypes.data, len(x), address, out.ctypes.data, threads, isa=isa)
        return out


def packed(name: str, outputs: int, width: int, seed: int = 0) -> tuple[Packed, np.ndarray]:
    rows = random_rows(FORMS[name], outputs, width, seed)
    return Packed(FORMS[name], rows, width), rows


def random_x(rows: int, width: int, seed: int = 1) -> Array:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, width)) * np.exp(rng.standard_normal((rows, 1)))).astype(np.float32)


def same(a: Array, b: Array) -> None:
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


def test_fma_of_the_book_rounds_once() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(20_000).astype(np.float32) for _ in range(2))
    c = (-(a * b) * (1 + rng.standard_normal(20_000) * 2.0**-22)).astype(np.float32)
    c[::2] *= np.float32(2.0**24)
    same(fma(a, b, c), np.array([exact(*each) for each in zip(a, b, c, strict=True)], np.float32))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("outputs", "width"), [(16, 256), (5, 512), (48, 768)])
def test_packing_loses_nothing(name: str, outputs: int, width: int) -> None:
    matrix, rows = packed(name, outputs, width)
    same(matrix.unpacked(), weights_of(FORMS[name], rows))


@pytest.mark.parametrize("name", FORMS)
def test_packed_weights_are_at_most_4_percent_larger(name: str) -> None:
    form = FORMS[name]
    assert native.packed_bytes(form.code, 1024, 1024) <= 1.04 * 1024 * 1024 // form.inputs * form.size


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("outputs", "width"), [(16, 256), (37, 512)])
def test_bits_of_the_book(name: str, isa: str, outputs: int, width: int) -> None:
    matrix, rows = packed(name, outputs, width)
    x = random_x(11, width)
    bias = np.random.default_rng(2).standard_normal(outputs).astype(np.float32)
    same(matrix.times(x, isa=isa), product(FORMS[name], rows, x))
    same(matrix.times(x, bias, isa=isa), product(FORMS[name], rows, x, bias))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "Q4_K", "Q6_K", "F16"])
def test_a_row_does_not_depend_on_others(name: str, isa: str) -> None:
    matrix, _ = packed(name, 80, 256)
    x = random_x(300, 256)
    alone = np.concatenate([matrix.times(x[i : i + 1], isa=isa) for i in range(300)])
    for rows in (*range(1, 18), 31, 64, 300):
        for threads in (1, 3):
            same(matrix.times(x[:rows], isa=isa, threads=threads), alone[:rows])


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("width", [1, 7, 33, 100])
def test_floats_of_any_width(name: str, width: int) -> None:
    matrix, rows = packed(name, 3, width)
    x = random_x(5, width)
    for isa in ISAS:
        same(matrix.times(x, isa=isa), product(FORMS[name], rows, x))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("fill", [0x00, 0x7F, 0x80, 0xFF])
def test_no_sum_overflows(name: str, isa: str, fill: int) -> None:
    """The largest codes against the largest rows, of either sign."""
    form = FORMS[name]
    rows = random_rows(form, 16, 512)
    blocks = rows.reshape(-1, form.size)
    first = max((at + 2 for at in form.floats), default=1) if form.name != "Q6_K" else 0
    blocks[:, first : 208 if form.name == "Q6_K" else form.size] = fill
    x = np.ones((3, 512), np.float32) * np.array([[1], [-1], [3]], np.float32)
    same(Packed(form, rows, 512).times(x, isa=isa), product(form, rows, x))


@pytest.mark.parametrize("isa", ISAS)
def test_rows_as_the_book_quantises_them(isa: str) -> None:
    x = random_x(6, 96)
    x[1, :32] = 0
    x[2, 32:64] = -1e-38
    x[3] *= 1e30
    x[4, 5] = -np.abs(x[4]).max() * 1000
    expected = quantise(x)
    for row in range(6):
        q, sums = np.zeros(96, np.int8), np.zeros(6, np.int16)
        scale, scaled_sum = np.zeros(3, np.float32), np.zeros(3, np.float32)
        addresses = [array.ctypes.data for array in (q, scale, scaled_sum, sums)]
        native.quantise_row(x[row].ctypes.data, 96, *addresses, isa=isa)
        same(scale, expected.scale[row])
        same(scaled_sum, expected.scaled_sum[row])
        np.testing.assert_array_equal(q.reshape(3, 32), expected.q[row])
        np.testing.assert_array_equal(sums, expected.q[row].reshape(6, 16).sum(-1))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "Q5_K", "Q6_K", "MXFP4", "F32"])
def test_what_is_not_finite_stays_so(name: str, isa: str, bad: float) -> None:
    matrix, _ = packed(name, 16, 256)
    x = random_x(3, 256)
    clean = matrix.times(x, isa=isa)
    x[1, 77] = bad
    found = matrix.times(x, isa=isa)
    assert not np.isfinite(found[1]).any()
    same(found[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("isa", ISAS)
def test_a_broken_scale_gives_no_finite_number(isa: str) -> None:
    form = FORMS["Q4_1"]
    rows = random_rows(form, 16, 64)
    rows.reshape(16, 2, form.size)[3, 1, :2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    found = Packed(form, rows, 64).times(random_x(2, 64), isa=isa)
    assert np.isnan(found[:, 3]).all()
    assert np.isfinite(np.delete(found, 3, axis=1)).all()


def test_an_impossible_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="no multiple of the form's 256"):
        native.packed_bytes(FORMS["Q4_K"].code, 16, 100)
    with pytest.raises(ValueError, match="no such form"):
        native.packed_bytes(99, 16, 32)
    with pytest.raises(ValueError, match="at least one output"):
        native.packed_bytes(FORMS["F32"].code, 0, 32)


def broken_products(form: Form, rows: np.ndarray, x: Array) -> dict[str, Array]:
    """What builds with a likely fault would give."""
    blocks = rows.reshape(len(rows), -1, form.size)
    neighbour = blocks.copy()
    neighbour[..., :2] = np.roll(blocks[..., :2], 1, axis=1)
    shifted = quantise(x)
    dropped = product(form, rows, x) + np.float32(0)
    for g in range(blocks.shape[1]):  # the zero point of eight, left out
        d = blocks[:, g, :2].copy().view(np.float16).astype(np.float32)[:, 0]
        dropped = dropped + (8 * d[None, :] * shifted.scaled_sum[:, g, None]).astype(np.float32)
    return {
        "scale of the neighbouring group": product(form, neighbour.reshape(len(rows), -1), x),
        "zero point dropped": dropped,
        "row order": product(form, np.roll(rows, 1, axis=0), x),
    }


def test_broken_builds_differ() -> None:
    form = FORMS["Q4_0"]
    rows, x = random_rows(form, 32, 128), random_x(4, 128)
    found = Packed(form, rows, 128).times(x)
    for fault, wrong in broken_products(form, rows, x).items():
        assert not np.array_equal(found, wrong), fault


def test_an_int16_that_overflows_would_be_noticed() -> None:
    """The largest rows of five-bit weights pass 32,767 if eight chunks are added before they are widened."""
    form = FORMS["Q5_0"]
    rows = random_rows(form, 16, 32)
    rows[:, 2:] = 0xFF
    x = np.ones((1, 32), np.float32)
    codes = 31 * 127 * 2 * 8
    assert codes > np.iinfo(np.int16).max
    same(Packed(form, rows, 32).times(x), product(form, rows, x))


def test_float_forms_round_trip() -> None:
    values = np.array([[1.0, -2.5, 65504.0, 6e-8, 0.0]], np.float32)
    for name in ("F32", "F16"):
        form = FORMS[name]
        same(Packed(form, as_float_form(form, values), 5).unpacked(), weights_of(form, as_float_form(form, values)))
