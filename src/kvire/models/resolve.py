"""A model's name becomes a local transformers directory: config.json, *.safetensors, tokenizer."""

from pathlib import Path

from kvire.core.errors import ModelNotFoundError
from kvire.models.checkpoint import open_checkpoint
from kvire.models.embedded import EMBEDDED, find_embedded
from kvire.models.gguf.convert import convert, find_converted, gguf_file, read_origin
from kvire.models.gguf.split import gguf_in
from kvire.models.hub import find_in_hub, is_hub_id
from kvire.models.progress import LateProgress, Progress, silent
from kvire.weights.packed_file import PACKED


def resolve(name: str, *, weights: str = "float32", progress: Progress | None = None) -> Path:
    """The directory of a model.

    weights: form in which a GGUF is converted: float32, file or int8 (EngineConfig).
    name: a directory, a .gguf file or part of one, an embedded model, the folder of an earlier
        conversion (as `kvire models ls` names it), or a hub id org/name.

    An existing path wins over every other reading. A GGUF is converted into the cache folder the
    first time; `progress` reports it (and hashing) once it takes more than two seconds.

    Raises ModelNotFoundError (nothing found; says what was tried), UnsupportedModelError (found,
    but refused).
    """
    report = LateProgress(progress) if progress is not None else silent
    path = Path(name).expanduser()
    if path.is_dir():
        if (gguf := gguf_in(path)) is not None:
            return convert(gguf_file(gguf, report), report, weights)
        return path if (path / PACKED).is_file() else open_checkpoint(path).path
    if path.is_file():
        return _from_file(path, report, weights)
    if (embedded := EMBEDDED.get(name)) is not None:
        return convert(find_embedded(embedded), report, weights)
    if (folder := find_converted(name)) is not None:
        return folder
    if is_hub_id(name) and path.suffix != ".gguf":
        return open_checkpoint(find_in_hub(name)).path
    raise ModelNotFoundError(_nothing(name, path))


def model_name(path: Path) -> str:
    """Name, for people, of the model in a directory from `resolve`.

    For example smollm2, org/name, or the folder's name.
    """
    if (origin := read_origin(path)) is not None:
        return origin.get("name", path.name)
    repository = path.parent.parent.name  # the hub's cache: models--org--name/snapshots/<commit>
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return path.resolve().name


def _from_file(path: Path, report: Progress, weights: str) -> Path:
    if path.suffix != ".gguf":
        raise ModelNotFoundError(f"{path} is a file, but no .gguf: pass the model's directory, or a GGUF")
    return convert(gguf_file(path, report), report, weights)


def _nothing(name: str, path: Path) -> str:
    if path.suffix == ".gguf" or name.startswith((".", "/", "~")):
        return f"there is no file or directory {path}"
    return (
        f"no model {name!r}: there is no such file or directory here, it is not an embedded model "
        f"({', '.join(EMBEDDED)}), and not a hub id of the form org/name. See kvire models ls."
    )
