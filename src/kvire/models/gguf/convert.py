"""A GGUF becomes a transformers directory, once, in the user's cache folder (made_once.py).

Its weights are float32 there, or packed in the file's own form.
"""

import json
import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from kvire.core.cache_folder import models_folder, write_json
from kvire.core.errors import ModelNotFoundError
from kvire.models.embedded import GgufSource
from kvire.models.families import kv_groups
from kvire.models.fingerprint import CHUNK_BYTES, file_digest
from kvire.models.gguf.config import ConfigFields, config_from_gguf
from kvire.models.gguf.header import GgufHeader
from kvire.models.gguf.split import gguf_name, gguf_parts
from kvire.models.gguf.tokenizer import check_tokenizer, tokenizer_from_gguf
from kvire.models.gguf.weights import converted_bytes, packed_tensors, tensor_places, write_weights
from kvire.models.made_once import make_once, need_room
from kvire.models.progress import Progress, silent
from kvire.weights.packed_file import PACKED, PACKER, need_kernels, write_packed

CONVERTER = 2  # raise it when the result of a conversion changes: older results are then left aside
ORIGIN = "kvire.json"  # in a converted directory: where it came from


def gguf_file(path: Path, progress: Progress = silent) -> GgufSource:
    """The source of a .gguf file, with its other parts; reads all of them once for the digest."""
    files = gguf_parts(path)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", gguf_name(path)).strip("-.") or "model"
    return GgufSource(name, files, _digest(files, progress), split=len(files) > 1)


def _digest(files: tuple[Path, ...], progress: Progress) -> str:
    digests = [file_digest(path, progress) for path in files]
    return digests[0] if len(digests) == 1 else sha256(" ".join(digests).encode()).hexdigest()


def converted_folder(source: GgufSource, weights: str = "float32") -> Path:
    """Path of the converted model, existing or not.

    Its name holds the digest of content, converter and form of the weights.
    """
    form = "" if weights == "float32" else f" {weights} {PACKER}"
    digest = sha256(f"kvire gguf {CONVERTER} {source.sha256}{form}".encode()).hexdigest()
    return models_folder() / f"{source.name}-{digest[:16]}"


def convert(source: GgufSource, progress: Progress = silent, weights: str = "float32") -> Path:
    """The converted directory; made now if it does not exist.

    weights: float32, file or int8, see EngineConfig.

    Raises UnsupportedModelError for unsupported models (before any weight is read), ConfigError if
    the cache folder has no room, ModelNotFoundError if the file has an unexpected digest.
    """
    if weights != "float32":
        need_kernels()
    target = converted_folder(source, weights)
    return make_once(target, lambda folder: _write_model(source, folder, weights, progress), progress)


def converted_models() -> Iterator[tuple[Path, dict[str, str]]]:
    """Every complete conversion in the cache folder, with its origin {name, source, sha256}."""
    for folder in sorted(models_folder().glob("[!.]*-*")):
        if (origin := read_origin(folder)) is not None:
            yield folder, origin


def read_origin(folder: Path) -> dict[str, str] | None:
    """Origin of a converted directory: {name, source, sha256}; None: it is no conversion of
    ours.
    """
    try:
        origin = json.loads((folder / ORIGIN).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return {key: str(value) for key, value in origin.items()} if isinstance(origin, dict) else None


def find_converted(name: str) -> Path | None:
    """The conversion with this folder name, as `kvire models ls` lists it; None: there is none."""
    return next((folder for folder, _ in converted_models() if folder.name == name), None)


def _write_model(source: GgufSource, folder: Path, weights: str, progress: Progress) -> None:
    """Fill `folder` with config, tokenizer and weights.

    Steps that may refuse the model come before long ones.
    """
    files = _whole_files(source, folder, progress)
    progress("reading the GGUF header", 0, 1)
    header = GgufHeader(*files)
    config = config_from_gguf(header)
    kv_groups(config)  # refuses families
    check_tokenizer(header)
    places = tensor_places(config, header)
    if weights == "float32":
        need_room(folder, converted_bytes(places, header))
        write_weights(folder, config, header, places, progress)
    else:
        need_room(folder, 2 * source.size_bytes)
        tensors = packed_tensors(config, header, places, progress, int8=weights == "int8")
        write_packed(folder / PACKED, source.sha256, tensors)
    progress("building the tokenizer", 0, 1)
    tokenizer_from_gguf(files[0], header).save_pretrained(folder)
    _write_configs(folder, config)
    origin = {
        "name": source.name,
        "source": str(source.files[0]),
        "sha256": source.sha256,
        "converter": CONVERTER,
        "weights": weights,
    }
    write_json(folder / ORIGIN, origin)
    header.close()
    if files[0].parent == folder:
        files[0].unlink()


def _whole_files(source: GgufSource, folder: Path, progress: Progress) -> tuple[Path, ...]:
    """Complete GGUF files, with their expected digests; pieces are joined inside `folder`."""
    if source.split or len(source.files) == 1:
        files, digest = source.files, _digest(source.files, progress)
    else:
        need_room(folder, source.size_bytes)
        files = (folder / "joined.gguf",)
        digest = _join(source, files[0], progress)
    if digest != source.sha256:
        repair = f" Install it again: {source.if_damaged}" if source.if_damaged else ""
        raise ModelNotFoundError(
            f"{source.files[0]} is not the file it should be (SHA-256 {digest}, expected {source.sha256}).{repair}"
        )
    return files


def _join(source: GgufSource, path: Path, progress: Progress) -> str:
    """Write the pieces one after the other; returns the SHA-256 of the whole."""
    digest, done, total = sha256(), 0, source.size_bytes
    with path.open("wb") as out:
        for piece in source.files:
            with piece.open("rb") as part:
                while chunk := part.read(CHUNK_BYTES):
                    digest.update(chunk)
                    out.write(chunk)
                    done += len(chunk)
                    progress("joining the parts", done, max(total, done))
    return digest.hexdigest()


def _write_configs(folder: Path, config: ConfigFields) -> None:
    write_json(folder / "config.json", config)
    special = {name: config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", {k: v for k, v in special.items() if v is not None})
