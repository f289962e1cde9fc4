"""Attention with reproducible bits for every row: the reference for deterministic mode.

A row's place in its block, not in the step, decides its place in a matrix product; all products
have one size, a whole block of queries by a whole block of keys; and blocks are added in ascending
order. The rest of the step, and how it is cut into chunks, then cannot change how a row's numbers
are rounded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvire.attention.params import AttentionParams
from kvire.attention.reference import AttentionPlan, Expand, PortableAttention
from kvire.cache.batch import Batch

# Index of a block of the sequence -> K [kv_heads, block_size, dk] and V [kv_heads, block_size, dv],
# zero past its end
ReadBlock = Callable[[int], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of one sequence whose tokens are in one block.

    rows: of the step's T.
    first: position of the first of them.
    """

    sequence: int
    rows: slice
    first: int

    @property
    def count(self) -> int:
        """Rows of the piece."""
        return int(self.rows.stop - self.rows.start)


def cut_at_blocks(batch: Batch, block_size: int) -> list[Piece]:
    """The batch's rows in order, each sequence cut at the borders of its blocks."""
    pieces = []
    for sequence, (start, stop) in enumerate(pairwise(batch.cu_seqlens)):
        row, position = start, batch.context_lens[sequence] - (stop - start)
        while row < stop:
            count = min(stop - row, block_size - position % block_size)
            pieces.append(Piece(sequence, slice(row, row + count), position))
            row, position = row + count, position + count
    return pieces


class BlockwiseAttention(PortableAttention):
    """Online softmax over whole blocks, one piece of a sequence after the other."""

    name = "blockwise"

    def attend(
        self, plan: AttentionPlan, layer: int, query: Tensor, k: Tensor, v: Tensor, params: AttentionParams
    ) -> Tensor:
        """As PortableAttention.attend."""
        assert query.shape[0] == k.shape[0] == v.shape[0] == plan.batch.cu_seqlens[-1], (query.shape, k.shape)

        def read(sequence: int, block: int) -> tuple[Tensor, Tensor]:
            keys, values = self._read_block(plan, layer, sequence, block)
            return keys.transpose(0, 1).contiguous(), values.transpose(0, 1).contiguous()

        return self._attend_pieces(plan, query, params, read)

    def attend_latent(
        self, plan: AttentionPlan, layer: int, query: Tensor, expand: Expand, params: AttentionParams
    ) -> Tensor:
        """As PortableAttention.attend_latent; `expand` gets whole blocks, zero past the end of the
        context.
        """

        def read(sequence: int, block: int) -> tuple[Tensor, Tensor]:
            latent, rope_key = self._read_block(plan, layer, sequence, block)
            keys, values = expand(latent.transpose(0, 1)[None], rope_key.transpose(0, 1)[None])
            return keys[0].contiguous(), values[0].contiguous()

        return self._attend_pieces(plan, query, params, read)

    def _read_block(self, plan: AttentionPlan, layer: int, sequence: int, block: int) -> tuple[Tensor, Tensor]:
        """float32 [block_size, kv_heads, width], uninitialised past the context."""
        size = plan.paged.spec.block_size
        stop = min((block + 1) * size, plan.batch.context_lens[sequence])
        k, v = self._gather(plan, layer, sequence, block * size, stop)
        missing = (0, 0, 0, 0, 0, (block + 1) * size - stop)
        return pad(k, missing), pad(v, missing)

    def _attend_pieces(
        self,
        plan: AttentionPlan,
        query: Tensor,
        params: AttentionParams,
        read: Callable[[int, int], tuple[Tensor, Tensor]],
    ) -> Tensor:
        size = plan.paged.spec.block_size
        parts = []
        for piece in cut_at_blocks(plan.batch, size):
            at = piece.first % size
            block = query.new_zeros(size, *query.shape[1:], dtype=torch.float32)
            block[at : at + piece.count] = query[piece.rows]
            out = attend_block(block, piece.first, partial(read, piece.sequence), params)
            parts.append(out[at : at + piece.count].to(query.dtype))
        return torch.cat(parts)


def attend_block(query: Tensor, first: int, read: ReadBlock, params: AttentionParams) -> Tensor:
    """query: float32 [block_size, query_heads, dk], all of a block's rows -> [block_size,
    query_heads, dv].

    first: the first position that counts; it decides which block of the window is read first.
    """
    size, heads = query.shape[:2]
    last = first // size
    oldest = 0 if params.window is None else max(0, first - params.window + 1) // size
    position = torch.arange(size, device=query.device)
    total: Tensor | None = None
    for block in range(oldest, last + 1):
        k, v = read(block)
        if total is None:
            q = query.transpose(0, 1).reshape(k.shape[0], -1, k.shape[-1]).contiguous()
            best = q.new_full((*k.shape[:1], heads // k.shape[0], size, 1), float("-inf"))
            total, values = torch.zeros_like(best), q.new_zeros(*best.shape[:-1], v.shape[-1])
        distance = (last - block) * size + position[:, None] - position[None, :]
        hidden = distance < 0 if params.window is None else (distance < 0) | (distance >= params.window)
        scores = torch.matmul(q, k.transpose(1, 2)).view(*best.shape[:-1], size) * params.scale
        if params.softcap is not None:
            scores = params.softcap * torch.tanh(scores / params.softcap)
        scores = scores.masked_fill(hidden, float("-inf"))
        maximum = torch.maximum(best, scores.amax(-1, keepdim=True))
        # A row that has seen nothing yet has the maximum -inf, and -inf - -inf is no number.
        base = maximum.masked_fill(maximum == float("-inf"), 0.0)
        weights, keep = torch.exp(scores - base), torch.exp(best - base)
        total = total * keep + weights.sum(-1, keepdim=True)
        product = torch.matmul(weights.flatten(1, 2), v).view_as(values)
        values = values * keep + product
        best = maximum
    assert total is not None
    if params.sinks is not None:  # one more key per head that has a weight but no value
        sinks = params.sinks.float().view(*best.shape[:2], 1, 1)
        maximum = torch.maximum(best, sinks)
        keep = torch.exp(best - maximum)
        total, values = total * keep + torch.exp(sinks - maximum), values * keep
    return (values / total).flatten(0, 1).transpose(0, 1)
