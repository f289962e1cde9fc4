"""The portable path against a softmax written out."""

import math

import pytest
import torch

from attention.cases import LAYER, Shape, assert_reaches_every_answer, make_case, naive_attention, random_shape
from kvire.attention import reference
from kvire.attention.params import AttentionParams
from kvire.attention.reference import PortableAttention
from kvire.cache.batch import Batch
from kvire.cache.paged import PagedKV
from kvire.core.spec import KVGroup, KVSpec, LayerKind

TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


@pytest.mark.parametrize("seed", range(30))
def test_equals_a_plain_softmax(seed: int) -> None:
    case = make_case(random_shape(seed), seed)
    torch.testing.assert_close(case.run(PortableAttention()).double(), case.expected(), **TOLERANCE)


@pytest.mark.parametrize("window", [None, 5, 20])
def test_tiles_of_a_long_chunk_join_up(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "TILE_ROWS", 16)
    case = make_case(Shape(lens=((1, 40), (50, 75)), window=window))
    torch.testing.assert_close(case.run(PortableAttention()).double(), case.expected(), **TOLERANCE)


def test_queries_in_half_precision_are_computed_in_float32() -> None:
    case = make_case(Shape(lens=((1, 40), (9, 30)), dtype="bfloat16"))
    case.query = case.query.to(torch.bfloat16)
    out = case.run(PortableAttention())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), case.expected(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_so_in_an_int8_pool(value: float) -> None:
    assert_reaches_every_answer(PortableAttention(), value)


def test_latent_attention_expands_each_context_once() -> None:
    rank, rope, heads, dk, dv = 12, 4, 3, 10, 6
    draw = torch.Generator().manual_seed(0)
    group = KVGroup(LayerKind.LATENT, (LAYER,), 1, rank, rope)
    paged = PagedKV(KVSpec((group,), "float32", 8), 12)
    counts, lens = [1, 7, 9], [20, 7, 21]
    table = torch.tensor([[3, 9, 1], [7, 0, 0], [2, 11, 5]], dtype=torch.int32)
    positions = [torch.arange(length - count, length) for count, length in zip(counts, lens, strict=True)]
    slots = [table[s][p // 8].long() * 8 + p % 8 for s, p in enumerate(positions)]
    batch = Batch(
        token_ids=torch.zeros(17, dtype=torch.int64),
        positions=torch.cat(positions),
        slots=(torch.cat(slots),),
        block_tables=(table,),
        context_lens=tuple(lens),
        cu_seqlens=(0, 1, 8, 17),
        logits_rows=torch.empty(0, dtype=torch.int64),
    )
    to_k, to_v = torch.randn(heads, rank, dk - rope, generator=draw), torch.randn(heads, rank, dv, generator=draw)
    calls = []

    def expand(latent: torch.Tensor, rope_key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append((latent.shape, rope_key.shape))
        shared = rope_key.expand(-1, heads, -1, -1)
        return torch.cat([latent @ to_k, shared], dim=-1), latent @ to_v

    backend = PortableAttention()
    plan = backend.plan(paged, batch)
    query = torch.randn(17, heads, dk, generator=draw)
    contexts = []
    for s, length in enumerate(lens):
        latent, rope_key = torch.randn(length, 1, rank, generator=draw), torch.randn(length, 1, rope, generator=draw)
        position = torch.arange(length)
        paged.write(LAYER, latent, rope_key, table[s][position // 8].long() * 8 + position % 8)
        k, v = expand(latent.transpose(0, 1)[None], rope_key.transpose(0, 1)[None])
        contexts.append((k[0].transpose(0, 1), v[0].transpose(0, 1)))
    calls.clear()
    params = AttentionParams(scale=0.3)
    out = backend.attend_latent(plan, LAYER, query, expand, params)
    expected = torch.cat([naive_attention(q, *kv, params) for q, kv in zip(query.split(counts), contexts, strict=True)])
    torch.testing.assert_close(out.double(), expected, **TOLERANCE)
    assert calls == [((1, 1, length, rank), (1, 1, length, rope)) for length in lens]
