"""Packed weights of a model's directory, made once and kept in the cache folder."""

from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedModel

from kvire.core.cache_folder import models_folder, write_json
from kvire.core.errors import ConfigError
from kvire.models.checkpoint import Checkpoint, open_checkpoint
from kvire.models.fingerprint import weights_digest
from kvire.models.gguf.convert import ORIGIN, read_origin
from kvire.models.made_once import make_once, need_room, remove_copy
from kvire.models.packed import tensors_of_checkpoint
from kvire.models.progress import Progress
from kvire.models.resolve import model_name
from kvire.weights.packed_file import (
    PACKED,
    PackedFile,
    PackedFileDamagedError,
    need_kernels,
    packed_folder_name,
    write_packed,
)

LoadStored = Callable[[Checkpoint], PreTrainedModel]


def open_packed(path: Path, weights: str, load: LoadStored, report: Progress) -> PackedFile:
    """The packed weights of a directory from `resolve`, made now if there are none yet.

    weights: file or int8.
    load: the model with its weights as they are stored; called only to pack them.

    Raises ConfigError (no kernels, no room, or a conversion in another form),
    UnsupportedModelError.
    """
    need_kernels()
    if (origin := read_origin(path)) is not None:
        return _of_conversion(path, weights, origin)
    checkpoint = open_checkpoint(path)
    digest = weights_digest(checkpoint.shards, report)
    folder = packed_folder(path, digest, weights)
    for _ in range(2):
        make_once(folder, lambda partial: _pack(partial, checkpoint, digest, weights, load, report), report)
        try:
            return PackedFile(folder / PACKED)
        except PackedFileDamagedError:
            remove_copy(folder)
    raise ConfigError(f"{folder} was damaged twice in a row: look at the disk, or set KVIRE_CACHE_DIR to another")


def packed_folder(path: Path, digest: str, weights: str) -> Path:
    """Where the packed weights of a directory lie, existing or not."""
    return models_folder() / packed_folder_name(model_name(path), digest, weights)


def _of_conversion(path: Path, weights: str, origin: dict[str, str]) -> PackedFile:
    """Of a GGUF, whose conversion packed them; a damaged one is removed."""
    if origin.get("weights", "float32") != weights:
        source = origin.get("source", "the GGUF")
        raise ConfigError(
            f"{path.name} was converted with weights={origin.get('weights', 'float32')!r}, not {weights!r}: name the "
            f"model or its GGUF ({source}) instead of that folder"
        )
    try:
        return PackedFile(path / PACKED)
    except (PackedFileDamagedError, OSError) as error:
        remove_copy(path)
        raise ConfigError(f"{error}; it was removed: start again, and it is converted anew") from error


def _pack(folder: Path, checkpoint: Checkpoint, digest: str, weights: str, load: LoadStored, report: Progress) -> None:
    need_room(folder, 2 * checkpoint.weights_bytes)
    report("packing the weights", 0, 1)
    tensors = tensors_of_checkpoint(load(checkpoint), checkpoint.shards, int8=weights == "int8")
    write_packed(folder / PACKED, digest, tensors)
    origin = {"name": model_name(checkpoint.path), "source": str(checkpoint.path), "sha256": digest, "weights": weights}
    write_json(folder / ORIGIN, origin)
