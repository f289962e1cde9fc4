"""Sessions on the disk: sealed, bounded, one tenant's, never half written, and never two stories under one name."""

import os
import stat
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from sessions.session_samples import CHAT, MIB, SAID, files, opened

from kvire.core.config import StoreConfig
from kvire.core.errors import StoreError
from kvire.sessions.folder import SessionConflictError, Sessions, open_sessions
from kvire.sessions.session_file import Session, SessionError
from kvire.store import place
from kvire.store.keyring import Keyring

READER = """
import sys
from pathlib import Path
from kvire.store.keyring import Keyring
from kvire.sessions.folder import Sessions
session = Sessions(Path(sys.argv[1]), Keyring(Path(sys.argv[2])), 1 << 20).load("", "work")
print(session.messages[0]["content"], session.token_ids)
assert "torch" not in sys.modules
"""


def du(store: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in [store / "sessions", *(store / "sessions").rglob("*")])


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_first_session_outlives_a_loss_of_power_with_its_folders(tmp_path):
    """A simulation: which folders were synced, that have new names in them."""
    synced: list[Path] = []
    sync = os.fsync

    def watched(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        sync(descriptor)

    store = tmp_path / "new" / "store"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", watched)
        opened(store, tmp_path / "keys" / "keyring.json").save("", CHAT)
    assert {store / "sessions", store, store.parent, tmp_path} <= {*synced}


@pytest.mark.parametrize("encrypt", [True, False], ids=["sealed", "plain"])
def test_what_was_saved_is_there_for_the_next_process(store, keys, encrypt):
    saved = opened(store, keys, encrypt=encrypt).save("", CHAT)
    assert saved == replace(CHAT, revision=saved.revision)
    assert opened(store, keys, encrypt=encrypt).load("", "work") == saved
    if encrypt:
        read = subprocess.run(
            [sys.executable, "-c", READER, str(store), str(keys)], capture_output=True, text=True, check=True
        )
        assert read.stdout == f"{SAID} (40123, 40456)\n"


def test_a_session_that_was_never_saved_is_none_and_leaves_nothing(sessions, store):
    assert sessions.load("", "work") is None
    assert sessions.names("") == []
    assert not sessions.delete("", "work")
    assert sessions.forget("nobody") == 0
    assert not store.exists()


def test_token_ids_are_of_one_model():
    assert CHAT.known_ids("weights") == CHAT.token_ids
    assert CHAT.known_ids("others") == ()


def test_files_and_folders_are_the_owner_s_alone(sessions, store):
    umask = os.umask(0)
    try:
        sessions.save("", CHAT)
    finally:
        os.umask(umask)
    folder = store / "sessions"
    assert [mode(path) for path in (store, folder, *folder.iterdir())] == [0o700] * 3
    assert [mode(path) for path in files(store)] == [0o600]


def test_tenants_are_apart(sessions, store):
    sessions.save("alice", CHAT)
    mine = sessions.save("bob", replace(CHAT, token_ids=(7,)))
    assert len({file.name for file in files(store)}) == 2, "nor does a file's name tell what others call theirs"
    assert sessions.load("carol", "work") is None
    assert sessions.names("carol") == []
    assert sessions.load("bob", "work") == mine
    assert sessions.load("alice", "work").token_ids == CHAT.token_ids
    assert sessions.delete("bob", "work")
    assert sessions.names("alice") == ["work"]


def test_whoever_comes_second_is_refused(store, keys):
    mine, theirs = opened(store, keys), opened(store, keys)
    base = mine.save("", CHAT)
    longer = theirs.save("", replace(theirs.load("", "work"), token_ids=(1, 2, 3)))
    with pytest.raises(SessionConflictError, match="somebody else continued this session"):
        mine.save("", base)
    assert mine.load("", "work") == longer


def test_a_new_session_does_not_overwrite_one_that_was_there(sessions):
    sessions.save("", CHAT)
    with pytest.raises(SessionConflictError):
        sessions.save("", CHAT)


def test_a_session_that_was_removed_and_begun_again_is_another_one(sessions):
    """A counter would come to the same number again."""
    base = sessions.save("", CHAT)
    sessions.delete("", "work")
    with pytest.raises(SessionConflictError):
        sessions.save("", base)
    again = sessions.save("", CHAT)
    with pytest.raises(SessionConflictError):
        sessions.save("", base)
    assert sessions.load("", "work") == again


def test_of_many_that_continue_at_once_one_wins(store, keys):
    base = opened(store, keys).save("", CHAT)
    start, won, lost = threading.Barrier(8), [], []

    def go_on(number: int) -> None:
        own = opened(store, keys)
        start.wait()
        try:
            won.append(own.save("", replace(base, token_ids=(number,))))
        except SessionConflictError:
            lost.append(number)

    threads = [threading.Thread(target=go_on, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and len(lost) == 7
    assert opened(store, keys).load("", "work") == won[0]


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_save_that_fails_leaves_what_was(sessions, store, monkeypatch, call):
    before = sessions.save("", CHAT)

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        if call == "write":
            broken.setattr("kvire.sessions.folder._write", fail)
        else:
            broken.setattr(os, call, fail)
        with pytest.raises(SessionError, match="cannot be kept: No space left on device"):
            sessions.save("", replace(before, token_ids=(1,)))
    assert sessions.load("", "work") == before
    assert sessions.save("", replace(before, token_ids=(1,))).token_ids == (1,)
    assert len(files(store)) == 1, "what the failed save left is gone"


def test_the_new_content_is_on_the_disk_before_it_has_the_name(sessions, monkeypatch):
    sessions.save("", replace(CHAT, name="first"))  # which makes folders
    calls = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(descriptor: int) -> None:
        calls.append("file" if stat.S_ISREG(os.fstat(descriptor).st_mode) else "folder")
        fsync(descriptor)

    def noted_rename(*args: object, **more: object) -> None:
        calls.append("rename")
        rename(*args, **more)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    sessions.save("", CHAT)
    assert calls[:3] == ["file", "rename", "folder"]


def test_the_limit_holds_at_every_moment(store, keys, monkeypatch):
    limit = 200_000
    sessions = opened(store, keys, limit=limit)
    highest, rename = 0, os.rename

    def measuring_rename(*args: object, **more: object) -> None:
        nonlocal highest
        highest = max(highest, du(store))
        rename(*args, **more)
        highest = max(highest, du(store))

    monkeypatch.setattr(os, "rename", measuring_rename)
    kept: dict[str, Session] = {}

    def fill() -> None:
        for number in range(100):
            one = Session(f"s{number % 7}", ({"role": "user", "content": "x" * 4000 * (1 + number // 7)},))
            one = replace(one, revision=kept[one.name].revision) if one.name in kept else one
            kept[one.name] = sessions.save(f"tenant-{number % 7}", one)

    with pytest.raises(SessionError, match="no room for this session") as error:
        fill()
    assert limit // 2 < highest <= limit
    assert "--disk-size" in str(error.value)
    for number, name in enumerate(sorted(kept)):
        assert sessions.load(f"tenant-{number}", name) == kept[name]
    sessions.delete("tenant-0", "s0")
    sessions.save("tenant-0", Session("small"))


def test_what_a_crash_left_goes_with_the_next_save_even_where_it_took_the_last_room(store, keys):
    sessions = opened(store, keys, limit=60_000)
    before = sessions.save("", CHAT)
    left = store / "sessions" / ".new"
    left.write_bytes(b"half a session" * 3000)
    assert sessions.names("") == ["work"]
    sessions.save("", before)
    assert not left.exists()


def test_links_are_not_followed(sessions, store, tmp_path):
    sessions.save("", CHAT)
    (file,) = files(store)
    target = tmp_path / "target"
    target.write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(target)
    for use in (sessions.load, sessions.save):
        with pytest.raises(SessionError, match="links are not followed"):
            use("", "work" if use == sessions.load else CHAT)
    file.unlink()
    folder = file.parent
    elsewhere = tmp_path / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    with pytest.raises(SessionError, match="links are not followed"):
        sessions.save("", CHAT)
    with pytest.raises(SessionError):
        sessions.forget("")
    assert list(elsewhere.iterdir()) == []
    (store / "sessions" / ".new").symlink_to(target)
    folder.unlink()
    content = target.read_bytes()
    sessions.save("", CHAT)
    assert target.read_bytes() == content


def test_a_fifo_does_not_hang(sessions, store):
    sessions.save("", CHAT)
    (file,) = files(store)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(SessionError, match="damaged"):
        sessions.load("", "work")


@pytest.mark.parametrize("name", ["", "a" * 65, "a/b", "../x", "a b", "ä", "a\n", "a\0"])
def test_names_are_restricted(sessions, store, name):
    with pytest.raises(SessionError, match="1 to 64 of the characters A-Z, a-z, 0-9"):
        Session(name)
    for use in (sessions.load, sessions.delete):
        with pytest.raises(SessionError, match="1 to 64"):
            use("", name)
    assert not store.exists()


def test_forgetting_a_tenant_removes_its_sessions_and_no_other(sessions, store):
    for name in ("work", "play"):
        sessions.save("alice", replace(CHAT, name=name))
    kept = sessions.save("bob", CHAT)
    assert sessions.forget("alice") == 2
    assert len(files(store)) == 1
    assert len(list((store / "sessions").iterdir())) == 1
    assert sessions.names("alice") == []
    assert sessions.load("bob", "work") == kept


@pytest.mark.parametrize("encrypt", [True, False], ids=["sealed", "plain"])
def test_nothing_comes_back_of_a_tenant_whose_key_is_gone(store, keys, encrypt):
    """Whoever holds a session from before cannot keep it under the new key either."""
    keyring = Keyring(keys, encrypt=encrypt)
    sessions = Sessions(store, keyring, MIB)
    held = sessions.save("alice", CHAT)
    tag = keyring.tenant("alice").tag
    keyring.forget("alice")
    with pytest.raises(SessionConflictError):
        sessions.save("alice", held)
    assert sessions.delete_tenant(tag) == 1
    assert files(store) == []
    assert sessions.load("alice", "work") is None


def test_broken_keys_are_an_error_and_not_a_new_session(sessions, keys):
    sessions.save("", CHAT)
    keys.write_bytes(b"{")
    with pytest.raises(StoreError, match="key file"):
        sessions.load("", "work")


def test_a_store_s_sessions_have_their_share_of_its_disk(tmp_path):
    assert place.session_bytes(64 * MIB) == 4 * MIB
    assert place.session_bytes(20 << 30) == 64 * MIB
    assert open_sessions(StoreConfig(remote=("redis://127.0.0.1",))) is None
    config = StoreConfig(path=tmp_path / "store", disk_bytes=64 * MIB, key_file=tmp_path / "k", encrypt=False)
    made = open_sessions(config)
    assert (made.limit_bytes, made.sealed) == (4 * MIB, False)
