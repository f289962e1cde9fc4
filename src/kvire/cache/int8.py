"""Symmetric int8: eight bits per number and one float32 scale per row of a head."""

import torch
from torch import Tensor


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: float [..., width] -> int8 [..., width] and float32 scales [...]; x is about int8 * scale, off by scale / 2.

    scale = max |x| / 127, ties round to even. A row in which a number is not finite has a scale that is not, and
    so comes back as nan: it must not look like numbers.
    """
    x = x.float()
    scales = x.abs().amax(-1) / 127
    # Below the normal numbers, whose quotients are exact enough, a row is as good as zero.
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, 0.0, scales)
    # 0 / 0 and inf / inf: any integer will do, since the scale says what it is worth.
    steps = (x / scales.unsqueeze(-1)).round_().nan_to_num_(0.0, 0.0, 0.0)
    return steps.to(torch.int8), scales


def dequantise(steps: Tensor, scales: Tensor) -> Tensor:
    """int8 [..., width] and float32 scales [...] -> float32 [..., width]."""
    return steps.float() * scales.unsqueeze(-1)
