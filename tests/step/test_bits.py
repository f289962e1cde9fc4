"""On the native step an answer's bits do not depend on company, chunks, hits, preemption, pool or threads."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.differential import Subject, Tally, prove
from harness.engines import BLOCK, ask, words
from harness.families import family_path
from harness.traffic import Shape

from kvire.core.config import EngineConfig
from kvire.core.spec import KVSpec
from kvire.engine.build import build_engine
from kvire.engine.engine import Engine
from kvire.step.model import StepModel

pytest.importorskip("kvire._native")
FAMILY = "qwen3"
TOKEN_BYTES = {"float32": 3 * 2 * 32 * 4, "float16": 3 * 2 * 32 * 2, "int8": 3 * 2 * (32 + 2 * 4)}  # K and V of a token
FOLDER = tempfile.TemporaryDirectory(prefix="kvire-packed-")


@pytest.fixture(autouse=True)
def cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVIRE_CACHE_DIR", FOLDER.name)


def step_engine(num_blocks: int, *, dtype: str = "float16", weights: str = "int8", **options: Any) -> Engine:
    """A tiny Qwen 3 as a native step; deterministic is what it always is."""
    options = {name: value for name, value in options.items() if name not in {"deterministic", "attention"}}
    store = options.pop("store", None)
    memory = num_blocks * BLOCK * TOKEN_BYTES[dtype]
    config = EngineConfig(block_size=BLOCK, kv_dtype=dtype, weights=weights, kv_memory=memory, **options)
    engine, _ = build_engine(str(family_path(FAMILY)), config, store=store)
    assert isinstance(engine.model, StepModel), "the native step runs"
    assert engine.pool.num_blocks == num_blocks
    return engine


def subject(dtype: str) -> Subject:
    def build(num_blocks: int, **options: Any) -> Engine:
        return step_engine(num_blocks, dtype=dtype, **options)

    return Subject(
        "native step", build, Shape(256, BLOCK, 6 * BLOCK + 1, 2 * BLOCK + 2), (9, 12, 20, 32, 64, 160), ("auto",)
    )


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "requests"), [("float16", 1200), ("int8", 400), ("float32", 400)])
def test_random_traffic_has_the_bits_of_an_engine_that_reuses_nothing(dtype: str, requests: int) -> None:
    tally = Tally()
    for first in range(0, requests, 50):
        tally.add(prove(subject(dtype), 7000 + first, 50, deterministic=True))
    assert not tally.faults, tally.faults[:3]
    assert tally.harmless == 0
    assert tally.reused_tokens > 0.1 * tally.prompt_tokens
    assert min(tally.evictions, tally.preemptions, tally.copies_on_write, tally.blocks_compared) > 0


def test_threads_and_instruction_sets_change_no_bit() -> None:
    prompt, found = words(3, 70), []
    for threads in (1, 2, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            engine = step_engine(20)
            answer = ask(engine, prompt, max_tokens=12, logprobs=3, ignore_eos=True)
            found.append((answer.token_ids, [one.top for one in answer.logprobs]))
            engine.close()
        finally:
            torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


def test_a_store_gives_the_same_bits_after_a_restart(tmp_path: Path) -> None:
    from kvire.core.config import StoreConfig  # noqa: PLC0415 - one test needs it

    store = StoreConfig(path=tmp_path / "store", disk_bytes=32 << 20, key_file=tmp_path / "keys.json", encrypt=False)
    prompt, found = words(5, 90), []
    for _ in range(2):
        engine = step_engine(20, store=store)
        engine.reuse.prefill.step(0, 90, 90, 5.0)  # computing is slow enough for the store to be worth it
        answer = ask(engine, prompt, max_tokens=12, logprobs=3, ignore_eos=True)
        found.append((answer.token_ids, [one.top for one in answer.logprobs]))
        loaded = answer.cache.disk_tokens if answer.cache else 0
        engine.close()
    assert loaded > 0 and found[0] == found[1]


def test_blocks_of_the_step_are_another_namespace() -> None:
    step, plain = step_engine(20), build_engine(str(family_path(FAMILY)), EngineConfig(kv_memory="4MiB"))[0]
    assert step.namespace.numerics == "float32/weights=int8/step/cpu"
    assert "layout=heads" in step.namespace.spec and "layout" not in plain.namespace.spec
    assert KVSpec(step.paged.spec.groups).layout == "tokens" and step.paged.spec.layout == "heads"
    step.close()
    plain.close()


def test_a_family_without_a_native_step_runs_all_the_same() -> None:
    engine, _ = build_engine(str(family_path("gpt2")), EngineConfig(weights="file", kv_memory="4MiB"))
    assert not isinstance(engine.model, StepModel)
    assert ask(engine, words(1, 20), max_tokens=3, ignore_eos=True).token_ids
    engine.close()
