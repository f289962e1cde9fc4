"""Attention with the C++ kernels: one call for all decodes, one per prefill.

Also picks the backend.
"""

import logging
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvire.attention.blockwise import BlockwiseAttention
from kvire.attention.params import AttentionParams
from kvire.attention.reference import AttentionPlan, Expand, PortableAttention
from kvire.cache.batch import Batch
from kvire.cache.paged import PagedKV
from kvire.core.dtypes import KV_DTYPES
from kvire.core.errors import ConfigError
from kvire.core.native import native_module

log = logging.getLogger(__name__)


def native_available() -> bool:
    """Whether the package was installed with its kernels."""
    return native_module() is not None


class NativeAttention(PortableAttention):
    """The same results through kvire._native, for float32 queries on the CPU; others take the
    portable path.
    """

    def __init__(self) -> None:
        native = native_module()
        if native is None:
            raise ConfigError(
                "native attention was asked for, but kvire was installed without its C++ kernels. Install a C++ "
                "compiler (on Debian: apt install g++) and reinstall kvire, or choose the portable attention."
            )
        self._native: Any = native
        self._layers: WeakKeyDictionary[PagedKV, dict[int, Any]] = WeakKeyDictionary()
        self.name = f"native-{native.isa()}"

    def write(self, plan: AttentionPlan, layer: int, k: Tensor, v: Tensor) -> None:
        """k: [T, kv_heads, key_width], v: [T, kv_heads, value_width]; rounded to the pool's
        dtype.
        """
        if not (_is_cpu_float(k) and _is_cpu_float(v)):
            super().write(plan, layer, k, v)
            return
        k, v = _rows(k), _rows(v)
        slots = plan.batch.slots[plan.paged.group_of[layer]].contiguous()
        assert slots.dtype == torch.int64
        assert k.shape == (slots.numel(), *plan.paged.k(layer).shape[2:]), k.shape
        assert v.shape == (slots.numel(), *plan.paged.v(layer).shape[2:]), v.shape
        self._native.write_kv(
            self._layer(plan.paged, layer),
            k=k.data_ptr(),
            k_token_stride=k.stride(0),
            k_head_stride=k.stride(1),
            v=v.data_ptr(),
            v_token_stride=v.stride(0),
            v_head_stride=v.stride(1),
            slots=slots.data_ptr(),
            tokens=slots.numel(),
            threads=torch.get_num_threads(),
        )

    def attend(
        self, plan: AttentionPlan, layer: int, query: Tensor, k: Tensor, v: Tensor, params: AttentionParams
    ) -> Tensor:
        """As PortableAttention.attend."""
        if not _is_cpu_float(query):
            return super().attend(plan, layer, query, k, v, params)
        query = _rows(query)
        assert query.shape[0] == k.shape[0] == v.shape[0] == plan.batch.cu_seqlens[-1], (query.shape, k.shape)
        out = query.new_empty(*query.shape[:2], v.shape[-1])
        if plan.num_decodes:
            self._decode(plan, layer, query, params, out)
        for sequence in range(plan.num_decodes, len(plan.batch.context_lens)):
            self._prefill(plan, layer, sequence, query, params, out)
        return out

    def _decode(self, plan: AttentionPlan, layer: int, query: Tensor, params: AttentionParams, out: Tensor) -> None:
        """The leading rows, one per sequence, into the leading rows of `out`."""
        key_width = plan.paged.k(layer).shape[-1]
        table = plan.batch.block_tables[plan.paged.group_of[layer]]
        sinks = _sinks(query, params)
        assert query.shape[-1] == key_width and out.shape[-1] == plan.paged.v(layer).shape[-1]
        assert table.dtype == torch.int32 and table.stride(-1) == 1 and out.is_contiguous()
        self._native.decode_attention(
            self._layer(plan.paged, layer),
            queries=query.data_ptr(),
            query_stride=query.stride(0),
            query_head_stride=query.stride(1),
            sequences=plan.num_decodes,
            query_heads=query.shape[1],
            block_tables=table.data_ptr(),
            table_stride=table.stride(0),
            table_width=table.shape[1],
            context_lens=plan.context_lens.data_ptr(),
            scale=params.scale,
            window=params.window or 0,
            softcap=params.softcap or 0.0,
            sinks=0 if sinks is None else sinks.data_ptr(),
            out=out.data_ptr(),
            threads=torch.get_num_threads(),
        )

    def _prefill(
        self, plan: AttentionPlan, layer: int, sequence: int, query: Tensor, params: AttentionParams, out: Tensor
    ) -> None:
        """The rows of one sequence, into theirs of `out`."""
        rows = plan.rows(sequence)
        q = query[rows]
        table = plan.batch.block_tables[plan.paged.group_of[layer]][sequence]
        sinks = _sinks(query, params)
        assert q.shape[-1] == plan.paged.k(layer).shape[-1] and out.shape[-1] == plan.paged.v(layer).shape[-1]
        assert table.dtype == torch.int32 and table.is_contiguous() and out.is_contiguous()
        self._native.prefill_attention(
            self._layer(plan.paged, layer),
            queries=q.data_ptr(),
            query_stride=q.stride(0),
            query_head_stride=q.stride(1),
            tokens=q.shape[0],
            query_heads=q.shape[1],
            block_table=table.data_ptr(),
            table_width=table.numel(),
            context_len=plan.batch.context_lens[sequence],
            scale=params.scale,
            window=params.window or 0,
            softcap=params.softcap or 0.0,
            sinks=0 if sinks is None else sinks.data_ptr(),
            out=out[rows].data_ptr(),
            threads=torch.get_num_threads(),
        )

    def _gather(self, plan: AttentionPlan, layer: int, sequence: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        keys, values = plan.paged.k(layer), plan.paged.v(layer)
        table = plan.batch.block_tables[plan.paged.group_of[layer]][sequence]
        assert table.dtype == torch.int32 and table.is_contiguous()
        k = torch.empty(stop - start, *keys.shape[2:])
        v = torch.empty(stop - start, *values.shape[2:])
        self._native.gather_kv(
            self._layer(plan.paged, layer),
            block_table=table.data_ptr(),
            table_width=table.numel(),
            start=start,
            length=stop - start,
            k_out=k.data_ptr(),
            v_out=v.data_ptr(),
            threads=torch.get_num_threads(),
        )
        return k, v

    def _layer(self, paged: PagedKV, layer: int) -> Any:
        """The kernels' view of one layer; made once, and freed with the pool."""
        layers = self._layers.setdefault(paged, {})
        if layer not in layers:
            k, v = paged.k(layer), paged.v(layer)
            k_scales, v_scales = paged.k_scales(layer), paged.v_scales(layer)
            assert k.device.type == "cpu" and k.stride()[1:] == (k.shape[2] * k.shape[3], k.shape[3], 1)
            assert v.shape[:3] == k.shape[:3] and v.stride()[1:] == (v.shape[2] * v.shape[3], v.shape[3], 1)
            for scales in (k_scales, v_scales):
                assert scales is None or (scales.shape == k.shape[:3] and scales.stride()[1:] == (k.shape[2], 1))
            layers[layer] = self._native.PagedLayer(
                k=k.data_ptr(),
                v=v.data_ptr(),
                k_block_stride=k.stride(0),
                v_block_stride=v.stride(0),
                num_blocks=k.shape[0],
                block_size=k.shape[1],
                heads=k.shape[2],
                key_width=k.shape[3],
                value_width=v.shape[3],
                dtype=KV_DTYPES[paged.spec.dtype].kernel_code,
                k_scales=0 if k_scales is None else k_scales.data_ptr(),
                v_scales=0 if v_scales is None else v_scales.data_ptr(),
                k_scale_stride=0 if k_scales is None else k_scales.stride(0),
                v_scale_stride=0 if v_scales is None else v_scales.stride(0),
            )
        return layers[layer]


class DeterministicNativeAttention(NativeAttention):
    """Every row by the prefill kernel, single ones too: there a row's bits do not depend on its
    chunk.
    """

    def __init__(self) -> None:
        super().__init__()
        self._blockwise = BlockwiseAttention()

    def plan(self, paged: PagedKV, batch: Batch) -> AttentionPlan:
        """As PortableAttention.plan; no row is a decode."""
        plan = super().plan(paged, batch)
        plan.num_decodes = 0
        return plan

    def attend(
        self, plan: AttentionPlan, layer: int, query: Tensor, k: Tensor, v: Tensor, params: AttentionParams
    ) -> Tensor:
        """As PortableAttention.attend, for float32 on the CPU only."""
        assert _is_cpu_float(query), "the portable path would compute other bits"
        return super().attend(plan, layer, query, k, v, params)

    def attend_latent(
        self, plan: AttentionPlan, layer: int, query: Tensor, expand: Expand, params: AttentionParams
    ) -> Tensor:
        """As PortableAttention.attend_latent."""
        return self._blockwise.attend_latent(plan, layer, query, expand, params)


def best_attention(kind: str = "auto", *, deterministic: bool = False, kv_dtype: str = "float32") -> PortableAttention:
    """The backend named `kind`: "native", "portable", or "auto", native where available.

    deterministic: the backend of that kind whose rows have the same bits in every step.

    Raises ConfigError for another name, and for "native" if the kernels were not built or do not
    know the dtype.
    """
    knows_dtype = KV_DTYPES[kv_dtype].kernel_code is not None
    portable, native = (
        (BlockwiseAttention, DeterministicNativeAttention) if deterministic else (PortableAttention, NativeAttention)
    )
    if kind == "portable":
        return portable()
    if kind == "native":
        if not knows_dtype:
            raise ConfigError(f"the native kernels do not read KV in {kv_dtype}; choose attention auto or portable")
        return native()
    if kind != "auto":
        raise ConfigError(f"attention {kind!r} is not known; choose auto, native or portable")
    if not knows_dtype:
        return portable()
    if not native_available():
        _warn_portable()
        return portable()
    return native()


@cache
def _warn_portable() -> None:
    log.warning(
        "kvire was installed without its C++ kernels (no working compiler was found at install time): attention "
        "runs on the slower portable path. For the fast one, install a C++ compiler (on Debian: apt install g++) "
        "and reinstall kvire."
    )


def _sinks(query: Tensor, params: AttentionParams) -> Tensor | None:
    """float32 [query_heads], contiguous."""
    if params.sinks is None:
        return None
    assert params.sinks.shape == query.shape[1:2]
    return params.sinks.float().contiguous()


def _is_cpu_float(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32


def _rows(x: Tensor) -> Tensor:
    """The last dimension contiguous, as the kernels need it."""
    return x if x.stride(-1) == 1 else x.contiguous()
