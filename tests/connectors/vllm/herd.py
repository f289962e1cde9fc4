"""Processes that use one folder at the same time, as small engines, while some of them are killed: S45.

    python herd.py FOLDER ROUNDS

Each round forks PROCESSES of them at once, the first where nothing is yet; one is killed in the middle. The others
have to end well: what they load is checked by the small engine, token by token. Prints the number that was killed.
"""

import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2])]

from connectors.vllm.small_engine import Request, SmallEngine  # noqa: E402

from kvire.core.config import StoreConfig  # noqa: E402
from kvire.store.open import open_store  # noqa: E402

PROCESSES = 4
PROMPTS = [[family * 10 + i // 5 for i in range(20 + number % 9)] for number in range(32) for family in [number % 4]]


def config(folder: Path) -> StoreConfig:
    return StoreConfig(path=folder / "store", disk_bytes=64 << 20, key_file=folder / "keys" / "keyring.json")


def serve(folder: Path, seed: int) -> None:
    """All prompts in some order."""
    store = open_store(config(folder), "float64")
    engine = SmallEngine(store)
    for number in random.Random(seed).sample(range(len(PROMPTS)), len(PROMPTS)):
        engine.run(Request(f"{number}", list(PROMPTS[number])))
    engine.close()
    store.close()


def fork(folder: Path, seed: int) -> int:
    if (child := os.fork()) == 0:
        try:
            serve(folder, seed)
        except BaseException:  # noqa: BLE001 - a child must never return into its parent's program
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def main() -> None:
    folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
    dice, killed = random.Random(0), 0
    for number in range(rounds):
        children = [fork(folder, 10 * number + i) for i in range(PROCESSES)]
        time.sleep(dice.random() * 0.4)
        os.kill(children[0], signal.SIGKILL)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        killed += os.WIFSIGNALED(statuses[0])
        if any(statuses[1:]):
            sys.exit(f"round {number}: {statuses}")
    print(killed)


if __name__ == "__main__":
    main()
