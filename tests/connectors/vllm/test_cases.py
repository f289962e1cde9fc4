"""Replays of bug reports about stores outside an engine, on the vLLM connector's two sides over real tiers.

What of these cases is about vLLM itself is in test_engine.py and test_engine_trouble.py, under the same numbers.
"""

import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from cases import test_remote_replays as stubborn
from connectors.vllm import broken, herd, scheduler_process
from connectors.vllm.small_engine import BLOCK_BYTES, NAMESPACE, TOKENS, Request, SmallEngine
from harness import waiting
from harness.broken_builds import Cases, Claim, Mutant, each_broken_build, each_claim, must_notice
from harness.loads import folder
from harness.stored import disk, memory, shared_folder, store_over
from harness.waiting import AT_ONCE_S, until
from store.remote_stubs import Stub, redis_request, sockets
from store.stores import BentTier, open_store

from kvire.codec.frame import Frames, prefix_bytes
from kvire.codec.seal import TAG_BYTES
from kvire.connectors.identity import connector_namespace
from kvire.core.config import StoreConfig
from kvire.core.errors import BlockMissing, TierUnavailable
from kvire.core.keys import Namespace
from kvire.core.record import BlockId
from kvire.store.check import Checker, CheckVerdict
from kvire.store.disk.segments import SegmentFiles
from kvire.store.disk.tier import DiskTier
from kvire.store.keyring import Keyring
from kvire.store.open import open_store as open_config
from kvire.store.remote.backend import STAMP_BYTES
from kvire.store.remote.open import open_remote
from kvire.store.tiered import TieredStore

VALUE_BYTES = STAMP_BYTES + prefix_bytes(TOKENS) + BLOCK_BYTES + TAG_BYTES  # of a block in Redis
PROMPT = list(range(20 * TOKENS + 1))
WHOLE = 20 * TOKENS
DEADLINE_S = 0.3  # of a remote tier that never answers


def asked(store: TieredStore, prompt: list[int] = PROMPT, *, salt: str | None = None, **more) -> Request:
    """By an engine whose device remembers nothing, and whose blocks are all written when this returns."""
    engine = SmallEngine(store, **more)
    request = engine.run(Request("a", list(prompt), cache_salt=salt))
    engine.close()
    assert store.flush(waiting.PATIENCE_S)
    return request


def s20_a_salt_in_every_tier() -> None:
    for tiers in (memory, disk, shared_folder):
        with folder() as path, store_over(tiers, path) as store:
            for salt, stored in (("a", 0), ("b", 0), ("a", WHOLE), (None, 0), ("b", WHOLE), (None, WHOLE)):
                assert asked(store, salt=salt).stored_tokens == stored, (tiers.__name__, salt)


def s21_hash_seeds_of_other_processes() -> None:
    """Schedulers with other hash seeds name the blocks as this process does, and find all of them."""
    with folder() as path:
        with store_over(disk, path) as store:
            asked(store)
        answers = set()
        for seed in (None, "0", "1", "12345"):
            told = subprocess.run(
                [sys.executable, scheduler_process.__file__, str(path), str(len(PROMPT))],
                env={"PATH": "/usr/bin:/bin"} | ({"PYTHONHASHSEED": seed} if seed else {}),
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            answers.add(told.stdout)
        with store_over(disk, path) as store:
            engine = SmallEngine(store)
            engine.scheduler.match(Request("a", list(PROMPT)), 0)
            own = [key.hex() for key in engine.scheduler._tracked["a"].chain.keys[:5]]
            engine.close()
        assert [answer.split() for answer in answers] == [[*own, str(WHOLE)]]


def namespace_of(model: Path) -> Namespace:
    return connector_namespace(
        model, {"hidden_size": 6}, engine="vllm 1", numerics="test", kv_dtype="float64", spec="test", block_size=TOKENS
    )


def s22_another_model_of_the_same_name() -> None:
    """Restarted on other weights of the same shapes in the same files, and on the first ones again."""
    with folder() as path:
        (path / "model").mkdir()
        weights = path / "model" / "model.safetensors"
        for content, stored in ((b"first", 0), (b"tuned", 0), (b"first", WHOLE)):
            weights.write_bytes(content)
            with store_over(disk, path) as store:
                assert asked(store, namespace=namespace_of(path / "model")).stored_tokens == stored, content


def s23_other_layouts_of_the_same_size() -> None:
    """Each is a miss, and counted by what differs; the first engine still finds its own."""
    others = {
        "kv_dtype": "int64", "spec": "heads and tokens transposed", "weights": "of equal size", "layout_version": 0,
        "numerics": "another vLLM", "shard": "tp=2 pp=1",
    }  # fmt: skip
    with folder() as path:
        with store_over(disk, path) as store:
            asked(store)
        for name, value in others.items():
            with store_over(disk, path) as store:
                misses_what_differs_in(name, store, replace(NAMESPACE, **{name: value}))
        with store_over(disk, path) as store:
            assert asked(store).stored_tokens == WHOLE


def misses_what_differs_in(name: str, store: TieredStore, namespace: Namespace) -> None:
    engine = SmallEngine(store, namespace=namespace)
    assert engine.run(Request("a", list(PROMPT))).stored_tokens == 0
    counts = engine.scheduler.take_counts()
    until(lambda: counts.update(engine.scheduler.take_counts()) or counts["foreign_requests", name])
    engine.close()


class FaultyTier(BentTier):
    """A tier that promises every block, and gives `faults` for those that it lists."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: dict[BlockId, Callable[[], None]] = {}
        self.bend = self._cut

    def read(self, block_id, buffers, timeout_s=None) -> int:
        if (fault := self.faults.get(block_id)) is not None:
            fault()
        return super().read(block_id, buffers, timeout_s)

    def _cut(self, block_id, buffers, length: int) -> int:
        return length // 2 if block_id in self.faults else length


def missing() -> None:
    raise BlockMissing("deleted")


def unreadable() -> None:
    raise TierUnavailable("permission denied")


def cut_off() -> None:
    pass


def s34_found_but_never_read() -> None:
    """Blocks that every lookup finds and no load gets: deleted, without permission, truncated.

    The report changes files between lookup and load and asks for 1.5 times the cold time; here a tier says what those
    files would make it say, for 1, 5 and all 10 blocks, and loads are counted.
    """
    for fault in (missing, unreadable, cut_off):
        for gone in ([0], [9], [3, 4, 5, 6, 7], list(range(10))):
            tier = FaultyTier()
            with folder() as path, open_store(path, tier) as store:
                asked(store, PROMPT[: 10 * TOKENS + 1])
                loads_what_comes_before(gone, tier, fault, store)


def loads_what_comes_before(gone: list[int], tier: FaultyTier, fault: Callable[[], None], store: TieredStore) -> None:
    """In one more load at most; the rest is computed."""
    engine = SmallEngine(store)
    request = Request("a", PROMPT[: 10 * TOKENS + 1])
    engine.scheduler.match(request, 0)
    keys = engine.scheduler._tracked["a"].chain.keys
    tier.faults = {BlockId(keys[index], 0): fault for index in gone}
    loads, begin = [], engine.worker.begin
    engine.worker.begin = lambda plan: loads.extend(plan.loads) or begin(plan)
    engine.run(request)
    assert request.stored_tokens == gone[0] * TOKENS, (fault.__name__, gone)
    assert len(loads) == 1 + (gone[0] > 0)
    assert sum(n for (name, _), n in engine.worker.take_counts().items() if name == "failed_blocks") >= 1
    engine.close()


def s44_files_that_vanish() -> None:
    """Under engines that go on: a file, half of them, all, the folder, and then something else stands in its place."""

    def remove(files: list[Path]) -> None:
        for file in files:
            file.write_bytes(b"")  # or whoever has it open goes on with it
            file.unlink()

    def one_file(place: Path) -> None:
        remove(sorted(place.glob("*.seg"))[:1])

    def half_of_the_files(place: Path) -> None:
        files = sorted(place.glob("*.seg"))
        assert len(files) >= 4
        remove(files[::2])

    def all_files(place: Path) -> None:
        for file in place.iterdir():
            file.unlink()

    def no_folder(place: Path) -> None:
        shutil.rmtree(place)

    def no_place(place: Path) -> None:
        shutil.rmtree(place)
        place.write_text("not a folder")

    prompts = [[100 * number + i for i in range(30)] for number in range(5)]
    with pytest.MonkeyPatch.context() as patch, folder() as path, store_over(disk, path) as store:
        patch.setattr("kvire.store.disk.allocator.SEGMENT_BYTES", 8 * 4096)  # so that there are several
        for lose in (one_file, half_of_the_files, all_files, no_folder):
            for prompt in prompts:
                asked(store, prompt)
                assert asked(store, prompt).stored_tokens == 28, "it is stored (again)"
            lose(path / "disk")
            assert sum(asked(store, prompt).stored_tokens for prompt in prompts) < 28 * 5, lose.__name__
        no_place(path / "disk")
        for prompt in prompts:
            assert asked(store, prompt).stored_tokens == 0
        assert store.stats().handles["disk"].counts.unavailable > 0, "it says that it is off"


def s44_a_folder_without_permission() -> None:
    """Under an engine that goes on, and one that starts; with permission again, it is used again."""
    with folder() as path:
        with store_over(disk, path) as store:
            asked(store)
            (path / "disk").chmod(0)
            if os.access(path / "disk", os.R_OK):
                pytest.skip("whoever runs this may read whatever the permissions say: run it as another user than root")
            asked(store)
        with store_over(disk, path) as store:
            assert asked(store).stored_tokens == 0
            assert store.stats().handles["disk"].counts.unavailable > 0, "it says that it is off"
            (path / "disk").chmod(0o700)
            until(lambda: asked(store).stored_tokens == WHOLE)


def s45_many_processes_on_one_folder(rounds: int = 3) -> None:
    """Four that start on a folder which is not there yet, with the same 32 prompts; one is killed each round. What is
    left is sound, and nothing that is of no use is left. The report has 20 rounds.
    """
    with folder() as path:
        place = path / "not" / "yet"
        done = subprocess.run(
            [sys.executable, herd.__file__, str(place), str(rounds)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert 0 < int(done.stdout) <= rounds
        store = open_config(herd.config(place), "float64")
        for prompt in herd.PROMPTS:
            assert asked(store, prompt).stored_tokens == (len(prompt) - 1) // TOKENS * TOKENS
        store.close()
        with DiskTier(place / "store") as tier:
            keyring = Keyring(herd.config(place).key_file)
            checker = Checker(tier, keyring, {keyring.tenant("").tag: ""})
            assert {checker.check(entry).verdict for entry in tier.entries()} == {CheckVerdict.SOUND}
            until(lambda: tier.leftovers(free=False) == 0)
            known = {SegmentFiles.name(*segment) for segment in tier._ask("SELECT id, slot_bytes FROM segments")}
        index = {"index.db", "index.db-wal", "index.db-shm", "lock"}
        assert {file.name for file in (place / "store").iterdir()} - index <= known
        assert [file.name for file in (place / "keys").iterdir()] == ["keyring.json"]


def s50_a_remote_that_loses_halves() -> None:
    """Objects go at random, or are cut, emptied, or become another one's: misses, and never an error.

    The report has 2,000 requests against a server that has room for a fifth of the data; here are 60, against a folder
    of which a fifth is lost or spoilt after every ten. A real Redis is in test_engine_trouble.py.
    """
    dice, found, broken_ones = random.Random(50), 0, 0
    with folder() as path, store_over(shared_folder, path) as store:
        prompts = [[100 * number + i for i in range(30)] for number in range(10)]
        for _ in range(6):
            for prompt in prompts:
                found += asked(store, prompt).stored_tokens
            objects = sorted(file for file in (path / "shared").rglob("*") if file.is_file())
            for file in dice.sample(objects, len(objects) // 5):
                broken_ones += 1
                content = file.read_bytes()
                match dice.randrange(4):
                    case 0:
                        file.unlink()
                    case 1:
                        file.write_bytes(content[: len(content) * dice.randrange(4) // 4])
                    case 2:
                        file.write_bytes(b"")
                    case 3:
                        file.write_bytes(dice.choice([one for one in objects if one.exists()]).read_bytes())
        [level] = store.stats().handles.values()
        assert 0 < found < 5 * 10 * 28
        assert level.counts.damaged > 0 and broken_ones > 20


def s51_a_remote_that_never_answers() -> None:
    """Or in drops, or half and a reset, or after a minute: nobody waits for it, and nothing is left behind.

    The report has 100 requests in each mode, and a deadline of 500 ms; here are 25, and 300 ms. Each ends within the
    cold time, the deadline, and what a busy machine may hold it up.
    """
    for behave in (stubborn.never, stubborn.in_drops, stubborn.half_and_reset, stubborn.much_too_late):
        before = threading.active_count(), sockets()
        with folder() as path, pytest.MonkeyPatch.context() as patch:
            patch.setattr(stubborn, "VALUE_BYTES", VALUE_BYTES)
            computes_beside(behave, path)
        until(partial(settled, *before))


def timed(engine: SmallEngine) -> list[float]:
    """Seconds that each of some requests takes, about which nothing is stored."""
    took = []
    for number in range(25):
        began = time.monotonic()
        request = engine.run(Request(f"{number}", [1000 * number + i for i in range(30)]))
        took.append(time.monotonic() - began)
        assert request.stored_tokens == 0
    engine.close()
    return took


def computes_beside(behave: Callable, path: Path) -> None:
    keyring = Keyring(path / "keyring.json")
    unanswered: list[bytes] = []

    def answer(words: list[bytes]) -> Iterator:
        if words[0] == b"CLIENT":
            return iter([b"+OK\r\n"])
        if words[0] == b"GET" or behave is stubborn.never:  # whatever else there is, the others answer at once
            unanswered.append(words[0])
        return behave(words)

    with store_over(memory, path / "cold") as store:
        cold_s = max(timed(SmallEngine(store)))
    with Stub(redis_request, answer) as server:
        tier = open_remote(f"redis://127.0.0.1:{server.port}", timeout_s=DEADLINE_S, probe_after_s=60.0)
        with TieredStore([(tier, Frames(keyring.tenant))], keyring, StoreConfig(load_timeout_s=DEADLINE_S)) as store:
            took = timed(SmallEngine(store, probe_s=DEADLINE_S))
            assert max(took) < cold_s + DEADLINE_S + AT_ONCE_S, took
            assert len(unanswered) < 40, "after some failures the tier is left alone"


def settled(threads: int, open_sockets: int) -> bool:
    return threading.active_count() <= threads and sockets() <= open_sockets


CASES: Cases = [
    (s20_a_salt_in_every_tier, [broken.salt_dropped]),
    (s21_hash_seeds_of_other_processes, [broken.keys_from_the_builtin_hash]),
    (s22_another_model_of_the_same_name, [broken.weights_are_known_by_name]),
    (s23_other_layouts_of_the_same_size, [broken.layouts_are_told_apart_by_size, broken.foreign_blocks_are_not_told]),
    (s34_found_but_never_read, [broken.failed_loads_are_forgotten, broken.missing_blocks_count_as_loaded]),
    (s44_files_that_vanish, [broken.missing_blocks_count_as_loaded]),
    (s44_a_folder_without_permission, []),
    (s45_many_processes_on_one_folder, []),
    (s50_a_remote_that_loses_halves, [broken.any_bytes_will_do, broken.missing_blocks_count_as_loaded]),
    (s51_a_remote_that_never_answers, [broken.remotes_are_waited_for]),
]


@each_claim(CASES)
def test_holds(claim: Claim) -> None:
    claim()


@each_broken_build(CASES)
def test_notices_a_broken_build(claim: Claim, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    must_notice(claim, mutant, monkeypatch)
