"""Attention of the native step: the bits of the book, the same for a token prefilled or decoded."""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
import torch
from harness.broken_builds import Mutant, must_notice

from kvire.attention.params import AttentionParams
from kvire.attention.reference import PortableAttention
from kvire.cache.batch import Batch
from kvire.cache.paged import PagedKV
from kvire.core.dtypes import KV_DTYPES
from kvire.core.spec import KVGroup, KVSpec, LayerKind
from step.forms import Array, fma

native = pytest.importorskip("kvire._native")
ISAS = {"avx512-vnni": ("baseline", "avx2", "avx512"), "avx2": ("baseline", "avx2")}.get(
    native.step_isa(), ("baseline",)
)
PIECE = 64


@dataclass
class Shape:
    heads: int = 2
    group: int = 3
    key_width: int = 16
    value_width: int = 16
    block_size: int = 16
    dtype: str = "float16"
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    scale: float = 0.3
    layout: str = "heads"

    def pool(self, blocks: int = 64) -> PagedKV:
        kind = LayerKind.SLIDING if self.window else LayerKind.FULL
        group = KVGroup(kind, (0,), self.heads, self.key_width, self.value_width, self.window)
        paged = PagedKV(KVSpec((group,), self.dtype, self.block_size, self.layout), blocks)
        paged.slabs[0].view(torch.uint8).fill_(0xFF)  # nan, or a mark
        return paged

    @property
    def sinks(self) -> Array | None:
        return np.linspace(-1, 2, self.heads * self.group, dtype=np.float32) if self.has_sinks else None


@dataclass
class Text:
    """One sequence with random Q, K and V; its blocks in the pool are `table`."""

    shape: Shape
    length: int
    table: list[int]
    q: Array = field(init=False)
    k: Array = field(init=False)
    v: Array = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.length)
        shape = self.shape
        self.q = rng.standard_normal((self.length, shape.heads * shape.group, shape.key_width)).astype(np.float32)
        self.k = rng.standard_normal((self.length, shape.heads, shape.key_width)).astype(np.float32)
        self.v = rng.standard_normal((self.length, shape.heads, shape.value_width)).astype(np.float32)


def layer_of(paged: PagedKV):
    """The kernels' view of layer 0."""
    k, v = paged.k(0), paged.v(0)
    scales = [paged.k_scales(0), paged.v_scales(0)]
    return native.PagedLayer(
        k=k.data_ptr(),
        v=v.data_ptr(),
        k_block_stride=k.stride(0),
        v_block_stride=v.stride(0),
        num_blocks=k.shape[0],
        block_size=k.shape[1],
        heads=k.shape[2],
        key_width=k.shape[3],
        value_width=v.shape[3],
        dtype=KV_DTYPES[paged.spec.dtype].kernel_code,
        k_scales=0 if scales[0] is None else scales[0].data_ptr(),
        v_scales=0 if scales[1] is None else scales[1].data_ptr(),
        k_scale_stride=0 if scales[0] is None else scales[0].stride(0),
        v_scale_stride=0 if scales[1] is None else scales[1].stride(0),
    )


def step(paged: PagedKV, parts: list[tuple[Text, int, int]], *, isa: str = "", threads: int = 1) -> list[Array]:
    """Each text's tokens begin .. end - 1 in one step; their outputs."""
    shape, size = parts[0][0].shape, parts[0][0].shape.block_size
    begin = np.cumsum([0, *(end - start for _, start, end in parts)]).astype(np.int64)
    lengths = np.array([end for _, _, end in parts], np.int64)
    width = max(len(text.table) for text, _, _ in parts)
    tables = np.array([text.table + [0] * (width - len(text.table)) for text, _, _ in parts], np.int32)
    slots = np.array(
        [text.table[at // size] * size + at % size for text, start, end in parts for at in range(start, end)], np.int64
    )
    q, k, v = (
        np.ascontiguousarray(np.concatenate([getattr(text, name)[start:end] for text, start, end in parts]))
        for name in "qkv"
    )
    out = np.full((len(q), shape.heads * shape.group, shape.value_width), np.nan, np.float32)
    sinks = shape.sinks
    native.step_attention(
        layer_of(paged),
        shape.heads * shape.group,
        shape.scale,
        shape.window or 0,
        shape.softcap or 0.0,
        0 if sinks is None else sinks.ctypes.data,
        len(parts),
        *(array.ctypes.data for array in (begin, lengths, tables)),
        width,
        *(array.ctypes.data for array in (slots, q, k, v, out)),
        threads,
        isa=isa,
    )
    return [out[a:b] for a, b in pairwise(begin)]


def portable(paged: PagedKV, text: Text, start: int, end: int) -> Array:
    """What the portable path makes of the same pool, whose KV is written."""
    shape = text.shape
    rows = end - start
    batch = Batch(
        token_ids=torch.zeros(rows, dtype=torch.long),
        positions=torch.arange(start, end),
        slots=(torch.zeros(rows, dtype=torch.long),),
        block_tables=(torch.tensor([text.table], dtype=torch.int32),),
        context_lens=(end,),
        cu_seqlens=(0, rows),
        logits_rows=torch.tensor([], dtype=torch.long),
    )
    sinks = None if shape.sinks is None else torch.from_numpy(shape.sinks)
    params = AttentionParams(shape.scale, shape.window, shape.softcap, sinks)
    backend = PortableAttention()
    q, k, v = (torch.from_numpy(each[start:end]) for each in (text.q, text.k, text.v))
    return backend.attend(backend.plan(paged, batch), 0, q, k, v, params).numpy()


def same(a: Array, b: Array) -> None:
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


def table_of(length: int, size: int, seed: int = 0, blocks: int = 64) -> list[int]:
    return [int(block) for block in np.random.default_rng(seed).permutation(blocks)[: -(-length // size)]]


SHAPES = {
    "smollm2": Shape(3, 3, 64, 64),
    "float32": Shape(dtype="float32"),
    "bfloat16": Shape(dtype="bfloat16"),
    "int8": Shape(dtype="int8"),
    "blocks of 1": Shape(block_size=1),
    "blocks of 24": Shape(block_size=24, dtype="int8"),
    "blocks of 128": Shape(block_size=128),
    "window": Shape(window=24),
    "window of 100": Shape(window=100, block_size=8),
    "softcap": Shape(softcap=2.0),
    "sinks": Shape(has_sinks=True, window=70),
    "odd widths": Shape(key_width=24, value_width=20, dtype="float32"),
    "odd int8": Shape(key_width=10, value_width=33, dtype="int8", block_size=5),
    "one query head": Shape(heads=4, group=1),
    "many query heads": Shape(heads=1, group=16, key_width=128, value_width=128),
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", SHAPES)
def test_agrees_with_the_portable_path(name: str, isa: str) -> None:
    shape = SHAPES[name]
    for length in (1, 5, 63, 64, 65, 200):
        if -(-length // shape.block_size) > 250:
            continue
        paged = shape.pool(256)
        text = Text(shape, length, table_of(length, shape.block_size, blocks=256))
        [found] = step(paged, [(text, 0, length)], isa=isa)
        np.testing.assert_allclose(found, portable(paged, text, 0, length), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_a_token_has_the_same_bits_prefilled_and_decoded(name: str) -> None:
    shape, length = SHAPES[name], 150
    text = Text(shape, length, table_of(length, shape.block_size, blocks=256))
    [whole] = step(shape.pool(256), [(text, 0, length)])
    for isa in ISAS:
        for cuts in ([40, 41, 64, 130, 131], [1, 149], [64, 128], list(range(100, 150))):
            paged, rows = shape.pool(256), []
            for start, end in zip([0, *cuts], [*cuts, length], strict=True):
                rows += step(paged, [(text, start, end)], isa=isa, threads=1 + end % 3)
            same(np.concatenate(rows), whole)


def test_company_changes_nothing() -> None:
    shape = SHAPES["smollm2"]
    texts = [Text(shape, length, table_of(length, 16, seed=9)) for length in (300, 90, 33, 150)]
    used = 0
    for text in texts:
        text.table = list(range(used, used + len(text.table)))
        used += len(text.table)
    alone = []
    for text in texts:
        paged = shape.pool()
        step(paged, [(text, 0, text.length - 1)])
        alone.append(step(paged, [(text, text.length - 1, text.length)])[0])
    paged = shape.pool()
    step(paged, [(text, 0, text.length - 1) for text in texts], threads=2)
    together = step(paged, [(text, text.length - 1, text.length) for text in texts], threads=2)
    for a, b in zip(alone, together, strict=True):
        same(a, b)
    mixed = step(paged, [(texts[0], 299, 300), (texts[1], 40, 90), (texts[2], 32, 33)], threads=3)
    same(mixed[0], alone[0])
    same(mixed[2], alone[2])


def test_threads_change_nothing() -> None:
    shape, length = SHAPES["smollm2"], 900
    text = Text(shape, length, table_of(length, 16))
    paged = shape.pool()
    step(paged, [(text, 0, length - 1)])
    rows = [step(paged, [(text, length - 1, length)], threads=threads)[0] for threads in (1, 2, 3, 7, 16)]
    for row in rows[1:]:
        same(row, rows[0])


def tree(lanes: Array) -> np.float32:
    values = lanes.copy()
    for apart in (8, 4, 2, 1):
        values[:apart] += values[apart : 2 * apart]
    return values[0]


def exp_of_the_book(x: Array) -> Array:
    x = np.asarray(x, np.float32)
    f = np.float32
    shifted = fma(x, np.full_like(x, f(1.44269504)), np.full_like(x, f(12582912.0)))
    n = shifted - f(12582912.0)
    r = fma(n, np.full_like(x, f(2.12194440e-4)), fma(n, np.full_like(x, f(-0.693359375)), x))
    series = np.full_like(x, f(1.0 / 5040))
    for term in (f(1) / f(720), f(1) / f(120), f(1) / f(24), f(1) / f(6), f(0.5), f(1), f(1)):
        series = fma(series, r, np.full_like(x, term))
    power = ((shifted.view(np.uint32) << np.uint32(23)) + np.uint32(0x3F800000)).view(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(x < f(-87.3), f(0), series * power).astype(np.float32)


State = tuple[np.float32, np.float32, Array]  # largest score, sum of weights, sum of weighted values


def kept(paged: PagedKV, text: Text) -> tuple[Array, Array]:
    """K and V as the pool holds them: float32 [length, heads, width]."""
    k, v = paged.gather(0, torch.tensor(text.table), text.length)
    return k.float().numpy(), v.float().numpy()


def piece_of(at: np.ndarray, z: Array, v: Array) -> State:
    """Positions at with scores z and values v."""
    p = exp_of_the_book(z - z.max())
    lanes, y = np.zeros(16, np.float32), np.zeros(v.shape[1], np.float32)
    for i, position in enumerate(at):
        lanes[position % 16] += p[i]
        y = fma(np.full_like(y, p[i]), v[i], y)
    return z.max(), tree(lanes), y


def joined(state: State, piece: State) -> State:
    best = max(state[0], piece[0])
    keep, take = exp_of_the_book(np.array([state[0] - best, piece[0] - best], np.float32))
    weight = fma(np.array([piece[1]]), np.array([take]), np.array([state[1] * keep], np.float32))[0]
    return best, weight, fma(piece[2], np.full_like(piece[2], take), state[2] * keep)


def capped(z: Array, cap: float) -> Array:
    """cap * tanh(z / cap)."""
    f, x = np.float32, z / np.float32(cap)
    clamped = np.clip(x, f(-10), f(10))
    far = f(1) - f(2) / (exp_of_the_book(clamped + clamped) + f(1))
    square, near = x * x, np.full_like(x, f(62 / 2835))
    for term in (-17 / 315, 2 / 15, -1 / 3):
        near = fma(near, square, np.full_like(x, f(term)))
    return f(cap) * np.where(square < f(0.0625), fma(near * square, x, x), far)


def book(paged: PagedKV, text: Text, row: int, head: int) -> Array:
    """One query head of one token, in the order of ADR 19."""
    shape, f = text.shape, np.float32
    kv = head // shape.group
    k, v = (x[:, kv] for x in kept(paged, text))
    q = (text.q[row, head] * f(shape.scale)).astype(np.float32)
    low = 0 if shape.window is None else max(0, row - shape.window + 1)
    state = None
    for begin in range(low // PIECE * PIECE, row + 1, PIECE):
        at = np.arange(max(begin, low), min(begin + PIECE, row + 1))
        z = np.zeros(len(at), np.float32)
        for d in range(shape.key_width):
            z = fma(np.full_like(z, q[d]), k[at, d], z)
        piece = piece_of(at, z if shape.softcap is None else capped(z, shape.softcap), v[at])
        state = piece if state is None else joined(state, piece)
    assert state is not None
    largest, weight, values = state
    if shape.sinks is None:
        return values * (f(1) / weight)
    best = max(largest, shape.sinks[head])
    keep, sink = exp_of_the_book(np.array([largest - best, shape.sinks[head] - best], np.float32))
    return values * (keep / (weight * keep + sink))


def keeps_to_the_book(shape: Shape, isa: str = "") -> None:
    paged, length = shape.pool(256), 150
    text = Text(shape, length, table_of(length, shape.block_size, blocks=256))
    [found] = step(paged, [(text, 0, length)], isa=isa)
    for row in (0, 63, 64, 128, 149):
        for head in (0, shape.heads * shape.group - 1):
            same(found[row, head], book(paged, text, row, head))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", SHAPES)
def test_bits_of_the_book(name: str, isa: str) -> None:
    keeps_to_the_book(SHAPES[name], isa)


def pieces_end_one_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(f"{__name__}.PIECE", PIECE - 1)


def pieces_half_as_long(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(f"{__name__}.PIECE", PIECE // 2)


def later_pieces_merged_first(patch: pytest.MonkeyPatch) -> None:
    join = joined
    patch.setattr(f"{__name__}.joined", lambda state, piece: join(piece, state))


def sums_not_fused(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(f"{__name__}.fma", lambda a, b, c: a * b + c)


def scales_of_the_neighbour(patch: pytest.MonkeyPatch) -> None:
    def neighbours(paged: PagedKV, text: Text) -> tuple[Array, Array]:
        k, v = kept_as_written(paged, text)
        scales = np.abs(k).max(-1, keepdims=True)
        return (k / scales * np.roll(scales, 1, axis=0)).astype(np.float32), v

    kept_as_written = kept
    patch.setattr(f"{__name__}.kept", neighbours)


@pytest.mark.parametrize(
    "mutant",
    [pieces_end_one_early, pieces_half_as_long, later_pieces_merged_first, sums_not_fused, scales_of_the_neighbour],
)
def test_another_book_would_be_noticed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    must_notice(lambda: keeps_to_the_book(SHAPES["int8"]), mutant, monkeypatch)


def test_no_part_of_a_split_context_comes_out_of_order() -> None:
    """One row over more pieces than are joined at once."""
    shape, length = Shape(heads=1, group=5, block_size=128), 1700
    text = Text(shape, length, table_of(length, 128))
    paged = shape.pool()
    step(paged, [(text, 0, length - 1)])
    [row] = step(paged, [(text, length - 1, length)], threads=3)
    for head in range(5):
        same(row[0, head], book(paged, text, length - 1, head))


def test_what_lies_outside_is_refused_before_anything_is_written() -> None:
    shape = Shape()
    paged = shape.pool(4)
    before = paged.slabs[0].clone().view(torch.uint8)
    text = Text(shape, 40, [0, 1, 9])
    with pytest.raises(IndexError):
        step(paged, [(text, 0, 40)])
    assert torch.equal(paged.slabs[0].view(torch.uint8), before)


@pytest.mark.parametrize("dtype", list(KV_DTYPES))
def test_both_layouts_hold_the_same_numbers(dtype: str) -> None:
    by_heads, by_tokens = (Shape(dtype=dtype, layout=layout).pool(8) for layout in ("heads", "tokens"))
    text = Text(Shape(dtype=dtype), 60, [3, 1, 7, 2])
    step(by_heads, [(text, 0, 60)])
    slots = torch.tensor([text.table[at // 16] * 16 + at % 16 for at in range(60)])
    by_tokens.write(0, torch.from_numpy(text.k), torch.from_numpy(text.v), slots)
    blocks = torch.tensor(text.table)
    for a, b in zip(by_heads.gather(0, blocks, 60), by_tokens.gather(0, blocks, 60), strict=True):
        assert torch.equal(a, b)
    other = Shape(dtype=dtype).pool(8)
    other.write(0, torch.from_numpy(text.k), torch.from_numpy(text.v), slots)
    for a, b in zip(by_heads.gather(0, blocks, 60), other.gather(0, blocks, 60), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", SHAPES)
def test_later_tokens_are_not_read(name: str, isa: str) -> None:
    """What a later token of the step holds, even inf and nan, leaves earlier rows alone."""
    shape = SHAPES[name]
    calm, wild = (Text(shape, 90, table_of(90, shape.block_size, blocks=256)) for _ in range(2))
    for of in (wild.k, wild.v):
        of[50:55], of[55:] = np.inf, np.nan
    [expected], [found] = (step(shape.pool(256), [(text, 0, 90)], isa=isa) for text in (calm, wild))
    same(found[:50], expected[:50])
    assert np.isnan(found[55:]).any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_score_that_is_nan_is_not_hidden(isa: str, softcap: float | None) -> None:
    shape = Shape(softcap=softcap)
    text = Text(shape, 70, table_of(70, 16))
    text.k[20] = np.nan
    [found] = step(shape.pool(), [(text, 0, 70)], isa=isa)
    assert np.isfinite(found[:20]).all()
    assert np.isnan(found[20:]).all()


@pytest.mark.parametrize("isa", ISAS)
def test_a_row_whose_scores_are_all_minus_infinity_is_nan(isa: str) -> None:
    shape = Shape(dtype="float32")
    text = Text(shape, 70, table_of(70, 16))
    text.q[:] = np.abs(text.q)
    text.k[:] = -np.inf
    [found] = step(shape.pool(), [(text, 0, 70)], isa=isa)
    assert np.isnan(found).all()


@pytest.mark.parametrize("dtype", ["float16", "int8"])
@pytest.mark.parametrize("block_size", [5, 16])
def test_tables_before_a_window_may_be_stale(block_size: int, dtype: str) -> None:
    shape, length = Shape(window=20, block_size=block_size, dtype=dtype), 200
    text = Text(shape, length, table_of(length, block_size, blocks=256))
    paged = shape.pool(256)
    step(paged, [(text, 0, length - 4)])
    expected = [step(paged, [(text, start, length)])[0] for start in (length - 4, length - 1)]
    text.table[: (length - 4 - 19) // block_size] = [2**30] * ((length - 4 - 19) // block_size)
    for start, rows in zip((length - 4, length - 1), expected, strict=True):
        same(step(paged, [(text, start, length)])[0], rows)


def test_keys_too_wide_are_refused() -> None:
    shape = Shape(heads=1, group=1, key_width=1025)
    with pytest.raises(ValueError, match="at most 1024"):
        step(shape.pool(2), [(Text(shape, 1, [0]), 0, 1)])
