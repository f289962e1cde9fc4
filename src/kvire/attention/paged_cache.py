"""How unmodified transformers classes run over the paged cache.

A model's attention layer calls `cache.update(K, V, layer)`, then the attention function registered
under ATTENTION_NAME. Both need the step's plan. The PagedCache holds it, and every attention module
of its model has the PagedCache as an attribute. Nothing is global: two engines in one process have
two models, and so two caches.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from kvire.attention.params import AttentionParams
from kvire.attention.reference import PortableAttention
from kvire.cache.batch import Batch
from kvire.cache.paged import PagedKV
from kvire.cache.staging import BatchStaging
from kvire.core.spec import LayerKind

# A name that transformers' mask registry does not know makes it build no masks: ours come from the
# plan.
ATTENTION_NAME = "kvire_paged"
CACHE_ATTRIBUTE = "kvire_cache"


class PagedCache:
    """The cache of a transformers model: writes into the pool, attends over it."""

    is_compileable = False

    def __init__(self, paged: PagedKV, backend: PortableAttention) -> None:
        self.paged = paged
        self.backend = backend
        self._plan: Any = None
        self._rows: Tensor | None = None
        self._kinds = {layer: group.kind for group in paged.spec.groups for layer in group.layers}
        self._windows = {layer: group.window for group in paged.spec.groups for layer in group.layers}
        self._sources: dict[int, int] = {}

    def attach(self, model: PreTrainedModel) -> None:
        """Make `model` run over this cache."""
        modules = attention_modules(model)
        self._sources = kv_sources(modules)
        assert set(self._sources.values()) == set(self._kinds), f"layers {sorted(self._kinds)} have KV: {self._sources}"
        for module in modules:
            setattr(module, CACHE_ATTRIBUTE, self)
        model.set_attn_implementation(ATTENTION_NAME)

    def begin(self, batch: Batch, rows: Tensor | None = None) -> None:
        """Prepare one step: compute the shared input of all layers once.

        rows: int64 [T], which rows of the model's input are the batch's; the others are padding,
            neither written nor attended. None: all of them, in order.
        """
        self._plan = self.backend.plan(self.paged, batch)
        self._rows = rows

    def get_seq_length(self, *_: Any) -> int:
        """Positions are always passed explicitly; a model that asks for a length would guess them
        wrong.
        """
        raise AssertionError("positions are explicit; the model must not derive them from the cache")

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """k, v: [1, H_kv, T, D], written into the pool; returned as the pool holds them.

        Rounded to the pool's dtype, so that a token's KV does not depend on which chunk it came in.
        """
        self.backend.write(self._plan, layer_idx, self._live(k), self._live(v))
        return self.paged.rounded(k), self.paged.rounded(v)

    def attend(self, module: nn.Module, query: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        """query: [1, H_q, T, D] -> [1, T, H_q, D_v]."""
        layer = self._sources[module.layer_idx]  # type: ignore[index]
        rows = self._live(query)
        if self._kinds[layer] is LayerKind.LATENT:
            expand: Any = module.expand_kv
            out = self.backend.attend_latent(self._plan, layer, rows, expand, params)
        else:
            out = self.backend.attend(self._plan, layer, rows, self._live(k), self._live(v), params)
        if self._rows is not None:
            out = out.new_zeros(query.shape[2], *out.shape[1:]).index_copy_(0, self._rows, out)
        return out.unsqueeze(0)

    def _live(self, x: Tensor) -> Tensor:
        """[1, H, rows of the input, D] -> [T, H, D], the batch's rows."""
        x = x[0].transpose(0, 1)
        return x if self._rows is None else x[self._rows]

    def window(self, layer: int) -> int | None:
        """Tokens that `layer` looks back, itself included; None for all of them."""
        return self._windows[self._sources[layer]]


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that attend: they know their layer and their scale."""
    return [m for m in model.modules() if isinstance(getattr(m, "layer_idx", None), int) and hasattr(m, "scaling")]


def kv_sources(modules: list[nn.Module]) -> dict[int, int]:
    """Layer -> the layer whose KV it attends over, its own unless the model says otherwise.

    A layer that shares KV, as Gemma 4's last ones do, gets the last layer of its kind that keeps
    any: the class hands it that layer's K and V of the step, and the pool has the rest.
    """
    last_of_kind: dict[str, int] = {}
    sources: dict[int, int] = {}
    for module in modules:
        layer: int = module.layer_idx  # type: ignore[assignment]
        kind: str = getattr(module, "layer_type", "")
        if not getattr(module, "is_kv_shared_layer", False):
            last_of_kind[kind] = layer
        sources[layer] = last_of_kind[kind]
    return sources


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _attention_mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function that transformers' attention layers call; see AttentionInterface."""
    cache: PagedCache = getattr(module, CACHE_ATTRIBUTE)
    params = AttentionParams(scaling, cache.window(module.layer_idx), softcap, s_aux)  # type: ignore[arg-type]
    return cache.attend(module, query, key, value, params), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)


class PagedModel:
    """A transformers model bound to a PagedCache: batch in, logits out.

    The model's weights are on the pool's device; batches and logits are on the CPU.
    """

    def __init__(self, model: PreTrainedModel, cache: PagedCache) -> None:
        self._model = model
        self._cache = cache
        device = cache.paged.device
        self._staging = None if device.type == "cpu" else BatchStaging(device)
        cache.attach(model)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Write the batch's KV into the pool and return logits of its logits_rows: float32 [R,
        vocab].
        """
        if self._staging is not None:
            batch = self._staging.to_device(batch)
        self._cache.begin(batch)
        out = self._model(
            input_ids=batch.token_ids.unsqueeze(0),
            position_ids=batch.positions.unsqueeze(0),
            cache=self._cache,
            use_cache=True,
            logits_to_keep=batch.logits_rows,
        )
        logits: Tensor = out.logits[0].float().cpu()
        return logits
