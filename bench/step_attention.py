"""Attention of the native step: operations per second of a prompt, bytes per second of decoding.

A prompt: causal attention over itself, a multiplication and an addition each, of scores and values.
Decoding: bytes of K and V of the contexts, beside a plain read of the whole pool, more than caches
hold, in turns. Pools are float16, blocks in random order. Best of `--rounds`.
"""

import kvire  # noqa: F401  before torch: it decides how torch's threads wait

# isort: split
import argparse
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from reporting import describe, write

from kvire.cache.paged import PagedKV
from kvire.core.dtypes import KV_DTYPES
from kvire.core.native import native_module
from kvire.core.spec import KVGroup, KVSpec, LayerKind

SHAPES = {"9/3 x 64 (SmolLM2-135M)": (9, 3, 64), "32/8 x 128 (Llama-3-8B)": (32, 8, 128)}
PROMPTS, DECODES = (300, 1668), ((1, 1024), (1, 4096), (16, 1024))
POOL_BYTES = 512 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", nargs="+", default=[""])
    options = parser.parse_args()
    native: Any = native_module()
    rows = []
    for isa in options.isa:
        for name, (query_heads, heads, width) in SHAPES.items():
            pool = Pool(query_heads, heads, width)
            for length in PROMPTS:
                seconds = min(pool.run(isa, options.threads, [(0, length)]) for _ in range(options.rounds))
                gflops = 4 * query_heads * width * length * (length + 1) / 2 / seconds / 1e9
                rows.append({"shape": name, "isa": isa, "prompt": length, "gflops": round(gflops, 1)})
                print(f"{isa or native.step_isa():>12} {name:<24} prompt of {length}: {gflops:.0f} GFLOPS")
            for sequences, length in DECODES:
                parts = [(length - 1, length)] * sequences
                best_s = read_s = float("inf")
                for _ in range(options.rounds):
                    best_s = min(best_s, *(pool.run(isa, options.threads, parts) for _ in range(5)))
                    started = perf_counter()
                    native.read_sum(pool.paged.slabs[0].data_ptr(), pool.paged.nbytes // 4, options.threads)
                    read_s = min(read_s, perf_counter() - started)
                gbs = 2 * 2 * heads * width * length * sequences / best_s / 1e9
                read = pool.paged.nbytes / read_s / 1e9
                rows.append(
                    {"shape": name, "isa": isa, "sequences": sequences, "context": length, "gbs": round(gbs, 2)}
                )
                rows[-1]["read_gbs"] = round(read, 2)
                print(f"{'':>12} {'':<24} {sequences} x {length}: {gbs:.1f} GB/s, plain read {read:.1f}")
    if options.json:
        write(options.json, {**describe(), "isa": native.step_isa(), "rows": rows})


class Pool:
    """A float16 pool of one layer, and the queries that meet it."""

    def __init__(self, query_heads: int, heads: int, width: int) -> None:
        self.query_heads, self.heads, self.width = query_heads, heads, width
        spec = KVSpec((KVGroup(LayerKind.FULL, (0,), heads, width, width),), "float16", 16, "heads")
        self.paged = PagedKV(spec, POOL_BYTES // spec.block_bytes(0))
        self.paged.slabs[0].fill_(0.01)
        k, v = self.paged.k(0), self.paged.v(0)
        native: Any = native_module()
        self.layer = native.PagedLayer(
            k=k.data_ptr(),
            v=v.data_ptr(),
            k_block_stride=k.stride(0),
            v_block_stride=v.stride(0),
            num_blocks=k.shape[0],
            block_size=16,
            heads=heads,
            key_width=width,
            value_width=width,
            dtype=KV_DTYPES["float16"].kernel_code,
        )
        self.order = np.random.default_rng(0).permutation(k.shape[0]).astype(np.int32)
        self.at = 0

    def run(self, isa: str, threads: int, parts: list[tuple[int, int]]) -> float:
        """Seconds of one step over blocks that no recent one has read."""
        native: Any = native_module()
        blocks = max(-(-end // 16) for _, end in parts)
        if self.at + blocks * len(parts) > len(self.order):
            self.at = 0
        tables = self.order[self.at : self.at + blocks * len(parts)].reshape(len(parts), blocks).copy()
        self.at += blocks * len(parts)
        begin = np.cumsum([0, *(end - start for start, end in parts)]).astype(np.int64)
        lengths = np.array([end for _, end in parts], np.int64)
        slots = np.concatenate(
            [
                tables[i, np.arange(*part) // 16].astype(np.int64) * 16 + np.arange(*part) % 16
                for i, part in enumerate(parts)
            ]
        )
        rows = int(begin[-1])
        q, k, v = (
            np.full((rows, heads, self.width), 0.01, np.float32) for heads in (self.query_heads, self.heads, self.heads)
        )
        out = np.empty_like(q)
        shape = (0.125, 0, 0.0, 0)
        started = perf_counter()
        native.step_attention(
            self.layer,
            self.query_heads,
            *shape,
            len(parts),
            *(array.ctypes.data for array in (begin, lengths, tables)),
            blocks,
            *(array.ctypes.data for array in (slots, q, k, v, out)),
            threads,
            isa=isa,
        )
        return perf_counter() - started


if __name__ == "__main__":
    torch.set_num_threads(2)
    main()
