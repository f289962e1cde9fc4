"""Writes blocks to a disk tier until it is told to stop: python disk_writer.py FOLDER CAPACITY_BYTES SEED BLOCKS"""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from store.disk_cases import get, put, record_of

from kvire.core.errors import BlockMissing, TierUnavailable
from kvire.store.disk.tier import DiskTier


def main() -> None:
    folder, capacity_bytes, seed, blocks = Path(sys.argv[1]), *map(int, sys.argv[2:])
    rng = random.Random(seed)
    hits = 0
    with DiskTier(folder, capacity_bytes) as tier:
        for number in range(blocks):
            record = record_of(seed * 1_000_000 + number)
            try:
                put(tier, record, size=rng.choice((3_000, 20_000, 20_000, 90_000)))
                if get(tier, record, 90_000) != 0:
                    raise SystemExit("wrong bytes")
                hits += 1
            except (BlockMissing, TierUnavailable):
                pass  # another process needed the room, or was at it for very long
        print(hits)


if __name__ == "__main__":
    main()
