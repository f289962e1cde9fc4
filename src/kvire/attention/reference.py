"""Attention in plain torch: gather a sequence's blocks, then SDPA. Portable; the kernels'
oracle.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvire.attention.params import AttentionParams
from kvire.cache.batch import Batch
from kvire.cache.paged import PagedKV

# Query rows that are computed together. Bounds the mask and keeps windowed rows from paying for
# each other's context; large enough for matrix products to run at full speed.
TILE_ROWS = 512

# (latent [1, 1, L, rank], rope key [1, 1, L, rope]) -> (K [1, query_heads, L, dk], V [1,
# query_heads, L, dv])
Expand = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """Query rows of one sequence, and the positions start .. stop - 1 that any of them sees.

    rows: of the step's T.
    mask: float32 [rows, stop - start], added to the scores; None: every row sees all.
    """

    rows: slice
    start: int
    stop: int
    mask: Tensor | None


class AttentionPlan:
    """State shared by the layers of one step: which rows read which blocks, computed at first
    use.
    """

    def __init__(self, paged: PagedKV, batch: Batch) -> None:
        self.paged = paged
        self.batch = batch
        self.num_decodes = batch.num_decodes
        self._tiles: dict[tuple[int, int | None], list[Tile]] = {}
        self._block_ids: dict[int, Tensor] = {}

    @cached_property
    def context_lens(self) -> Tensor:
        """int32 [S] on the CPU."""
        return torch.tensor(self.batch.context_lens, dtype=torch.int32, device="cpu")

    def block_ids(self, group: int) -> Tensor:
        """int64 [S, M], fit for indexing."""
        if group not in self._block_ids:
            self._block_ids[group] = self.batch.block_tables[group].long()
        return self._block_ids[group]

    def rows(self, sequence: int) -> slice:
        """The sequence's rows of the step."""
        return slice(self.batch.cu_seqlens[sequence], self.batch.cu_seqlens[sequence + 1])

    def tiles(self, sequence: int, window: int | None) -> list[Tile]:
        """The sequence's rows, at most TILE_ROWS at a time."""
        key = (sequence, window)
        if key not in self._tiles:
            rows = self.rows(sequence)
            starts = range(rows.start, rows.stop, TILE_ROWS)
            pieces = [slice(at, min(at + TILE_ROWS, rows.stop)) for at in starts]
            self._tiles[key] = [self._tile(sequence, piece, window) for piece in pieces]
        return self._tiles[key]

    def _tile(self, sequence: int, rows: slice, window: int | None) -> Tile:
        stop = self.batch.context_lens[sequence] - (self.rows(sequence).stop - rows.stop)
        first = stop - (rows.stop - rows.start)  # position of the tile's first row
        assert first >= 0, "a sequence's own tokens must be part of its context"
        start = 0 if window is None else max(0, first - window + 1)
        mask = causal_mask(first, start, stop, window, self.paged.device) if stop - first > 1 else None
        return Tile(rows, start, stop, mask)


def causal_mask(first: int, start: int, stop: int, window: int | None, device: torch.device) -> Tensor:
    """float32 [stop - first, stop - start].

    0 if the query at a position sees the key at another, else -inf.
    """
    query = torch.arange(first, stop, device=device)[:, None]
    key = torch.arange(start, stop, device=device)[None, :]
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))


class PortableAttention:
    """Gather + SDPA, one sequence after the other. Computes in float32 from any dtype of the
    pool.
    """

    name = "portable"

    def plan(self, paged: PagedKV, batch: Batch) -> AttentionPlan:
        """Prepare one step; every layer of the step gets the same plan."""
        return AttentionPlan(paged, batch)

    def write(self, plan: AttentionPlan, layer: int, k: Tensor, v: Tensor) -> None:
        """k: [T, kv_heads, key_width], v: [T, kv_heads, value_width]; rounded to the pool's
        dtype.
        """
        plan.paged.write(layer, k, v, plan.batch.slots[plan.paged.group_of[layer]])

    def attend(
        self, plan: AttentionPlan, layer: int, query: Tensor, k: Tensor, v: Tensor, params: AttentionParams
    ) -> Tensor:
        """query: [T, query_heads, key_width] -> [T, query_heads, value_width], in the query's
        dtype.

        k, v: this step's new KV, [T, kv_heads, width], float32 but already rounded to the pool's
            dtype. They are in the pool as well: `write` comes first.
        """
        assert query.shape[0] == k.shape[0] == v.shape[0] == plan.batch.cu_seqlens[-1], (query.shape, k.shape)
        out = query.new_empty(*query.shape[:2], v.shape[-1])
        for sequence in range(len(plan.batch.context_lens)):
            self._attend_sequence(plan, layer, sequence, query, params, out)
        return out

    def attend_latent(
        self, plan: AttentionPlan, layer: int, query: Tensor, expand: Expand, params: AttentionParams
    ) -> Tensor:
        """The same for multi-head latent attention, whose blocks hold the latent (as K) and the
        rope key (as V).

        query: [T, query_heads, dk] -> [T, query_heads, dv]. `expand` makes K and V of a sequence's
            context.
        """
        parts = []
        for sequence in range(len(plan.batch.context_lens)):
            tiles = plan.tiles(sequence, params.window)
            start, stop = tiles[0].start, tiles[-1].stop
            latent, rope_key = self._gather(plan, layer, sequence, start, stop)
            k, v = expand(latent.transpose(0, 1)[None], rope_key.transpose(0, 1)[None])
            for tile in tiles:
                seen = slice(tile.start - start, tile.stop - start)
                heads_last = (k[0, :, seen].transpose(0, 1), v[0, :, seen].transpose(0, 1))
                parts.append(attend_dense(query[tile.rows], *heads_last, tile.mask, params))
        return torch.cat(parts)

    def _attend_sequence(
        self, plan: AttentionPlan, layer: int, sequence: int, query: Tensor, params: AttentionParams, out: Tensor
    ) -> None:
        for tile in plan.tiles(sequence, params.window):
            k, v = self._gather(plan, layer, sequence, tile.start, tile.stop)
            out[tile.rows] = attend_dense(query[tile.rows], k, v, tile.mask, params)

    def _gather(self, plan: AttentionPlan, layer: int, sequence: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """K and V of positions start .. stop - 1 of one sequence: float32 [stop - start, kv_heads,
        width].
        """
        paged = plan.paged
        block_size = paged.spec.block_size
        first = start // block_size
        blocks = plan.block_ids(paged.group_of[layer])[sequence, first : -(-stop // block_size)]
        k, v = paged.gather(layer, blocks, stop - first * block_size)
        skipped = start - first * block_size  # a window may begin in the middle of a block
        return k[skipped:].float(), v[skipped:].float()


def attend_dense(query: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, params: AttentionParams) -> Tensor:
    """Attention in float32, returned in the query's dtype.

    query: [n, query_heads, dk], k: [L, kv_heads, dk], v: [L, kv_heads, dv], mask: [n, L]
    -> [n, query_heads, dv].
    """
    q, k, v = (x.float().transpose(0, 1) for x in (query, k, v))
    if params.softcap is None and params.sinks is None:
        grouped = q.shape[0] != k.shape[0]
        out = scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask, scale=params.scale, enable_gqa=grouped
        )[0]
    else:
        out = _attend_by_scores(q, k, v, mask, params)
    return out.transpose(0, 1).to(query.dtype)


def _attend_by_scores(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, params: AttentionParams) -> Tensor:
    """Attention with explicit scores, heads first, for features that SDPA lacks: softcap and
    sinks.
    """
    groups = q.shape[0] // k.shape[0]
    grouped = q.reshape(k.shape[0], groups, *q.shape[1:])
    scores = torch.matmul(grouped, k.transpose(1, 2)[:, None]) * params.scale
    if params.softcap is not None:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    if mask is not None:
        scores = scores + mask
    if params.sinks is not None:  # one more key per head that has a weight but no value
        sinks = params.sinks.float().reshape(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return torch.matmul(weights, v[:, None]).flatten(0, 1)
