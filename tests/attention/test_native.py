"""The C++ kernels against the portable path and a softmax written out, and the promises they make besides."""

import gc
import math
import threading
import weakref

import pytest
import torch
from harness.backends import INNER_RUN, must_pass_on_a_plain_cpu

from attention.cases import LAYER, Shape, assert_reaches_every_answer, make_case, random_shape
from kvire.attention.cpu import NativeAttention, native_available
from kvire.attention.reference import PortableAttention
from kvire.core.native import native_module

pytestmark = pytest.mark.skipif(not native_available(), reason="installed without the C++ kernels")

TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


@pytest.mark.parametrize("seed", range(60))
def test_equals_a_plain_softmax(seed: int) -> None:
    case = make_case(random_shape(seed), seed)
    torch.testing.assert_close(case.run(NativeAttention()).double(), case.expected(), **TOLERANCE)


@pytest.mark.parametrize("seed", range(100, 112))
def test_equals_the_portable_path_on_long_contexts(seed: int) -> None:
    torch.set_num_threads(2)
    shape = Shape(
        lens=((1, 1500), (1, 3), (1, 2049), (600, 1400)),
        heads=((9, 3), (32, 8))[seed % 2],
        widths=(64, 64),
        block_size=32,
        dtype=("float32", "float16", "bfloat16", "int8")[seed % 4],
        window=(None, 512)[seed // 4 % 2],
        sinks=seed % 3 == 0,
    )
    case = make_case(shape, seed)
    torch.testing.assert_close(case.run(NativeAttention()), case.run(PortableAttention()), **TOLERANCE)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("window", [None, 70])
def test_a_row_has_the_same_bits_alone_in_a_batch_and_on_any_number_of_threads(dtype: str, window: int | None) -> None:
    shape = Shape(
        lens=((1, 700), (1, 1), (1, 900), (1, 257)), heads=(6, 2), widths=(24, 24), dtype=dtype, window=window
    )
    case = make_case(shape)
    backend = NativeAttention()
    together = case.run(backend)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(case.run(backend), together)
        for s in range(4):
            assert torch.equal(case.only(s).run(backend), together[s : s + 1])


def test_many_long_sequences_are_computed_in_waves() -> None:
    # 40 sequences of 14 spans with 256 heads of 128 floats each: 74 MB of partial results, of which 64 MiB may be kept
    shape = Shape(lens=((1, 3500),) * 40, heads=(256, 1), widths=(8, 128), block_size=32)
    case = make_case(shape)
    backend = NativeAttention()
    out = case.run(backend)
    for s in (0, 17, 39):
        assert torch.equal(case.only(s).run(backend), out[s : s + 1])


def special_values() -> torch.Tensor:
    tiny = [2.0**e * m for e in range(-150, -100, 3) for m in (1, 1.25, 1.5)]
    half = [2.0**e * m for e in range(-27, 17) for m in (1, 1 + 2**-11, 1 + 2**-10, 1 + 3 * 2**-11, 1.9999)]
    edges = [0.0, 65504, 65519.99, 65520, 65536, 3.3895e38, 3.4e38, float("inf"), 5.96e-8, 2.98e-8, 2.9803e-8]
    values = torch.tensor(tiny + half + edges)
    patterns = torch.randint(0, 0x7F800000, (5000,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    return torch.cat([values, -values, patterns.view(torch.float32), torch.tensor([float("nan")] * 3)])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("width", [1, 8, 13])
def test_rounds_as_torch_does(dtype: str, width: int) -> None:
    values = special_values()
    values = torch.cat([values, torch.zeros(-len(values) % width)]).view(-1, 1, width)
    case = make_case(Shape(lens=((len(values), len(values)),), heads=(1, 1), widths=(width, width), dtype=dtype))
    backend = NativeAttention()
    plan = case.plan(backend)
    backend.write(plan, LAYER, values, -values)
    rounded = [x.to(case.paged.dtype) for x in (values, -values)]
    for stored, wanted in zip(case.paged.gather(LAYER, plan.block_ids(0)[0], len(values)), rounded, strict=True):
        assert_same_bits(stored, wanted)
    for read, wanted in zip(backend._gather(plan, LAYER, 0, 0, len(values)), rounded, strict=True):
        assert_same_bits(read, wanted.float())


@pytest.mark.parametrize("width", [1, 8, 13, 64])
def test_quantises_as_the_portable_path_does(width: int) -> None:
    draw = torch.Generator().manual_seed(width)
    rows = torch.randn(3000, width, generator=draw) * 2.0 ** torch.randint(-150, 127, (3000, 1), generator=draw)
    ties = torch.randint(-254, 255, (500, width), generator=draw) / 2  # exact halves, where the largest is 127
    ties[:, 0] = 127
    rows = torch.cat([rows, ties, torch.zeros(1, width), torch.full((1, width), 3.4028234e38)])
    for value in (math.nan, math.inf, -math.inf):
        odd = torch.randn(width, width, generator=draw)
        rows = torch.cat([rows, odd.fill_diagonal_(value)])
    k, v = rows.view(-1, 1, width), -rows.view(-1, 1, width)
    cases = []
    for backend in (NativeAttention(), PortableAttention()):
        case = make_case(Shape(lens=((len(k), len(k)),), heads=(1, 1), widths=(width, width), dtype="int8"))
        plan = case.plan(backend)
        backend.write(plan, LAYER, k, v)
        slots = case.batch.slots[0]
        stored = [x(LAYER).flatten(0, 1)[slots] for x in (case.paged.k, case.paged.k_scales, case.paged.v)]
        cases.append((*stored, *backend._gather(plan, LAYER, 0, 0, len(k))))
    for native, portable in zip(*cases, strict=True):
        assert native.dtype == portable.dtype
        if native.dtype == torch.int8:
            assert torch.equal(native, portable)
        else:
            assert_same_bits(native, portable)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_so_in_an_int8_pool(value: float) -> None:
    assert_reaches_every_answer(NativeAttention(), value)


def assert_same_bits(left: torch.Tensor, right: torch.Tensor) -> None:
    """Signs of zeros included; any nan is like any other, also within torch."""
    assert torch.equal(left.isnan(), right.isnan())
    bits = torch.int32 if left.dtype == torch.float32 else torch.int16
    left, right = (x.masked_fill(x.isnan(), 0).view(bits) for x in (left, right))
    assert torch.equal(left, right)


def test_strided_inputs_are_read_in_place() -> None:
    case = make_case(Shape(lens=((1, 30), (1, 9), (5, 20))))
    backend = NativeAttention()
    expected = case.run(backend)
    # transformers hands over [heads, T, width], transposed
    case.k, case.v, case.query = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (case.k, case.v, case.query))
    assert torch.equal(case.run(backend), expected)
    case.k, case.v, case.query = (torch.stack([x, x], dim=-1)[..., 0] for x in (case.k, case.v, case.query))
    assert torch.equal(case.run(backend), expected)


def test_other_dtypes_take_the_portable_path() -> None:
    case = make_case(Shape(lens=((1, 30), (5, 20)), dtype="bfloat16"))
    case.query = case.query.to(torch.bfloat16)
    assert torch.equal(case.run(NativeAttention()), case.run(PortableAttention()))


def test_pieces_of_a_long_context_join_up() -> None:
    # Prefill packs 8192 positions at a time.
    for lens in ((300, 8300), (9, 16400), (200, 8192), (8200, 8200)):
        for window in (None, 8150):
            shape = Shape(lens=(lens,), heads=(2, 1), widths=(8, 8), window=window, sinks=True)
            case = make_case(shape)
            torch.testing.assert_close(case.run(NativeAttention()), case.run(PortableAttention()), **TOLERANCE)


@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (8, 2), (10, 2), (7, 1), (100, 1)])
@pytest.mark.parametrize("widths", [(64, 64), (7, 24), (33, 17), (1, 1), (16, 40)])
def test_prefill_of_any_shape(heads: tuple[int, int], widths: tuple[int, int]) -> None:
    lens = ((2, 2), (130, 130), (37, 300), (5, 129), (128, 128), (16, 17), (3, 400))
    for dtype, window, softcap, sinks in (
        ("float32", None, None, False),
        ("float32", 20, None, True),
        ("int8", 150, 5.0, False),
    ):
        case = make_case(Shape(lens, heads, widths, dtype=dtype, window=window, softcap=softcap, sinks=sinks))
        torch.testing.assert_close(case.run(NativeAttention()).double(), case.expected(), **TOLERANCE)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("window", [None, 70])
def test_a_prefilled_row_has_the_same_bits_in_any_chunk_and_on_any_number_of_threads(
    dtype: str, window: int | None
) -> None:
    case = make_case(Shape(lens=((400, 500), (77, 500)), heads=(6, 2), widths=(24, 24), dtype=dtype, window=window))
    backend = NativeAttention()
    together = case.run(backend)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(case.run(backend), together)
        assert torch.equal(case.only(1).run(backend), together[400:])
    for first in (1, 2, 63, 398):
        assert torch.equal(case.only(0, first).run(backend), together[first:400])


@pytest.mark.parametrize("slot", [-1, -(2**62), 10**9, 2**62])
def test_a_slot_outside_the_pool_is_refused_before_anything_is_written(slot: int) -> None:
    case = make_case(Shape(lens=((5, 5),)))
    backend = NativeAttention()
    plan = case.plan(backend)
    before = case.paged.slabs[0].clone()
    case.batch.slots[0][3] = slot
    with pytest.raises(IndexError, match="slot"):
        backend.write(plan, LAYER, case.k, case.v)
    torch.testing.assert_close(case.paged.slabs[0], before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("block", [-1, 2**31 - 1, -(2**31), "pool size"])
def test_a_block_outside_the_pool_is_refused(block: int | str) -> None:
    case = make_case(Shape(lens=((1, 40), (5, 30)), window=20))
    backend = NativeAttention()
    wrong = case.paged.k(LAYER).shape[0] if isinstance(block, str) else block
    for sequence, needed, unneeded in ((0, 1, 0), (1, 1, None)):
        table = case.batch.block_tables[0]
        right = table[sequence].clone()
        if unneeded is not None:  # before the window: stale entries are nobody's business
            table[sequence, unneeded] = wrong
            case.run(backend)
        table[sequence, needed] = wrong
        with pytest.raises(IndexError, match="block id"):
            case.only(sequence).run(backend)
        table[sequence] = right
    case.run(backend)


@pytest.mark.parametrize("length", [0, -5, 49, 2**31 - 1])
def test_a_length_that_leaves_the_block_table_is_refused(length: int) -> None:
    case = make_case(Shape(lens=((1, 20),)))
    assert case.batch.block_tables[0].shape[1] * 16 == 48
    object.__setattr__(case.batch, "context_lens", (length,))
    with pytest.raises(IndexError, match="length"):
        case.run(NativeAttention())
    with pytest.raises(IndexError, match="positions"):
        NativeAttention()._gather(case.plan(NativeAttention()), LAYER, 0, max(length - 1, -1), max(length, 49))


def test_senseless_arguments_are_refused() -> None:
    native = native_module()
    sizes = {"num_blocks": 2, "block_size": 4, "heads": 1, "key_width": 8, "value_width": 8, "dtype": 0}
    strides = {"k_block_stride": 64, "v_block_stride": 64}
    native.PagedLayer(k=64, v=64, **strides, **sizes)
    for wrong in ({"heads": 0}, {"block_size": -1}, {"dtype": 4}, {"key_width": 17}, {"num_blocks": 0}):
        with pytest.raises(ValueError, match=r"sizes|dtype|overlap"):
            native.PagedLayer(k=64, v=64, **strides, **{**sizes, **wrong})
    with pytest.raises(ValueError, match="addresses"):
        native.PagedLayer(k=0, v=64, **strides, **sizes)
    scales = {"k_scales": 64, "v_scales": 64, "k_scale_stride": 4, "v_scale_stride": 4}
    with pytest.raises(ValueError, match="scales if its dtype is int8"):
        native.PagedLayer(k=64, v=64, **strides, **sizes, **scales)
    sizes["dtype"] = 3
    native.PagedLayer(k=64, v=64, **strides, **sizes, **scales)
    for wrong in ({"k_scales": 0}, {"v_scales": 0}, {"v_scales": 65}, {"k_scale_stride": 3}, {"v_scale_stride": 3}):
        with pytest.raises(ValueError, match="scales"):
            native.PagedLayer(k=64, v=64, **strides, **sizes, **{**scales, **wrong})
    case = make_case(Shape(lens=((1, 20),), heads=(4, 2)))
    case.query = case.query[:, :3]
    with pytest.raises(ValueError, match="multiple"):
        case.run(NativeAttention())


def test_read_sum_reads_everything() -> None:
    data = torch.randint(0, 8, (2**19 + 77,)).float()
    assert native_module().read_sum(data.data_ptr(), data.numel(), 2) == data.double().sum().item()


def test_a_pool_can_be_freed_while_the_backend_lives() -> None:
    case = make_case(Shape(lens=((1, 20),)))
    backend = NativeAttention()
    case.run(backend)
    pool = weakref.ref(case.paged)
    del case
    gc.collect()
    assert pool() is None


def test_several_python_threads_at_once() -> None:
    case = make_case(Shape(lens=((1, 700), (1, 900), (40, 60))))
    backend = NativeAttention()
    expected = case.run(backend)
    wrong = []

    def work() -> None:
        torch.set_num_threads(2)
        wrong.extend(1 for _ in range(20) if not torch.equal(case.run(backend), expected))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@INNER_RUN
def test_all_of_this_holds_on_a_plain_cpu_and_without_openmp() -> None:
    must_pass_on_a_plain_cpu(__file__)
