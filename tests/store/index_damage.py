"""Damage the index of a disk tier at random, use the tier, and look what came of it.

tests/store/test_disk_damage.py runs a thousand damages, tools/damage_index.py any number.
"""

import random
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from store.disk_cases import MIB, OTHER_TENANT, ROOT, TENANT, Clocks, get, held, put, record_of, records_of, version_in

from kvire.core.errors import BlockMissing, FrameDamaged, TierUnavailable
from kvire.core.record import BlockRecord
from kvire.store.disk.tier import DiskTier

CAPACITY_BYTES = 4 * MIB
MOST_S = 2.0  # any one call
LOST = " found"  # what a trouble ends with that costs a block and nothing else
SIZES = (700, 3_000, 20_000)
INDEX_FILES = ("index.db", "index.db-wal", "index.db-shm")
ORDINARY = (BlockMissing, TierUnavailable, FrameDamaged)  # answers that a tier may give
CHAINS, LENGTH = 6, 6
BLOCKS = [record for number in range(CHAINS) for record in records_of(number, LENGTH)]
GIVEN_UP = BLOCKS[:2]  # deleted in each trial
NEW = records_of(5_000, 3)


@dataclass
class Tally:
    """What many damages did. Blocks are counted after opening again (found) and after the index was lost besides
    (rebuilt), of those that should be there (expected).
    """

    trials: int = 0
    noticed: int = 0
    exceptions: int = 0
    wrong: int = 0
    slow: int = 0
    slowest_s: float = 0.0
    expected: int = 0
    found: int = 0
    rebuilt: int = 0
    pins_expected: int = 0
    pins: int = 0
    troubles: list[str] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        """Of troubles only those that break a bar; that some block is lost is in the counts."""
        counts = {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(self).items()}
        return counts | {"troubles": [trouble for trouble in self.troubles if not trouble.endswith(LOST)]}

    def check(self) -> None:
        """The bars, but for time, which a busy machine takes."""
        told = "\n".join(self.troubles[:5])
        assert self.exceptions == 0, told
        assert self.wrong == 0, told
        assert self.rebuilt >= 0.99 * self.expected, f"{self.rebuilt} of {self.expected}"
        assert self.found >= 0.99 * self.expected, f"{self.found} of {self.expected} without losing the index"


def size_of(record: BlockRecord) -> int:
    return SIZES[int.from_bytes(record.id.key[:2], "little") % len(SIZES)]


def tier_of(folder: Path, capacity_bytes: int | None = CAPACITY_BYTES) -> DiskTier:
    """A tier whose upkeep is done by hand, and whose clock can be put forward."""
    clocks = Clocks()
    tier = DiskTier(folder, capacity_bytes, wall=clocks.wall, elapsed=clocks.elapsed)
    tier._upkeep.start = lambda: None
    tier.clocks = clocks
    return tier


def make(folder: Path) -> None:
    """A folder with chains of two tenants in slots of three sizes, pins, notes, lifetimes, and slots that are free."""
    with tier_of(folder) as tier:
        passing = records_of(4_000, 8)
        for record in (*passing, *BLOCKS):
            tenant = TENANT if record.id.key[0] % 2 else OTHER_TENANT
            ttl_s = 1e6 if record.id.key[1] % 4 == 0 else None
            assert put(tier, record, size=size_of(record), tenant=tenant, ttl_s=ttl_s)
        tier.delete([record.id for record in passing], "damaged")
        tier.pin([record.id for record in BLOCKS[-LENGTH:]], pinned=True)
        tier.note_namespace(ROOT, {"weights": "w", "block_size": "16"})
        tier.touch([record.id for record in BLOCKS[LENGTH : 2 * LENGTH]])
        settle(tier)


def settle(tier: DiskTier) -> None:
    """Do what upkeep has to do, and more than it would do in a minute."""
    tier._upkeep._next_sync = tier._upkeep._next_expiry = 0.0
    for _ in range(5000):  # a remade index may have large segments to look through
        if not tier._upkeep.round():
            return
    raise AssertionError("upkeep finds no end")


class Trial:
    """One damage of one folder."""

    def __init__(self, tally: Tally, name: str) -> None:
        self.tally = tally
        self.name = name
        tally.trials += 1

    def call(self, tier: DiskTier, what: str, action: Callable[[], Any]) -> Any:
        """The action's answer; None if it is an ordinary failure. What is none is counted."""
        started = time.perf_counter()
        try:
            return action()
        except ORDINARY:
            tier.clocks.wait(10.0)  # a tier that failed is left alone for less than that
            return None
        except Exception:  # noqa: BLE001 - this is what is looked for
            self.tally.exceptions += 1
            self.tell(what, traceback.format_exc(limit=-4))
            return None
        finally:
            took_s = time.perf_counter() - started
            self.tally.slowest_s = max(self.tally.slowest_s, took_s)
            if took_s > MOST_S:
                self.tally.slow += 1
                self.tell(what, f"took {took_s:.1f} s")

    def tell(self, what: str, trouble: str) -> None:
        if len(self.tally.troubles) < 100 or not trouble.endswith(LOST):
            self.tally.troubles.append(f"{self.name}, {what}: {trouble}")

    def read(self, tier: DiskTier, record: BlockRecord, versions: tuple[int, ...] = (0,)) -> bool:
        """Whether the block is there; wrong bytes are counted."""
        version = self.call(tier, "read", lambda: [get(tier, record, 20_000)])
        if version is not None and version[0] not in versions:
            self.tally.wrong += 1
            self.tell("read", f"version {version[0]}")
        return version is not None

    def use(self, tier: DiskTier, rng: random.Random) -> None:
        """Every call of the tier."""
        ids = [record.id for record in BLOCKS]
        calls: list[tuple[str, Callable[[], Any]]] = [
            ("held", lambda: tier.held(ids)),
            ("read_run", lambda: self.run(tier)),
            ("read", lambda: [self.read(tier, record) for record in rng.sample(BLOCKS[2:], 4)]),
            ("write", lambda: [put(tier, record, 7, size=size_of(record)) for record in NEW]),
            ("read what was written", lambda: [self.read(tier, record, (7,)) for record in NEW]),
            ("touch", lambda: tier.touch(ids[-8:])),
            ("upkeep", lambda: settle(tier)),
            ("pin", lambda: tier.pin([NEW[0].id], pinned=True)),
            ("delete", lambda: tier.delete([record.id for record in GIVEN_UP], "forgotten")),
            ("entries", lambda: list(tier.entries())),
            ("children", lambda: tier.children(BLOCKS[0].id.key, 0, 4)),
            ("roots_of", lambda: tier.roots_of(BLOCKS[3].content)),
            ("note_namespace", lambda: tier.note_namespace(ROOT, {"weights": "w", "block_size": "16"})),
            ("namespaces", tier.namespaces),
            ("tenants", tier.tenants),
            ("leftovers", lambda: tier.leftovers(free=True)),
            ("stats", tier.stats),
            ("delete_tenant", lambda: tier.delete_tenant(b"nobody.........."[:16])),
        ]
        for what, action in rng.sample(calls, len(calls)):
            self.call(tier, what, action)
        tier.clocks.wait(10.0)

    def run(self, tier: DiskTier) -> None:
        records = BLOCKS[2:20]
        buffers = [[memoryview(bytearray(size_of(record)))] for record in records]
        outcomes = tier.read_run([record.id for record in records], buffers)
        for record, [buffer], outcome in zip(records, buffers, outcomes, strict=True):
            if isinstance(outcome, int) and version_in(buffer[:outcome], record.id) != 0:
                self.tally.wrong += 1
                self.tell("read_run", "wrong bytes")

    def count(self, folder: Path) -> tuple[int, int]:
        """Blocks that are there after opening again, and pinned ones."""
        with closing(self.opened(folder, CAPACITY_BYTES)) as tier:
            for _ in range(3):  # whoever finds it damaged has it made again, and finds the blocks after that
                self.call(tier, "upkeep", lambda: settle(tier))
                here = sum(self.read(tier, record) for record in BLOCKS[2:])
                if here == len(BLOCKS[2:]):
                    break
            promised = sum(self.call(tier, "held", lambda: held(tier, BLOCKS[2:])) or ())
            pinned = sum(entry.pinned for entry in self.call(tier, "entries", lambda: list(tier.entries())) or ())
        return min(here, promised), pinned

    def opened(self, folder: Path, capacity_bytes: int | None) -> DiskTier:
        tier = tier_of(folder, capacity_bytes)
        self.call(tier, "open", tier.open)
        return tier


def place_to_damage(folder: Path, rng: random.Random, *, burst: bool) -> tuple[Path, int, bytes]:
    """Where to damage and with what: a bit of a byte that says something, or 4 to 4,096 random bytes."""
    files = [path for path in (folder / name for name in INDEX_FILES) if path.exists() and path.stat().st_size]
    sizes = [file.stat().st_size for file in files]
    while True:
        [path] = rng.choices(files, sizes)
        content = path.read_bytes()
        at = rng.randrange(len(content))
        if burst:
            length = rng.choice((4, 4, 16, 256, rng.randint(4, 4096)))
            return path, at, rng.randbytes(length)[: len(content) - at]
        if content[at]:
            return path, at, bytes([content[at] ^ 1 << rng.randrange(8)])


def damage(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def attempt(template: Path, folder: Path, seed: int, tally: Tally, *, burst: bool, in_use: bool) -> None:
    """One damage: of an index in use, or before the folder is opened."""
    rng = random.Random(seed)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template, folder)
    trial = Trial(tally, f"{'burst' if burst else 'bit'} {seed} {'in use' if in_use else 'at opening'}")
    capacity_bytes = rng.choice((None, CAPACITY_BYTES))
    if in_use:
        tier = trial.opened(folder, capacity_bytes)
        held(tier, BLOCKS)
        put(tier, record_of(6_000), size=700)
        if rng.random() < 0.5:
            settle(tier)
        identity = (folder / "index.db").stat().st_ino
        place = place_to_damage(folder, rng, burst=burst)
        damage(*place)
    else:
        identity = (folder / "index.db").stat().st_ino
        place = place_to_damage(folder, rng, burst=burst)
        damage(*place)
        tier = trial.opened(folder, capacity_bytes)
    trial.name += f" {place[0].name}:{place[1]}+{len(place[2])}"
    trial.use(tier, rng)
    trial.call(tier, "close", tier.close)
    expected = len(BLOCKS) - len(GIVEN_UP)
    found, pins = trial.count(folder)
    tally.noticed += not (folder / "index.db").exists() or (folder / "index.db").stat().st_ino != identity
    if found < expected:
        trial.tell("after opening again", f"{found} of {expected} found")
        for name in INDEX_FILES:
            (folder / name).unlink(missing_ok=True)
        rebuilt, _ = trial.count(folder)
    else:
        rebuilt = found
    if rebuilt < expected:
        trial.tell("after a rebuild", f"{rebuilt} of {expected} found")
    tally.expected += expected
    tally.found += found
    tally.rebuilt += rebuilt
    tally.pins_expected += LENGTH
    tally.pins += min(pins, LENGTH)


def damages(place: Path, bits: int, bursts: int, seed: int, tally: Tally) -> Iterator[None]:
    """Damage an index so many times, every other one while it is in use."""
    make(template := place / "template")
    for number in range(bits + bursts):
        attempt(template, place / "folder", seed + number, tally, burst=number >= bits, in_use=number % 2 == 0)
        yield
