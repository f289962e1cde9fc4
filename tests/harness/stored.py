"""Engines over every kind of tier, restarted on what the one before left: random traffic, one
oracle.
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.differential import Subject, Tally, compare_blocks, judge, run
from harness.traffic import Traffic
from harness.waiting import PATIENCE_S
from kvire.codec.frame import Frames
from kvire.core.config import StoreConfig
from kvire.engine.engine import Engine
from kvire.plan.cost import PrefillSpeed
from kvire.store.disk.tier import DiskTier
from kvire.store.keyring import Keyring
from kvire.store.memory.tier import MemoryTier
from kvire.store.open import unsealed
from kvire.store.remote.open import open_remote
from kvire.store.tier import Tier
from kvire.store.tiered import TieredStore

MIB = 1 << 20
DISK_BYTES = 64 * MIB


class FixedPrefill(PrefillSpeed):
    """Computing costs what the test says, so that the choice between loading and computing is the
    test's.
    """

    def measured(self, start: int, count: int, seconds: float) -> None:
        self.samples += 1


class Slow:
    """A tier each of whose reads takes `read_s` longer."""

    read_run = lent = None  # no way around `read`

    def __init__(self, tier: Tier, read_s: float) -> None:
        self._tier, self._read_s = tier, read_s

    def __getattr__(self, name: str):
        return getattr(self._tier, name)

    def read(self, block_id, buffers, timeout_s=None) -> int:
        time.sleep(self._read_s)
        return self._tier.read(block_id, buffers, timeout_s)


Tiers = Callable[[Path, Keyring], list[tuple[Tier, Frames]]]


def memory(folder: Path, keyring: Keyring) -> list[tuple[Tier, Frames]]:
    return [(MemoryTier(16 * MIB), Frames(unsealed(keyring)))]


def disk(folder: Path, keyring: Keyring) -> list[tuple[Tier, Frames]]:
    return [(DiskTier(folder / "disk", DISK_BYTES), Frames(keyring.tenant))]


def memory_and_disk(folder: Path, keyring: Keyring) -> list[tuple[Tier, Frames]]:
    return [(MemoryTier(1 * MIB), Frames(unsealed(keyring))), *disk(folder, keyring)]


def slow_disk(folder: Path, keyring: Keyring) -> list[tuple[Tier, Frames]]:
    return [(Slow(tier, 0.003), frames) for tier, frames in disk(folder, keyring)]


def shared_folder(folder: Path, keyring: Keyring) -> list[tuple[Tier, Frames]]:
    return [(open_remote(f"file://{folder / 'shared'}", timeout_s=PATIENCE_S), Frames(keyring.tenant))]


def slow_remote(folder: Path, keyring: Keyring) -> list[tuple[Tier, Frames]]:
    return [(Slow(tier, 0.003), frames) for tier, frames in shared_folder(folder, keyring)]


# By name: the tiers, and what one token is said to cost to compute. Where that is a little more
# than loading it, both go on at once, from the two ends.
KINDS: dict[str, tuple[Tiers, float]] = {
    "memory": (memory, 0.01),
    "disk": (disk, 0.01),
    "memory+disk": (memory_and_disk, 0.01),
    "both ends, disk": (slow_disk, 0.0003),
    "remote": (shared_folder, 0.01),
    "both ends, remote": (slow_remote, 0.0003),
}


@contextmanager
def store_over(tiers: Tiers, folder: Path) -> Iterator[TieredStore]:
    """Open on whatever lies in `folder`."""
    keyring = Keyring(folder / "keys" / "keyring.json")
    store = TieredStore(tiers(folder, keyring), keyring, StoreConfig(load_timeout_s=PATIENCE_S))
    with store:
        yield store


def say_what_prefill_costs(engine: Engine, token_s: float) -> None:
    engine.reuse.prefill = FixedPrefill(token_s)


def prove_stored(
    subject: Subject, kind: str, folder: Path, seed: int, requests: int, *, lives: int, deterministic: bool
) -> Tally:
    """`requests` requests, spread over `lives` engines one after the other on the same tiers
    (memory: the same too).
    """
    tiers, token_s = KINDS[kind]
    rng = random.Random(seed)
    traffic = Traffic(rng, subject.shape, logprobs=2 if deterministic else 20)
    total = Tally()
    timed = Subject(subject.name, _timed(subject.build, token_s), subject.shape, subject.pools[:3], subject.attention)
    with store_over(tiers, folder) as first:
        for life in range(lives):
            with store_over(tiers, folder) if life and kind != "memory" else _left_open(first) as store:
                episode = run(
                    timed, seed + life, requests // lives, deterministic=deterministic, traffic=traffic, store=store
                )
                total.add(judge(episode))
                total.blocks_compared += compare_blocks(episode)
                assert store.flush(PATIENCE_S)
    return total


@contextmanager
def _left_open(store: TieredStore) -> Iterator[TieredStore]:
    yield store


def _timed(build: Callable[..., Engine], token_s: float) -> Callable[..., Engine]:
    def build_timed(**options) -> Engine:
        engine = build(**options)
        say_what_prefill_costs(engine, token_s)
        return engine

    return build_timed
