"""Symmetric scaling: few bits per number and one float32 scale per row of a head."""

import torch
from torch import Tensor


def quantise(x: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """x: float [..., width] -> `dtype` [..., width] and float32 scales [...]; x is about number *
    scale.

    scale = max |x| / the largest number of dtype. To integers, ties round to even, and the error of
    x is at most scale / 2. A row with a non-finite number gets a non-finite scale, and so is read
    back as nan: it must not look like numbers.
    """
    x = x.float()
    largest = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
    scales = x.abs().amax(-1) / largest
    # Below the normal numbers, whose quotients are exact enough, a row is as good as zero.
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, 0.0, scales)
    # 0 / 0 and inf / inf: any number will do, since the scale decides its value.
    steps = (x / scales.unsqueeze(-1)).nan_to_num_(0.0, 0.0, 0.0)
    return (steps if dtype.is_floating_point else steps.round_()).to(dtype), scales


def dequantise(steps: Tensor, scales: Tensor) -> Tensor:
    """`dtype` [..., width] and float32 scales [...] -> float32 [..., width]."""
    return steps.float() * scales.unsqueeze(-1)
