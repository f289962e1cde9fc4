"""Kill a disk tier's writer 10,000 times; after each kill no block may be wrong or lost.

    python tools/kill_store.py [KILLS] [FOLDER]   about 10 minutes for 10,000 in memory

What is killed and what is checked: tests/store/disk_kill.py, of which the tests run a hundred.
"""

import runpy
import sys
import tempfile
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "tests" / "store" / "disk_kill.py"
KILLS = 10_000


def main() -> None:
    kills = int(sys.argv[1]) if sys.argv[1:] else KILLS
    with tempfile.TemporaryDirectory(dir=sys.argv[2] if sys.argv[2:] else None) as folder:
        sys.argv = [str(SCRIPT), "random", str(kills), folder]
        runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
