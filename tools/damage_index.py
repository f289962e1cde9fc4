"""Damage the index of a store folder at random, use the store, and count what came of it.

    python tools/damage_index.py [--bits 20000] [--bursts 5000] [--seed 1]
        [--json docs/results/index_damage.json]

Half of the damages are done to a store in use, half before it is opened. What is damaged, called
and counted: tests/store/index_damage.py, of which the tests run a thousand. About 20 minutes in
memory; run it with `nice`.
"""

import argparse
import json
import logging
import platform
import sqlite3
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from store.index_damage import Tally, damages

EVERY = 500  # damages between two lines of progress
KINDS = ("bits", "bursts")


def run(kind: str, count: int, seed: int) -> dict[str, Any]:
    """Damage the index `count` times in one way; what came of it."""
    tally, started = Tally(), time.monotonic()
    numbers = {name: count if name == kind else 0 for name in KINDS}
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as place:
        for _ in damages(Path(place), **numbers, seed=seed, tally=tally):
            if tally.trials % EVERY == 0:
                told = f"{tally.exceptions} exceptions, {tally.wrong} wrong, {tally.slow} slow"
                print(f"{kind}: {tally.trials} of {count}, {told}, {time.monotonic() - started:.0f} s", file=sys.stderr)
    return tally.report()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, default=20_000, help="damages of a single bit")
    parser.add_argument("--bursts", type=int, default=5_000, help="damages of 4 to 4,096 random bytes")
    parser.add_argument("--seed", type=int, default=1, help="of the first damage; the others count on from it")
    parser.add_argument("--json", type=Path, help="write the result here, too")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)  # each damage is told of, and rightly
    result: dict[str, Any] = {
        "command": f"python tools/damage_index.py --bits {arguments.bits} --bursts {arguments.bursts} "
        f"--seed {arguments.seed}",
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "bits": run("bits", arguments.bits, arguments.seed),
        "bursts": run("bursts", arguments.bursts, arguments.seed + 1_000_000),
    }
    print(json.dumps(result, indent=1))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    for kind in KINDS:
        tally = Tally(**result[kind])
        tally.check()
        assert tally.slow == 0, tally.troubles


if __name__ == "__main__":
    main()
