"""KV between a transformers cache and the bytes of blocks.

A block of a group of layers is one slab, `[layer][K: token, head, width | V: token, head, width]`,
as everywhere in Kvire; a cache keeps `[1, head, token, width]` per layer, and of layers with a
window only the last window - 1 tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationMixin
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvire.core.dtypes import compute_dtypes
from kvire.core.errors import UnsupportedModelError
from kvire.core.spec import KVGroup, KVSpec, LayerKind

# Of generate() and forward(): "past_key_values" in older versions, "cache" in newer ones.
CACHE = "cache" if "cache" in signature(GenerationMixin.prepare_inputs_for_generation).parameters else "past_key_values"


class WholeWindowLayer(DynamicSlidingWindowLayer):
    """Computes as its parent does, and keeps copies of all KV, from which blocks are saved.

    computed: (K, V) of each call, [1, head, token, width].
    """

    def __init__(self, sliding_window: int) -> None:
        super().__init__(sliding_window)
        self.computed: list[tuple[Tensor, Tensor]] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As the parent's."""
        self.computed.append((key_states, value_states))
        whole: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
        return whole


def new_cache(config: Any) -> DynamicCache:
    """The cache generate() would make, with window layers that keep dropped tokens."""
    made = DynamicCache(config=config)
    made.layers = [
        WholeWindowLayer(layer.sliding_window) if type(layer) is DynamicSlidingWindowLayer else layer
        for layer in made.layers
    ]
    return made


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The shape of a model's blocks.

    spec: groups, full attention first; dtype; block size in tokens.
    """

    spec: KVSpec

    @classmethod
    def probe(cls, model: Any, block_size: int) -> "CacheLayout":
        """The layout of the model's real cache, found by computing one token.

        Raises UnsupportedModelError, naming the layer, for a cache other than K and V by token.
        """
        probed = new_cache(model.config)
        token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
        with torch.no_grad():
            model(input_ids=token, use_cache=True, **{CACHE: probed})
        kinds: dict[tuple[Any, ...], list[int]] = {}
        dtypes = set()
        for number, layer in enumerate(probed.layers):
            if (states := _states(number, layer)) is None:
                continue
            keys, values = states
            if keys.shape[:3] != (1, keys.shape[1], 1) or values.shape[:3] != keys.shape[:3]:
                raise UnsupportedModelError(
                    f"layer {number} keeps K {tuple(keys.shape)} and V {tuple(values.shape)} for one token, not "
                    "[1, head, 1, width] each: its KV cannot be cut into blocks of tokens"
                )
            dtypes.add(keys.dtype if keys.dtype == values.dtype else f"{keys.dtype} and {values.dtype}")
            window = layer.sliding_window if isinstance(layer, WholeWindowLayer) else None
            kinds.setdefault((window or 0, keys.shape[1], keys.shape[3], values.shape[3]), []).append(number)
        names = {str(dtype).removeprefix("torch.") for dtype in dtypes}
        if len(names) != 1 or not names <= set(compute_dtypes()):
            raise UnsupportedModelError(
                f"KV of {', '.join(sorted(names)) or 'no layer'} cannot be stored: load the model "
                "in float32, float16 or bfloat16"
            )
        groups = tuple(
            KVGroup(
                LayerKind.SLIDING if window else LayerKind.FULL, tuple(layers), heads, key_width, value_width,
                window=window or None,
            )
            for (window, heads, key_width, value_width), layers in sorted(kinds.items())
        )  # fmt: skip
        return cls(KVSpec(groups, names.pop(), block_size))

    @property
    def dtype(self) -> torch.dtype:
        """Of K and V."""
        dtype: torch.dtype = getattr(torch, self.spec.dtype)
        return dtype

    def empty_cache(self, config: Any) -> DynamicCache:
        """A cache to fill.

        Raises UnsupportedModelError if the model's windows differ from the probed ones.
        """
        made = new_cache(config)
        for group in self.spec.groups:
            windows = {getattr(made.layers[index], "sliding_window", None) for index in group.layers}
            if windows != {group.window}:
                raise UnsupportedModelError("the model's config was changed since the model was opened: open it again")
        return made

    def first_needed(self, group: int, stop: int) -> int:
        """The first block that a group needs for its state after `stop` blocks."""
        window = self.spec.groups[group].window
        return 0 if window is None else max(0, stop * self.spec.block_size - (window - 1)) // self.spec.block_size

    def fill(self, filled: DynamicCache, slabs: list[Tensor], stop: int, device: torch.device) -> None:
        """Bring an empty cache into the state after `stop` blocks.

        slabs: per group, [at least stop, block bytes] of uint8; read from block `first_needed` on.
        """
        tokens = stop * self.spec.block_size
        for number, group in enumerate(self.spec.groups):
            first = self.first_needed(number, stop)
            for index, *regions in self._regions(slabs[number][first:stop], group):
                layer = filled.layers[index]
                keys, values = (region.permute(2, 0, 1, 3).flatten(1, 2)[None] for region in regions)
                if group.window is not None:
                    keys, values = (states[:, :, -group.window + 1 :] for states in (keys, values))
                    layer.cumulative_length = tokens
                keys, values = (states.to(device).contiguous() for states in (keys, values))
                layer.lazy_initialization(keys, values)
                layer.keys, layer.values = keys, values

    def take(self, computed: DynamicCache, start: int, stop: int) -> list[Tensor]:
        """Blocks from `start` to `stop` of a cache that was filled up to `start`.

        Per group, uint8 of [stop - start, block bytes].

        Raises UnsupportedModelError if the cache is not of this layout.
        """
        slabs = []
        for number, group in enumerate(self.spec.groups):
            slab = torch.empty((stop - start, self.spec.block_bytes(number)), dtype=torch.uint8)
            for index, *regions in self._regions(slab, group):
                states = self._computed(computed.layers[index], start, stop)
                for kept, region in zip(states, regions, strict=True):
                    blocks, tokens, heads, width = region.shape
                    if kept.dtype != region.dtype or kept.shape != (1, heads, blocks * tokens, width):
                        raise UnsupportedModelError(
                            f"layer {index} keeps another KV than when the model was opened: open it again"
                        )
                    region.copy_(kept[0].reshape(heads, blocks, tokens, width).permute(1, 2, 0, 3))
            slabs.append(slab)
        return slabs

    def _computed(self, layer: Any, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer's tokens in these blocks."""
        begin, end = start * self.spec.block_size, stop * self.spec.block_size
        if not isinstance(layer, WholeWindowLayer):
            return layer.keys[:, :, begin:end], layer.values[:, :, begin:end]
        keys, values = (torch.cat(states, dim=2)[:, :, : end - begin] for states in zip(*layer.computed, strict=True))
        return keys, values

    def _regions(self, slab: Tensor, group: KVGroup) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Views of a slab: layer, K and V as [block, token, head, width]."""
        shape = self.spec.block_size, group.kv_heads
        offset = 0
        for layer in group.layers:
            views = []
            for width in (group.key_width, group.value_width):
                size = self.spec.rows_bytes(group, width)
                views.append(slab[:, offset : offset + size].view(self.dtype).view(-1, *shape, width))
                offset += size
            yield layer, views[0], views[1]


def _states(number: int, layer: Any) -> tuple[Tensor, Tensor] | None:
    """K and V of a probed layer; None if it keeps none of its own."""
    name = type(layer).__name__
    if name == "DummyLayer":
        return None
    if type(layer) not in {DynamicLayer, WholeWindowLayer}:
        raise UnsupportedModelError(
            f"layer {number} keeps its state in a {name}, which is not K and V by the token: a prefix of it cannot be "
            "stored. Run this model without a stored cache."
        )
    return (layer.keys, layer.values) if layer.is_initialized else None
