"""A directory is checked before anything in it is loaded."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvire.core.errors import ModelNotFoundError, UnsupportedModelError
from kvire.models.checkpoint import open_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with a config and 6 + 4 numbers in two shards."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file({"a": np.zeros((2, 3), np.float32)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": np.zeros(4, np.float16)}, tmp_path / "model-00002-of-00002.safetensors")
    _index(tmp_path, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    return tmp_path


def _index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_and_their_numbers(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert [shard.name[:11] for shard in checkpoint.shards] == ["model-00001", "model-00002"]
    assert checkpoint.parameters() == 10
    assert checkpoint.weights_bytes == sum(shard.stat().st_size for shard in checkpoint.shards)


def test_pickled_weights_are_refused_and_never_opened(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "exploded",))

    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(UnsupportedModelError, match=r"pytorch_model\.bin.*safetensors"):
        open_checkpoint(tmp_path)
    assert not (tmp_path / "exploded").exists()


def test_an_adapter_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match=r"PEFT adapter.*merge"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "weights.bin", ""])
def test_an_index_cannot_lead_out_of_the_folder(folder: Path, name: str) -> None:
    _index(folder, {"a": name})
    with pytest.raises(UnsupportedModelError, match=r"not a safetensors file beside it"):
        open_checkpoint(folder)


def test_a_missing_shard_is_an_incomplete_download(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match=r"incomplete"):
        open_checkpoint(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a":' * 100_000])
def test_damaged_json(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(UnsupportedModelError, match=r"JSON"):
        open_checkpoint(folder)


def test_damaged_weights(folder: Path) -> None:
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(UnsupportedModelError, match=r"damaged"):
        open_checkpoint(folder).parameters()


def test_hints(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"pass the file itself, .*model\.gguf"):
        open_checkpoint(tmp_path)
