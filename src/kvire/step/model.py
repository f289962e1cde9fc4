"""The engine's model over a native step: a batch in, logits out, one call."""

import logging
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvire.cache.batch import Batch
from kvire.cache.paged import PagedKV
from kvire.step.fuse import fuse
from kvire.step.lower import Lowered, lower
from kvire.step.program import Program
from kvire.step.record import record
from kvire.step.threads import StepThreads

log = logging.getLogger(__name__)


def recorded(model: PreTrainedModel, windows: dict[int, int | None]) -> Lowered:
    """A model's forward as operations on rows.

    Raises NotRecordableError. The model's attention is another one afterwards.
    """
    return fuse(lower(record(model, windows)))


class StepModel:
    """A recorded model over a pool that is laid out by heads."""

    def __init__(self, lowered: Lowered, paged: PagedKV) -> None:
        self._program = Program(lowered, paged)
        self._vocab_size = self._program.native.logits_width
        self._threads = StepThreads(torch.get_num_threads())

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Write the batch's KV into the pool and return logits of its logits_rows: float32 [R,
        vocab].
        """
        logits = torch.empty(batch.logits_rows.numel(), self._vocab_size)
        row_begin = torch.tensor(batch.cu_seqlens, dtype=torch.int64)
        context_lens = torch.tensor(batch.context_lens, dtype=torch.int64)
        tables: list[Any] = [table.contiguous() for table in batch.block_tables]
        assert all(table.dtype == torch.int32 for table in tables)
        started = perf_counter()
        self._program.native.run(
            token_ids=batch.token_ids.data_ptr(),
            positions=batch.positions.data_ptr(),
            sequences=len(batch.context_lens),
            row_begin=row_begin.data_ptr(),
            context_lens=context_lens.data_ptr(),
            block_tables=[table.data_ptr() for table in tables],
            table_strides=[table.shape[1] for table in tables],
            slots=[slots.data_ptr() for slots in batch.slots],
            wanted=batch.logits_rows.data_ptr(),
            wanted_rows=batch.logits_rows.numel(),
            logits=logits.data_ptr(),
            threads=self._threads.count,
        )
        self._threads.note(perf_counter() - started, self._program.native.waited_s)
        return logits
