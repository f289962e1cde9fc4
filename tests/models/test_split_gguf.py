"""A GGUF in several files is one model, whichever of them is named."""

import json
from pathlib import Path

import pytest

from kvire.core.errors import ModelNotFoundError, UnsupportedModelError
from kvire.models.catalog import describe
from kvire.models.loader import load_model
from kvire.models.planned import find_model
from kvire.models.resolve import resolve

from .tiny_gguf import make_gguf

NAMES = ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf")


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """A folder with both parts: of 20 tensors, 11 in the first."""
    (folder := tmp_path / "split").mkdir()
    make_gguf(folder / "m.gguf", tensors_per_part=11)
    assert sorted(path.name for path in folder.iterdir()) == list(NAMES)
    return folder


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return make_gguf(tmp_path / "whole.gguf")


def test_either_part_and_the_folder_are_the_whole_model(split: Path, whole: Path) -> None:
    expected = load_model(resolve(str(whole)))
    found = {resolve(str(path)) for path in (split / NAMES[0], split / NAMES[1], split)}
    (folder,) = found
    loaded = load_model(folder)
    assert (loaded.weights_digest, loaded.name) == (expected.weights_digest, "m")
    assert loaded.config_digest == expected.config_digest
    assert loaded.tokenizer("a t").input_ids == expected.tokenizer("a t").input_ids


def test_models_show_and_plan_count_both_parts(split: Path, whole: Path) -> None:
    expected = describe(str(whole)).parameters
    for path in (split / NAMES[0], split / NAMES[1], split):
        assert describe(str(path)).parameters == find_model(str(path)).shape.weights.total == expected
    resolve(str(split))
    assert describe(str(split / NAMES[1])).converted


@pytest.mark.parametrize(("gone", "number"), [(NAMES[0], 1), (NAMES[1], 2)])
def test_a_part_that_is_missing_is_named(split: Path, gone: str, number: int) -> None:
    (split / gone).unlink()
    (left,) = split.iterdir()
    for ask in (resolve, describe, find_model):
        for path in (left, split):
            with pytest.raises(ModelNotFoundError, match=rf"part {number} of 2 is not beside it.*{gone} is missing"):
                ask(str(path))


def test_a_whole_file_may_be_called_the_only_part(tmp_path: Path, whole: Path) -> None:
    expected = load_model(resolve(str(whole))).weights_digest
    named = whole.rename(tmp_path / "m-00001-of-00001.gguf")
    assert load_model(resolve(str(named))).weights_digest == expected


def test_a_part_whose_name_does_not_say_so(split: Path) -> None:
    for i, name in enumerate(NAMES, start=1):
        renamed = (split / name).rename(split / f"part{i}.gguf")
        with pytest.raises(UnsupportedModelError, match=rf"part {i} of 2 of a split GGUF.*llama-gguf-split --merge"):
            resolve(str(renamed))


def test_parts_of_two_models(split: Path, tmp_path: Path) -> None:
    (other := tmp_path / "other").mkdir()
    make_gguf(other / "m.gguf", tensors_per_part=15)
    (other / NAMES[1]).replace(split / NAMES[1])
    with pytest.raises(UnsupportedModelError, match="16 different tensors, and should have 20"):
        resolve(str(split))


def test_parts_in_the_wrong_order(split: Path) -> None:
    (split / NAMES[0]).rename(split / "first")
    (split / NAMES[1]).rename(split / NAMES[0])
    (split / "first").rename(split / NAMES[1])
    with pytest.raises(UnsupportedModelError, match="named as part 1 of 2, and says that it is part 2 of 2"):
        resolve(str(split))


def test_a_folder_of_several_models_is_not_guessed_at(split: Path) -> None:
    make_gguf(split / "another.gguf")
    with pytest.raises(ModelNotFoundError, match="It holds a GGUF: pass the file itself"):
        resolve(str(split))


@pytest.mark.parametrize("head", [False, True], ids=["tied", "own output matrix"])
def test_an_output_matrix_of_its_own(tmp_path: Path, head: bool) -> None:  # noqa: FBT001 - of the matrix
    path = make_gguf(tmp_path / "m.gguf", head=head)
    folder = resolve(str(path))
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is not head
    model = load_model(folder).model
    own = model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    assert own == head
    assert describe(str(path)).parameters == find_model(str(path)).shape.weights.total
    assert find_model(str(path)).shape.weights.total == sum(value.numel() for value in model.parameters())
