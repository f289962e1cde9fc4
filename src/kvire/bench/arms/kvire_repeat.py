"""One repeat on the built-in engine: up to three processes, one after another, each over what the
one before left.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from kvire.bench import page_cache
from kvire.bench.arm import MeasuredPass, Say, loop, prompts_of_scripts, turned
from kvire.bench.arms.kvire_setup import KvireSetup
from kvire.bench.arms.server import Counters, RunningServer, Traffic, serving
from kvire.bench.client import ask_completion
from kvire.bench.load import send_all
from kvire.bench.settings import GridCell
from kvire.bench.states import TIER_OF, Around, TierState
from kvire.bench.work.ideal import Seen, Spell
from kvire.bench.work.prompts import BenchPrompt, Script, TokenScale, Writer, message
from kvire.bench.work.workloads import BenchWork
from kvire.core.errors import ConfigError
from kvire.core.memory import format_size

HEADROOM = 1.15  # of pool and tiers over the need of a pass
WARM_UPS, WARM_UP_TOKENS = 2, 300  # the first long prompts of a process take longer
LEAST_DISK_BYTES, LEAST_POOL_TOKENS = 256 << 20, 1024
MORE_RAM_BYTES = 16 << 20  # of the memory tier, for its records beside KV
REMOTE_TTL_S = 24 * 3600  # after a run nobody has the keys of its blocks in a remote store
FORGET = {"store": False}  # a probe's blocks are kept nowhere, so that the next state finds those of the fill
FILL_POOL, LEAST_FILLERS = (
    1.26,
    3,
)  # what fillers take of a cell's room, more than the pool holds; and in how many prompts
LONGEST_FILLER = 0.8  # of the model's context, since texts are only about as long as asked
FILLER = GridCell("filler", 0, 1)


@dataclass(frozen=True, slots=True)
class RepeatFolders:
    """What a run needs.

    pool_tokens: the most that one cell touches.
    tokens: of all cells together.
    """

    pool_tokens: int
    tokens: int


class Repeat:
    """One repeat of a Kvire arm, with servers and a store of its own.

    folder: of the store, empty at first.
    say: takes a line about each step.
    """

    def __init__(self, arm: KvireSetup, repeat: int, write: Writer, folder: Path, say: Say) -> None:
        self._arm, self._repeat, self._write, self._folder, self._say = arm, repeat, write, folder, say
        self._settings = arm.settings
        cells = turned(list(arm.settings.cells()), repeat)
        self._cells = [(cell, arm.settings.work(cell, write, repeat)) for cell in cells]
        self._room = room(self._cells, arm.encode)
        self._wanted = set(self._settings.states)
        self._traffic = Traffic()  # of the running process
        self._kept: list[BenchPrompt] = []  # what this repeat's store was sent: fills and fillers
        self._filler: tuple[Script, ...] = ()
        self._unwritten = False  # whether the store was too slow for the blocks of a fill

    def all(self) -> Iterator[MeasuredPass]:
        """Every state, each as soon as it can be had."""
        restarted = self._wanted & {TierState.D}
        with self._serving("first start", local=True) as server:
            started = server.counters()
            for cell, work in self._cells:
                yield from self._first_process(server, started, cell, work, last=not restarted)
        if restarted:
            with self._serving("restart", local=True) as server:
                for cell, work in self._cells:
                    yield from self._restarted(server, cell, work)
        if TierState.N in self._wanted:
            with self._serving("new node", local=False) as server:
                for cell, work in self._cells:
                    if work.probe:
                        yield self._pass(server, cell, TierState.N, work)

    def _first_process(
        self, server: RunningServer, started: Counters, cell: GridCell, work: BenchWork, *, last: bool
    ) -> Iterator[MeasuredPass]:
        around = Around(stored_blocks=started.total("kvire_store_blocks"))
        measured = self._pass(server, cell, TierState.E, work, around)
        self._kept += prompts_of_scripts(work.fill)
        if TierState.E in self._wanted:
            yield measured
        self._unwritten |= not server.flush()
        for state in (TierState.G, TierState.W):  # W is what G is, said in a way that other servers can be held to
            if work.probe and state in self._wanted:
                yield self._pass(server, cell, state, work)
        if work.probe and TierState.R in self._wanted:
            self._flush_pool(server)
            yield self._pass(server, cell, TierState.R, work)
        if last and TierState.Z in self._wanted:
            yield self._pass(server, cell, TierState.Z, work)

    def _restarted(self, server: RunningServer, cell: GridCell, work: BenchWork) -> Iterator[MeasuredPass]:
        """Passes without reuse, which leave nothing that anybody could meet, come before or after
        in turn.
        """
        states = [TierState.D, TierState.Z] if self._repeat % 2 else [TierState.Z, TierState.D]
        for state in states:
            if state in self._wanted and (work.probe or state is TierState.Z):
                around = Around(resident_bytes=self._drop_page_cache()) if state is TierState.D else None
                yield self._pass(server, cell, state, work, around)

    def _pass(
        self, server: RunningServer, cell: GridCell, state: TierState, work: BenchWork, around: Around | None = None
    ) -> MeasuredPass:
        self._say(f"{cell}: {state}")
        scripts = {TierState.E: work.fill, TierState.Z: work.baseline}.get(state, work.probe)
        before, read_before = server.counters(), server.read_bytes()
        extra = None if state is TierState.E else self._extra(f"{cell}", salted=state is TierState.Z)
        done = send_all(server.endpoint, scripts, loop(self._settings, cell, self._repeat), extra)
        after, read_after = server.counters(), server.read_bytes()
        self._traffic.check(after, sent=len(done.samples))
        around = replace(around or Around(), own_process=self._traffic.ours)
        if state in TIER_OF and state is not TierState.G:
            around = replace(
                around,
                loaded_bytes=loaded_bytes(after, TIER_OF[state]) - loaded_bytes(before, TIER_OF[state]),
                read_bytes=None if read_before is None or read_after is None else read_after - read_before,
                unwritten=self._unwritten,
            )
        return self._arm.judge.measured(cell, self._repeat, state, work, done, around, kept=self._kept)

    def _extra(self, name: str, *, salted: bool) -> Callable[[int, int], Mapping[str, Any]]:
        def fields(script: int, turn: int) -> Mapping[str, Any]:
            salt = f"{self._settings.nonce}/{name}/{self._repeat}/{script}/{turn}"
            return {**FORGET, "cache_salt": salt} if salted else FORGET

        return fields

    def _flush_pool(self, server: RunningServer) -> None:
        """Fill the pool with other prompts.

        The memory tier keeps them: they are computed once in a process.
        """
        self._say("flushing the pool")
        if not self._filler:
            tokens = FILL_POOL * self._room.pool_tokens
            count = max(LEAST_FILLERS, ceil(tokens / (LONGEST_FILLER * self._arm.facts.context_tokens)))
            texts = [self._write.document(tokens / count, "filler", self._repeat, i) for i in range(count)]
            self._filler = tuple(Script((BenchPrompt((message("user", text),), 1),)) for text in texts)
            self._kept += prompts_of_scripts(self._filler)
        done = send_all(server.endpoint, self._filler, loop(self._settings, FILLER, self._repeat))
        self._traffic.check(server.counters(), sent=len(done.samples))
        server.flush()

    def _drop_page_cache(self) -> int | None:
        """Bytes of the store that are still in memory.

        Before every pass: what one reads, the kernel reads beyond.
        """
        page_cache.drop(self._store)
        return page_cache.resident_bytes(self._store)

    @property
    def _store(self) -> Path:
        return self._folder / "store"

    @contextmanager
    def _serving(self, what: str, *, local: bool) -> Iterator[RunningServer]:
        """A process that has been warmed up by prompts whose KV nobody can meet."""
        self._say(what)
        arm = self._arm
        with serving(arm.model, self._options(local=local), arm.endpoint, arm.program) as server:
            for i in range(WARM_UPS):
                text = self._write.document(min(WARM_UP_TOKENS, self._room.pool_tokens / 2), "warm-up", what, i)
                salted = {**FORGET, "cache_salt": f"warm-up/{self._repeat}/{what}/{i}"}
                answer = ask_completion(server.endpoint, [message("user", text)], 2, salted)
                if answer.error is not None:
                    raise ConfigError(f"the server answered its first prompt with {answer.error}: {answer.detail}")
            self._traffic = Traffic()
            self._traffic.check(server.counters(), sent=WARM_UPS)
            yield server

    def _options(self, *, local: bool) -> list[str]:
        """The pool holds what one cell needs, so that flushing it takes little; tiers hold
        everything.
        """
        arm, options = self._arm, [*self._arm.options]
        if not any(word.partition("=")[0] == "--kv-memory" for word in options):
            options += ["--kv-memory", str(int(self._room.pool_tokens * HEADROOM * arm.kv_bytes_per_token))]
        if not arm.has_store:
            return options
        options += ["--key-file", str(self._folder / "keys" / "keyring.json")]
        if local:
            options += self._local_tiers()
        if arm.remote is not None:
            options += ["--remote", arm.remote, "--store-ttl", str(REMOTE_TTL_S)]
        return options

    def _local_tiers(self) -> list[str]:
        everything = self._room.tokens + 2 * self._room.pool_tokens  # the filler as well
        size_bytes = int(everything * HEADROOM * HEADROOM * self._arm.kv_bytes_per_token)
        disk_bytes = max(LEAST_DISK_BYTES, 2 * size_bytes)
        if disk_bytes > (free_bytes := shutil.disk_usage(self._folder).free):
            raise ConfigError(
                f"the run needs {format_size(disk_bytes)} of disk, but {format_size(free_bytes)} are free in "
                f"{self._arm.place}; name another disk with --store, or make --context or --scripts smaller"
            )
        tiers = ["--store", str(self._store), "--disk-size", str(disk_bytes)]
        return tiers + (["--ram", str(size_bytes + MORE_RAM_BYTES)] if TierState.R in self._wanted else [])


class KvireArm(KvireSetup):
    """A setup that measures itself, as an Arm does."""

    def measure(self, repeat: int, scale: TokenScale, say: Say) -> Iterator[MeasuredPass]:
        """See Arm. What the servers kept is gone afterwards."""
        self.place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="kvire-bench-", dir=self.place) as folder:
            write = Writer(scale, self.settings.seed, self.settings.nonce)
            yield from Repeat(self, repeat, write, Path(folder), say).all()


def room(cells: Sequence[tuple[GridCell, BenchWork]], encode: Spell) -> RepeatFolders:
    """What these prompts and their answers take, shared beginnings counted once; and what may be
    under way at once.
    """
    most = every = 0
    for cell, work in cells:
        seen, unique, longest = Seen(), 0, 0
        for prompt in prompts_of_scripts((*work.fill, *work.probe)):
            units = encode(prompt)
            unique += len(units) - seen.shared(units) + prompt.output_tokens
            longest = max(longest, len(units) + prompt.output_tokens)
            seen.add(units)
        most = max(most, unique, min(cell.at_once, len(work.baseline)) * longest)
        every += unique
    return RepeatFolders(max(most, LEAST_POOL_TOKENS), every)


def loaded_bytes(counters: Counters, tier: str) -> float:
    """Bytes of KV that the store read from a tier; a remote tier's name is its address."""
    if tier == "remote":
        return counters.beyond("kvire_store_loaded_bytes_total", ("memory", "disk"))
    return counters.of("kvire_store_loaded_bytes_total", tier)
