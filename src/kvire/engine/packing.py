"""Packs chunks of sequences into the one batch that the model runs."""

import numpy as np
import numpy.typing as npt
import torch

from kvire.cache.batch import Batch
from kvire.engine.scheduler import Chunk


def logits_rows(chunk: Chunk) -> int:
    """Rows of logits that a chunk needs.

    All for prompt logprobs, one if a token is sampled, else none.
    """
    return chunk.count if chunk.seq.scores_prompt else int(chunk.completes)


def build_batch(chunks: list[Chunk], block_size: int) -> Batch:
    """Pack the chunks, in order, into one batch."""
    token_ids: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    cu_seqlens, context_lens = [0], []
    for chunk in chunks:
        start, end = chunk.seq.num_computed, chunk.seq.num_computed + chunk.count
        token_ids += chunk.seq.token_ids[start:end]
        positions += range(start, end)
        cu_seqlens.append(len(token_ids))
        context_lens.append(end)
        rows += range(len(token_ids) - logits_rows(chunk), len(token_ids))
    groups = [lease_group for chunk in chunks if chunk.seq.lease for lease_group in [chunk.seq.lease.leases]]
    tables = [_block_tables([leases[g].block_ids for leases in groups]) for g in range(len(groups[0]))]
    where = np.array(positions)
    owner = np.repeat(np.arange(len(chunks)), [chunk.count for chunk in chunks])
    block, offset = np.divmod(where, block_size)
    return Batch(
        token_ids=torch.from_numpy(np.array(token_ids)),
        positions=torch.from_numpy(where),
        slots=tuple(torch.from_numpy(t[owner, block].astype(np.int64) * block_size + offset) for t in tables),
        block_tables=tuple(map(torch.from_numpy, tables)),
        context_lens=tuple(context_lens),
        cu_seqlens=tuple(cu_seqlens),
        logits_rows=torch.from_numpy(np.array(rows, dtype=np.int64)),
    )


def _block_tables(tables: list[list[int | None]]) -> npt.NDArray[np.int32]:
    """int32 [S, M]. Entries that no token attends to, given back or beyond the end, are block 0."""
    width = max(len(table) for table in tables)
    padded = [[block_id or 0 for block_id in table] + [0] * (width - len(table)) for table in tables]
    return np.array(padded, dtype=np.int32)
