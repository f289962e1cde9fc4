"""How unmodified transformers classes run over the paged cache.

A model's attention layer calls `cache.update(K, V, layer)`, then the attention function registered
under ATTENTION_NAME. Both need the step's plan; it lies on the PagedCache, which every attention
module of its model carries as an attribute. Nothing is global: two engines in one process have two
models, and so two caches.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from kvire.attention.params import AttentionParams
from kvire.attention.reference import PortableAttention
from kvire.cache.batch import Batch
from kvire.cache.paged import PagedKV
from kvire.core.spec import LayerKind

# A name that transformers' mask registry does not know makes it build no masks: ours come from the plan.
ATTENTION_NAME = "kvire_paged"
CACHE_ATTRIBUTE = "kvire_cache"


class PagedCache:
    """What a transformers model sees as its cache: writes into the pool, attends over it."""

    is_compileable = False

    def __init__(self, paged: PagedKV, backend: PortableAttention) -> None:
        self.paged = paged
        self.backend = backend
        self._plan: Any = None
        self._kinds = {layer: group.kind for group in paged.spec.groups for layer in group.layers}
        self._windows = {layer: group.window for group in paged.spec.groups for layer in group.layers}

    def attach(self, model: PreTrainedModel) -> None:
        """Make `model` run over this cache."""
        found = set()
        for module in model.modules():
            layer = getattr(module, "layer_idx", None)
            if isinstance(layer, int) and layer in self._kinds and hasattr(module, "scaling"):
                setattr(module, CACHE_ATTRIBUTE, self)
                found.add(layer)
        assert found == set(self._kinds), f"no attention module for layers {sorted(set(self._kinds) - found)}"
        model.set_attn_implementation(ATTENTION_NAME)

    def begin(self, batch: Batch) -> None:
        """Prepare one step: what all layers share is worked out once."""
        self._plan = self.backend.plan(self.paged, batch)

    def get_seq_length(self, *_: Any) -> int:
        """Positions are always passed explicitly; a model that asks for a length would guess them wrong."""
        raise AssertionError("positions are explicit; the model must not derive them from the cache")

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """k, v: [1, H_kv, T, D], written into the pool; returned as the pool holds them.

        Rounded to the pool's dtype, so that a token's KV does not depend on which chunk it came in.
        """
        self.backend.write(self._plan, layer_idx, k[0].transpose(0, 1), v[0].transpose(0, 1))
        if self.paged.dtype != k.dtype:
            k, v = k.to(self.paged.dtype).to(k.dtype), v.to(self.paged.dtype).to(v.dtype)
        return k, v

    def attend(self, module: nn.Module, query: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        """query: [1, H_q, T, D] -> [1, T, H_q, D_v]."""
        layer: int = module.layer_idx  # type: ignore[assignment]
        rows = query[0].transpose(0, 1)
        if self._kinds[layer] is LayerKind.LATENT:
            expand: Any = module.expand_kv
            out = self.backend.attend_latent(self._plan, layer, rows, expand, params)
        else:
            keys, values = k[0].transpose(0, 1), v[0].transpose(0, 1)
            out = self.backend.attend(self._plan, layer, rows, keys, values, params)
        return out.unsqueeze(0)

    def window(self, layer: int) -> int | None:
        """Tokens that `layer` looks back, itself included; None for all of them."""
        return self._windows[layer]


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
    """A transformers model bound to a PagedCache: batch in, logits out."""

    def __init__(self, model: PreTrainedModel, cache: PagedCache) -> None:
        self._model = model
        self._cache = cache
        cache.attach(model)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Write the batch's KV into the pool and return logits of its logits_rows: float32 [R, vocab]."""
        self._cache.begin(batch)
        out = self._model(
            input_ids=batch.token_ids.unsqueeze(0),
            position_ids=batch.positions.unsqueeze(0),
            cache=self._cache,
            use_cache=True,
            logits_to_keep=batch.logits_rows,
        )
        logits: Tensor = out.logits[0].float()
        return logits
