"""A transformers directory becomes a model in memory, with its KV groups and identity."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers import logging as transformers_logging

from kvire.attention.paged_cache import attention_modules, kv_sources
from kvire.core.dtypes import compute_dtypes
from kvire.core.errors import ConfigError, UnsupportedModelError
from kvire.core.memory import available_bytes, format_size
from kvire.core.spec import KVGroup
from kvire.models.checkpoint import Checkpoint, open_checkpoint, read_config
from kvire.models.families import kv_groups, max_positions, need_output_matrix
from kvire.models.fingerprint import config_digest, weights_digest
from kvire.models.loaded_state import loaded_state
from kvire.models.packed import form_of, packed_model
from kvire.models.packed_cache import open_packed
from kvire.models.progress import LateProgress, Progress, silent
from kvire.models.resolve import model_name
from kvire.models.rope import fix_longrope

# Their attention reads its window from the config at every call; that of others keeps it, or has
# none.
WINDOW_IN_CONFIG = ("ministral3", "mistral", "mixtral", "phi3", "starcoder2")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and its identity.

    model: the unmodified transformers class, in eval mode, without gradients.
    config: the config it was built from, LongRoPE fixed.
    groups: KV kept by its layers, per token.
    max_positions: longest sequence in tokens.
    eos_token_ids: all tokens that end an answer, ascending.
    weights_digest, config_digest: hex, see fingerprint.py.
    state_digest: hex, see loaded_state.py.
    weights_bytes: of the weights in memory.
    form: of the matrices: float32, or packed forms such as "q4_1, q8_0".
    """

    name: str
    path: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    config: PreTrainedConfig
    groups: tuple[KVGroup, ...]
    max_positions: int
    eos_token_ids: tuple[int, ...]
    weights_digest: str
    config_digest: str
    state_digest: str
    weights_bytes: int
    form: str = "float32"


def load_model(
    path: Path,
    *,
    dtype: str = "float32",
    weights: str = "float32",
    name: str | None = None,
    max_model_len: int | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a directory from `resolve`.

    dtype: of computation, whatever the files are stored in.
    weights: float32 (then in `dtype`), file or int8: see EngineConfig.
    name: for people, by default from `resolve.model_name`.
    max_model_len: tokens of the longest sequence that will run, by default the model's limit;
        LongRoPE factors depend on it.

    Raises UnsupportedModelError (refused, or files that do not make up the model), ConfigError
    (dtype unknown, or not enough memory).
    """
    if dtype not in compute_dtypes():
        raise ConfigError(f"dtype must be one of {', '.join(compute_dtypes())}, got {dtype!r}")
    report = LateProgress(progress) if progress is not None else silent
    kv_groups(read_config(path))  # refuses before any class of the model is imported
    config = _load_config(path)
    groups = kv_groups(config)
    fix_longrope(config, max_model_len or max_positions(config))
    identity = config_digest(config.to_dict())
    in_memory = _load_float32 if weights == "float32" else _load_packed
    loaded = in_memory(path, config, dtype if weights == "float32" else weights, report)
    _check_groups(loaded.model, groups)
    tokenizer = _load_tokenizer(path)
    return LoadedModel(
        name=name or model_name(path),
        path=path,
        model=loaded.model,
        tokenizer=tokenizer,
        config=config,
        groups=groups,
        max_positions=max_positions(config),
        eos_token_ids=_eos_token_ids(path, config, tokenizer),
        weights_digest=loaded.digest,
        config_digest=identity,
        state_digest=loaded_state(loaded.model),
        weights_bytes=loaded.weights_bytes,
        form=loaded.form,
    )


@dataclass(frozen=True, slots=True)
class _InMemory:
    model: PreTrainedModel
    digest: str
    weights_bytes: int
    form: str


def _load_float32(path: Path, config: PreTrainedConfig, dtype: str, report: Progress) -> _InMemory:
    """All weights as numbers of `dtype`."""
    checkpoint = open_checkpoint(path)
    need_output_matrix(config, checkpoint.sizes())
    _need_memory(checkpoint, dtype)
    digest, model = _load_as_digested(checkpoint, config, dtype, report)
    return _InMemory(model, digest, _parameter_bytes(model), dtype)


def _load_packed(path: Path, config: PreTrainedConfig, weights: str, report: Progress) -> _InMemory:
    """Matrices as the file has them, or int8; packed now if they were not before."""

    def loaded(checkpoint: Checkpoint) -> PreTrainedModel:
        need_output_matrix(config, checkpoint.sizes())
        return _load_model(path, config, "auto")

    file = open_packed(path, weights, loaded, report)
    model = packed_model(config, file)
    return _InMemory(model, file.digest, file.nbytes, form_of(file))


def _parameter_bytes(model: PreTrainedModel) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())


def _load_as_digested(
    checkpoint: Checkpoint, config: PreTrainedConfig, dtype: str, report: Progress
) -> tuple[str, PreTrainedModel]:
    """Digest of the weights, and the model with exactly these weights."""
    before = _stamps(checkpoint)
    digest = weights_digest(checkpoint.shards, report)
    model = _load_model(checkpoint.path, config, dtype)
    if _stamps(checkpoint) != before:
        raise UnsupportedModelError(f"{checkpoint.path} was being written while it was loaded: start again")
    return digest, model


def _stamps(checkpoint: Checkpoint) -> list[tuple[int, int, int, int]]:
    statuses = [shard.stat() for shard in checkpoint.shards]
    return [(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns) for status in statuses]


def _load_config(path: Path) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the config classes validate with exceptions of many kinds
        raise UnsupportedModelError(f"{path / 'config.json'} is not valid for its family: {error}") from error


def _need_memory(checkpoint: Checkpoint, dtype: str) -> None:
    needed, free = checkpoint.parameters() * compute_dtypes()[dtype].element_bytes, available_bytes()
    if needed > free:
        raise ConfigError(
            f"{checkpoint.path.name} needs {format_size(needed)} for its weights in {dtype}, and {format_size(free)} "
            "of memory are available. Take a smaller model, or free memory."
        )


def _load_model(path: Path, config: PreTrainedConfig, dtype: str) -> PreTrainedModel:
    """The class with its weights.

    A checkpoint that lacks weights, or has others, is another model: refused.

    Weights stored in `dtype` are mapped from their files, not copied: replace a model's files by
    renaming new ones into place, never by writing into them while the model runs.
    """
    with _quiet_transformers():  # its report on keys is the exception raised below
        model, found = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # told apart below, instead of raised without names
            output_loading_info=True,
        )
    for kind, meaning in (
        ("missing_keys", "lacks weights that the model needs"),
        ("unexpected_keys", "has weights that the model has no place for"),
        ("mismatched_keys", "has weights of other shapes than config.json says"),
        ("error_msgs", "could not be loaded"),
    ):
        if names := sorted(map(str, found.get(kind) or ())):
            raise UnsupportedModelError(f"{path} {meaning}: {', '.join(names[:5])}. Its files do not belong together.")
    return model.eval().requires_grad_(False)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    verbosity, bar = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bar:
            transformers_logging.enable_progress_bar()


def _load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedModelError(f"{path} has no tokenizer that transformers can load: {error}") from error


def _check_groups(model: PreTrainedModel, groups: Sequence[KVGroup]) -> None:
    """Check the groups against the built layers: a wrong window would give wrong answers
    silently.
    """
    modules = attention_modules(model)
    sources = kv_sources(modules)
    group_of = {layer: group for group in groups for layer in group.layers}
    if set(sources.values()) != set(group_of):
        raise UnsupportedModelError(f"layers {sorted(set(sources.values()))} keep KV, config.json says otherwise")
    for attention in modules:
        layer: int = attention.layer_idx  # type: ignore[assignment]
        group = group_of[sources[layer]]
        if (window := _window_of(attention)) != group.window:
            raise UnsupportedModelError(f"layer {layer} looks back {window} tokens, config.json says {group.window}")
        if (projection := getattr(attention, "k_proj", None)) is not None:
            width = group.kv_heads * group.key_width
            if projection.out_features != width:
                raise UnsupportedModelError(f"layer {layer}: K is {projection.out_features} wide, not {width}")


def _window_of(attention: Any) -> int | None:
    """Tokens that an attention module looks back; None for all of them."""
    if not getattr(attention, "is_sliding", True):
        return None
    owner = attention.config if attention.config.model_type in WINDOW_IN_CONFIG else attention
    window: int | None = getattr(owner, "sliding_window", None)
    return window


def _eos_token_ids(path: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every end token in any of the three files: checkpoints often update only one of them."""
    found: set[int] = set()
    generation = path / "generation_config.json"
    sources = [config.eos_token_id, tokenizer.eos_token_id]
    if generation.is_file():
        sources.append(GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id)
    for value in sources:
        found.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return tuple(sorted(found))
