"""Products with packed weights: integer operations and stored bytes per second, by form and rows.

Many copies of a matrix are kept, about 100 MB of them, and every call reads the next one, so that
weights come from memory as in a model. One row: bytes per second, beside a plain read of the same
memory in turns. More rows: operations (a multiplication and an addition each) per second. Best of
`--rounds`, as a foreign process only ever makes a round slower.
"""

import kvire  # noqa: F401  before torch: it decides how torch's threads wait

# isort: split
import argparse
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch  # noqa: F401  its OpenMP threads run the kernels
from reporting import describe, write

from kvire.core.native import native_module

FORMS = {"q4_1": (5, 20, 32), "q4_0": (4, 18, 32), "q8_0": (3, 34, 32), "q4_k": (8, 144, 256), "q5_k": (9, 176, 256)}
FORMS |= {"q6_k": (10, 210, 256), "mxfp4": (12, 17, 32), "f16": (1, 2, 1)}
SHAPES = ((3072, 576), (576, 1536), (2048, 2048))
ROWS = (1, 2, 4, 8, 16, 64, 512)
COPIES_BYTES = 100 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", nargs="+", default=[""])
    parser.add_argument("--forms", nargs="+", default=list(FORMS))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    options = parser.parse_args()
    native: Any = native_module()
    print(f"{native.step_isa()}, {options.threads} threads; GB/s for one row, else GOPS")
    rows: list[dict[str, Any]] = []
    for isa in options.isa:
        for name in options.forms:
            for outputs, width in SHAPES:
                if width % FORMS[name][2]:
                    continue
                measured = [measure(native, name, outputs, width, count, isa, options) for count in options.rows]
                rows += measured
                shown = "  ".join(f"{row['rows']}: {row['shown']:6.1f}" for row in measured)
                print(f"{isa:>8} {name:<6} {outputs:>5} x {width:<5} {shown}  read {measured[0]['read_gbs']:.0f}")
    if options.json:
        write(options.json, {**describe(), "isa": native.step_isa(), "rows": rows})


def measure(native: Any, name: str, outputs: int, width: int, count: int, isa: str, options: Any) -> dict[str, Any]:
    code, block_bytes, inputs = FORMS[name]
    size = native.packed_bytes(code, outputs, width)
    copies = max(2, COPIES_BYTES // size)
    memory = np.zeros(copies * size + 64, np.uint8)
    memory = memory[-memory.ctypes.data % 64 :]
    source = np.full(outputs * width // inputs * block_bytes, 0x11, np.uint8)
    native.pack_weights(code, outputs, width, source.ctypes.data, memory.ctypes.data, options.threads)
    for i in range(1, copies):
        memory[i * size : (i + 1) * size] = memory[:size]
    matrices = [native.PackedWeights(code, outputs, width, memory.ctypes.data + i * size) for i in range(copies)]
    x, out = np.ones((count, width), np.float32), np.empty((count, outputs), np.float32)
    calls = max(3, min(copies, int(2e9 / (2 * count * outputs * width))))
    best_s = read_s = float("inf")
    at = 0
    for _ in range(options.rounds):
        started = perf_counter()
        for _ in range(calls):
            at = (at + 1) % copies
            native.packed_linear(matrices[at], x.ctypes.data, count, 0, out.ctypes.data, options.threads, isa=isa)
        best_s = min(best_s, (perf_counter() - started) / calls)
        started = perf_counter()
        native.read_sum(memory.ctypes.data, (32 << 20) // 4, options.threads)
        read_s = min(read_s, perf_counter() - started)
    gops, gbs = 2 * count * outputs * width / best_s / 1e9, size / best_s / 1e9
    shown = gbs if count == 1 else gops
    return {
        "form": name,
        "isa": isa or native.step_isa(),
        "outputs": outputs,
        "width": width,
        "rows": count,
        "us": round(best_s * 1e6, 2),
        "gops": round(gops, 1),
        "gbs": round(gbs, 2),
        "read_gbs": round((32 << 20) / read_s / 1e9, 2),
        "shown": shown,
    }


if __name__ == "__main__":
    main()
