"""The forms that weights are kept in, one record each.

A form without kernels is kept in the nearest one that has them, as `lossy` says.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Form:
    """How a matrix's numbers are stored.

    name: as GGUF names it, in lower case.
    code: of the kernels (native/step/weights.h), and part of packed files.
    block_inputs, block_bytes: of a block of one row, in the file's own order.
    """

    name: str
    code: int
    block_inputs: int
    block_bytes: int

    def row_bytes(self, width: int) -> int:
        """Bytes of one row in the file's own order. Raises ValueError unless blocks fill it."""
        if width % self.block_inputs:
            raise ValueError(f"rows of {width} numbers do not fill blocks of {self.block_inputs} ({self.name})")
        return width // self.block_inputs * self.block_bytes


_RECORDS = (
    Form("f32", 0, 1, 4),
    Form("f16", 1, 1, 2),
    Form("bf16", 2, 1, 2),
    Form("q8_0", 3, 32, 34),
    Form("q4_0", 4, 32, 18),
    Form("q4_1", 5, 32, 20),
    Form("q5_0", 6, 32, 22),
    Form("q5_1", 7, 32, 24),
    Form("q4_k", 8, 256, 144),
    Form("q5_k", 9, 256, 176),
    Form("q6_k", 10, 256, 210),
    Form("iq4_nl", 11, 32, 18),
    Form("mxfp4", 12, 32, 17),
)
FORMS = {form.name: form for form in _RECORDS}
INT8 = FORMS["q8_0"]  # eight bits with a float16 scale for every 32: of weights that have no blocks of their own


def padded_width(width: int) -> int:
    """Numbers in a row of `INT8` blocks that holds `width` of them."""
    return -(-width // INT8.block_inputs) * INT8.block_inputs


def quantise_to_int8(values: Floats) -> Bytes:
    """Rows of `INT8` blocks [outputs, bytes] of float32 [outputs, width].

    A width that blocks do not fill is padded with zeros: the matrix becomes wider. Raises
    ValueError for numbers beyond the range of the scales, or not finite.
    """
    outputs, width = values.shape
    blocks = padded_width(width) // INT8.block_inputs
    padded = np.zeros((outputs, padded_width(width)), np.float32)
    padded[:, :width] = values
    each = padded.reshape(outputs, blocks, INT8.block_inputs)
    step = np.abs(each).max(-1) / np.float32(127)
    with np.errstate(over="ignore"):
        scale = step.astype(np.float16)
    if not np.isfinite(scale).all():
        raise ValueError("it has numbers that are not finite, or too large for int8 with float16 scales")
    divisor = np.where(scale > 0, scale, np.float16(1)).astype(np.float32)
    quantised = np.clip(np.rint(each / divisor[..., None]), -127, 127).astype(np.int8)
    out = np.empty((outputs, blocks, INT8.block_bytes), np.uint8)
    out[..., :2] = scale[..., None].view(np.uint8)
    out[..., 2:] = quantised.view(np.uint8)
    return out.reshape(outputs, -1)
