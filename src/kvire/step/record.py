"""Recording: a model's own forward, run once on tensors without numbers.

Linear layers, embeddings and attention are single operations of the recorded graph; everything else
is recorded as torch computes it. The number of tokens is a symbol, so that the graph holds for any.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import PreTrainedModel

from kvire.attention.paged_cache import ATTENTION_NAME, CACHE_ATTRIBUTE, attention_modules, kv_sources
from kvire.attention.params import AttentionParams
from kvire.models.packed import PackedEmbedding, PackedModule

EXAMPLE_TOKENS, EXAMPLE_ROWS = 7, 3  # any numbers but 0 and 1, which torch treats specially


class NotRecordableError(Exception):
    """The model cannot run as a native step; the message says why."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of attention: by which layer, over whose KV, and how."""

    layer: int
    source: int
    params: AttentionParams


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded forward.

    graph: from (token ids [1, T], positions [1, T], rows [R]) to logits [1, R, vocabulary].
    modules: packed modules, by the number that the graph names them by.
    calls: of attention, by number.
    """

    graph: GraphModule
    modules: tuple[PackedModule, ...]
    calls: tuple[AttentionCall, ...]


@torch.library.custom_op("kvire::recorded_linear", mutates_args=())
def recorded_linear(x: Tensor, module: int, outputs: int) -> Tensor:
    """Stands for a packed linear layer."""
    raise AssertionError("a recorded operation does not run")


@recorded_linear.register_fake
def _(x: Tensor, module: int, outputs: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], outputs, dtype=torch.float32)


@torch.library.custom_op("kvire::recorded_embedding", mutates_args=())
def recorded_embedding(ids: Tensor, module: int, width: int) -> Tensor:
    """Stands for a packed embedding."""
    raise AssertionError("a recorded operation does not run")


@recorded_embedding.register_fake
def _(ids: Tensor, module: int, width: int) -> Tensor:
    return ids.new_empty(*ids.shape, width, dtype=torch.float32)


@torch.library.custom_op("kvire::recorded_attention", mutates_args=())
def recorded_attention(q: Tensor, k: Tensor, v: Tensor, call: int) -> Tensor:
    """Stands for one call of attention, writing K and V included."""
    raise AssertionError("a recorded operation does not run")


@recorded_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, call: int) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1])


class _RecordingCache:
    """The model's cache while it is recorded: keeps nothing, notes the calls."""

    is_compileable = False

    def __init__(self, sources: dict[int, int], windows: dict[int, int | None]) -> None:
        self._sources = sources
        self._windows = windows
        self.calls: list[AttentionCall] = []

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return k, v

    def get_seq_length(self, *_: Any) -> int:
        raise NotRecordableError("it asks the cache for its length")

    def window(self, layer: int) -> int | None:
        return self._windows[self._sources[layer]]

    def attend(self, module: nn.Module, query: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        layer: int = module.layer_idx  # type: ignore[assignment]
        self.calls.append(AttentionCall(layer, self._sources[layer], params))
        made: Tensor = recorded_attention(query, k, v, len(self.calls) - 1)
        return made


def record(model: PreTrainedModel, windows: dict[int, int | None]) -> Recording:
    """Record the forward of a model whose matrices are packed.

    windows: of each layer that keeps KV.

    Raises NotRecordableError. The model's cache is another one afterwards: attach it anew.
    """
    if any(hasattr(module, "experts") for module in model.modules()):
        raise NotRecordableError("it is a mixture of experts")
    attention = attention_modules(model)
    cache = _RecordingCache(kv_sources(attention), windows)
    for module in attention:
        setattr(module, CACHE_ATTRIBUTE, cache)
    model.set_attn_implementation(ATTENTION_NAME)
    packed = [module for module in model.modules() if isinstance(module, PackedModule)]

    def forward(ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        found: Tensor = model(
            input_ids=ids, position_ids=positions, cache=cache, use_cache=True, logits_to_keep=rows
        ).logits
        return found

    numbers = {id(module): i for i, module in enumerate(packed)}
    try:
        for module in packed:
            module.recorder = lambda x, at: _stand_in(x, at, numbers[id(at)])
        graph = _traced(forward)
    except NotRecordableError:
        raise
    except Exception as error:
        raise NotRecordableError(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}") from error
    finally:
        for module in packed:
            module.recorder = None
    return Recording(graph, tuple(packed), tuple(cache.calls))


def _stand_in(x: Tensor, module: PackedModule, number: int) -> Tensor:
    if isinstance(module, PackedEmbedding):
        found: Tensor = recorded_embedding(x, number, module.embedding_dim)
        return found
    made: Tensor = recorded_linear(x, number, module.packed.shape[0])
    return made


def _traced(forward: Any) -> GraphModule:
    tokens = torch.zeros(1, EXAMPLE_TOKENS, dtype=torch.long)
    rows = torch.zeros(EXAMPLE_ROWS, dtype=torch.long)
    with torch.no_grad(), _quiet_torch():
        trace = make_fx(forward, tracing_mode="symbolic", _allow_non_fake_inputs=True)
        made: GraphModule = trace(tokens, tokens.clone(), rows)
    return made


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Torch logs its tracing to whoever logs everything: nothing below a warning."""
    loggers = [logging.getLogger(name) for name in ("torch", *_torch_loggers())]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(max(logger.level, logging.WARNING))
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _torch_loggers() -> list[str]:
    return [name for name in list(logging.root.manager.loggerDict) if name.startswith("torch.")]
