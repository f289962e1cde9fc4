"""Data of `kvire models ls` and `kvire models show NAME`, without loading a model."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvire.core.dtypes import KV_DTYPES
from kvire.core.errors import KvireError, ModelNotFoundError
from kvire.core.spec import KVGroup, KVSpec
from kvire.models.checkpoint import open_checkpoint, read_config
from kvire.models.embedded import EMBEDDED, EmbeddedModel, GgufSource, find_embedded
from kvire.models.families import (
    expanded_elements_per_token,
    hidden_layers,
    kv_groups,
    max_positions,
    need_output_matrix,
)
from kvire.models.gguf.config import config_from_gguf
from kvire.models.gguf.convert import ORIGIN, converted_folder, converted_models, find_converted, gguf_file
from kvire.models.gguf.header import GgufHeader
from kvire.models.gguf.split import gguf_in
from kvire.models.gguf.tokenizer import check_tokenizer
from kvire.models.hub import find_in_hub, is_hub_id
from kvire.weights.packed_file import PACKED, packed_folder_name


@dataclass(frozen=True, slots=True)
class ListedModel:
    """One line of `kvire models ls`.

    source: "embedded" or "gguf".
    size_bytes: on disk, the converted directory if there is one, else the GGUF; 0 when not
        installed.
    path: the converted directory.
    install: command that installs it.
    packed_bytes: of its packed weights in the cache folder, all forms together.
    """

    name: str
    source: str
    installed: bool
    converted: bool
    size_bytes: int
    path: Path | None = None
    about: str = ""
    install: str = ""
    packed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about one model without loading it.

    supported: whether it can be served; if not, `reason` says why and what to do. groups is empty
        then.
    weights_bytes: of the weight files.
    parameters: numbers in them, an unneeded output matrix included.
    kv_bytes_per_token: by dtype of the pool.
    context_tokens: the longest sequence it was made for.
    expanded_elements_per_token: elements that latent attention would keep without its latent; None:
        it is not latent.
    converted: False for a GGUF that has not been converted yet.
    """

    name: str
    path: Path
    model_type: str
    supported: bool
    reason: str
    layers: int
    groups: tuple[KVGroup, ...]
    kv_bytes_per_token: Mapping[str, int]
    context_tokens: int
    weights_bytes: int
    parameters: int
    expanded_elements_per_token: int | None = None
    converted: bool = True

    @property
    def memory_bytes(self) -> int:
        """Size of the weights in float32, the dtype of computation."""
        return 4 * self.parameters


def list_models() -> list[ListedModel]:
    """The embedded models, installed or not, then everything else that the cache folder has of
    other GGUFs and directories.
    """
    lines = [_embedded_line(model) for model in EMBEDDED.values()]
    known = {line.path for line in lines}
    for folder, origin in converted_models():
        if folder in known or origin.get("name") in EMBEDDED:
            continue
        is_packed = (folder / PACKED).is_file()
        about = f"{'packed' if is_packed else 'converted'} from {origin.get('source', 'a GGUF')}"
        packed_bytes = (folder / PACKED).stat().st_size if is_packed else 0
        lines.append(
            ListedModel(folder.name, "gguf", True, True, _size_bytes(folder), folder, about, packed_bytes=packed_bytes)
        )
    return lines


def unused_copies() -> list[Path]:
    """Folders of the cache that no start would take: their source is gone, or another version of
    Kvire made them.
    """
    return [folder for folder, origin in converted_models() if not _is_current(folder, origin)]


def _is_current(folder: Path, origin: Mapping[str, str]) -> bool:
    name, digest, weights = (origin.get(field, "") for field in ("name", "sha256", "weights"))
    if not Path(origin.get("source", "")).exists():
        return False
    if (folder / "config.json").is_file():
        return folder.name == converted_folder(GgufSource(name, (), digest), weights or "float32").name
    return folder.name == packed_folder_name(name, digest, weights)


def describe(name: str) -> ModelFacts:
    """Facts about a model, named as for `resolve`; converts and downloads nothing, imports no
    torch.

    A refused model is described too, with the reason. Raises ModelNotFoundError.
    """
    path = Path(name).expanduser()
    path = (gguf_in(path) or path) if path.is_dir() else path
    if path.is_dir():
        return _of_directory(name, path)
    if path.is_file() and path.suffix == ".gguf":
        return _of_gguf(name, gguf_file(path))
    if (embedded := EMBEDDED.get(name)) is not None:
        return _of_gguf(name, find_embedded(embedded))
    if is_hub_id(name):
        return _of_directory(name, find_in_hub(name, download=False))
    if (folder := find_converted(name)) is not None:
        return _of_directory(name, folder)
    raise ModelNotFoundError(f"no model {name!r} here: see kvire models ls")


def _embedded_line(model: EmbeddedModel) -> ListedModel:
    try:
        source = find_embedded(model)
    except ModelNotFoundError:
        return ListedModel(model.name, "embedded", False, False, 0, None, model.about, model.install)
    folder = converted_folder(source)
    converted = folder.is_dir()
    packed = [converted_folder(source, weights) / PACKED for weights in ("file", "int8")]
    return ListedModel(
        name=model.name,
        source="embedded",
        installed=True,
        converted=converted,
        size_bytes=_size_bytes(folder) if converted else source.size_bytes,
        path=folder if converted else None,
        about=model.about,
        install=model.install,
        packed_bytes=sum(path.stat().st_size for path in packed if path.is_file()),
    )


def _of_directory(name: str, path: Path) -> ModelFacts:
    config = read_config(path)
    if (path / PACKED).is_file():
        reason = f"it holds packed weights alone: name the model or its GGUF instead, as in {name}"
        return _refused(name, path, str(config.get("model_type", "unknown")), reason, (path / PACKED).stat().st_size)
    try:
        checkpoint = open_checkpoint(path)
        sizes = checkpoint.sizes()
        facts = _facts(name, path, config, checkpoint.weights_bytes, sum(sizes.values()))
        need_output_matrix(config, sizes)
    except KvireError as error:
        return _refused(name, path, str(config.get("model_type", "unknown")), str(error))
    return facts


def _of_gguf(name: str, source: GgufSource) -> ModelFacts:
    """Facts from the converted directory if it exists; else from the header of a whole file."""
    folder = converted_folder(source)
    if (folder / ORIGIN).is_file():
        return _of_directory(name, folder)
    if len(source.files) > 1 and not source.split:
        reason = f"not converted yet, so little is known: kvire models pull {name}"
        return _refused(name, source.files[0], "unknown", reason, source.size_bytes, converted=False)
    return _of_header(name, source)


def _of_header(name: str, source: GgufSource) -> ModelFacts:
    path = source.files[0]
    kind = "unknown"
    try:
        header = GgufHeader(*source.files)
        kind = header.architecture or kind
        config = config_from_gguf(header)
        check_tokenizer(header)
    except KvireError as error:
        return _refused(name, path, kind, str(error), source.size_bytes, converted=False)
    return _facts(name, path, config, source.size_bytes, header.parameters(), converted=False)


def _facts(
    name: str, path: Path, config: Mapping[str, Any], weights: int, parameters: int, *, converted: bool = True
) -> ModelFacts:
    groups = kv_groups(config)
    return ModelFacts(
        name=name,
        path=path,
        model_type=config["model_type"],
        supported=True,
        reason="",
        layers=hidden_layers(config),
        groups=groups,
        kv_bytes_per_token={dtype: KVSpec(groups, dtype).bytes_per_token for dtype in KV_DTYPES},
        context_tokens=max_positions(config),
        weights_bytes=weights,
        parameters=parameters,
        expanded_elements_per_token=expanded_elements_per_token(config),
        converted=converted,
    )


def _refused(name: str, path: Path, kind: str, reason: str, weights: int = 0, *, converted: bool = True) -> ModelFacts:
    return ModelFacts(name, path, kind, False, reason, 0, (), {}, 0, weights, 0, converted=converted)


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
