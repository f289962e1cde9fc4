"""Random weights in every form that a file may have them in, and the products by the book, in numpy."""

from dataclasses import dataclass
from fractions import Fraction

import gguf
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
GROUP = 32


@dataclass(frozen=True)
class Form:
    """code: of the kernels. inputs, size: of a block of the file. floats: where float16 scales lie in a block."""

    name: str
    code: int
    inputs: int
    size: int
    floats: tuple[int, ...] = ()


FORMS = {
    form.name: form
    for form in (
        Form("F32", 0, 1, 4),
        Form("F16", 1, 1, 2),
        Form("BF16", 2, 1, 2),
        Form("Q8_0", 3, 32, 34, (0,)),
        Form("Q4_0", 4, 32, 18, (0,)),
        Form("Q4_1", 5, 32, 20, (0, 2)),
        Form("Q5_0", 6, 32, 22, (0,)),
        Form("Q5_1", 7, 32, 24, (0, 2)),
        Form("Q4_K", 8, 256, 144, (0, 2)),
        Form("Q5_K", 9, 256, 176, (0, 2)),
        Form("Q6_K", 10, 256, 210, (208,)),
        Form("IQ4_NL", 11, 32, 18, (0,)),
        Form("MXFP4", 12, 32, 17),
    )
}
SCALED = [name for name, form in FORMS.items() if form.inputs > 1]


def random_rows(form: Form, outputs: int, width: int, seed: int = 0) -> Bytes:
    """Rows of blocks as a file has them: any bytes, but sane scales."""
    rng = np.random.default_rng(seed)
    if form.inputs == 1:
        values = rng.standard_normal((outputs, width)).astype(np.float32)
        return as_float_form(form, values)
    blocks = rng.integers(0, 256, (outputs * (width // form.inputs), form.size), dtype=np.uint8)
    for at in form.floats:
        scales = (rng.standard_normal(len(blocks)) * 0.02).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    if form.name == "MXFP4":
        blocks[:, 0] = rng.integers(110, 132, len(blocks))
    return blocks.reshape(outputs, -1)


def as_float_form(form: Form, values: Array) -> Bytes:
    if form.name == "F32":
        return values.view(np.uint8)
    if form.name == "F16":
        return values.astype(np.float16).view(np.uint8)
    bits = values.view(np.uint32)
    return (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)).view(np.uint8)


def weights_of(form: Form, rows: Bytes) -> Array:
    """float32 [outputs, width], as gguf reads them."""
    kind = gguf.GGMLQuantizationType[form.name]
    if form.name == "BF16":
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if form.inputs == 1:
        return rows.view(np.float32 if form.name == "F32" else np.float16).astype(np.float32)
    return gguf.dequantize(rows, kind).astype(np.float32)


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c with one rounding. The product is exact in float64; the sum is, too, or its error decides a tie."""
    product = a.astype(np.float64) * b.astype(np.float64)
    total = product + c.astype(np.float64)
    # What the float64 sum lost (Knuth), so that rounding twice can be told from rounding once.
    back = total - product
    lost = (product - (total - back)) + (c.astype(np.float64) - back)
    rounded = total.astype(np.float32)
    # Only a float64 that lies exactly between two float32 is rounded wrongly: nudge it to its true side.
    nudged = np.where(lost > 0, np.nextafter(total, np.inf), np.where(lost < 0, np.nextafter(total, -np.inf), total))
    return np.where(lost == 0, rounded, nudged.astype(np.float32))


@dataclass(frozen=True)
class Rows:
    """q: int8 [rows, groups, 32]; scale: float32 [rows, groups]."""

    q: npt.NDArray[np.int8]
    scale: Array

    @property
    def scaled_sum(self) -> Array:
        return (self.scale * self.q.sum(-1, dtype=np.int32).astype(np.float32)).astype(np.float32)


def quantise(x: Array) -> Rows:
    groups = -(-x.shape[1] // GROUP)
    padded = np.zeros((x.shape[0], groups * GROUP), np.float32)
    padded[:, : x.shape[1]] = x
    each = padded.reshape(len(x), groups, GROUP)
    most = np.abs(each).max(-1)
    counts = most >= np.float32(2.0**-100)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        factor = np.where(counts, np.float32(127) / most, np.float32(0)).astype(np.float32)
        q = np.rint((each * factor[..., None]).astype(np.float32))
        q = np.where(counts[..., None], q, 0).astype(np.int8)
    scale = np.where(counts, most / np.float32(127), np.float32(0)).astype(np.float32)
    return Rows(q, scale)


@dataclass(frozen=True)
class Parts:
    """Weights taken apart. codes: signed integers [outputs, groups, 32]; d: [outputs, groups]; m: alike, or None;
    halves: integer scales [outputs, groups, 2] for each half of a group, or None.
    """

    codes: npt.NDArray[np.int32]
    d: Array
    m: Array | None = None
    halves: npt.NDArray[np.int32] | None = None


def parts_of(form: Form, rows: Bytes) -> Parts:
    """From gguf's own reading, by setting scales to one: independent of how the kernels unpack."""
    outputs = len(rows)
    blocks = rows.reshape(-1, form.size)
    shape = (outputs, -1)
    plain = blocks.copy()
    one = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    zero = np.zeros(2, np.uint8)

    def half(at: int) -> Array:
        return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)[:, 0]

    if form.name in {"Q4_K", "Q5_K"}:
        scale, minimum = gguf.quants.Q4_K.get_scale_min(blocks[:, 4:16].copy())
        flat = blocks.copy()
        flat[:, 0:2], flat[:, 2:4] = one, zero
        flat[:, 4:16] = np.array([1] * 4 + [0] * 4 + [1] * 4, np.uint8)
        codes = gguf.dequantize(flat, gguf.GGMLQuantizationType[form.name])
        d = half(0)[:, None] * scale.astype(np.float32)
        m = -(half(2)[:, None] * minimum.astype(np.float32))
        return Parts(
            codes.reshape(outputs, -1, GROUP).astype(np.int32), d.reshape(shape), m.reshape(shape).astype(np.float32)
        )
    if form.name == "Q6_K":
        flat = blocks.copy()
        flat[:, 192:208], flat[:, 208:210] = 1, one
        codes = gguf.dequantize(flat, gguf.GGMLQuantizationType.Q6_K).reshape(outputs, -1, GROUP)
        halves = blocks[:, 192:208].view(np.int8).astype(np.int32).reshape(outputs, -1, 2)
        return Parts(codes.astype(np.int32), np.repeat(half(208), 8).reshape(shape), None, halves)
    if form.name == "MXFP4":
        plain[:, 0] = 128  # half of 2^1
        codes = gguf.dequantize(plain, gguf.GGMLQuantizationType.MXFP4)
        d = gguf.quants.MXFP4.e8m0_to_fp32_half(blocks[:, :1])[:, 0]
        return Parts(codes.reshape(outputs, -1, GROUP).astype(np.int32), d.reshape(shape))
    plain[:, 0:2] = one
    minimum_at = form.floats[1] if len(form.floats) > 1 else None
    if minimum_at is not None:
        plain[:, minimum_at : minimum_at + 2] = zero
    codes = gguf.dequantize(plain, gguf.GGMLQuantizationType[form.name]).reshape(outputs, -1, GROUP).astype(np.int32)
    m = None if minimum_at is None else half(minimum_at).reshape(shape)
    return Parts(codes, half(0).reshape(shape), m)


def product(form: Form, rows: Bytes, x: Array, bias: Array | None = None) -> Array:
    """float32 [rows of x, outputs], in the order of docs/adr/0019-one-arithmetic.md."""
    y = np.zeros((len(x), len(rows)), np.float32)
    if form.inputs == 1:
        weights = weights_of(form, rows)
        for k in range(x.shape[1]):
            y = fma(x[:, k, None], weights[None, :, k], y)
    else:
        parts, quantised = parts_of(form, rows), quantise(x)
        for g in range(parts.codes.shape[1]):
            products = quantised.q[:, None, g].astype(np.int32) * parts.codes[None, :, g]
            if parts.halves is not None:
                halves = products.reshape(*products.shape[:2], 2, GROUP // 2).sum(-1)
                dots = (halves * parts.halves[None, :, g]).sum(-1)
            else:
                dots = products.sum(-1)
            scaled = (dots.astype(np.float32) * quantised.scale[:, g, None]).astype(np.float32)
            y = fma(scaled, parts.d[None, :, g], y)
            if parts.m is not None:
                y = fma(parts.m[None, :, g], quantised.scaled_sum[:, g, None], y)
    return y if bias is None else y + bias


def exact(a: float, b: float, c: float) -> np.float32:
    """fma of three floats in fractions: slow, and right beyond doubt."""
    value = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    nearest = np.float32(float(value))
    around = [np.nextafter(nearest, np.float32(-np.inf)), nearest, np.nextafter(nearest, np.float32(np.inf))]

    def rank(candidate: np.float32) -> tuple[Fraction, int]:
        return abs(Fraction(float(candidate)) - value), int(candidate.view(np.uint32)) & 1

    return min(around, key=rank)
