"""Behind vLLM's own CPU tier: its real manager of tiers, and a real engine, over the store. No GPU is needed."""

import json
import os
import random
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from connectors.store_commands import sound_and_whole
from connectors.vllm.engine_process import NEEDS_VLLM, PYTHON, Vllm
from connectors.vllm.test_engine import BLOCK, SMALL, options, prompts
from connectors.vllm.test_engine_trouble import damage
from store.servers import redis_server

import kvire
from kvire.store.reuse.planner import TRY_AFTER

pytestmark = [pytest.mark.slow, pytest.mark.engine, NEEDS_VLLM]
HERE = Path(__file__).parent
TOKENS = 16  # in a block of secondary_driver.py
CHUNKS = 40  # of an engine's CPU tier there
COUNT, BLOCKS = 5, 6  # prompts, and blocks of each
LOOK_S = 0.3  # that no call of vLLM's scheduler may take: one that waits for a tier takes seconds

Commands = Callable[..., Any]


class Script(Vllm):
    """A script under vLLM's Python that follows commands."""

    def __init__(self, script: str, argument: str, log: Path, **environment: str) -> None:
        self.log, self._log = log, log.open("w")
        self.process = subprocess.Popen(
            [os.environ[PYTHON], str(HERE / script), argument],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
            env=os.environ
            | {"PYTHONPATH": str(Path(kvire.__file__).parents[1]), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            | {"OMP_NUM_THREADS": "1"}
            | environment,
        )
        self.answer()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        for left in Path("/dev/shm").glob(f"vllm_offload_kvire-test-{self.process.pid}*"):  # of one that was killed
            left.unlink()


@pytest.fixture(scope="module")
def tiering(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    """A process in which scheduler sides of engines are opened by name."""
    with Script("secondary_driver.py", str(llama), tmp_path_factory.mktemp("tiering") / "log") as script:
        yield script


@pytest.fixture
def one(tiering: Script, tmp_path: Path) -> Iterator[Commands]:
    """Commands to an engine over a folder of this test; it is closed at the end, or by command."""
    is_open = False

    def command(do: str, **more: Any) -> Any:
        nonlocal is_open
        if do == "open":
            more = {"options": options(tmp_path), "chunks": CHUNKS} | more
        answer = tiering(do, name="one", **more)
        is_open = answer == "" if do == "open" else is_open and do != "close"
        return answer

    yield command
    if is_open:
        assert tiering("close", name="one")


def asked(seed: int = 0, count: int = COUNT) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(256) for _ in range(BLOCKS * TOKENS + 3)] for _ in range(count)]


def keep(one: Commands, given: list[list[int]], **more: Any) -> None:
    """Store prompts, and nothing of them in the CPU tier."""
    assert one("store", prompts=given, **more) == BLOCKS * len(given)
    assert one("settle")
    one("evict", count=CHUNKS)


ALL, NONE = [BLOCKS] * COUNT, [0] * COUNT


def test_what_left_the_cpu_tier_comes_back_and_is_counted(one: Commands, tmp_path: Path) -> None:
    """And `kvire store` reads what it wrote."""
    one("open")
    assert one("find", prompts=asked()) == NONE
    keep(one, asked())
    before = one("stats")
    assert one("find", prompts=asked()) == ALL
    assert one("find", prompts=[prompt[: 2 * TOKENS] + [999] * 50 for prompt in asked()]) == [2] * COUNT
    after = one("stats")
    row_bytes = before["saved_bytes"] / before["saved_blocks"]
    assert before["saved_blocks"] == BLOCKS * COUNT + CHUNKS
    assert after["loaded_blocks disk"] == BLOCKS * COUNT
    assert after["loaded_bytes disk"] == BLOCKS * COUNT * row_bytes
    assert one("longest_s") < LOOK_S
    one("close")
    sound_and_whole(tmp_path / "store", tmp_path / "keys" / "k.json", engine="vllm 0.", least_blocks=BLOCKS * COUNT)


def test_what_is_computed_sooner_is_left_and_tried_again(one: Commands) -> None:
    given = asked(count=TRY_AFTER + 1)
    room = BLOCKS * len(given)
    one("open", chunks=room)
    assert one("store", prompts=given) == room
    assert one("settle")
    one("evict", count=room)
    one("say_how_fast", token_s=1.0, bytes_per_s=1.0)
    found = one("find", prompts=given)  # on a busy machine a look may come to its limit, and find nothing
    assert found[: TRY_AFTER - 1] == [0] * (TRY_AFTER - 1)
    assert sum(found) == BLOCKS, "one of them was tried"
    assert one("stats")["slower_tokens"] >= BLOCKS * TOKENS * (TRY_AFTER - 1)
    one("evict", count=room)
    one("say_how_fast", token_s=1.0, bytes_per_s=1e9)
    assert one("find", prompts=given[:COUNT]) == ALL


def test_groups_with_windows_are_kept_apart(one: Commands) -> None:
    one("open", groups=[None, 40], chunks=80)
    assert one("store", prompts=asked()) == 2 * BLOCKS * COUNT
    assert one("settle")
    one("evict", count=80)
    assert one("find", prompts=asked()) == [2 * BLOCKS] * COUNT


def test_chunks_of_several_blocks(one: Commands) -> None:
    one("open", extra={"blocks_per_chunk": 2}, chunks=2 * CHUNKS)
    assert one("store", prompts=asked()) == BLOCKS // 2 * COUNT
    assert one("settle")
    one("evict", count=1)
    one("close")
    one("open", extra={"blocks_per_chunk": 2}, chunks=2 * CHUNKS)
    assert one("find", prompts=asked()) == [BLOCKS // 2] * COUNT
    one("close")
    one("open")
    assert one("find", prompts=asked()) == NONE, "another layout"


@pytest.mark.parametrize(
    "facts",
    [{"numerics": "attention=other"}, {"kv_dtype": "float16"}, {"spec": "other strides"}],
    ids=lambda facts: next(iter(facts)),
)
def test_who_computes_or_lays_out_differently_finds_nothing(one: Commands, facts: dict[str, str]) -> None:
    one("open")
    keep(one, asked())
    one("close")
    one("open", facts=facts)
    assert one("find", prompts=asked()) == NONE
    one("close")
    one("open")
    assert one("find", prompts=asked()) == ALL


def test_a_cache_salt_separates(one: Commands) -> None:
    one("open")
    keep(one, asked(), cache_salt="ours")
    assert one("find", prompts=asked(), cache_salt="theirs") == NONE
    assert one("find", prompts=asked()) == NONE
    assert one("find", prompts=asked(), cache_salt="ours") == ALL


@pytest.mark.parametrize(("more", "reason"), [({"lora": "a"}, "lora"), ({"image": "a"}, "multimodal")])
def test_what_depends_on_more_than_token_ids_is_not_kept(one: Commands, more: dict[str, str], reason: str) -> None:
    one("open")
    keep(one, asked(), **more)
    assert one("find", prompts=asked(), **more) == NONE
    counted = one("stats")
    assert counted[f"excluded_requests {reason}"] == 2 * COUNT
    assert counted["saved_blocks"] == CHUNKS, "those that filled the CPU tier"


def test_after_a_reset_nothing_older_is_found(one: Commands) -> None:
    """Whoever changes the weights of a running vLLM resets its caches."""
    one("open")
    keep(one, asked())
    one("reset")
    assert one("find", prompts=asked()) == NONE
    keep(one, asked())
    assert one("find", prompts=asked()) == ALL


def test_requests_that_are_cancelled_while_they_load(one: Commands) -> None:
    one("open")
    keep(one, asked())
    for _ in range(5):
        one("give_up", prompts=asked())
        one("evict", count=CHUNKS)
    assert one("find", prompts=asked()) == ALL
    one("evict", count=CHUNKS)
    one("give_up", prompts=asked())
    assert one("close"), "in the middle of loads vLLM gets its memory back"


def test_damaged_and_removed_blocks_are_misses(one: Commands, tmp_path: Path) -> None:
    one("open")
    keep(one, asked())
    for file in (tmp_path / "store").rglob("*"):
        if file.is_file() and "index" not in file.name and file.stat().st_size > 4096:
            damage(file)
    assert one("find", prompts=asked()) == NONE
    assert one("stats")["failed_blocks damaged"] == BLOCKS * COUNT
    keep(one, asked(1))
    shutil.rmtree(tmp_path / "store")
    assert one("find", prompts=asked(1)) == NONE


def test_a_store_that_is_too_small_holds_what_it_can(one: Commands, tmp_path: Path) -> None:
    one("open", options=options(tmp_path, disk_size="5MB"))
    given = asked(count=60)
    for start in range(0, 60, COUNT):
        one("store", prompts=given[start : start + COUNT])
        assert one("settle")
    used = sum(file.stat().st_blocks * 512 for file in (tmp_path / "store").rglob("*") if file.is_file())
    assert used <= 5_000_000
    found = [one("find", prompts=[prompt])[0] for prompt in given]
    assert 0 < sum(found) < BLOCKS * 60


class Silent:
    """A server that takes connections and never says a word."""

    def __enter__(self) -> Self:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.taken: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def _accept(self) -> None:
        try:
            while True:
                self.taken.append(self.socket.accept()[0])
        except OSError:
            pass

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        for one in self.taken:
            one.close()


def test_a_remote_that_hangs_or_is_not_there_is_a_miss_and_stops_nobody(one: Commands, tmp_path: Path) -> None:
    with Silent() as silent:
        for port in (silent.port, 1):
            remote = {"remote": f"redis://127.0.0.1:{port}", "key_file": str(tmp_path / "k.json"), "load_timeout": 1}
            one("open", options=remote)
            one("store", prompts=asked())
            assert one("find", prompts=asked(1)) == NONE
            assert one("longest_s") < LOOK_S
            began = time.monotonic()
            one("close")
            assert time.monotonic() - began < 20


def test_what_only_redis_has_is_found(one: Commands, tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as port:
        remote = {
            "remote": f"redis://127.0.0.1:{port}",
            "key_file": str(tmp_path / "keys" / "k.json"),
            "load_timeout": 10,
        }
        one("open", options=remote)
        keep(one, asked())
        assert one("find", prompts=asked()) == ALL
        assert one("find", prompts=asked(1)) == NONE
        assert one("stats")["loaded_blocks remote"] == BLOCKS * COUNT


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"connector": "Offloading"}, '"kv_connector":"KvireOffloadingConnector"'),
        ({"extra": {"secondary_tiers": []}}, '"type":"KvireTier"'),
        ({"extra": {"blocks_per_chunk": 2}, "groups": [None, 40]}, "sliding windows"),
        ({"options": {"ram": "1GB"}}, "cpu_bytes_to_use"),
        ({"options": {"root_dir": "/data"}}, "no option 'root_dir'"),
        ({"config": {"load_format": "dummy"}}, "load_format dummy"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_it_cannot_serve_right_is_refused_at_start(one: Commands, wrong: dict[str, Any], said: str) -> None:
    assert said in one("open", **wrong)


def test_processes_share_a_folder_whatever_their_hashes_and_one_is_killed(
    one: Commands, llama: Path, tmp_path: Path
) -> None:
    """The other process hashes in another way and from another seed, so that vLLM's own names differ in all blocks."""
    one("open")
    keep(one, asked())
    with Script("secondary_driver.py", str(llama), tmp_path / "log", PYTHONHASHSEED="7") as other:
        other("open", name="other", options=options(tmp_path), chunks=CHUNKS, algorithm="sha256_cbor")
        assert other("find", name="other", prompts=asked()) == ALL
        assert other("store", name="other", prompts=asked(1)) == BLOCKS * COUNT
        assert other("settle", name="other")
        assert one("find", prompts=asked(1)) == ALL
        other.send("store", name="other", prompts=asked(2, count=500))
        time.sleep(0.3)
        other.kill()
    found = [one("find", prompts=[prompt])[0] for prompt in asked(2, count=500)]
    assert sum(found) > 0
    assert one("find", prompts=asked(1)) == ALL


def test_a_real_engine_that_is_killed_and_started_again(llama: Path, tmp_path: Path) -> None:
    """All of vLLM's offloading but the copies of a GPU: the same tokens, without computing what was stored."""
    given = prompts(12)
    wanted = {"model": str(llama), "options": options(tmp_path) | {"cpu_bytes": 8 << 20}, "arguments": SMALL}
    with Script("secondary_engine.py", json.dumps(wanted), tmp_path / "cold") as cold:
        expected = cold("generate", prompts=given)
        time.sleep(1.5)  # what is saved is written within a second
        cold.send("generate", prompts=prompts(12, seed=1))
        time.sleep(0.1)
        cold.kill()
    with Script("secondary_engine.py", json.dumps(wanted), tmp_path / "warm") as warm:
        again = warm("generate", prompts=given)
        figures = warm("metrics")
    assert again["tokens"] == expected["tokens"]
    assert again["cached"] == [len(prompt) // BLOCK * BLOCK for prompt in given]
    stored = {tuple(prompt[:end]) for prompt in given for end in range(BLOCK, len(prompt) + 1, BLOCK)}
    assert figures["kvire_tier_loaded_blocks disk"] == len(stored), "each once, though prompts share their beginnings"
