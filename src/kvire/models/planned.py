"""The model of `kvire plan`: a card, or any source of a config.

Loads no weights, imports no torch.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvire.core.errors import ConfigError, KvireError, ModelNotFoundError
from kvire.models.checkpoint import open_checkpoint, read_config
from kvire.models.families import has_output_matrix, need_output_matrix
from kvire.models.gguf.config import config_from_gguf
from kvire.models.gguf.header import GgufHeader
from kvire.models.gguf.split import gguf_in, gguf_parts
from kvire.models.hub import find_config_in_hub, is_hub_id
from kvire.plan.cards import card, find_card
from kvire.plan.families.wrappers import INNER, language_model
from kvire.plan.plan import PlannedModel
from kvire.plan.read_shape import read_shape
from kvire.plan.shape import Shape


def find_model(name: str, say: Callable[[str], None] = lambda _: None) -> PlannedModel:
    """Find a directory, a config.json, a .gguf file, a card, or a hub id, in that order.

    say: called before the hub is asked.

    Raises ModelNotFoundError, or ConfigError naming the unknown part of the config.
    """
    path = Path(name).expanduser()
    path = (gguf_in(path) or path) if path.is_dir() else path
    if path.is_dir():
        return _of_directory(name, path)
    if path.is_file():
        return _of_file(name, path)
    if (found := find_card(name)) is not None:
        source = f"{found.source}; {found.note}" if found.note else found.source
        return PlannedModel(found.name, found.title, source, found.verified, read_shape(found.config))
    if "/" in name:
        return _of_hub(name, say)
    return PlannedModel(
        name, name, "", verified=False, shape=read_shape(card(name).config)
    )  # raises, naming the nearest


def _of_directory(name: str, path: Path) -> PlannedModel:
    config = read_config(path)
    return PlannedModel(name, path.resolve().name, str(path / "config.json"), verified=True, shape=_shape(config, path))


def _of_file(name: str, path: Path) -> PlannedModel:
    if path.suffix == ".gguf":
        header = GgufHeader(*gguf_parts(path))
        shape = _counted(_shape(config_from_gguf(header)), header.parameters())
        shape = replace(shape, notes=(*shape.notes, "weights are counted as if unquantised, as the engine keeps them"))
        return PlannedModel(name, path.name, str(path), verified=True, shape=shape)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no config.json: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is no config.json: it holds no JSON object")
    return PlannedModel(name, path.resolve().parent.name, str(path), verified=True, shape=_shape(config))


def _of_hub(name: str, say: Callable[[str], None]) -> PlannedModel:
    if not is_hub_id(name):
        raise ModelNotFoundError(f"there is no file or directory {name}")
    try:
        path = find_config_in_hub(name, say)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"{error} Any config.json will do, and so will a card: kvire plan --cards") from error
    return replace(_of_file(name, path), title=name, source=f"config.json of {name} on the hub")


def _shape(config: Mapping[str, Any], folder: Path | None = None) -> Shape:
    """Shape by the config.

    The parameters are counted if there are weight files of one language model, unquantised.
    """
    packed = config.get("quantization_config") or config.get("compression_config")
    if folder is None or packed or any(isinstance(config.get(name), Mapping) for name in INNER):
        return read_shape(config)
    sizes = _sizes(folder)
    if sizes and has_output_matrix(sizes):
        config = {**config, "tie_word_embeddings": False}  # present, whatever the config says
    shape = read_shape(config)
    if not sizes:
        return shape
    need_output_matrix(language_model(config)[0], sizes)
    return _counted(shape, sum(sizes.values()))


def _sizes(folder: Path) -> dict[str, int]:
    """Numbers in each tensor of the weight files; empty if there are no readable ones."""
    try:
        return open_checkpoint(folder).sizes()
    except KvireError:
        return {}


def _counted(shape: Shape, parameters: int) -> Shape:
    """The shape with the parameters of the files.

    Raises ConfigError if they are far from the config's.
    """
    weights = shape.weights
    if not 0.9 < parameters / weights.total < 1.1:
        raise ConfigError(
            f"the weight files hold {parameters:,} parameters, and the config says {weights.total:,}: they do not "
            "belong together, or the config describes something that is not known here"
        )
    return replace(shape, weights=replace(weights, dense=parameters - weights.experts, counted=True))
