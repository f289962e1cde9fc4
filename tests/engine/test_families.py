"""Every supported family over the paged cache equals its own uncached forward, in mixed batches."""

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from harness.backends import BACKENDS
from models.tiny import FAMILIES, make_tiny

from kvire.attention.paged_cache import PagedCache, PagedModel
from kvire.cache.batch import Batch
from kvire.cache.paged import PagedKV
from kvire.core.spec import KVSpec
from kvire.models.loader import LoadedModel, load

BLOCK = 8
NUM_BLOCKS = 120
# Largest difference of a logit; logits of the tiny models lie between about -30 and 30.
TOLERANCE = {"float32": 2e-3, "float16": 0.3, "bfloat16": 1.0}


@dataclass
class Stored:
    """A sequence whose first `computed` tokens are in the pool."""

    token_ids: list[int]
    table: list[int]
    computed: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)


def step(model: PagedModel, groups: int, chunks: list[tuple[Stored, int]]) -> None:
    """Compute `count` more tokens of each sequence, all of their logits included."""
    chunks = sorted(chunks, key=lambda chunk: chunk[1] != 1)
    ids, positions, slots, cu_seqlens = [], [], [], [0]
    for seq, count in chunks:
        where = range(seq.computed, seq.computed + count)
        ids += [seq.token_ids[p] for p in where]
        positions += where
        slots += [seq.table[p // BLOCK] * BLOCK + p % BLOCK for p in where]
        cu_seqlens.append(len(ids))
    width = max(len(seq.table) for seq, _ in chunks)
    table = torch.tensor([seq.table + [0] * (width - len(seq.table)) for seq, _ in chunks], dtype=torch.int32)
    batch = Batch(
        token_ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        slots=(torch.tensor(slots),) * groups,
        block_tables=(table,) * groups,
        context_lens=tuple(seq.computed + count for seq, count in chunks),
        cu_seqlens=tuple(cu_seqlens),
        logits_rows=torch.arange(len(ids)),
    )
    rows = model.forward(batch)
    for i, (seq, count) in enumerate(chunks):
        seq.logits.append(rows[cu_seqlens[i] : cu_seqlens[i + 1]])
        seq.computed += count


def run_mixed(loaded: LoadedModel, backend, dtype: str, seed: int) -> list[tuple[Stored, torch.Tensor]]:
    """Five sequences arrive one after the other, prefill in chunks of any size and decode beside each other.

    Returns each with the logits of the plain, uncached forward.
    """
    rng = random.Random(seed)
    lengths = [90, 3, 41, 33, 64]  # the tiny windows are 24 tokens
    sequences = [[rng.randrange(256) for _ in range(n)] for n in lengths]
    with torch.inference_mode():
        expected = [loaded.model(torch.tensor([ids])).logits[0] for ids in sequences]
    paged = PagedKV(KVSpec(loaded.groups, dtype, BLOCK), NUM_BLOCKS)
    model = PagedModel(loaded.model, PagedCache(paged, backend))
    free = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    stored = [Stored(ids, [free.pop() for _ in range(-(-len(ids) // BLOCK))]) for ids in sequences]
    arrived = 0
    while any(seq.computed < len(seq.token_ids) for seq in stored):
        arrived = min(arrived + 1, len(stored))
        chunks = []
        for seq in stored[:arrived]:
            left = len(seq.token_ids) - seq.computed
            # The last ten tokens of each come one by one, as decodes do.
            if left:
                chunks.append((seq, 1 if left <= 10 else rng.randint(1, left - 10)))
        step(model, len(loaded.groups), chunks)
    return list(zip(stored, expected, strict=True))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    return {family: make_tiny(family, folder / family) for family in FAMILIES}


@pytest.mark.parametrize("make_backend", BACKENDS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_uncached_forward(family: str, make_backend, tiny: dict[str, Path]) -> None:
    for seq, expected in run_mixed(load(tiny[family]), make_backend(), "float32", seed=1):
        assert torch.cat(seq.logits).sub(expected).abs().max() < TOLERANCE["float32"]


@pytest.mark.parametrize("make_backend", BACKENDS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_half_precision_pools_stay_close(family: str, dtype: str, make_backend, tiny: dict[str, Path]) -> None:
    """Typically: where rounding sends a token to another expert, its logits may differ by anything."""
    for seq, expected in run_mixed(load(tiny[family]), make_backend(), dtype, seed=2):
        typical = torch.cat(seq.logits).sub(expected).abs().amax(dim=-1).median()
        assert 0 < typical < TOLERANCE[dtype]


def test_what_deepseek_keeps_is_its_latent(tiny: dict[str, Path]) -> None:
    """Stored bytes = layers x (rank + rope width) x bytes, whatever the number of heads."""
    loaded = load(tiny["deepseek_v3"])
    config = loaded.config
    paged = PagedKV(KVSpec(loaded.groups, "float16", BLOCK), 10)
    per_token = config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim) * 2
    assert paged.nbytes == 10 * BLOCK * per_token


def test_gemma3_keeps_two_groups(tiny: dict[str, Path]) -> None:
    loaded = load(tiny["gemma3_text"])
    assert [group.window for group in loaded.groups] in ([24, None], [None, 24])


def test_two_engines_in_one_process_do_not_meet(tiny: dict[str, Path]) -> None:
    """Steps of two models alternate; each keeps its own cache."""
    make_backend = BACKENDS[0]
    runs = []
    for family in ("llama", "qwen3"):
        loaded = load(tiny[family])
        ids = [(7 * i) % 256 for i in range(40)]
        with torch.inference_mode():
            expected = loaded.model(torch.tensor([ids])).logits[0]
        paged = PagedKV(KVSpec(loaded.groups, "float32", BLOCK), 8)
        runs.append(
            (PagedModel(loaded.model, PagedCache(paged, make_backend())), Stored(ids, [5, 1, 7, 0, 3]), expected)
        )
    for _ in range(4):
        for model, seq, _ in runs:
            step(model, 1, [(seq, 10)])
    for _, seq, expected in runs:
        assert torch.cat(seq.logits).sub(expected).abs().max() < TOLERANCE["float32"]
