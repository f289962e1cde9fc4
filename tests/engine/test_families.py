"""Every supported family over the paged cache equals its own uncached forward, in mixed batches."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.backends import BACKENDS
from models.tiny import EACH_FAMILY, make_tiny
from transformers import AutoModelForCausalLM

from kvire.attention.paged_cache import PagedCache, PagedModel
from kvire.cache.batch import Batch
from kvire.cache.paged import PagedKV
from kvire.core.spec import KVSpec
from kvire.models.families import expanded_elements_per_token
from kvire.models.loader import LoadedModel, load_model

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


class Tiny(dict[str, Path]):
    """The tiny model of each family, made when it is asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __missing__(self, family: str) -> Path:
        self[family] = make_tiny(family, self.folder / family)
        return self[family]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("make_backend", BACKENDS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("family", EACH_FAMILY)
def test_logits_equal_the_uncached_forward(family: str, make_backend, tiny: dict[str, Path]) -> None:
    for seq, expected in run_mixed(load_model(tiny[family]), make_backend(), "float32", seed=1):
        assert torch.cat(seq.logits).sub(expected).abs().max() < TOLERANCE["float32"]


@pytest.mark.parametrize("make_backend", BACKENDS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "family", ["llama", "gemma3_text", "gemma4_text", "gpt2", "gpt_oss", "deepseek_v2", "deepseek_v3", "olmo3"]
)
def test_half_precision_pools_stay_close(family: str, dtype: str, make_backend, tiny: dict[str, Path]) -> None:
    """Typically: where rounding sends a token to another expert, its logits may differ by anything."""
    for seq, expected in run_mixed(load_model(tiny[family]), make_backend(), dtype, seed=2):
        typical = torch.cat(seq.logits).sub(expected).abs().amax(dim=-1).median()
        assert 0 < typical < TOLERANCE[dtype]


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_every_block_in_reach_counts_and_no_other(family: str, tiny: dict[str, Path]) -> None:
    """What gives the matrix its worth: zeroing any one block of a group moves the next logits, if the group sees it."""
    loaded = load_model(tiny[family])
    ids = [(37 * i + 11) % 256 for i in range(60)]
    paged = PagedKV(KVSpec(loaded.groups, "float32", BLOCK), 8)
    model = PagedModel(loaded.model, PagedCache(paged, BACKENDS[0]()))
    seq = Stored(ids, [5, 1, 7, 0, 3, 2, 6, 4])
    step(model, len(loaded.groups), [(seq, 60)])
    for g, group in enumerate(loaded.groups):
        seen_from = 0 if group.window is None else len(ids) - group.window
        for index, block in enumerate(seq.table[:7]):  # the last one, of token 59, is written again
            kept = paged.slabs[g][block].clone()
            paged.slabs[g][block] = 0
            again = Stored(ids, seq.table, computed=59)
            step(model, len(loaded.groups), [(again, 1)])
            moved = (again.logits[0] - seq.logits[0][-1:]).abs().max()
            assert (moved > 1e-2) if (index + 1) * BLOCK > seen_from else (moved < 1e-4), (group, index, moved)
            paged.slabs[g][block] = kept


# Two sets of factors that are far apart.
LONGROPE = {
    "original_max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [1.5 + i for i in range(8)],
        "original_max_position_embeddings": 32,
    },
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-dynamic": ("llama", {"rope_parameters": DYNAMIC}),
    "hunyuan-alpha": ("hunyuan_v1_dense", {"head_dim": 16, "rope_parameters": DYNAMIC | {"alpha": 1000.0}}),
    "phi3-longrope": ("phi3", LONGROPE),
    "olmo3-yarn": ("olmo3", {"rope_scaling": YARN}),
    "deepseek-yarn": ("deepseek_v2", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}}),
    "deepseek-whole-q": ("deepseek_v2", {"q_lora_rank": None}),
    "gemma4-no-sharing": ("gemma4_text", {"num_kv_shared_layers": 0, "use_bidirectional_attention": "vision"}),
    "gemma4-k-is-v": (
        "gemma4_text",
        {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
        },
    ),
    "gemma4-experts": (
        "gemma4_text",
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    ),
    "mixtral-full": ("mixtral", {"sliding_window": None}),
    "exaone4-no-window": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "qwen3_moe-full": ("qwen3_moe", {"use_sliding_window": False}),
    "smollm3-as-released": ("smollm3", {"use_sliding_window": False}),
    "gpt_neox-sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": False}),
}


@pytest.mark.parametrize("make_backend", BACKENDS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("variant", VARIANTS)
def test_other_forms_of_a_family(variant: str, make_backend, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    loaded = load_model(make_tiny(family, tmp_path / variant, **overrides))
    for seq, expected in run_mixed(loaded, make_backend(), "float32", seed=3):
        assert torch.cat(seq.logits).sub(expected).abs().max() < TOLERANCE["float32"]


def test_longrope_has_the_factors_of_the_longest_sequence(tmp_path: Path) -> None:
    """As transformers has them at that length, whatever the length of the sequence at hand."""
    path = make_tiny("phi3", tmp_path / "phi3", sliding_window=None, **LONGROPE)
    ids = torch.tensor([[(7 * i) % 256 for i in range(40)]])
    plain = AutoModelForCausalLM.from_pretrained(path)
    short, long = load_model(path, max_model_len=32), load_model(path, max_model_len=2048)
    with torch.inference_mode():
        of_short, of_long = plain(ids[:, :32]).logits, plain(ids).logits
        assert torch.equal(short.model(ids[:, :32]).logits, of_short)
        assert torch.equal(long.model(ids).logits, of_long)
        assert (long.model(ids[:, :32]).logits - of_long[:, :32]).abs().max() < 1e-4
        assert (of_short - of_long[:, :32]).abs().max() > 0.1
    assert short.config_digest != long.config_digest
    assert load_model(path).config_digest == long.config_digest


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_latent_attention_keeps_a_fraction_of_what_its_heads_would(family: str, tiny: dict[str, Path]) -> None:
    """4 heads of 24 + 16 numbers a layer become one latent of 32 + 8: a quarter of the bytes in the pool."""
    loaded = load_model(tiny[family])
    config = loaded.config
    expanded = config.num_hidden_layers * config.num_attention_heads * (config.qk_head_dim + config.v_head_dim)
    paged = PagedKV(KVSpec(loaded.groups, "float16", BLOCK), 10)
    assert paged.nbytes / (10 * BLOCK) == config.num_hidden_layers * (32 + 8) * 2
    assert expanded_elements_per_token(config) == expanded == 4 * paged.nbytes / (10 * BLOCK) / 2


def test_layers_that_share_kv_keep_none(tiny: dict[str, Path]) -> None:
    loaded = load_model(tiny["gemma4_text"])
    assert [(group.layers, group.key_width) for group in loaded.groups] == [((1, 3), 32), ((0, 2), 16)]


def test_what_deepseek_keeps_is_its_latent(tiny: dict[str, Path]) -> None:
    """Stored bytes = layers x (rank + rope width) x bytes, whatever the number of heads."""
    loaded = load_model(tiny["deepseek_v3"])
    config = loaded.config
    paged = PagedKV(KVSpec(loaded.groups, "float16", BLOCK), 10)
    per_token = config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim) * 2
    assert paged.nbytes == 10 * BLOCK * per_token


def test_gemma3_keeps_two_groups(tiny: dict[str, Path]) -> None:
    loaded = load_model(tiny["gemma3_text"])
    assert [group.window for group in loaded.groups] in ([24, None], [None, 24])


def test_two_engines_in_one_process_do_not_meet(tiny: dict[str, Path]) -> None:
    """Steps of two models alternate; each keeps its own cache."""
    make_backend = BACKENDS[0]
    runs = []
    for family in ("llama", "qwen3"):
        loaded = load_model(tiny[family])
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
