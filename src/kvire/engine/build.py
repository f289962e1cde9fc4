"""From a model's name and options to a running engine."""

import logging
import time
from dataclasses import replace

import torch
from torch import nn

from kvire.attention.cpu import best_attention
from kvire.attention.paged_cache import PagedCache, PagedModel
from kvire.attention.reference import PortableAttention
from kvire.attention.tiled_model import TiledModel
from kvire.cache.paged import PagedKV
from kvire.core.config import EngineConfig, StoreConfig
from kvire.core.errors import ConfigError, StoreError
from kvire.core.native import kernels_digest
from kvire.core.spec import KVSpec, LayerKind
from kvire.engine.device import choose_device, device_with_room, free_bytes, prepare
from kvire.engine.engine import Engine
from kvire.engine.memory_plan import MemoryPlan
from kvire.models.code_digest import ModelCode
from kvire.models.fingerprint import namespace
from kvire.models.loader import LoadedModel, load_model
from kvire.models.native_modules import use_native_modules
from kvire.models.precision import matmul_precision
from kvire.models.progress import Progress
from kvire.models.resolve import resolve
from kvire.step.lower import Lowered
from kvire.step.model import StepModel, recorded
from kvire.step.prove import prove
from kvire.step.record import NotRecordableError
from kvire.store.open import open_store
from kvire.store.tiered import TieredStore

DIGITS = 32  # hexadecimal ones, of each digest of software

log = logging.getLogger(__name__)


def build_engine(
    name: str,
    config: EngineConfig,
    progress: Progress | None = None,
    store: StoreConfig | TieredStore | None = None,
) -> tuple[Engine, LoadedModel]:
    """Find, load and wire up a model; computes in float32.

    store: config of a store to open and use, or an open one; None for the pool alone.

    Raises ModelNotFoundError, UnsupportedModelError, ConfigError or StoreError.
    """
    device = choose_device(config)
    prepare(device)
    loaded = load_model(
        resolve(name, weights=config.weights_form, progress=progress),
        weights=config.weights_form,
        name=name,
        max_model_len=config.max_model_len,
        progress=progress,
    )
    device = device_with_room(loaded.weights_bytes, device, config)
    loaded.model.to(device)
    spec = KVSpec(loaded.groups, config.kv_dtype, config.block_size)
    if config.deterministic:
        refuse_experts(loaded.model)
    attention = config.attention if device.type == "cpu" else "portable"
    backend = best_attention(attention, deterministic=config.deterministic, kv_dtype=config.kv_dtype)
    step = _native_step(loaded, config, spec)
    if step is not None:
        spec = replace(spec, layout="heads")
    elif backend.name.startswith("native"):
        use_native_modules(loaded.model)
    plan = MemoryPlan.measure(config, spec, loaded.max_positions, free_bytes(device))
    paged = PagedKV(spec, plan.num_blocks, device)
    model_class = TiledModel if config.deterministic else PagedModel
    opened = _open(store, config, device)
    model = model_class(loaded.model, PagedCache(paged, backend)) if step is None else StepModel(step, paged)
    engine = Engine(
        model,
        paged,
        config,
        namespace(
            weights=loaded.weights_digest,
            config=loaded.config_digest,
            groups=loaded.groups,
            numerics=numerics(config, backend, device, is_step=step is not None),
            layout=spec.layout,
            kv_dtype=config.kv_dtype,
            block_size=config.block_size,
            build=computed_by(loaded, model, backend),
        ),
        max_model_len=plan.max_model_len,
        vocab_size=loaded.model.get_input_embeddings().num_embeddings,
        eos_token_ids=frozenset(loaded.eos_token_ids),
        tokenizer=loaded.tokenizer,
        store=opened,
    )
    return engine, loaded


def _native_step(loaded: LoadedModel, config: EngineConfig, spec: KVSpec) -> Lowered | None:
    """The model's step for the C++ kernels, proven; None: transformers' forward runs it."""
    if not config.keeps_packed or config.deterministic or config.attention == "portable":
        return None
    windows = {layer: group.window for group in loaded.groups for layer in group.layers}
    start_s = time.monotonic()
    try:
        if any(group.kind is LayerKind.LATENT for group in loaded.groups):
            raise NotRecordableError("it has latent attention")
        lowered = recorded(loaded.model, windows)
        prove(lowered, loaded.model, spec, loaded.model.get_input_embeddings().num_embeddings)
    except NotRecordableError as error:
        log.info("%s runs transformers' forward over packed weights: %s", loaded.name, error)
        return None
    log.info("%s runs as a native step: recorded and proven in %.1f s", loaded.name, time.monotonic() - start_s)
    return lowered


def numerics(config: EngineConfig, backend: PortableAttention, device: torch.device, *, is_step: bool = False) -> str:
    """How this engine computes, as far as options and machine decide it.

    is_step: as a native step, whose bits do not depend on the processor.
    """
    weights = f"weights={config.weights_form}" if config.keeps_packed else ""
    if is_step:
        return f"float32/{weights}/step/{device.type}"
    parts = ["float32", weights, "deterministic" if config.deterministic else "", backend.name, device.type]
    if precision := matmul_precision(device.type):
        parts.append(f"matmul={precision}")
    return "/".join(filter(None, parts))


def computed_by(loaded: LoadedModel, bound: PagedModel | TiledModel | StepModel, backend: PortableAttention) -> str:
    """Versions and digests of all software that computes KV.

    bound: the loaded model as it runs, over its cache.

    Not the version of transformers: two releases that compute and load this model with the same
    code share blocks.
    """
    code = ModelCode(
        loaded.model,
        also={
            type(bound): ("forward",),
            PagedCache: ("update", "attend"),
            type(backend): ("plan", "write", "attend", "attend_latent"),
            PagedKV: ("write", "rounded", "gather"),
        },
        without=("transformers.masking_utils",),  # it makes no masks for an attention that it does not know
    )
    parts = {"torch": torch.__version__, "code": code.current()[:DIGITS], "loaded": loaded.state_digest[:DIGITS]}
    if backend.name.startswith("native") or loaded.form != "float32":
        parts["kernels"] = kernels_digest()[:DIGITS]
    return " ".join(f"{name} {value}" for name, value in parts.items())


def _open(store: StoreConfig | TieredStore | None, config: EngineConfig, device: torch.device) -> TieredStore | None:
    """The open store; None for none, or if an optional one cannot be opened."""
    if store is None or isinstance(store, TieredStore) or store.is_empty:
        return store if isinstance(store, TieredStore) else None
    try:
        if device.type != "cpu":
            raise ConfigError("the store needs the pool in host memory for now: choose --device cpu, or --no-store")
        if not config.prefix_cache or config.kv_cache != "paged":
            raise ConfigError("a store needs the prefix cache: leave prefix_cache on and kv_cache paged")
        return open_store(store, config.kv_dtype)
    except (StoreError, ConfigError) as error:
        if store.required:
            raise
        log.warning("working without a store: %s", error)
        return None


def refuse_experts(model: nn.Module) -> None:
    """Raise ConfigError for a mixture of experts: an expert's row count depends on the other
    rows.
    """
    if any(hasattr(module, "experts") or "Experts" in type(module).__name__ for module in model.modules()):
        raise ConfigError(
            "deterministic mode does not support mixture-of-experts models: an expert computes a token together with "
            "whichever others chose it, so its bits depend on them; leave deterministic off, or take a dense model"
        )
