"""Requirements on a transformers directory, checked before anything of it is loaded.

Nothing here imports torch or reads weights: an unusable directory is refused in milliseconds, and a
pickle is never opened.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from kvire.core.errors import ModelNotFoundError, UnsupportedModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.msgpack", "*.h5")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A transformers directory.

    config: config.json, unchanged.
    shards: the weight files, by name.
    """

    path: Path
    config: Mapping[str, Any]
    shards: tuple[Path, ...]

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weight files on disk."""
        return sum(shard.stat().st_size for shard in self.shards)

    def sizes(self) -> dict[str, int]:
        """Numbers in each tensor of the weight files, by name, from their headers alone."""
        return {name: size for shard in self.shards for name, size in _sizes(shard)}

    def parameters(self) -> int:
        """Numbers stored in the weight files, from their headers alone."""
        return sum(self.sizes().values())


def open_checkpoint(path: Path) -> Checkpoint:
    """Check the shape of a directory.

    Raises ModelNotFoundError if it is no transformers directory, UnsupportedModelError if it is a
    refused one: an adapter, pickled weights, damaged JSON.
    """
    if not path.is_dir():
        raise ModelNotFoundError(f"{path} is not a directory")
    if (path / "adapter_config.json").exists():
        raise UnsupportedModelError(
            f"{path} is a PEFT adapter (adapter_config.json). Adapters are not supported: merge it into its "
            "base model (peft: merge_and_unload, then save_pretrained) and pass the merged directory."
        )
    return Checkpoint(path, read_config(path), weight_files(path))


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a directory, unchanged."""
    if not (path / "config.json").is_file():
        raise ModelNotFoundError(f"{path} has no config.json, so it is not a transformers directory.{_hint(path)}")
    return _read_json(path / "config.json")


def weight_files(path: Path) -> tuple[Path, ...]:
    """The safetensors files that transformers would load, sorted by name; pickles are refused."""
    if (path / SINGLE).is_file():
        return (path / SINGLE,)
    if (path / INDEX).is_file():
        return _indexed_files(path)
    pickles = sorted(found.name for pattern in PICKLES for found in path.glob(pattern))
    if pickles:
        raise UnsupportedModelError(
            f"{path} has its weights only in {', '.join(pickles[:3])}. Loading such a file can run code hidden in "
            "it, so Kvire never does: convert it to safetensors on a machine you trust "
            "(load it with transformers, then save_pretrained), or take a safetensors copy of the model."
        )
    raise ModelNotFoundError(f"{path} has no {SINGLE} and no {INDEX}.{_hint(path)}")


def _indexed_files(path: Path) -> tuple[Path, ...]:
    weight_map = _read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UnsupportedModelError(f"{path / INDEX} names no weights: the file is damaged, download it again")
    files = []
    for name in sorted({str(value) for value in weight_map.values()}):
        # The index is input: a name with a folder in it could lead out of the model's directory.
        if name != Path(name).name or not name.endswith(".safetensors"):
            raise UnsupportedModelError(f"{path / INDEX} names {name!r}, which is not a safetensors file beside it")
        if not (path / name).is_file():
            raise ModelNotFoundError(f"{path} lacks {name}, which {INDEX} names: the download is incomplete")
        files.append(path / name)
    return tuple(files)


def _hint(path: Path) -> str:
    if ggufs := sorted(path.glob("*.gguf")):
        return f" It holds a GGUF: pass the file itself, {ggufs[0]}."
    if (path / "params.json").exists():
        return " It looks like a vendor's original release: take the transformers version of the model."
    return " A model directory has config.json, *.safetensors and a tokenizer."


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{path} is not readable JSON ({error}): download it again") from error
    if not isinstance(value, dict):
        raise UnsupportedModelError(f"{path} is not a JSON object: download it again")
    return value


def _sizes(shard: Path) -> Iterator[tuple[str, int]]:
    try:
        with safe_open(str(shard), framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - a safetensors handle, not a dict
                yield name, prod(tensors.get_slice(name).get_shape())
    except SafetensorError as error:
        raise UnsupportedModelError(f"{shard} is damaged ({error}): download it again") from error
