"""Deterministic attention: right within rounding, and a row's bits are its own whatever else the step computes."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from attention.cases import LAYER, Case, Shape, make_case, naive_attention, random_shape
from kvire.attention.blockwise import BlockwiseAttention, cut_at_blocks
from kvire.attention.cpu import NativeAttention, best_attention, native_available
from kvire.attention.params import AttentionParams
from kvire.attention.reference import PortableAttention
from kvire.cache.batch import Batch
from kvire.cache.paged import PagedKV
from kvire.core.spec import KVGroup, KVSpec, LayerKind

TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}
KINDS = ["portable", "native"] if native_available() else ["portable"]
needs_native = pytest.mark.skipif(not native_available(), reason="installed without the native kernels")
# Longer than one packed piece of the native kernel (8,192 positions), and than one of its tasks (96 rows).
LONG = Shape(lens=((300, 8400),), heads=(6, 2), window=None)


def deterministic(kind: str) -> PortableAttention:
    return best_attention(kind, deterministic=True)


def part(case: Case, sequence: int, first: int, stop: int) -> Case:
    """The same pool with a batch of rows first .. stop - 1 of one sequence, as if its later tokens had not come."""
    one = case.only(sequence, first)
    rows, unseen = stop - first, case.batch.cu_seqlens[sequence + 1] - case.batch.cu_seqlens[sequence] - stop
    batch = replace(
        one.batch,
        token_ids=one.batch.token_ids[:rows],
        positions=one.batch.positions[:rows],
        slots=(one.batch.slots[0][:rows],),
        context_lens=(one.batch.context_lens[0] - unseen,),
        cu_seqlens=(0, rows),
    )
    return replace(one, batch=batch, query=one.query[:rows], k=one.k[:rows], v=one.v[:rows])


def in_chunks(case: Case, backend: PortableAttention, draw: random.Random, most: int) -> Tensor:
    """Every sequence alone, in chunks of 1 to `most` rows, over a pool that holds NaN where nothing was written."""
    parts = []
    for sequence, count in enumerate(case.batch.query_lens):
        row = 0
        while row < count:
            stop = min(count, row + draw.randint(1, most))
            parts.append(part(case, sequence, row, stop).run(backend))
            row = stop
    return torch.cat(parts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(30))
def test_equals_a_plain_softmax(seed: int, kind: str) -> None:
    case = make_case(random_shape(seed), seed)
    torch.testing.assert_close(case.run(deterministic(kind)).double(), case.expected(), **TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [1, 7, 40])
@pytest.mark.parametrize("seed", range(30))
def test_a_row_has_the_same_bits_alone_and_in_any_chunk(seed: int, most: int, kind: str) -> None:
    backend = deterministic(kind)
    shape = replace(random_shape(seed), dtype="float32")
    chunked = in_chunks(make_case(shape, seed), backend, random.Random(seed), most)
    assert torch.equal(make_case(shape, seed).run(backend), chunked)


@needs_native
@pytest.mark.parametrize(
    "shape",
    [
        LONG,
        replace(LONG, window=1000),
        replace(LONG, window=37, softcap=20.0, sinks=True),
        replace(LONG, lens=((200, 200),), window=64),
    ],
    ids=["full", "window", "small window", "from the start"],
)
def test_the_same_for_long_contexts(shape: Shape) -> None:
    backend = deterministic("native")
    chunked = in_chunks(make_case(shape), backend, random.Random(0), 64)
    case = make_case(shape)
    together = case.run(backend)
    assert torch.equal(together, chunked)
    for row in (0, 5, 131, 199):
        assert torch.equal(part(case, 0, row, row + 1).run(backend), together[row : row + 1])


@needs_native
def test_the_fast_kernels_round_single_rows_differently() -> None:
    """So the tests above can fail."""
    chunked = in_chunks(make_case(LONG), NativeAttention(), random.Random(0), 1)
    assert not torch.equal(make_case(LONG).run(NativeAttention()), chunked)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_before_the_window_are_not_read(kind: str) -> None:
    case = make_case(Shape(lens=((1, 200), (20, 100)), window=20))
    case.batch.block_tables[0][0, : 180 // 16] = case.paged.num_blocks[0]
    case.batch.block_tables[0][1, : 61 // 16] = case.paged.num_blocks[0]
    torch.testing.assert_close(case.run(deterministic(kind)).double(), case.expected(), **TOLERANCE)


def test_pieces_lie_in_one_block_each() -> None:
    case = make_case(Shape(lens=((1, 17), (40, 50), (16, 32))))
    pieces = cut_at_blocks(case.batch, 16)
    assert [(p.sequence, p.rows.start, p.rows.stop, p.first) for p in pieces] == [
        (0, 0, 1, 16),
        (1, 1, 7, 10),
        (1, 7, 23, 16),
        (1, 23, 39, 32),
        (1, 39, 41, 48),
        (2, 41, 57, 16),
    ]


class Latent:
    """One sequence of latent attention over a pool that holds NaN where nothing was written."""

    size, rank, rope, heads, width = 8, 12, 4, 3, 10

    def __init__(self, length: int) -> None:
        draw = torch.Generator().manual_seed(0)
        group = KVGroup(LayerKind.LATENT, (LAYER,), 1, self.rank, self.rope)
        self.paged = PagedKV(KVSpec((group,), "float32", self.size), -(-length // self.size) + 1)
        self.paged.slabs[0].fill_(float("nan"))
        self.table = torch.randperm(self.paged.num_blocks[0], generator=draw)[None].int()
        self.weights = torch.randn(self.heads * (self.width + 6), self.rank, generator=draw)
        self.latent, self.rope_key, self.query = (
            torch.randn(length, *rest, generator=draw)
            for rest in ((1, self.rank), (1, self.rope), (self.heads, self.width + self.rope))
        )
        self.expanded: list[int] = []

    def expand(self, latent: Tensor, rope_key: Tensor) -> tuple[Tensor, Tensor]:
        self.expanded.append(latent.shape[2])
        kv = linear(latent[0, 0], self.weights).view(-1, self.heads, self.width + 6).transpose(0, 1)[None]
        shared = rope_key.expand(-1, self.heads, -1, -1)
        return torch.cat([kv[..., : self.width], shared], dim=-1), kv[..., self.width :]

    def run(self, backend: PortableAttention, first: int, stop: int) -> Tensor:
        positions = torch.arange(first, stop)
        slots = self.table[0, positions // self.size].long() * self.size + positions % self.size
        none = torch.empty(0, dtype=torch.int64)
        batch = Batch(positions, positions, (slots,), (self.table,), (stop,), (0, stop - first), none)
        plan = backend.plan(self.paged, batch)
        backend.write(plan, LAYER, self.latent[first:stop], self.rope_key[first:stop])
        return backend.attend_latent(plan, LAYER, self.query[first:stop], self.expand, AttentionParams(0.3))


@pytest.mark.parametrize("kind", KINDS)
def test_latent_attention(kind: str) -> None:
    backend, length = deterministic(kind), 45
    whole = Latent(length)
    together = whole.run(backend, 0, length)
    assert set(whole.expanded) == {whole.size}
    k, v = (
        x[0].transpose(0, 1) for x in whole.expand(*(x.transpose(0, 1)[None] for x in (whole.latent, whole.rope_key)))
    )
    expected = naive_attention(whole.query, k, v, AttentionParams(0.3))
    torch.testing.assert_close(together.double(), expected, **TOLERANCE)
    for chunk in (1, 5, 8, 13):
        cut = Latent(length)
        parts = [cut.run(backend, first, min(length, first + chunk)) for first in range(0, length, chunk)]
        assert torch.equal(torch.cat(parts), together)


def test_the_portable_kind_runs_blockwise() -> None:
    assert type(deterministic("portable")) is BlockwiseAttention
