"""Where config and files disagree on whether the output matrix is the embedding: as transformers, or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvire.core.errors import UnsupportedModelError
from kvire.models.catalog import describe
from kvire.models.loader import load_model
from kvire.models.planned import find_model

from .tiny import make_tiny

FAMILIES = ("llama", "qwen3", "gemma3_text")  # by its class, the last one is tied
ROWS, WIDTH = 320, 64


def _change(folder: Path, head: torch.Tensor | None, **config: Any) -> None:
    """Fields of the config, None to remove one; the output matrix in the file, None for none."""
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | config
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    if head is not None:
        tensors["lm_head.weight"] = head
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _noise() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(7))


def _in_file(folder: Path) -> int:
    return sum(value.numel() for value in load_file(folder / "model.safetensors").values())


def _assert_as_transformers(folder: Path) -> None:
    """The same greedy answers to 20 prompts, and everybody counts what the file has."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = load_model(folder).model
    for seed in range(20):
        prompt = torch.randint(0, 256, (1, 12), generator=torch.Generator().manual_seed(seed))
        options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        assert torch.equal(ours.generate(prompt, **options), theirs.generate(prompt, **options))
    assert describe(str(folder)).parameters == find_model(str(folder)).shape.weights.total == _in_file(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_matrix_too_many_counts_as_transformers_takes_it(family: str, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path / "model", tie_word_embeddings=True)
    _change(folder, _noise())
    _assert_as_transformers(folder)
    assert not torch.equal(load_model(folder).model.lm_head.weight, load_model(folder).model.model.embed_tokens.weight)


def test_a_copy_of_the_embedding_changes_nothing(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "model", tie_word_embeddings=True)
    _change(folder, load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone())
    _assert_as_transformers(folder)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("said", [False, None], ids=["false", "left out"])
def test_a_matrix_that_is_missing_is_never_noise(family: str, said: Any, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path / "model", tie_word_embeddings=True)
    _change(folder, None, tie_word_embeddings=said)
    if family == "gemma3_text" and said is None:
        _assert_as_transformers(folder)
        return
    with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight.*tie_word_embeddings"):
        load_model(folder)
    facts = describe(str(folder))
    assert not facts.supported and "lm_head.weight" in facts.reason
    with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight.*tie_word_embeddings"):
        find_model(str(folder))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_matrix_that_the_config_does_not_mention(family: str, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path / "model", tie_word_embeddings=False)
    _change(folder, _noise(), tie_word_embeddings=None)
    _assert_as_transformers(folder)


def test_a_build_that_does_not_look_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without our own look transformers' report still refuses it, and without both the matrix would be random."""
    folder = make_tiny("llama", tmp_path / "model", tie_word_embeddings=True)
    _change(folder, None, tie_word_embeddings=False)
    monkeypatch.setattr("kvire.models.loader.need_output_matrix", lambda *_: None)
    with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight"):
        load_model(folder)
