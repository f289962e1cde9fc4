"""Memory layout of blocks: one slab per block and group, all its layers contiguous.

A slab is [layer][K: token, head, key_width | V: token, head, value_width], so that moving a block
anywhere is one copy. Attention reads one layer of many slabs through strided views. In a pool of a
scaled dtype (int8) K is followed by its scales, float32 [token, head] at a multiple of four bytes,
and V by its own. In the layout "heads" K lies [head, key_width, token], V [head, token,
value_width], scales [head, token]; the views have the same dimensions, and other strides.
"""

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from kvire.cache.scaled import dequantise, quantise
from kvire.core.dtypes import KV_DTYPES
from kvire.core.spec import KVSpec

CPU = torch.device("cpu")


class PagedKV:
    """The K and V of `num_blocks` blocks in every group of `spec`, or one count per group.

    k(layer): [num_blocks, block_size, kv_heads, key_width] and v(layer) alike with value_width:
    views of the slabs, in the pool's dtype, on `device`. In a scaled dtype, k_scales(layer) and
    v_scales(layer) hold the step size of each row. Blocks start out uninitialised.
    """

    def __init__(self, spec: KVSpec, num_blocks: int | Sequence[int], device: torch.device = CPU) -> None:
        self.spec = spec
        self.device = device
        self.num_blocks = [num_blocks] * len(spec.groups) if isinstance(num_blocks, int) else list(num_blocks)
        assert len(self.num_blocks) == len(spec.groups) and min(self.num_blocks) > 0
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self._is_scaled = KV_DTYPES[spec.dtype].is_scaled
        self.slabs: list[Tensor] = []  # per group: [num_blocks, elements of one slab]
        self.group_of: dict[int, int] = {}  # model layer -> group
        self._k: dict[int, Tensor] = {}
        self._v: dict[int, Tensor] = {}
        self._k_scales: dict[int, Tensor] = {}
        self._v_scales: dict[int, Tensor] = {}
        for g, group in enumerate(spec.groups):
            slab = _storage(self.num_blocks[g] * spec.block_bytes(g), self.dtype, device).view(self.num_blocks[g], -1)
            self.slabs.append(slab)
            self.group_of |= dict.fromkeys(group.layers, g)
            start = 0
            for layer in group.layers:
                for rows, scales, width, order in (
                    (self._k, self._k_scales, group.key_width, _K_ORDER),
                    (self._v, self._v_scales, group.value_width, _V_ORDER),
                ):
                    stop = start + spec.block_size * group.kv_heads * width
                    shape = (spec.block_size, group.kv_heads, width)
                    rows[layer] = _by_tokens(slab[:, start:stop], shape, order[spec.layout])
                    start += spec.rows_bytes(group, width) // self.dtype.itemsize
                    if scale_bytes := spec.scales_bytes(group):
                        stop = start + scale_bytes // self.dtype.itemsize
                        part = slab[:, start:stop].view(torch.float32)
                        shape = (spec.block_size, group.kv_heads, 1)
                        scales[layer] = _by_tokens(part, shape, _V_ORDER[spec.layout])[..., 0]
                        start = stop

    def close(self) -> None:
        """Free the memory now, before the garbage collector finds the cycle of model and cache."""
        self.slabs.clear()
        self._k.clear()
        self._v.clear()
        self._k_scales.clear()
        self._v_scales.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.numel() * slab.element_size() for slab in self.slabs)

    def memory(self, group: int, block_id: int) -> memoryview:
        """The bytes of one block, all layers of `group`: writable, valid until close().

        CPU only.
        """
        return self.slabs[group][block_id].view(torch.uint8).numpy().data

    def k(self, layer: int) -> Tensor:
        """K of one model layer: [num_blocks, block_size, kv_heads, key_width]."""
        return self._k[layer]

    def v(self, layer: int) -> Tensor:
        """V of one model layer: [num_blocks, block_size, kv_heads, value_width]."""
        return self._v[layer]

    def k_scales(self, layer: int) -> Tensor | None:
        """float32 [num_blocks, block_size, kv_heads], the scales of k(layer); None unless its dtype
        is scaled.
        """
        return self._k_scales.get(layer)

    def v_scales(self, layer: int) -> Tensor | None:
        """float32 [num_blocks, block_size, kv_heads], the scales of v(layer); None unless its dtype
        is scaled.
        """
        return self._v_scales.get(layer)

    def rounded(self, x: Tensor) -> Tensor:
        """K or V [..., width] as the pool would hold it, in the dtype of x."""
        if self._is_scaled:
            return dequantise(*quantise(x, self.dtype)).to(x.dtype)
        return x.to(self.dtype).to(x.dtype)

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """k: [T, kv_heads, key_width], v: [T, kv_heads, value_width], slots: [T] int64.

        Rounds to the pool's dtype.
        """
        keys, values = self._k[layer], self._v[layer]
        assert k.shape == (slots.numel(), *keys.shape[2:]), (k.shape, keys.shape)
        assert v.shape == (slots.numel(), *values.shape[2:]), (v.shape, values.shape)
        at = (slots // self.spec.block_size, slots % self.spec.block_size)
        _store(k, keys, self.k_scales(layer), at)
        _store(v, values, self.v_scales(layer), at)

    def gather(self, layer: int, block_ids: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """First `length` tokens of the blocks: k [length, kv_heads, key_width], v alike.

        In the pool's dtype; dequantised to float32 from a scaled dtype.
        """
        k = _load(self._k[layer], self.k_scales(layer), block_ids, length)
        v = _load(self._v[layer], self.v_scales(layer), block_ids, length)
        return k, v

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Copy one block of `group`, all layers (copy-on-write)."""
        self.slabs[group][target].copy_(self.slabs[group][source])


# Which of token, head, width (0, 1, 2) comes first, second and last in memory.
_K_ORDER = {"tokens": (0, 1, 2), "heads": (1, 2, 0)}
_V_ORDER = {"tokens": (0, 1, 2), "heads": (1, 0, 2)}


def _by_tokens(part: Tensor, shape: tuple[int, int, int], order: tuple[int, ...]) -> Tensor:
    """[blocks, token, head, width] of memory [blocks, numbers] in another order of the last
    three.
    """
    stored = part.view(part.shape[0], *(shape[i] for i in order))
    return stored.permute(0, *(1 + order.index(i) for i in range(3)))


def _store(x: Tensor, rows: Tensor, scales: Tensor | None, at: tuple[Tensor, Tensor]) -> None:
    if scales is None:
        rows[at] = x.to(rows.dtype)
    else:
        rows[at], scales[at] = quantise(x, rows.dtype)


def _load(rows: Tensor, scales: Tensor | None, block_ids: Tensor, length: int) -> Tensor:
    found = rows.index_select(0, block_ids).flatten(0, 1)[:length]
    if scales is None:
        return found
    return dequantise(found, scales.index_select(0, block_ids).flatten(0, 1)[:length])


def _storage(size_bytes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return _huge_page_storage(size_bytes, dtype)
    return torch.empty(size_bytes, dtype=torch.uint8, device=device).view(dtype)


def _huge_page_storage(size_bytes: int, dtype: torch.dtype) -> Tensor:
    """Memory backed by huge pages where the kernel can, allocated on first touch.

    Decode reads cross fewer TLB entries: 25 GB/s became 29 at 4,096 tokens of SmolLM2
    (bench/decode_attention.py).
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=dtype)
    # Private: a shared anonymous mapping is shared memory to the kernel, which has huge pages off
    # by default.
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)
