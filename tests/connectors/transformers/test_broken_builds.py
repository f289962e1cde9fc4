"""Deliberately broken builds of the stored cache, and the claims that notice them."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.broken_builds import Cases, Claim, Mutant, each_broken_build, each_claim, must_notice
from harness.plain_generate import greedy, prompt, tiny
from transformers.models.llama import modeling_llama

from kvire.connectors.transformers import StoredCache
from kvire.connectors.transformers import loading as loading_module
from kvire.connectors.transformers import weights as weights_module
from kvire.connectors.transformers.blocks import CACHE
from kvire.connectors.transformers.computed import Computed
from kvire.core.config import StoreConfig
from kvire.models.code_digest import ModelCode

BLOCK = 16


def config(path: Path) -> StoreConfig:
    return StoreConfig(path=path / "store", disk_bytes=64 << 20, key_file=path / "keys" / "keyring.json")


def what_generate_took_back_is_not_stored() -> None:
    """It computes ahead, notices late that it was to stop, and crops: 119 tokens were computed, and 108 are kept."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place)
        model, ids = tiny("llama", path / "model"), prompt(100)
        whole = model.generate

        def cropping(**arguments):
            out = whole(**arguments)
            arguments[CACHE].crop(-11)
            return out

        model.generate = cropping
        with StoredCache.open(model, config(path)) as stored:
            expected = stored.generate(ids, **greedy(20))
            assert stored.store.flush(10)
            assert stored.store.stats().handles["disk"].tier.blocks == 108 // BLOCK
            assert torch.equal(stored.generate(ids, **greedy(20)), expected)
            assert stored.report.reused_tokens == 96


def one_token_is_always_computed() -> None:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place)
        model, ids = tiny("llama", path / "model"), prompt(4 * BLOCK)
        with StoredCache.open(model, config(path)) as stored:
            for reused in (0, 3 * BLOCK):
                assert torch.equal(stored.generate(ids, **greedy(8)), model.generate(ids, **greedy(8)))
                assert stored.report.reused_tokens == reused


def edited_models_find_nothing_of_before(edit: Callable[[pytest.MonkeyPatch, Any], None]) -> Claim:
    """Between two calls, and after opening anew."""

    def claim() -> None:
        with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
            path = Path(place)
            model, ids = tiny("llama", path / "model"), prompt(4 * BLOCK)
            with StoredCache.open(model, config(path)) as stored:
                stored.generate(ids, **greedy(2))
                edit(patch, model)
                stored.generate(ids, **greedy(2))
                assert stored.report.reused_tokens == 0
            edit(patch, model)
            with StoredCache.open(model, config(path)) as stored:
                stored.generate(ids, **greedy(2))
                assert stored.report.reused_tokens == 0

    claim.__name__ = f"nothing_is_found_after_{edit.__name__}"
    return claim


def an_edited_number(patch: pytest.MonkeyPatch, model: Any) -> None:
    model.model.layers[0].self_attn.scaling *= 2


def an_edited_function(patch: pytest.MonkeyPatch, model: Any) -> None:
    rotate = modeling_llama.rotate_half
    patch.setattr(modeling_llama, "rotate_half", lambda x: 2 * rotate(x))


def numbers_do_not_count(patch: pytest.MonkeyPatch) -> None:
    """Only tensors do."""
    patch.setattr(weights_module, "plain_attributes", lambda model: b"")


def code_does_not_count(patch: pytest.MonkeyPatch) -> None:
    """A model is its weights and its config."""
    patch.setattr(ModelCode, "current", lambda self: "")


def code_is_looked_at_once(patch: pytest.MonkeyPatch) -> None:
    """When the model is opened."""
    patch.setattr(ModelCode, "current", lambda self: self._walk.hexdigest)


def cropped_tokens_are_stored(patch: pytest.MonkeyPatch) -> None:
    """What went into the cache counts, not what is left of it."""

    def broken(self, limit):
        fed = torch.cat(self._fed).tolist() if self._fed else []
        return (self._prompt[: self._start] + fed)[:limit]

    patch.setattr(Computed, "token_ids", broken)


def whole_prompts_are_loaded(patch: pytest.MonkeyPatch) -> None:
    """No token is left to compute."""
    patch.setattr(loading_module, "loadable", lambda chain: len(chain.token_ids) // chain.block_size)


CASES: Cases = [
    (what_generate_took_back_is_not_stored, [cropped_tokens_are_stored]),
    (one_token_is_always_computed, [whole_prompts_are_loaded]),
    (edited_models_find_nothing_of_before(an_edited_number), [numbers_do_not_count]),
    (edited_models_find_nothing_of_before(an_edited_function), [code_does_not_count, code_is_looked_at_once]),
]


@each_claim(CASES)
def test_holds(claim: Claim) -> None:
    claim()


@each_broken_build(CASES)
def test_notices_a_broken_build(claim: Claim, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    must_notice(claim, mutant, monkeypatch)
