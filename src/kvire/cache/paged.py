"""Where the bytes of blocks lie: one slab per block and group, all its layers contiguous.

A slab is [layer][K: token, head, key_width | V: token, head, value_width], so that moving a block
anywhere is one copy. Attention reads one layer of many slabs through strided views.
"""

import mmap

import torch
from torch import Tensor

from kvire.core.spec import KVSpec

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class PagedKV:
    """The K and V of `num_blocks` blocks in every group of `spec`.

    k(layer): [num_blocks, block_size, kv_heads, key_width] and v(layer) alike with value_width: views
    of the slabs, in the pool's dtype. Blocks start out uninitialised.
    """

    def __init__(self, spec: KVSpec, num_blocks: int) -> None:
        assert num_blocks > 0
        self.spec = spec
        self.num_blocks = num_blocks
        self.dtype = DTYPES[spec.dtype]
        self.slabs: list[Tensor] = []  # per group: [num_blocks, elements of one slab]
        self.group_of: dict[int, int] = {}  # model layer -> group
        self._k: dict[int, Tensor] = {}
        self._v: dict[int, Tensor] = {}
        for g, group in enumerate(spec.groups):
            slab = _huge_page_storage(num_blocks * spec.block_bytes(g), self.dtype).view(num_blocks, -1)
            self.slabs.append(slab)
            k_elements = spec.block_size * group.kv_heads * group.key_width
            v_elements = spec.block_size * group.kv_heads * group.value_width
            for i, layer in enumerate(group.layers):
                start = i * (k_elements + v_elements)
                self.group_of[layer] = g
                self._k[layer] = _heads(slab[:, start : start + k_elements], spec.block_size, group.kv_heads)
                start += k_elements
                self._v[layer] = _heads(slab[:, start : start + v_elements], spec.block_size, group.kv_heads)

    def close(self) -> None:
        """Give the memory back now, not when the garbage collector finds the cycle of model and cache."""
        self.slabs.clear()
        self._k.clear()
        self._v.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.numel() * slab.element_size() for slab in self.slabs)

    def k(self, layer: int) -> Tensor:
        """K of one model layer: [num_blocks, block_size, kv_heads, key_width]."""
        return self._k[layer]

    def v(self, layer: int) -> Tensor:
        """V of one model layer: [num_blocks, block_size, kv_heads, value_width]."""
        return self._v[layer]

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """k: [T, kv_heads, key_width], v: [T, kv_heads, value_width], slots: [T] int64; rounds to the pool's dtype."""
        keys, values = self._k[layer], self._v[layer]
        assert k.shape == (slots.numel(), *keys.shape[2:]), (k.shape, keys.shape)
        assert v.shape == (slots.numel(), *values.shape[2:]), (v.shape, values.shape)
        block, offset = slots // self.spec.block_size, slots % self.spec.block_size
        keys[block, offset] = k.to(self.dtype)
        values[block, offset] = v.to(self.dtype)

    def gather(self, layer: int, block_ids: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """First `length` tokens of the blocks, in the pool's dtype: k [length, kv_heads, key_width], v alike."""
        keys, values = self._k[layer], self._v[layer]
        k = keys.index_select(0, block_ids).flatten(0, 1)[:length]
        v = values.index_select(0, block_ids).flatten(0, 1)[:length]
        return k, v

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Copy one block of `group`, all layers (copy-on-write)."""
        self.slabs[group][target].copy_(self.slabs[group][source])


def _heads(part: Tensor, block_size: int, heads: int) -> Tensor:
    return part.view(part.shape[0], block_size, heads, -1)


def _huge_page_storage(size_bytes: int, dtype: torch.dtype) -> Tensor:
    """Memory that the kernel backs with huge pages where it can, and only once it is touched.

    Decode reads cross fewer TLB entries: 25 GB/s became 29 at 4,096 tokens of SmolLM2 (bench/decode_attention.py).
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=dtype)
    # Private: a shared anonymous mapping is shared memory to the kernel, which has huge pages off by default.
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)
