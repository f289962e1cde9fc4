"""Case N16: a longer prompt that is cached is cut back for a shorter one, though the window before the cut is gone.

Other systems then answer from rows that are not there, and keep the bad entry. A tiny Gemma 3 with a window of 512
tokens, at the case's own lengths; every answer is held against transformers' own uncached forward.
"""

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from harness.broken_builds import must_notice
from harness.differential import poison
from harness.engines import BLOCK, Answer, ask, engine_of, words
from harness.kv_mutants import window_hit_needs_too_little
from harness.loads import PATIENT_S
from harness.plain_generate import greedy, tiny
from harness.store_engine_mutants import window_loaded_one_block_short
from harness.stored import Tiers, disk, memory, say_what_prefill_costs, store_over
from harness.waiting import PATIENCE_S
from models.tiny import make_tiny
from transformers import AutoModelForCausalLM

from kvire.connectors.transformers import StoredCache
from kvire.core.config import StoreConfig
from kvire.core.spec import KVSpec
from kvire.engine.engine import Engine
from kvire.llm import LLM
from kvire.models.loader import LoadedModel, load_model
from kvire.models.resolve import resolve
from kvire.store.tiered import TieredStore

WINDOW, LONG = 512, 3000
CUTS = (1400, 600, 513, 512, 1)
ROUND = (LONG, *CUTS, LONG)
NEW_TOKENS = 4
PROMPT = words(16, LONG)
WINDOW_BLOCKS = 2 * (WINDOW // BLOCK + 1) + 4  # two windows and a chunk: far less than the prompt
LOGPROB_TOLERANCE = 2e-4
LAYERS: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
    "max_position_embeddings": 4096,
}


@cache
def loaded() -> LoadedModel:
    with TemporaryDirectory() as folder:
        return load_model(make_tiny("gemma3_text", Path(folder), **LAYERS))


def engine(store: TieredStore | None = None, window_blocks: int = WINDOW_BLOCKS) -> Engine:
    """Nothing is remembered yet; KV that nobody wrote is NaN."""
    spec = KVSpec(loaded().groups, "float32", BLOCK)
    blocks = [256 if group.window is None else window_blocks for group in spec.groups]
    made = engine_of(deepcopy(loaded().model), spec, blocks, store=store, max_batch_tokens=128)
    if store is not None:
        say_what_prefill_costs(made, PATIENT_S)
    poison(made)
    return made


@cache
def uncached(length: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Greedy tokens and their log-probabilities, each from one plain forward of the whole text."""
    ids, chosen, logprobs = PROMPT[:length], [], []
    for _ in range(NEW_TOKENS):
        with torch.inference_mode():
            scores = torch.log_softmax(loaded().model(torch.tensor([ids]), use_cache=False).logits[0, -1].float(), -1)
        chosen.append(int(scores.argmax()))
        logprobs.append(float(scores.max()))
        ids = [*ids, chosen[-1]]
    return tuple(chosen), tuple(logprobs)


def asked(made: Engine, length: int) -> Answer:
    """One prompt of the case; its answer is the uncached one."""
    answer = ask(made, PROMPT[:length], max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, logprobs=0)
    tokens, logprobs = uncached(length)
    assert tuple(answer.token_ids) == tokens, length
    assert [entry.logprob for entry in answer.logprobs] == pytest.approx(logprobs, abs=LOGPROB_TOLERANCE), length
    return answer


def reused(made: Engine) -> list[int]:
    """Tokens reused, prompt by prompt."""
    return [asked(made, length).cache.reused_tokens for length in ROUND]


def in_a_small_pool() -> None:
    """What has left the window was given back, and only runs of whole windows that nobody took are reused."""
    made = engine()
    assert reused(made) == [0, 384, 0, 512, 511, 0, 600]
    assert asked(made, LONG).cache.reused_tokens == LONG - 1


def in_a_pool_with_room() -> None:
    """Every cut is reused to its last token but one, since its window was not needed by anybody else."""
    assert reused(engine(window_blocks=256)) == [0, 1399, 599, 512, 511, 0, LONG - 1]


def from_a_store(tiers: Tiers, folder: Path) -> None:
    """Whole blocks, and only as many as lie in the window before the end; from the disk also after a restart."""
    with store_over(tiers, folder) as store:
        asked(engine(store), LONG)
        assert store.flush(PATIENCE_S)
        if tiers is memory:
            cut_back(store)
    if tiers is disk:
        with store_over(tiers, folder) as store:
            cut_back(store)


def cut_back(store: TieredStore) -> None:
    for length in (*CUTS, LONG):
        found = asked(engine(store), length).cache
        assert found.reused_tokens == found.memory_tokens + found.disk_tokens == (length - 1) // BLOCK * BLOCK, length


@pytest.mark.parametrize("claim", [in_a_small_pool, in_a_pool_with_room])
def test_in_the_pool_alone(claim: Callable[[], None]) -> None:
    claim()


@pytest.mark.parametrize("tiers", [memory, disk])
def test_from_a_store(tiers: Tiers, tmp_path: Path) -> None:
    from_a_store(tiers, tmp_path)


def test_with_a_stored_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under transformers' own generate, which keeps whole windows only; then again after a restart."""
    monkeypatch.setattr("kvire.plan.cost.PrefillSpeed.seconds", lambda *_: PATIENCE_S)
    model = tiny("gemma3_text", tmp_path / "model", **LAYERS)
    config = StoreConfig(path=tmp_path / "store", disk_bytes=64 << 20, key_file=tmp_path / "keys" / "keyring.json")
    with StoredCache.open(model, config) as stored:
        stored.generate(torch.tensor([PROMPT]), **greedy(NEW_TOKENS))
    for length in (*CUTS, LONG):
        ids = torch.tensor([PROMPT[:length]])
        with StoredCache.open(model, config) as stored:
            assert torch.equal(stored.generate(ids, **greedy(NEW_TOKENS)), model.generate(ids, **greedy(NEW_TOKENS)))
            assert stored.report.reused_tokens == (length - 1) // BLOCK * BLOCK


def test_broken_builds_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        must_notice(in_a_small_pool, window_hit_needs_too_little, patch)
    with monkeypatch.context() as patch:
        must_notice(lambda: from_a_store(memory, tmp_path), window_loaded_one_block_short, patch)


@pytest.mark.model
@pytest.mark.usefixtures("loading_pays")
def test_gemma3_270m(tmp_path: Path) -> None:
    """The real model: pool, then disk after a restart."""
    store, expected = tmp_path / "store", {}
    for turn in ("cold", "restarted"):
        with LLM("gemma3-270m", store=store, kv_memory="512MiB") as llm:
            ids = llm.tokenizer(" ".join(str(i * i) for i in range(1500))).input_ids[:LONG]
            for length in ROUND:
                got = llm.generate(ids[:length], max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
                if turn == "cold" and length not in expected:
                    with torch.inference_mode():
                        text = torch.tensor([[*ids[:length], *got.token_ids]])
                        scores = oracle()(text).logits[0, length - 1 : -1]
                    expected[length] = scores.argmax(-1).tolist()
                assert got.token_ids == expected[length], (turn, length)
                assert turn == "cold" or length == 1 or got.cache.reused_tokens > 0


@cache
def oracle() -> torch.nn.Module:
    """The same weights, as transformers runs them."""
    return AutoModelForCausalLM.from_pretrained(resolve("gemma3-270m"), dtype=torch.float32).eval()
