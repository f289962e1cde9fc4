"""Decode attention: bytes of KV read per second, beside what the same memory gives to a plain read.

The pool is far larger than the caches, block tables are random, and every call reads blocks that no
recent call has read. Calls take turns with plain reads of stretches of the same pool, so that both
meet the same machine. Medians say what one gets on it as busy as it is; the fastest tenth says what
the kernel can do, since a foreign process on one of the cores stalls whatever waits for all of
them.

Threads wait as in the product (OMP_WAIT_POLICY=passive, which kvire sets); with
OMP_WAIT_POLICY=active in the environment each call saves the 50 to 100 us that waking a thread
takes.
"""

import kvire  # noqa: F401  before torch: it decides how torch's threads wait

# isort: split
import argparse
import math
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from reporting import describe, summary, write
from torch import Tensor

from kvire.attention.cpu import NativeAttention
from kvire.attention.params import AttentionParams
from kvire.cache.batch import Batch
from kvire.cache.paged import PagedKV
from kvire.core.native import native_module
from kvire.core.spec import KVGroup, KVSpec, LayerKind

SHAPES = {"9/3 x 64 (SmolLM2-135M)": (9, 3, 64), "32/8 x 128 (Llama-3-8B)": (32, 8, 128)}
LOADS = ((1, 1024), (1, 4096), (16, 1024))  # sequences, tokens of context each
BLOCK_SIZE = 16  # the default of an engine
LAYER = 0
READ_BYTES = 16 << 20  # of one plain read: long enough for threads to start, short enough to miss most interruptions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write raw samples here")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pool-mib", type=int, default=1024)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "float16", "bfloat16", "int8"])
    options = parser.parse_args()

    rows = []
    print(f"OMP_WAIT_POLICY={os.environ['OMP_WAIT_POLICY']}")
    print(f"{'':>9} {'heads':<24} {'S x L':>9} {'decode GB/s':>12} {'read GB/s':>10} {'ratio':>6}   fastest tenth")
    for dtype in options.dtypes:
        for name, shape in SHAPES.items():
            pool = make_pool(shape, dtype, options.pool_mib << 20)
            for load in LOADS:
                row = {"dtype": dtype, "shape": name, "sequences": load[0], "context": load[1]}
                row |= measure(pool, shape, load, options.rounds)
                rows.append(row)
                print(line(row), flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        backend = NativeAttention()
        facts = {"machine": describe(), "backend": backend.name}
        facts["threads_of"] = Path(native_module().thread_runtime()).name
        facts |= {"pool_mib": options.pool_mib, "block_size": BLOCK_SIZE}
        facts |= {"omp_wait_policy": os.environ["OMP_WAIT_POLICY"]}
        write(options.json, {**facts, "rows": rows})


def make_pool(shape: tuple[int, int, int], dtype: str, size_bytes: int) -> PagedKV:
    """Every page written: memory that never was is one page of zeros, which the cache holds."""
    _, kv_heads, width = shape
    spec = KVSpec((KVGroup(LayerKind.FULL, (LAYER,), kv_heads, width, width),), dtype, BLOCK_SIZE)
    pool = PagedKV(spec, size_bytes // spec.block_bytes(0))
    new = torch.randn(2, BLOCK_SIZE, kv_heads, width)
    pool.write(LAYER, new[0], new[1], torch.arange(BLOCK_SIZE))
    pool.slabs[0][1:] = pool.slabs[0][:1]
    return pool


def measure(pool: PagedKV, shape: tuple[int, int, int], load: tuple[int, int], rounds: int) -> dict[str, Any]:
    """Rounds of one call after another over all blocks of the pool, each followed by a
    plain read.
    """
    backend = NativeAttention()
    query_heads, kv_heads, width = shape
    sequences, length = load
    plans = [backend.plan(pool, batch) for batch in make_batches(pool.num_blocks[0], sequences, length)]
    query = torch.randn(sequences, query_heads, width)
    new = torch.zeros(sequences, kv_heads, width)
    params = AttentionParams(scale=1 / math.sqrt(width))
    call_bytes = sequences * length * pool.spec.bytes_per_token
    pieces = pool.slabs[0].view(torch.float32).view(-1).split(READ_BYTES // 4)
    readers = [torch.sum, native_sum]

    decode, reads = [], {reader: [] for reader in readers}
    for step in range(rounds * len(plans)):
        plan = plans[step % len(plans)]
        decode.append(call_bytes / timed(lambda p=plan: backend.attend(p, LAYER, query, new, new, params)) / 1e9)
        # half a pool away from the blocks that were just read
        piece, reader = pieces[(step + len(pieces) // 2) % (len(pieces) - 1)], readers[step % 2]
        reads[reader].append(piece.nbytes / timed(lambda r=reader, p=piece: r(p)) / 1e9)
    read = max(reads.values(), key=statistics.median)
    return {
        "bytes_per_token": pool.spec.bytes_per_token,
        "decode_gb_s": summary(decode),
        "read_gb_s": summary(read),
        "fastest_tenth_gb_s": {"decode": fastest_tenth(decode), "read": max(map(fastest_tenth, reads.values()))},
    }


def native_sum(data: Tensor) -> float:
    return native_module().read_sum(data.data_ptr(), data.numel(), torch.get_num_threads())


def timed(work: Callable[[], object]) -> float:
    started = perf_counter()
    work()
    return perf_counter() - started


def fastest_tenth(rates: list[float]) -> float:
    """The rate that one sample in ten reaches."""
    return sorted(rates)[-1 - len(rates) // 10]


def make_batches(num_blocks: int, sequences: int, length: int) -> list[Batch]:
    """Batches of decoding sequences that together use every block of the pool once, in random
    order.
    """
    per_sequence = length // BLOCK_SIZE
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    count = num_blocks // (per_sequence * sequences)
    tables = order[: count * sequences * per_sequence].view(count, sequences, per_sequence)
    ones = torch.zeros(sequences, dtype=torch.int64)
    return [
        Batch(ones, ones, (ones,), (table,), (length,) * sequences, tuple(range(sequences + 1)), ones)
        for table in tables
    ]


def line(row: dict[str, Any]) -> str:
    decode, read = row["decode_gb_s"]["median"], row["read_gb_s"]["median"]
    fast_decode, fast_read = row["fastest_tenth_gb_s"]["decode"], row["fastest_tenth_gb_s"]["read"]
    load = f"{row['sequences']} x {row['context']}"
    medians = f"{decode:>12.1f} {read:>10.1f} {decode / read:>6.2f}"
    fast = f"{fast_decode:.1f} of {fast_read:.1f} = {fast_decode / fast_read:.2f}"
    return f"{row['dtype']:>9} {row['shape']:<24} {load:>9} {medians}   {fast}"


if __name__ == "__main__":
    main()
