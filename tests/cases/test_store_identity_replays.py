"""Replays of bug reports about who may use which stored block, as in test_store_replays.py."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
from engine import test_store
from harness import store_engine_mutants as broken
from harness import store_mutants as broken_store
from harness.broken_builds import Cases, Claim, Mutant, each_broken_build, each_claim, must_notice
from harness.engines import BLOCK, ask, oracle, words
from harness.families import family_path
from harness.loads import PATIENT_S, engine_over, explained, folder, keep, say_its_namespace_is
from harness.stored import disk, memory, memory_and_disk, say_what_prefill_costs, shared_folder, store_over

from kvire.core.config import EngineConfig
from kvire.engine.build import build_engine
from kvire.engine.engine import Engine
from kvire.store.tiered import TieredStore

B = BLOCK


def trained_on(model: Path) -> None:
    """Other weights of the same shapes, under the same name."""
    path = model / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    weights["model.layers.1.self_attn.v_proj.weight"] *= 1.5
    safetensors.torch.save_file(weights, path, metadata={"format": "pt"})


def engine_from(model: Path, store: TieredStore | None = None) -> Engine:
    config = EngineConfig(block_size=B, kv_memory="1MiB", attention="portable")
    engine, _ = build_engine(str(model), config, store=store)
    say_what_prefill_costs(engine, PATIENT_S)
    return engine


def s17_weights_replaced_under_one_name() -> None:
    """The old engine and its store live on beside the new one."""
    prompt = words(17, 5 * B + 2)
    with folder() as path, store_over(memory, path) as store:
        model = shutil.copytree(family_path("llama"), path / "model")
        old = engine_from(model, store)
        first = ask(old, prompt)
        assert store.flush(10)
        trained_on(model)
        for new in (engine_from(model, store), old):
            again = ask(new, prompt)
            expected = ask(engine_from(model), prompt) if new is not old else first
            assert again.token_ids == expected.token_ids
            assert again.cache.reused_tokens == (0 if new is not old else len(prompt) - 1)
        assert again.token_ids != ask(engine_from(model), prompt).token_ids, "the weights do make a difference"


def s18_adapters_of_one_name() -> None:
    prompt = words(18, 4 * B + 1)
    with folder() as path, store_over(memory_and_disk, path) as store:
        for adapter, reused in (("a" * 64, 0), ("b" * 64, 0), ("", 0), ("a" * 64, 4 * B), ("", 4 * B)):
            engine = say_its_namespace_is(engine_over(store), adapter=adapter)
            assert ask(engine, prompt).cache.reused_tokens == reused, adapter[:1]
            assert store.flush(10)


def s20_salts_in_every_tier() -> None:
    for tiers in (memory, disk, shared_folder):
        with folder() as path:
            test_store.test_tenants_and_salts_share_nothing_in_any_tier(path, tiers)


def s20_forgotten_tenants() -> None:
    with folder() as path:
        test_store.test_a_forgotten_tenant_finds_nothing_and_the_others_everything(path, memory)


def s21_hash_seeds_of_other_processes() -> None:
    """Processes with other hash seeds, without torch, compute the same keys and find the blocks of this one."""
    prompt = words(21, 5 * B)
    with folder() as path:
        with store_over(disk, path) as store:
            keep(store, prompt)
            root = engine_over(store).reuse.name().root
        found = set()
        for seed in ("0", "1", "12345"):
            environment = {"PYTHONHASHSEED": seed, "PATH": "/usr/bin:/bin"}
            told = subprocess.run(
                [sys.executable, "-c", READER, str(path / "disk"), root.hex(), ",".join(map(str, prompt))],
                env=environment, capture_output=True, text=True, check=True,
            )  # fmt: skip
            found.add(told.stdout)
        (lines,) = found
        assert lines.split()[-1] == "5" and len(lines.split()) == 6


READER = """
import sys
from kvire.core.keys import block_keys
from kvire.core.record import BlockId
from kvire.store.disk.tier import DiskTier
folder, root, prompt = sys.argv[1:]
keys = block_keys(bytes.fromhex(root), [int(token) for token in prompt.split(",")], 16)
with DiskTier(folder) as tier:
    print(*(key.hex() for key in keys), sum(tier.held([BlockId(key, 0) for key in keys])))
assert "torch" not in sys.modules
"""


def s22_another_model_of_the_same_name() -> None:
    """Over restarts on one disk; what the first model left is used when it comes back."""
    prompt = words(22, 5 * B + 2)
    with folder() as path:
        model = shutil.copytree(family_path("llama"), path / "model")
        shutil.copytree(model, path / "first")
        for change, reused in ((None, 0), (trained_on, 0), (None, 5 * B)):
            shutil.rmtree(model)
            shutil.copytree(path / "first", model)
            if change is not None:
                change(model)
            with store_over(disk, path) as store:
                answer = ask(engine_from(model, store), prompt)
                assert store.flush(10)
            assert answer.cache.reused_tokens == reused
            assert answer.token_ids == ask(engine_from(model), prompt).token_ids


def s23_another_layout_of_the_same_size() -> None:
    prompt = words(23, 4 * B + 1)
    layouts = {
        "kv_dtype": "bfloat16", "block_size": 2 * B, "spec": "heads and tokens transposed", "weights": "same shapes",
        "layout_version": 0,
    }  # fmt: skip
    with folder() as path:
        with store_over(disk, path) as store:
            keep(store, prompt)
        for name, value in layouts.items():
            with store_over(disk, path) as store:
                answer = explained(say_its_namespace_is(engine_over(store), **{name: value}), prompt)
                assert (answer.cache.reused_tokens, answer.cache.miss_detail) == (0, name)
                assert answer.token_ids == oracle(prompt).token_ids


CASES: Cases = [
    (s17_weights_replaced_under_one_name, [broken.weights_are_known_by_name]),
    (s18_adapters_of_one_name, [broken_store.salt_dropped]),
    (s20_salts_in_every_tier, [broken.cache_salt_dropped]),
    (s20_forgotten_tenants, [broken.salt_dropped, broken.forgotten_salts_are_remembered]),
    (s21_hash_seeds_of_other_processes, [broken.keys_from_the_builtin_hash]),
    (s22_another_model_of_the_same_name, [broken.weights_are_known_by_name]),
    (s23_another_layout_of_the_same_size, [broken_store.salt_dropped, broken.misses_are_not_explained]),
]  # fmt: skip


@each_claim(CASES)
def test_holds(claim: Claim) -> None:
    claim()


@each_broken_build(CASES)
@pytest.mark.timeout(180)
def test_notices_a_broken_build(claim: Claim, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    must_notice(claim, mutant, monkeypatch)
