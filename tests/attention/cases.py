"""One step of random sequences over a random block table, and what attention over it must give."""

import math
import random
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvire.attention.params import AttentionParams
from kvire.attention.reference import AttentionPlan, PortableAttention
from kvire.cache.batch import Batch
from kvire.cache.paged import PagedKV
from kvire.core.spec import KVGroup, KVSpec, LayerKind

LAYER = 3  # the second of two layers that share their blocks


@dataclass(frozen=True)
class Shape:
    """lens: per sequence (tokens of this step, tokens of its context with them); single tokens first."""

    lens: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (4, 2)  # query, KV
    widths: tuple[int, int] = (16, 16)  # key, value
    block_size: int = 16
    dtype: str = "float32"
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


@dataclass
class Case:
    shape: Shape
    paged: PagedKV
    batch: Batch
    query: Tensor
    k: Tensor
    v: Tensor
    params: AttentionParams
    dense: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # per sequence: K, V of its whole context

    def run(self, backend: PortableAttention) -> Tensor:
        plan = self.plan(backend)
        backend.write(plan, LAYER, self.k, self.v)
        k, v = self.paged.rounded(self.k), self.paged.rounded(self.v)
        return backend.attend(plan, LAYER, self.query, k, v, self.params)

    def plan(self, backend: PortableAttention) -> AttentionPlan:
        return backend.plan(self.paged, self.batch)

    def expected(self) -> Tensor:
        """float64 [T, query_heads, value_width], one score at a time as far as readable."""
        parts = []
        for s, (k, v) in enumerate(self.dense):
            rows = slice(self.batch.cu_seqlens[s], self.batch.cu_seqlens[s + 1])
            parts.append(naive_attention(self.query[rows], k, v, self.params))
        return torch.cat(parts)

    def only(self, sequence: int, first: int = 0) -> "Case":
        """The same pool with a batch of one of the sequences, without its `first` rows."""
        rows = slice(self.batch.cu_seqlens[sequence] + first, self.batch.cu_seqlens[sequence + 1])
        batch = Batch(
            token_ids=self.batch.token_ids[rows],
            positions=self.batch.positions[rows],
            slots=(self.batch.slots[0][rows],),
            block_tables=(self.batch.block_tables[0][sequence : sequence + 1],),
            context_lens=(self.batch.context_lens[sequence],),
            cu_seqlens=(0, rows.stop - rows.start),
            logits_rows=torch.empty(0, dtype=torch.int64),
        )
        return replace(self, batch=batch, query=self.query[rows], k=self.k[rows], v=self.v[rows])


def naive_attention(query: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
    """query: the last n rows of a context with k [L, H_kv, D_k] and v [L, H_kv, D_v]."""
    n, heads = query.shape[:2]
    length, group = k.shape[0], heads // k.shape[1]
    out = torch.empty(n, heads, v.shape[-1], dtype=torch.float64)
    for i in range(n):
        last = length - n + i
        first = 0 if params.window is None else max(0, last - params.window + 1)
        for h in range(heads):
            keys = k[first : last + 1, h // group].double()
            scores = (keys @ query[i, h].double()) * params.scale
            if params.softcap is not None:
                scores = params.softcap * torch.tanh(scores / params.softcap)
            weights = torch.exp(scores - scores.max())
            total = weights.sum()
            if params.sinks is not None:
                total = total + torch.exp(params.sinks[h].double() - scores.max())
            out[i, h] = (weights / total) @ v[first : last + 1, h // group].double()
    return out


def make_case(shape: Shape, seed: int = 0) -> Case:
    """Memory that no sequence owns is NaN, so that a read of it shows."""
    draw = torch.Generator().manual_seed(seed)
    (query_heads, kv_heads), (key_width, value_width) = shape.heads, shape.widths
    tables, num_blocks = _block_tables(shape, random.Random(seed))
    kind = LayerKind.FULL if shape.window is None else LayerKind.SLIDING
    group = KVGroup(kind, (0, LAYER), kv_heads, key_width, value_width, shape.window)
    paged = PagedKV(KVSpec((group,), shape.dtype, shape.block_size), num_blocks)
    for x in (paged.k, paged.v) if shape.dtype != "int8" else (paged.k_scales, paged.v_scales):
        for layer in group.layers:
            x(layer).fill_(math.nan)

    dense, new_k, new_v, slots, positions = [], [], [], [], []
    for s, (count, length) in enumerate(shape.lens):
        k = torch.randn(length, kv_heads, key_width, generator=draw)
        v = torch.randn(length, kv_heads, value_width, generator=draw)
        position = torch.arange(length)
        slot = tables[s][position // shape.block_size].long() * shape.block_size + position % shape.block_size
        paged.write(LAYER, k[: length - count], v[: length - count], slot[: length - count])
        dense.append((paged.rounded(k), paged.rounded(v)))
        new_k.append(k[length - count :])
        new_v.append(v[length - count :])
        slots.append(slot[length - count :])
        positions.append(position[length - count :])

    counts = [count for count, _ in shape.lens]
    batch = Batch(
        token_ids=torch.zeros(sum(counts), dtype=torch.int64),
        positions=torch.cat(positions),
        slots=(torch.cat(slots),),
        block_tables=(tables,),
        context_lens=tuple(length for _, length in shape.lens),
        cu_seqlens=tuple(sum(counts[:i]) for i in range(len(counts) + 1)),
        logits_rows=torch.empty(0, dtype=torch.int64),
    )
    query = torch.randn(sum(counts), query_heads, key_width, generator=draw)
    sinks = torch.randn(query_heads, generator=draw) if shape.sinks else None
    params = AttentionParams(1 / math.sqrt(key_width), shape.window, shape.softcap, sinks)
    return Case(shape, paged, batch, query, torch.cat(new_k), torch.cat(new_v), params, dense)


def assert_reaches_every_answer(backend: PortableAttention, value: float) -> None:
    """A number that is not finite, written to an int8 pool, shows in all rows that see it: decoded and prefilled."""
    for name in ("k", "v"):
        case = make_case(Shape(lens=((1, 300), (1, 40), (40, 90)), dtype="int8"))
        assert case.run(backend).isfinite().all()
        for row in (0, 2):  # the first sequence's only token, the last one's first; in the first of two KV heads
            getattr(case, name)[row, 0, 5] = value
        finite = case.run(backend).isfinite()
        seen = torch.zeros_like(finite)
        seen[0, :2] = seen[2:, :2] = True
        assert torch.equal(finite, ~seen), name


def _block_tables(shape: Shape, draw: random.Random) -> tuple[Tensor, int]:
    """int32 [S, M] with blocks in random order, and the size of a pool with some to spare.

    Blocks that lie wholly before a window have been given back: their entries hold no valid block.
    """
    needed = [-(-length // shape.block_size) for _, length in shape.lens]
    num_blocks = sum(needed) + 3
    free = draw.sample(range(num_blocks), num_blocks)
    table = torch.zeros(len(needed), max(needed) + 1, dtype=torch.int32)
    for s, blocks in enumerate(needed):
        table[s, :blocks] = torch.tensor([free.pop() for _ in range(blocks)], dtype=torch.int32)
    return table, num_blocks


def random_shape(seed: int) -> Shape:
    """Everything drawn at once: widths that are no multiple of a vector, mixed batches, windows inside blocks."""
    draw = random.Random(seed)
    kv_heads = draw.choice([1, 2, 3])
    key_width = draw.choice([8, 16, 20, 33, 64])
    decodes = [(1, draw.choice([1, 2, 31, 256, 257, 300, draw.randrange(1, 700)])) for _ in range(draw.randrange(4))]
    chunks = []
    for _ in range(draw.randrange(0 if decodes else 1, 3)):
        count = draw.randrange(2, 70)
        chunks.append((count, count + draw.choice([0, 0, 5, draw.randrange(300)])))
    return Shape(
        lens=(*decodes, *chunks),
        heads=(kv_heads * draw.choice([1, 2, 3, 4, 5, 8]), kv_heads),
        widths=(key_width, draw.choice([key_width, key_width, 12, 40])),
        block_size=draw.choice([1, 8, 16, 24, 32]),
        dtype=draw.choice(["float32", "float16", "bfloat16", "int8"]),
        window=draw.choice([None, None, 1, 7, 64, 300]),
        softcap=draw.choice([None, None, 20.0, 1.5]),
        sinks=draw.random() < 0.3,
    )
