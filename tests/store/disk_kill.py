"""Kill those who write to a disk tier, at any moment, and look what is left. Run it as a program, without torch:

    python disk_kill.py random KILLS FOLDER [SEED]   kill -9 after a random time
    python disk_kill.py steps FOLDER                 kill -9 before each system call and each statement in turn
    python disk_kill.py rebuild FOLDER               the same while a lost index is made again
    python disk_kill.py herd FOLDER                  four processes write the same blocks, one is killed each round

What should be there is written down outside the victim: a line before and after each change. Prints a line of counts,
exits with an error and says which block is wrong, if one is.
"""

import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from store.disk_cases import MIB, WatchedFiles, check_index, disk_usage, frame_of, get, held, put, record_of

from kvire.core.errors import BlockMissing
from kvire.store.disk import writer
from kvire.store.disk.files import Files
from kvire.store.disk.tier import DiskTier

SEQUENCES, PLACES = 12, 6
ROOMY, TIGHT = 32 * MIB, 4 * MIB
GONE = -1


class Ledger:
    """What a victim began and what it finished, in a file that outlives it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def note(self, word: str, sequence: int, place: int, version: int) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(fd, f"{word} {sequence} {place} {version}\n".encode())
        os.close(fd)

    def possible(self) -> dict[tuple[int, int], set[int]]:
        """For each block, the versions that it may have now; GONE: none."""
        versions: dict[tuple[int, int], set[int]] = defaultdict(lambda: {GONE})
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            word, *numbers = line.split()
            sequence, place, version = map(int, numbers)
            if word == "begin":
                versions[sequence, place].add(version)
            else:
                versions[sequence, place] = {version}
        return versions

    def settle(self, found: dict[tuple[int, int], int]) -> None:
        """What was found is what is there now."""
        lines = [f"done {sequence} {place} {version}\n" for (sequence, place), version in found.items()]
        self.path.write_text("".join(lines))


def work(tier: DiskTier, ledger: Ledger, seed: int, changes: int) -> None:
    """Write, replace and delete blocks, as the seed says."""
    writer.NOTED_IN_ITS_TURN_S = 0.0  # a fast machine fills the whole tier within that second
    rng = random.Random(seed)
    for number in range(changes):
        sequence, place, version = rng.randrange(SEQUENCES), rng.randrange(PLACES), seed * 1000 + number
        record = record_of(sequence, place)
        if rng.random() < 0.1:
            ledger.note("begin", sequence, place, GONE)
            tier.delete([record.id], "damaged")
            ledger.note("done", sequence, place, GONE)
        else:
            ledger.note("begin", sequence, place, version)
            kept = put(tier, record, version, size=rng.choice((600, 20_000, 20_000, 60_000)))
            assert kept, tier.stats()
            ledger.note("done", sequence, place, version)
        tier.touch([record.id])


def victim(action: Callable[[], None], kill_after_s: float | None) -> bool:
    """Run `action` in a process of its own, killed after that time if it does not end or kill itself before; whether
    it was killed.
    """
    child = os.fork()
    if child == 0:
        try:
            action()
        except BaseException:  # noqa: BLE001 - everything a victim says before it dies
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit("the victim failed by itself")
    return os.WIFSIGNALED(status)


def verify(folder: Path, ledger: Ledger, capacity_bytes: int, counts: Counter[str], *, evicts: bool) -> None:
    """Open the folder; every block has to be what it may be, and everything is accounted for."""
    found = {}
    started = time.monotonic()
    with DiskTier(folder, capacity_bytes) as tier:
        counts["open_us"] = max(counts["open_us"], int((time.monotonic() - started) * 1e6))
        while tier._upkeep.round():
            pass
        for (sequence, place), versions in ledger.possible().items():
            record = record_of(sequence, place)
            try:
                version = get(tier, record, 60_000)
            except BlockMissing:
                version = GONE
            if version is None or version not in versions | ({GONE} if evicts else set()):
                raise SystemExit(f"{folder}: block {sequence}/{place} is {version}, and should be one of {versions}")
            found[sequence, place] = version
            counts["blocks"] += version != GONE
    if (usage := disk_usage(folder)) > capacity_bytes:
        raise SystemExit(f"{folder} takes {usage} bytes, above its limit")
    check_index(folder)
    ledger.settle(found)


def random_kills(kills: int, folder: Path, seed: int) -> Counter[str]:
    """Half of them in a folder with room for all blocks, half in one that has to evict."""
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    for number in range(kills):
        tight = number % 2
        place, capacity_bytes = (folder / "tight", TIGHT) if tight else (folder / "roomy", ROOMY)
        ledger = Ledger(folder / f"ledger-{tight}")

        def action(path: Path = place, size: int = capacity_bytes, ledger: Ledger = ledger, seed: int = number) -> None:
            with DiskTier(path, size) as tier:
                work(tier, ledger, seed, 10_000)

        counts["killed"] += victim(action, rng.uniform(0.002, 0.08))
        if number % 5 == 4 and (place / "index.db").exists():
            (place / "index.db").unlink()  # and the index is lost besides
        verify(place, ledger, capacity_bytes, counts, evicts=bool(tight))
    return counts


def dying_files(step: int, seen: list[str]) -> Files:
    """Dies before call number `step`."""

    def watch(name: str, _: tuple[Any, ...]) -> None:
        seen.append(name)
        if len(seen) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return WatchedFiles(watch)


def each_step(folder: Path, prepare: Callable[[Path, Ledger], None], act: Callable[[DiskTier, Ledger], None],
              *, evicts: bool) -> Counter[str]:  # fmt: skip
    """The same work again and again, killed one step later each time, until it is not killed any more."""
    counts: Counter[str] = Counter()
    prepared, ledger_before = folder / "prepared", Ledger(folder / "ledger")
    prepare(prepared, ledger_before)
    ledger_before.settle({block: max(versions) for block, versions in ledger_before.possible().items()})
    step, killed = 0, True
    while killed:
        step += 1
        place, ledger = folder / str(step), Ledger(folder / f"ledger-{step}")
        shutil.copytree(prepared, place)
        shutil.copy(ledger_before.path, ledger.path)

        def action(path: Path = place, step: int = step, ledger: Ledger = ledger) -> None:
            act(DiskTier(path, TIGHT, files=dying_files(step, [])), ledger)

        killed = victim(action, None)
        counts["killed"] += killed
        verify(place, ledger, TIGHT, counts, evicts=evicts)
        shutil.rmtree(place)
    return counts


def steps(folder: Path) -> Counter[str]:
    """Every step of writing with eviction, replacing, deleting and closing."""

    def fill(path: Path, _: Ledger) -> None:
        with DiskTier(path, TIGHT) as tier:
            for number in range(110):
                tier.write(record_of(1000 + number), frame_of(record_of(1000 + number)), b"t" * 16)

    def act(tier: DiskTier, ledger: Ledger) -> None:
        tier._upkeep.start = lambda: None  # its steps are taken by hand, so that they come in the same order
        work(tier, ledger, 1, 6)
        tier._upkeep.round()
        tier.close()

    return each_step(folder, fill, act, evicts=True)


def rebuild(folder: Path) -> Counter[str]:
    """Every step of making a lost index again."""

    def lose(path: Path, ledger: Ledger) -> None:
        with DiskTier(path, TIGHT) as tier:
            work(tier, ledger, 1, 12)
        (path / "index.db").write_bytes(b"no index" * 2000)

    def act(tier: DiskTier, _: Ledger) -> None:
        tier._upkeep.start = lambda: None
        held(tier, [record_of(0)])
        while tier._upkeep.round():
            pass
        tier.close()

    return each_step(folder, lose, act, evicts=False)


def herd(folder: Path) -> Counter[str]:
    """Four processes start together on a folder that is not there; each writes the same 32 blocks, 20 rounds."""
    counts: Counter[str] = Counter()
    store = folder / "store"
    records = [record_of(1, place) for place in range(32)]
    for round_number in range(20):

        def action(seed: int) -> None:
            with DiskTier(store, ROOMY) as tier:
                for record in random.Random(seed).sample(records, len(records)):
                    put(tier, record, 0)
                    if (version := get(tier, record)) != 0:
                        raise AssertionError(f"wrong bytes: {version}")

        children = []
        for number in range(4):
            if (child := os.fork()) == 0:
                try:
                    action(4 * round_number + number)
                except BaseException:  # noqa: BLE001
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            children.append(child)
        time.sleep(random.Random(round_number).uniform(0.005, 0.05))
        os.kill(children[0], signal.SIGKILL)
        codes = [os.waitpid(child, 0)[1] for child in children]
        if any(codes[1:]):
            raise SystemExit(f"round {round_number}: {codes}")
        counts["killed"] += codes[0] != 0
        with DiskTier(store, ROOMY) as tier:
            while tier._upkeep.round():
                pass
            if not all(held(tier, records)):
                raise SystemExit(f"round {round_number}: blocks are missing")
            counts["blocks"] += sum(get(tier, record) == 0 for record in records)
        check_index(store)
    return counts


def main() -> None:
    mode, *rest = sys.argv[1:]
    if mode == "random":
        counts = random_kills(int(rest[0]), Path(rest[1]), int(rest[2]) if rest[2:] else 0)
    else:
        counts = {"steps": steps, "rebuild": rebuild, "herd": herd}[mode](Path(rest[0]))
    print(" ".join(f"{name}={count}" for name, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
