"""Run every benchmark, keep what came out and make one page of it: `make bench`.

Nothing else should run meanwhile.

    python bench/run.py [NAME ...]     some of the benchmarks, in this order

By default all that need no environment of another engine; bench_agrees, transformers_connector,
vllm_connector and vllm_tiers run when they are named. A benchmark that fails does not keep the
others from running; the exit status says so at the end.
"""

import subprocess
import sys
from pathlib import Path
from time import perf_counter

HERE = Path(__file__).parent
RESULTS = HERE.parent / "docs" / "results"
BENCHMARKS = (
    "decode_attention",
    "engine",
    "serving",
    "pool_waste",
    "kv_cache_modes",
    "int8_quality",
    "store_tiers",
    "store_engine",
    "fifty_pages",
    "plan_check",
    "log_tools",
    "field",
)


def main() -> int:
    failed = []
    for name in sys.argv[1:] or BENCHMARKS:
        print(f"== {name}", flush=True)
        started = perf_counter()
        call = [sys.executable, HERE / f"{name}.py", "--json", RESULTS / f"{name}.json"]
        if subprocess.run(call, check=False).returncode:
            failed.append(name)
        print(f"== {name}: {perf_counter() - started:.0f} s", flush=True)
    subprocess.run([sys.executable, HERE / "table.py"], check=True)
    for name in failed:
        print(f"{name} failed", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
