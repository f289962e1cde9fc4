"""`kvire store` on Redis and on a shared folder."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli.stores import BLOCKS, HOUR_S, fill, frame_of, held, open_tier, prompt, put
from store import servers

from kvire.store.keyring import Keyring


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with servers.redis_server(tmp_path_factory.mktemp("redis")) as port:
        yield f"redis://127.0.0.1:{port}/0"


@pytest.fixture(params=["redis", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path / 'shared'}"
    return request.getfixturevalue("redis_url")


def test_every_command_on_a_remote_store(kvire_store, url: str, keyring: Keyring) -> None:
    prompts = fill(url, keyring)
    _, listed, _ = kvire_store("ls", url, "--json")
    keys = {chain["key"]: chain["length"] for space in listed["namespaces"] for chain in space["chains"]}
    assert keys == {records[-1].id.key.hex(): len(records) for records in prompts.values()}
    _, values, _ = kvire_store("stat", url, "--json")
    assert (values["blocks"], values["health"], values["kind"]) == (BLOCKS, "ok", "remote")
    assert values["limit_bytes"] is None

    key = prompts["long"][-1].id.key.hex()
    assert kvire_store("pin", key, "--store", url, "--json")[1]["blocks"] == 5
    assert kvire_store("stat", url, "--json")[1]["pinned"] == 5
    assert kvire_store("unpin", key, "--store", url, "--json")[1]["blocks"] == 5
    assert kvire_store("stat", url, "--json")[1]["pinned"] == 0

    assert kvire_store("verify", url, "--json")[1]["sound"] == BLOCKS
    bad = prompts["short"][-1]
    frame = bytearray(frame_of(keyring, bad))
    frame[-1] ^= 1
    tier = open_tier(url)
    tier.write(bad, memoryview(frame), keyring.tenant("").tag)
    tier.close()
    assert kvire_store("verify", url)[0] == 1
    assert kvire_store("scrub", url, "--json")[1]["removed"] == 1
    assert held(url, prompts["short"]) == [True] * 3 + [False]

    keyring.forget("other")
    assert kvire_store("gc", url, "--json")[1]["removed"] == 0
    assert all(held(url, prompts["other"])), "they may be somebody else's"
    assert kvire_store("forget", url, "--yes", "--json")[1]["blocks"] == 8
    assert held(url, prompts["long"] + prompts["half"]) == [False] * 8
    assert kvire_store("clear", url, "--yes", "--json")[1] == {"store": url, "removed": 3, "left": 0}


def test_values_that_are_no_frames_are_told_and_scrubbed(kvire_store, redis_url: str, keyring: Keyring) -> None:
    [record] = prompt(keyring, [1] * 16)
    tier = open_tier(redis_url)
    put(tier, keyring, [record])
    for junk in prompt(keyring, [2] * 16) + prompt(keyring, [3] * 16):
        tier.write(junk, memoryview(b"not a frame"), bytes(16))
    tier.close()
    assert kvire_store("stat", redis_url, "--json")[1]["strange"] == 2
    assert kvire_store("ls", redis_url)[0] == 0
    assert kvire_store("scrub", redis_url, "--json")[1]["removed"] == 2
    assert kvire_store("stat", redis_url, "--json")[1]["strange"] == 0
    assert held(redis_url, [record]) == [True]


def test_blocks_written_long_ago_count_as_expired_with_ttl(
    kvire_store, url: str, keyring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = prompt(keyring, [1] * 16), prompt(keyring, [2] * 16)
    with contextlib.closing(open_tier(url)) as tier:
        tier.clear()
        with monkeypatch.context() as patched:
            now = time.time()
            patched.setattr(time, "time", lambda: now - HOUR_S)
            put(tier, keyring, old)
        put(tier, keyring, new)
    assert kvire_store("gc", url, "--json")[1]["removed"] == 0
    assert kvire_store("gc", url, "--json", "--ttl", HOUR_S / 2)[1]["removed"] == 1
    assert held(url, old + new) == [False, True]


def test_an_unreachable_store_is_named_without_its_password(kvire_store, keyring: Keyring) -> None:
    code, out, err = kvire_store("stat", "redis://user:secret@127.0.0.1:1/0")
    assert (code, out) == (2, "")
    assert "redis://127.0.0.1:1/0 does not answer" in err
    assert "secret" not in err
