"""Through a real vLLM: processes that die, stores that are shared, full, damaged or gone, remotes that are dead."""

import os
import shutil
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest
import redis
from connectors.vllm.checks import killed_at_random
from connectors.vllm.engine_process import EngineGoneError
from connectors.vllm.test_engine import BLOCK, SMALL, options, prompts, whole
from harness.full_disk import fill_up
from harness.waiting import PATIENCE_S, until
from store.remote_stubs import Stub, redis_request
from store.servers import redis_server

from kvire.store.disk.tier import DiskTier

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
    def begin(number: int) -> Any:
        return start(llama, options(tmp_path), arguments=SMALL, spawns=number % 2 == 0)

    strictly = [(prompt, answer, [inf] * len(answer)) for prompt, answer in zip(asked, expected, strict=True)]
    found = killed_at_random(begin, strictly, KILLS)
    assert found.wrong == 0, found.worst
    assert found.requests == 6 * KILLS + len(asked)
    assert found.reused_tokens > 0


def test_two_engines_on_one_folder(
    llama: Path, tmp_path: Path, start: Start, asked: list[list[int]], expected: list[list[int]]
) -> None:
    """S45."""
    one = start(llama, options(tmp_path), arguments=SMALL)
    two = start(llama, options(tmp_path), arguments=SMALL)
    for engine, mine in ((one, asked[:8]), (two, asked[8:])):
        engine.send("generate", prompts=mine, max_tokens=40)
    assert one.answer()["tokens"] + two.answer()["tokens"] == expected
    written(tmp_path / "store", asked, expected)
    for engine, others in ((one, slice(8, 16)), (two, slice(0, 8))):
        answer = engine("generate", prompts=asked[others], max_tokens=40)
        assert answer["tokens"] == expected[others]
        assert answer["cached"] == [whole(prompt) for prompt in asked[others]]


def test_damaged_emptied_and_removed_stores(
    llama: Path, tmp_path: Path, start: Start, asked: list[list[int]], expected: list[list[int]]
) -> None:
    """S34, S44."""
    folder = tmp_path / "store"
    with start(llama, options(tmp_path), arguments=SMALL) as engine:
        engine("generate", prompts=asked, max_tokens=40)
        written(folder, asked, expected)
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


def written(folder: Path, asked: list[list[int]], answers: list[list[int]]) -> None:
    """Wait until every block of these is in the folder. The last token of an answer is not computed."""
    whole_ones = (prompt + answer[:-1] for prompt, answer in zip(asked, answers, strict=True))
    blocks = {tuple(tokens[:stop]) for tokens in whole_ones for stop in range(BLOCK, len(tokens) + 1, BLOCK)}

    def count() -> int:
        with DiskTier(folder) as tier:
            return sum(1 for _ in tier.entries())

    until(lambda: count() >= len(blocks), lambda: f"{count()} of {len(blocks)} blocks", every_s=0.2)


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


def test_a_file_system_that_others_fill(
    llama: Path, tmp_path: Path, small_file_system: Path, start: Start, asked: list[list[int]]
) -> None:
    """Costs writes, which are counted, and nothing else; with room again, saving goes on."""
    folder, others = small_file_system / "store", small_file_system / "of somebody else"
    first, later = asked[:8], asked[8:]
    with start(llama, None, arguments=SMALL) as alone:
        expected = [alone("generate", prompts=part, max_tokens=40)["tokens"] for part in (first, later)]
    with start(llama, options(tmp_path, store=str(folder)), arguments=SMALL) as engine:
        fill_up(others)

        def refused() -> float:
            assert engine("forget_device")
            assert engine("generate", prompts=first, max_tokens=40)["tokens"] == expected[0]
            figures = engine("metrics")
            assert "kvire_matched_tokens disk" not in figures
            return figures.get("kvire_refused_writes disk", 0)

        until(refused)
        others.unlink()

        def kept() -> bool:
            assert engine("forget_device")
            answer = engine("generate", prompts=later, max_tokens=40)
            assert answer["tokens"] == expected[1]
            return answer["cached"] == [whole(prompt) for prompt in later]

        until(kept, every_s=0.5)
    with start(llama, options(tmp_path, store=str(folder)), arguments=SMALL) as again:
        answer = again("generate", prompts=later, max_tokens=40)
        assert answer["tokens"] == expected[1]
        assert answer["cached"] == [whole(prompt) for prompt in later]


def test_remotes_that_are_not_there_or_never_answer_are_not_waited_for(
    llama: Path, tmp_path: Path, start: Start, asked: list[list[int]], expected: list[list[int]]
) -> None:
    """S51."""
    with Stub(redis_request, lambda _: iter([10 * PATIENCE_S])) as server:
        remote = ["redis://127.0.0.1:1", f"redis://127.0.0.1:{server.port}"]
        with start(llama, options(tmp_path, remote=remote), arguments=SMALL) as engine:
            answer = engine("generate", prompts=asked, max_tokens=40)
            assert answer["tokens"] == expected
            assert answer["seconds"] < PATIENCE_S
    assert server.requests > 0


def test_what_only_redis_has_is_found_and_loaded(
    llama: Path, tmp_path: Path, start: Start, asked: list[list[int]], expected: list[list[int]]
) -> None:
    """S50: also if it then loses some, and gives halves of others."""
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
            lose_and_cut(port)
            second("forget_device")
            answer = second("generate", prompts=asked, max_tokens=40)
            assert answer["tokens"] == expected
            assert 0 < sum(answer["cached"]) < sum(map(whole, asked))


def lose_and_cut(port: int) -> None:
    """Every fourth value goes, or becomes a half, nothing, or another one's."""
    with redis.Redis(port=port) as client:
        names = sorted(client.keys())
        for number, name in enumerate(names[::4]):
            value = client.get(name)
            match number % 4:
                case 0:
                    client.delete(name)
                case 1:
                    client.set(name, value[: len(value) // 2])
                case 2:
                    client.set(name, b"")
                case 3:
                    client.set(name, client.get(names[1]))


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
