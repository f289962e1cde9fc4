"""Run every benchmark and keep what came out: `make bench`. Nothing else should run meanwhile."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE.parent / "docs" / "results"

for name in ("decode_attention", "engine"):
    print(f"== {name}", flush=True)
    subprocess.run([sys.executable, HERE / f"{name}.py", "--json", RESULTS / f"{name}.json"], check=True)
