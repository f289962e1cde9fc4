"""Eight bits and a scale: how far off they are, where they lie, and what happens to numbers that have no place."""

import math

import pytest
import torch

from kvire.cache.paged import PagedKV
from kvire.cache.scaled import dequantise, quantise
from kvire.core.spec import KVGroup, KVSpec, LayerKind


def test_a_number_is_off_by_half_a_step_at_most() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(5000, 64, generator=draw) * 2.0 ** torch.randint(-100, 100, (5000, 1), generator=draw)
    steps, scales = quantise(x)
    torch.testing.assert_close(scales, x.abs().amax(-1) / 127, rtol=0, atol=0)
    error = (dequantise(steps, scales).double() - x.double()).abs() / scales.double()[:, None]
    assert error.max() <= 0.5 + 127 * 2**-23  # x / scale and its product are rounded to float32 once each
    assert (steps.abs().amax(-1) == 127).all()


def test_ties_round_to_even() -> None:
    steps, scales = quantise(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]]))
    assert scales.tolist() == [1.0]
    assert steps.tolist() == [[127, 0, 2, 2, 0, -2, -2]]


def test_rows_of_nothing_are_zero() -> None:
    steps, scales = quantise(torch.tensor([[0.0, -0.0], [1e-40, -1e-45]]))
    assert not steps.any() and not scales.any()
    assert torch.equal(dequantise(steps, scales), torch.zeros(2, 2))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_not_finite_spoils_its_row_and_no_other(value: float) -> None:
    read = dequantise(*quantise(torch.tensor([[1.0, value, 0.0], [1.0, 2.0, 3.0]])))
    assert read[0].isnan().all()
    torch.testing.assert_close(read[1], torch.tensor([1.0, 2.0, 3.0]), rtol=0, atol=0.5 * 3 / 127)


@pytest.mark.parametrize("block_size", [1, 3, 32])
@pytest.mark.parametrize(("heads", "widths"), [(1, (33, 18)), (3, (64, 64)), (2, (7, 1))])
def test_layers_and_blocks_do_not_share_memory(block_size: int, heads: int, widths: tuple[int, int]) -> None:
    group = KVGroup(LayerKind.FULL, (0, 2, 5), heads, *widths)
    spec = KVSpec((group,), "int8", block_size)
    paged = PagedKV(spec, 4)
    assert paged.nbytes == 4 * spec.block_bytes(0)
    tokens = 4 * block_size
    slots = torch.randperm(tokens, generator=torch.Generator().manual_seed(1))
    written = {n: [torch.randn(tokens, heads, width) for width in widths] for n in group.layers}
    for n, kv in written.items():
        paged.write(n, *kv, slots)
    for n, kv in written.items():
        for read, wrote in zip(paged.gather(n, torch.arange(4), tokens), kv, strict=True):
            assert torch.equal(read[slots], paged.rounded(wrote))


def test_a_copied_block_brings_its_scales() -> None:
    group = KVGroup(LayerKind.FULL, (0, 1), 2, 5, 8)
    paged = PagedKV(KVSpec((group,), "int8", 4), 2)
    for layer in group.layers:
        paged.write(layer, torch.randn(8, 2, 5), torch.randn(8, 2, 8), torch.arange(8))
    paged.copy_block(0, 1, 0)
    for layer in group.layers:
        for copied in paged.gather(layer, torch.tensor([0, 1]), 8):
            assert torch.equal(copied[:4], copied[4:])
