"""Through a real vLLM: processes that die, stores that are shared, full, damaged or gone, remotes that are dead."""

import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from connectors.vllm.engine_process import EngineGoneError
from connectors.vllm.test_engine import SMALL, options, prompts, whole
from store.servers import redis_server

Start = Callable[..., Any]
KILLS = int(os.environ.get("KVIRE_VLLM_KILLS", "2"))


@pytest.fixture(scope="module")
def asked() -> list[list[int]]:
    return prompts(16, seed=7)


@pytest.fixture
def expected(llama: Path, start: Start, asked: list[list[int]]) -> list[list[int]]:
    with start(llama, None, arguments=SMALL) as alone:
        return alone("generate", prompts=asked, max_tokens=40)["tokens"]


@pytest.mark.timeout(300 + 60 * KILLS)
def test_killed_at_any_moment_it_starts_again_and_is_right(
    llama: Path, tmp_path: Path, start: Start, asked: list[list[int]], expected: list[list[int]]
) -> None:
    dice = random.Random(0)
    found = 0
    for number in range(KILLS):
        engine = start(llama, options(tmp_path), arguments=SMALL, spawns=number % 2 == 0)
        chosen = dice.sample(range(len(asked)), 6)
        answer = engine("generate", prompts=[asked[i] for i in chosen], max_tokens=40)
        assert answer["tokens"] == [expected[i] for i in chosen]
        found += sum(answer["cached"])
        engine.send("generate", prompts=[asked[i] for i in dice.sample(range(len(asked)), 8)], max_tokens=40)
        time.sleep(dice.random() * 1.5)
        engine.kill()
    with start(llama, options(tmp_path), arguments=SMALL) as last:
        answer = last("generate", prompts=asked, max_tokens=40)
    assert answer["tokens"] == expected
    assert found + sum(answer["cached"]) > 0


def test_two_engines_on_one_folder(
    llama: Path, tmp_path: Path, start: Start, asked: list[list[int]], expected: list[list[int]]
) -> None:
    one = start(llama, options(tmp_path), arguments=SMALL)
    two = start(llama, options(tmp_path), arguments=SMALL)
    for engine, mine in ((one, asked[:8]), (two, asked[8:])):
        engine.send("generate", prompts=mine, max_tokens=40)
    assert one.answer()["tokens"] + two.answer()["tokens"] == expected
    time.sleep(1.5)  # what is saved is written within a second
    for engine, others in ((one, slice(8, 16)), (two, slice(0, 8))):
        answer = engine("generate", prompts=asked[others], max_tokens=40)
        assert answer["tokens"] == expected[others]
        assert answer["cached"] == [whole(prompt) for prompt in asked[others]]


def test_damaged_emptied_and_removed_stores(
    llama: Path, tmp_path: Path, start: Start, asked: list[list[int]], expected: list[list[int]]
) -> None:
    folder = tmp_path / "store"
    with start(llama, options(tmp_path), arguments=SMALL) as engine:
        engine("generate", prompts=asked, max_tokens=40)
        time.sleep(1.5)
        for file in folder.rglob("*"):
            if file.is_file() and "index" not in file.name and file.stat().st_size > 4096:
                damage(file)
        engine("forget_device")
        answer = engine("generate", prompts=asked, max_tokens=40)
        assert answer["tokens"] == expected
        assert sum(answer["cached"]) < sum(map(whole, asked))
        assert engine("metrics")["kvire_failed_blocks damaged"] > 0
        shutil.rmtree(folder)
        engine("forget_device")
        assert engine("generate", prompts=asked, max_tokens=40)["tokens"] == expected
    with start(llama, options(tmp_path), arguments=SMALL) as again:
        assert again("generate", prompts=asked, max_tokens=40)["tokens"] == expected


def damage(file: Path) -> None:
    """Change a byte in every 4 KiB."""
    with file.open("r+b") as opened:
        for place in range(2048, file.stat().st_size, 4096):
            opened.seek(place)
            byte = opened.read(1)
            opened.seek(place)
            opened.write(bytes([byte[0] ^ 1]))


def test_a_store_too_small_for_anything(
    llama: Path, tmp_path: Path, start: Start, asked: list[list[int]], expected: list[list[int]]
) -> None:
    for _ in range(2):
        with start(llama, options(tmp_path, disk_size="5MB"), arguments=SMALL) as engine:
            assert engine("generate", prompts=asked, max_tokens=40)["tokens"] == expected
    used = sum(file.stat().st_blocks * 512 for file in (tmp_path / "store").rglob("*") if file.is_file())
    assert used <= 5_000_000


def test_a_remote_that_is_not_there_costs_next_to_nothing(
    llama: Path, tmp_path: Path, start: Start, asked: list[list[int]], expected: list[list[int]]
) -> None:
    with start(llama, options(tmp_path, remote=["redis://127.0.0.1:1"]), arguments=SMALL) as engine:
        answer = engine("generate", prompts=asked, max_tokens=40)
        assert answer["tokens"] == expected
        assert answer["first_s"][0] < 5


def test_what_only_redis_has_is_found_and_loaded(
    llama: Path, tmp_path: Path, start: Start, asked: list[list[int]], expected: list[list[int]]
) -> None:
    with redis_server(tmp_path / "redis") as port:
        remote = {
            "remote": f"redis://127.0.0.1:{port}",
            "key_file": str(tmp_path / "keys" / "k.json"),
            "load_timeout": 10,
        }
        with start(llama, remote, arguments=SMALL) as first:
            assert first("generate", prompts=asked, max_tokens=40)["tokens"] == expected
        with start(llama, remote, arguments=SMALL, spawns=True) as second:
            answer = second("generate", prompts=asked, max_tokens=40)
            assert answer["tokens"] == expected
            assert answer["cached"] == [whole(prompt) for prompt in asked]
            assert second("metrics")["kvire_loaded_blocks remote"] > 0


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"store_size": "/tmp/x"}, "no option 'store_size'"),
        ({"disk_size": "many"}, "disk_size"),
        ({"encrypt": "yes"}, "encrypt"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_at_start(
    llama: Path, tmp_path: Path, start: Start, changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(EngineGoneError, match=said):
        start(llama, options(tmp_path) | changed, arguments=SMALL)
