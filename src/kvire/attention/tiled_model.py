"""Deterministic mode: every forward pass has exactly block_size rows, each token in a fixed one.

A token's row is its place in its block. A matrix product rounds differently for different row
counts, and a row's bits may depend on its number; they do not depend on the contents of the other
rows. With both fixed, a token's KV and logits are the same bits whether it is computed alone or in
a batch, in a prompt or as the next token of an answer.
"""

from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvire.attention.blockwise import Piece, cut_at_blocks
from kvire.attention.paged_cache import PagedCache
from kvire.cache.batch import Batch


class TiledModel:
    """A transformers model on the CPU bound to a PagedCache, as PagedModel is; runs a batch tile by
    tile.
    """

    def __init__(self, model: PreTrainedModel, cache: PagedCache) -> None:
        self._model = model
        self._cache = cache
        self._tile_rows = cache.paged.spec.block_size
        self._vocab_size = model.get_output_embeddings().weight.shape[0]
        cache.attach(model)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Write the batch's KV into the pool and return logits of its logits_rows: float32 [R,
        vocab].
        """
        wanted = {row: i for i, row in enumerate(batch.logits_rows.tolist())}
        logits = torch.empty(len(wanted), self._vocab_size)
        for tile in pack_tiles(cut_at_blocks(batch, self._tile_rows), self._tile_rows):
            places = [
                (wanted[row], (piece.first + row - piece.rows.start) % self._tile_rows)
                for piece in tile
                for row in range(piece.rows.start, piece.rows.stop)
                if row in wanted
            ]
            of_tile = self._run(only(batch, tile), with_logits=bool(places))
            if places:
                to, at = torch.tensor(places).unbind(1)
                logits[to] = of_tile[at].float()
        return logits

    def _run(self, batch: Batch, *, with_logits: bool) -> Tensor:
        """One tile: logits [tile_rows, vocab] of all of its rows, or of none."""
        # The other rows only need to be finite: token 0, at the row's own place in a first block.
        positions = torch.arange(self._tile_rows)
        token_ids = torch.zeros_like(positions)
        rows = batch.positions % self._tile_rows
        positions[rows] = batch.positions
        token_ids[rows] = batch.token_ids
        self._cache.begin(batch, rows)
        out = self._model(
            input_ids=token_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            cache=self._cache,
            use_cache=True,
            logits_to_keep=0 if with_logits else positions[:0],  # 0 means all
        )
        logits: Tensor = out.logits[0]
        return logits


def pack_tiles(pieces: list[Piece], tile_rows: int) -> list[list[Piece]]:
    """Pieces that run together, one list per tile.

    No two of a tile need the same row, and a sequence's earlier pieces are in earlier tiles.
    """
    tiles: list[list[Piece]] = []
    taken: list[int] = []  # per tile, a bit for each row
    earliest: dict[int, int] = {}  # sequence -> the first tile that its next piece may join
    for piece in pieces:
        rows = ((1 << piece.count) - 1) << piece.first % tile_rows
        at = earliest.get(piece.sequence, 0)
        while at < len(tiles) and taken[at] & rows:
            at += 1
        if at == len(tiles):
            tiles.append([])
            taken.append(0)
        tiles[at].append(piece)
        taken[at] |= rows
        earliest[piece.sequence] = at + 1
    return tiles


def only(batch: Batch, pieces: list[Piece]) -> Batch:
    """The batch of some pieces, one per sequence; no logits are wanted."""
    pieces = sorted(pieces, key=lambda piece: piece.count != 1)
    rows = torch.cat([torch.arange(piece.rows.start, piece.rows.stop) for piece in pieces])
    sequences = [piece.sequence for piece in pieces]
    return replace(
        batch,
        token_ids=batch.token_ids[rows],
        positions=batch.positions[rows],
        slots=tuple(slots[rows] for slots in batch.slots),
        block_tables=tuple(table[sequences] for table in batch.block_tables),
        context_lens=tuple(piece.first + piece.count for piece in pieces),
        cu_seqlens=(0, *accumulate(piece.count for piece in pieces)),
        logits_rows=batch.logits_rows[:0],
    )
