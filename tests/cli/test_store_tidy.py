"""`kvire store gc`, `pin`, `forget` and `clear`, alone and beside a writer."""

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cli import stores
from cli.stores import BLOCKS, HOUR_S, fill, held, open_tier, prompt, put
from harness.waiting import until

from kvire.cli.store import forget
from kvire.cli.store.place import opened
from kvire.core.errors import TierUnavailable
from kvire.core.record import BlockId
from kvire.sessions.folder import Sessions
from kvire.sessions.session_file import Session
from kvire.store.disk.files import Files
from kvire.store.disk.tier import DiskTier
from kvire.store.keyring import Keyring


def test_gc_removes_what_nobody_finds(kvire_store, folder: Path, keyring: Keyring) -> None:
    prompts = fill(folder, keyring, age_s=2 * HOUR_S)
    expired = prompt(keyring, [5] * 16)
    with open_tier(folder, age_s=2 * HOUR_S) as tier:
        put(tier, keyring, expired, ttl_s=HOUR_S)
        tier.delete([prompts["long"][2].id], "room")  # in the middle of two chains
        tier.pin([prompts["short"][-1].id], pinned=True)
    orphans = prompts["long"][3:]
    before = {entry.id for entry in open_tier(folder).entries()}

    _, would, _ = kvire_store("gc", folder, "--dry-run", "--json")
    assert (would["expired"]["blocks"], would["orphans"]["blocks"], would["removed"]) == (1, len(orphans), 0)
    assert {entry.id for entry in open_tier(folder).entries()} == before

    _, did, _ = kvire_store("gc", folder, "--json")
    assert did["removed"] == 1 + len(orphans)
    after = {entry.id for entry in open_tier(folder).entries()}
    assert before - after == {record.id for record in expired + orphans}
    assert prompts["short"][-1].id in after, "pinned"
    assert "0 blocks expired" in kvire_store("gc", folder)[1]
    assert kvire_store("gc", folder, "--json", "--ttl", 60)[1]["expired"]["blocks"] == len(after) - 1


def test_gc_leaves_young_orphans_and_windows_alone(kvire_store, folder: Path, keyring: Keyring) -> None:
    """A child may be written before its parent; and behind a window no parent is needed."""
    windowed = f"{stores.SPEC};sliding layers=2 heads=1 k=4 v=4 window=32"
    young = prompt(keyring, [1] * 32)[1:]
    full, sliding = (prompt(keyring, [2] * 64, spec=windowed, group=group) for group in (0, 1))
    cut, cut_sliding = (prompt(keyring, [3] * 64, spec=windowed, group=group) for group in (0, 1))
    with open_tier(folder) as tier:
        put(tier, keyring, young)
    with open_tier(folder, age_s=HOUR_S) as tier:
        put(tier, keyring, full + sliding[2:] + cut[:1] + cut_sliding)
        for changed in ({"spec": stores.SPEC}, {"spec": windowed}):
            noted = stores.namespace(keyring.tenant("").salt, **changed)
            tier.note_namespace(noted.root, noted.public_fields())
    assert kvire_store("gc", folder, "--json")[1]["orphans"]["blocks"] == 3
    assert all(held(folder, young + full + sliding[2:] + cut[:1] + cut_sliding[:1]))
    assert not any(held(folder, cut_sliding[1:]))


def test_gc_takes_unreadable_blocks_only_when_told(kvire_store, folder: Path, keyring: Keyring) -> None:
    prompts = fill(folder, keyring)
    sessions = Sessions(folder, keyring, 1 << 20)
    sessions.save("other", Session("chat"))
    keyring.forget("other")
    _, values, _ = kvire_store("gc", folder, "--json")
    assert (values["unreadable"]["blocks"], values["removed"]) == (3, 0)
    assert "--unreadable takes them along" in kvire_store("gc", folder)[1]
    assert kvire_store("gc", folder, "--unreadable", stdin="n\n")[0] == 1
    assert all(held(folder, prompts["other"]))
    assert kvire_store("gc", folder, "--unreadable", "--yes", "--json")[1]["removed"] == 3
    assert not any(held(folder, prompts["other"]))
    assert all(held(folder, prompts["long"]))
    assert not list((folder / "sessions").glob("[0-9a-f]*"))

    keyring.forget("")
    code, _, err = kvire_store("gc", folder, "--unreadable", "--yes")
    assert code == 2 and "holds no key at all" in err
    assert all(held(folder, prompts["long"]))


def test_gc_takes_blocks_of_older_builds_only_when_told(kvire_store, folder: Path, keyring: Keyring) -> None:
    """Pins, keys and sessions go on."""
    token_ids, salt = list(range(64)), keyring.tenant("").salt
    sessions = Sessions(folder, keyring, 1 << 20)
    sessions.save("", Session("chat"))
    before, old, new = ({}, {"build": "torch 1"}, {"build": "torch 2"})
    blocks = [prompt(keyring, token_ids, **fields) for fields in (before, old, new)]
    for age_s, fields, records in zip((2 * HOUR_S, HOUR_S, 0), (before, old, new), blocks, strict=True):
        with open_tier(folder, age_s=age_s) as tier:
            put(tier, keyring, records)
            name = stores.namespace(salt, spec=stores.SPEC, **fields)
            tier.note_namespace(name.root, {key: value for key, value in name.public_fields().items() if value})
    with open_tier(folder) as tier:
        tier.pin([blocks[1][0].id], pinned=True)

    _, told, _ = kvire_store("stat", folder, "--json")
    assert told["older_builds"]["blocks"] == 8 and told["older_builds"]["pinned"] == 1
    assert [space["older_build"] for space in told["namespaces"]] == [False, True, True]
    assert "of older builds 8 blocks" in kvire_store("stat", folder)[1]

    _, left, _ = kvire_store("gc", folder, "--json")
    assert (left["older_builds"]["blocks"], left["removed"]) == (8, 0)
    assert "--older-builds takes them along" in kvire_store("gc", folder)[1]
    assert kvire_store("gc", folder, "--older-builds", "--dry-run", "--json")[1]["removed"] == 0
    assert kvire_store("gc", folder, "--older-builds", "--json")[1]["removed"] == 7
    assert held(folder, blocks[0] + blocks[1]) == [False] * 4 + [True] + [False] * 3
    assert all(held(folder, blocks[2]))
    assert "1 of them stay, being pinned" in kvire_store("gc", folder, "--older-builds")[1]
    assert keyring.tenant("").salt == salt and sessions.load("", "chat") is not None


class DyingFiles(Files):
    """Ends the process in the middle of a frame."""

    def write(self, fd: int, frame: memoryview, offset: int) -> None:
        if len(frame) > 1000:
            os._exit(9)
        super().write(fd, frame, offset)


def test_gc_frees_what_a_crash_left(kvire_store, folder: Path, keyring: Keyring) -> None:
    fill(folder, keyring)
    if (victim := os.fork()) == 0:
        tier = DiskTier(folder, stores.CAPACITY_BYTES, files=DyingFiles())
        put(tier, keyring, prompt(keyring, [9] * 16))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(victim, 0)[1]) == 9
    assert kvire_store("gc", folder, "--dry-run", "--json")[1]["leftover_bytes"] > 0
    assert kvire_store("gc", folder, "--json")[1]["leftover_bytes"] > 0
    assert kvire_store("gc", folder, "--json")[1]["leftover_bytes"] == 0
    assert kvire_store("verify", folder, "--json")[1]["sound"] == BLOCKS


class WaitingFiles(Files):
    """Stops in the middle of a frame until it is told to go on."""

    def __init__(self) -> None:
        self.is_writing, self.go_on = threading.Event(), threading.Event()

    def write(self, fd: int, frame: memoryview, offset: int) -> None:
        if len(frame) > 1000:
            self.is_writing.set()
            assert self.go_on.wait(60)
        super().write(fd, frame, offset)


def test_gc_leaves_those_alone_who_are_still_writing(kvire_store, folder: Path, keyring: Keyring) -> None:
    fill(folder, keyring)
    files, records = WaitingFiles(), prompt(keyring, [9] * 16)
    with DiskTier(folder, stores.CAPACITY_BYTES, files=files) as tier, ThreadPoolExecutor() as pool:
        writing = pool.submit(put, tier, keyring, records)
        assert files.is_writing.wait(60)
        assert kvire_store("gc", folder, "--json")[1]["leftover_bytes"] == 0
        files.go_on.set()
        writing.result()
    assert held(folder, records) == [True]


def test_a_folder_that_is_busy_for_a_moment_is_asked_again(folder: Path, keyring: Keyring) -> None:
    fill(folder, keyring)
    answers = [TierUnavailable("busy"), TierUnavailable("busy"), 7]

    def change() -> int:
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    with opened(str(folder), None) as place:
        assert place.patiently(change) == 7
    answers[:] = [TierUnavailable("down"), 7]
    with opened("memory://", None) as place, pytest.raises(TierUnavailable):
        place.patiently(change)


def pinned(folder: Path) -> set[BlockId]:
    return {entry.id for entry in open_tier(folder).entries() if entry.pinned}


def test_pins_cover_chains_and_unpin_keeps_what_others_need(kvire_store, folder: Path, keyring: Keyring) -> None:
    prompts = fill(folder, keyring)
    long, short = ({record.id for record in prompts[name]} for name in ("long", "short"))
    keys = {name: prompts[name][-1].id.key.hex() for name in prompts}
    assert kvire_store("pin", keys["long"][:10], "--store", folder, "--json")[1]["blocks"] == len(long)
    assert pinned(folder) == long
    kvire_store("pin", keys["short"], "--store", folder)
    assert pinned(folder) == long | short
    _, values, _ = kvire_store("unpin", keys["long"], "--store", folder, "--json")
    assert (values["blocks"], values["still_pinned"]) == (2, 3)
    assert pinned(folder) == short
    kvire_store("unpin", keys["short"], "--store", folder)
    assert pinned(folder) == set()
    assert (
        kvire_store("pin", "--namespace", prompts["half"][0].root.hex()[:12], "--store", folder, "--json")[1]["blocks"]
        == 3
    )
    assert pinned(folder) == {record.id for record in prompts["half"]}


def test_forget_destroys_the_key_and_removes_everything(kvire_store, folder: Path, keyring: Keyring) -> None:
    prompts = fill(folder, keyring)
    sessions = Sessions(folder, keyring, 1 << 20)
    sessions.save("other", Session("chat"))
    sessions.save("", Session("mine"))
    for answer in ("n\n", ""):
        code, _, err = kvire_store("forget", folder, "--tenant", "other", stdin=answer)
        assert code == 1 and "There is no way back" in err
    assert all(held(folder, prompts["other"])) and keyring.tenants() == ["", "other"]

    old = keyring.tenant("other")
    _, values, _ = kvire_store("forget", folder, "--tenant", "other", "--yes", "--json")
    assert (values["blocks"], values["sessions"]) == (3, 1)
    assert keyring.tenants() == [""]
    assert keyring.tenant("other").salt != old.salt
    assert not any(held(folder, prompts["other"]))
    assert all(held(folder, prompts["long"])) and sessions.names("") == ["mine"]
    content = b"".join(path.read_bytes() for path in folder.glob("*.seg"))
    assert old.tag not in content, "its blocks are overwritten"


def test_forget_also_removes_what_a_server_writes_meanwhile(
    kvire_store, folder: Path, keyring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request under way goes on under the old root, sealed with the tenant's new key."""
    prompts = fill(folder, keyring)
    late = prompt(keyring, [*range(48), *[4] * 16], tenant="other")[-1]

    def write_late(_seconds: float) -> None:
        with open_tier(folder) as tier:
            put(tier, keyring, [late])

    monkeypatch.setattr(forget.time, "sleep", write_late)
    kvire_store("forget", folder, "--tenant", "other", "--yes")
    assert not any(held(folder, [late, *prompts["other"]]))


def test_clear_removes_everything_and_looks(
    kvire_store, folder: Path, keyring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = fill(folder, keyring)
    kvire_store("pin", prompts["long"][-1].id.key.hex(), "--store", folder)
    assert kvire_store("clear", folder, stdin="n\n")[0] == 1
    assert all(held(folder, prompts["long"]))
    assert kvire_store("clear", folder, "--yes", "--json")[1] == {"store": str(folder), "removed": BLOCKS, "left": 0}
    assert kvire_store("stat", folder, "--json")[1]["blocks"] == 0
    assert keyring.tenants() == ["", "other"]

    fill(folder, keyring)
    monkeypatch.setattr(DiskTier, "clear", lambda tier: tier.delete([prompts["long"][0].id], "cleared"))
    code, _, err = kvire_store("clear", folder, "--yes")
    assert code == 2 and f"{BLOCKS - 1} blocks are in" in err


def test_everything_works_beside_a_writer(kvire_store, folder: Path, keyring: Keyring) -> None:
    prompts = fill(folder, keyring)
    command = [sys.executable, stores.__file__, str(folder), str(keyring.path)]
    environment = os.environ | {"PYTHONPATH": str(Path(stores.__file__).parents[1])}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout.readline() == "ready\n"
        key = prompts["long"][-1].id.key.hex()
        for _ in range(3):
            for args in (("ls",), ("stat",), ("verify", "--sample", 50), ("scrub",), ("gc",)):
                code, out, err = kvire_store(args[0], folder, *args[1:])
                assert code == 0, (args, out, err)
            for command in ("pin", "unpin"):
                code, _, err = kvire_store(command, key, "--store", folder)
                assert code == 0, (command, err)
        assert kvire_store("forget", folder, "--tenant", "other", "--yes")[0] == 0
        until(lambda: all(held(folder, prompt(keyring, [11] * 32))), every_s=0.1)  # its eleventh
        out, _ = writer.communicate("stop\n", timeout=60)
    done = json.loads(out)
    assert done["errors"] == [] and done["prompts"] > 10
    code, values, _ = kvire_store("verify", folder, "--json")
    assert (code, values["damaged"], values["gone"]) == (0, 0, 0)
    assert all(held(folder, prompts["long"] + prompts["half"]))
    last = prompt(keyring, [done["prompts"]] * 32)
    assert all(held(folder, last)), "gc takes nothing that is new"
