"""What the store adds to plain copies: 256 blocks of 368,640 bytes (4,096 tokens of SmolLM2, fp16), interleaved.

Prints milliseconds, median and best of several rounds. Behind docs/adr/0015-tiered-store.md.
"""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvire.codec.frame import Frames
from kvire.codec.seal import TenantKey
from kvire.core.config import StoreConfig
from kvire.core.keys import BlockKey, block_keys
from kvire.core.record import BlockId, BlockRecord
from kvire.store import loader
from kvire.store.disk import DiskTier
from kvire.store.keyring import Keyring
from kvire.store.memory import MemoryTier
from kvire.store.ticket import LoadState, Wanted
from kvire.store.tiered import TieredStore

BLOCKS, KV_BYTES, TOKENS = 256, 368_640, 16
GIB = 1 << 30


def records() -> list[BlockRecord]:
    root = BlockKey(b"r" * 32)
    ids = list(range(BLOCKS * TOKENS))
    keys = block_keys(root, ids, TOKENS)
    return [
        BlockRecord(BlockId(key, 0), keys[i - 1] if i else root, root, i, tuple(ids[i * TOKENS : (i + 1) * TOKENS]),
                    KV_BYTES, key[:16])
        for i, key in enumerate(keys)
    ]  # fmt: skip


def timed(times: dict[str, list[float]], name: str, call) -> None:
    start = time.perf_counter()
    call()
    times[name].append(1e3 * (time.perf_counter() - start))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    blocks = records()
    source = np.random.default_rng(0).integers(0, 256, (BLOCKS, KV_BYTES), dtype=np.uint8)
    target = np.zeros_like(source)
    wanted = [Wanted(block, memoryview(target[i])) for i, block in enumerate(blocks)]
    ids = [block.id for block in blocks]
    times: dict[str, list[float]] = defaultdict(list)

    def load(store: TieredStore) -> None:
        ticket = store.load(wanted)
        assert ticket.wait(10)
        assert ticket.states() == [LoadState.READY] * BLOCKS

    def save(store: TieredStore) -> None:
        assert all(store.save(block, memoryview(source[i])) for i, block in enumerate(blocks))

    with tempfile.TemporaryDirectory() as folder:
        keyring = Keyring(Path(folder) / "keys" / "keyring.json")

        def unsealed(name: str) -> TenantKey:
            return replace(keyring.tenant(name), secret=None)

        def opened(*kinds: str, threads: int) -> TieredStore:
            loader.LOCAL_THREADS = threads
            tiers = {
                "memory": lambda: (MemoryTier(GIB), Frames(unsealed)),
                "disk": lambda: (DiskTier(Path(folder) / "disk", GIB), Frames(keyring.tenant)),
            }
            store = TieredStore([tiers[kind]() for kind in kinds], keyring, StoreConfig(), buffer_bytes=2 * GIB // 4)
            store.open()
            return store

        stores = {f"memory, {n} threads": opened("memory", threads=n) for n in (1, 2)}
        for n in (2, 1):
            stores[f"sealed disk in the page cache, {n} threads"] = opened("disk", threads=n)
        for store in stores.values():
            save(store)
            assert store.flush(60)
        memory = MemoryTier(GIB)
        promoting = TieredStore(
            [(memory, Frames(unsealed)), (DiskTier(Path(folder) / "disk", GIB), Frames(keyring.tenant))],
            keyring, StoreConfig(), buffer_bytes=GIB // 2,
        )  # fmt: skip
        promoting.open()
        for _ in range(rounds):
            timed(times, "copy, whole", lambda: np.copyto(target, source))
            timed(times, "copy, by block", lambda: [np.copyto(t, s) for t, s in zip(target, source, strict=True)])
            for name, store in stores.items():
                timed(times, f"load from {name}", lambda store=store: load(store))
            assert (target == source).all()
            memory.clear()
            timed(times, "load from sealed disk, promoting", lambda: load(promoting))
            timed(times, "flush of what was promoted", lambda: promoting.flush(10))
            timed(times, "save (engine's thread)", lambda: save(stores["memory, 1 threads"]))
            timed(times, "held, 128 ids, memory", lambda: stores["memory, 1 threads"].held(ids[:128]))
            timed(
                times, "held, 128 ids, disk", lambda: stores["sealed disk in the page cache, 1 threads"].held(ids[:128])
            )
            stores["memory, 1 threads"].flush(10)
        for store in (*stores.values(), promoting):
            store.close()
    width = max(map(len, times))
    for name, values in times.items():
        print(f"{name:<{width}}  {statistics.median(values):8.2f}  best {min(values):8.2f}")


if __name__ == "__main__":
    main()
