"""A recorded model may serve only after it has answered as transformers does.

Both run over the same packed matrices, on the same random tokens, as a prompt and as next tokens.
Their products agree bit for bit where their inputs do, so that what is left is the rounding of
norms and attention; a wrong program is far outside of it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvire.attention.paged_cache import PagedCache, PagedModel
from kvire.attention.reference import PortableAttention
from kvire.cache.batch import Batch
from kvire.cache.paged import PagedKV
from kvire.core.spec import KVSpec
from kvire.step.lower import Lowered
from kvire.step.model import StepModel
from kvire.step.record import NotRecordableError

CHUNKS = (17, 1, 2, 30)  # tokens of consecutive steps: blocks are begun, filled and left
WORST_DIVERGENCE = 0.05  # nats, of any token; rounding gives thousandths, a wrong rotary angle several


def prove(lowered: Lowered, model: Any, spec: KVSpec, vocab_size: int) -> None:
    """Raises NotRecordableError if the program answers otherwise than the model.

    spec: of the pool that the program will run over.
    """
    blocks = -(-sum(CHUNKS) // spec.block_size) + 1
    ids = torch.randint(0, vocab_size, (sum(CHUNKS),), generator=torch.Generator().manual_seed(0))
    plain = KVSpec(spec.groups, "float32", spec.block_size)
    exact = KVSpec(spec.groups, "float32", spec.block_size, "heads")
    found = _answers(lambda paged: StepModel(lowered, paged), exact, blocks, ids)
    expected = _answers(lambda paged: PagedModel(model, PagedCache(paged, PortableAttention())), plain, blocks, ids)
    p, q = expected.double().log_softmax(-1), found.double().log_softmax(-1)
    worst = float((p.exp() * (p - q)).sum(-1).max())
    if not worst < WORST_DIVERGENCE:  # also if it is no number
        raise NotRecordableError(f"the recorded step answers otherwise than the model (KL {worst:.3g})")


def _answers(make: Callable[[PagedKV], Any], spec: KVSpec, blocks: int, ids: Tensor) -> Tensor:
    """Logits of every token, of two sequences that take turns and then run together.

    In each step the wanted rows are in another order than the tokens.
    """
    paged = PagedKV(spec, 2 * blocks)
    model, found = make(paged), []
    tables = torch.arange(2 * blocks, dtype=torch.int32).flip(0).view(2, blocks)
    start = 0
    for count in CHUNKS:
        turns = ([0], [1]) if count > 2 else ([0, 1],)
        found += [model.forward(_step(spec, tables, parts, ids, start, count)) for parts in turns]
        start += count
    del model
    paged.close()
    return torch.cat(found)


def _step(spec: KVSpec, tables: Tensor, parts: list[int], ids: Tensor, start: int, count: int) -> Batch:
    """Tokens start .. start + count - 1 of some sequences; the second has other tokens."""
    positions = torch.arange(start, start + count)
    token_ids = torch.cat([ids[positions] if part == 0 else ids.flip(0)[positions] for part in parts])
    blocks = torch.stack([tables[part][positions // spec.block_size] for part in parts]).flatten().long()
    where = positions.repeat(len(parts))
    return Batch(
        token_ids=token_ids,
        positions=where,
        slots=(blocks * spec.block_size + where % spec.block_size,) * len(spec.groups),
        block_tables=(tables[parts].contiguous(),) * len(spec.groups),
        context_lens=(start + count,) * len(parts),
        cu_seqlens=tuple(range(0, count * len(parts) + 1, count)),
        logits_rows=torch.arange(count * len(parts)).flip(0)[: max(1, count * len(parts) - 3)],
    )
