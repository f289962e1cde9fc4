"""The keyring: one file that only its owner reads, the same for every process, and really without whom it forgot."""

import errno
import fcntl
import json
import logging
import os
import stat
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest

from kvire.codec import seal
from kvire.core.errors import StoreError
from kvire.store.keyring import FRESH_S, Keyring, default_path

RACER = """
import sys, time
from pathlib import Path
from kvire.store.keyring import Keyring
keyring = Keyring(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.read(1)
for name in sys.argv[2:]:
    key = keyring.tenant(name)
    print(key.salt, key.secret.hex(), flush=True)
assert "torch" not in sys.modules
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "home" / "kvire" / "keyring.json"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_file_and_its_folder_are_the_owners_alone(path):
    umask = os.umask(0)
    try:
        Keyring(path).tenant("")
    finally:
        os.umask(umask)
    assert mode(path) == 0o600 and mode(path.parent) == 0o700
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]  # nothing else is left lying about


def test_a_keyring_that_nobody_uses_leaves_no_file(path):
    keyring = Keyring(path)
    assert keyring.tenants() == []
    assert not keyring.forget("nobody")
    assert not path.exists()


def test_keys_are_made_once_and_differ_in_everything(path):
    keyring = Keyring(path)
    keys = [keyring.tenant(name) for name in ("", "a", "b", 'x"\n/ü')]
    assert keyring.tenants() == ["", "a", "b", 'x"\n/ü']
    assert [Keyring(path).tenant(key.name) for key in keys] == keys
    for field in ("salt", "secret", "tag"):
        assert len({getattr(key, field) for key in keys}) == len(keys)
    assert all(len(key.secret) == 32 and len(key.salt) == 64 and len(key.tag) == 16 for key in keys)


def test_without_encryption_there_is_a_salt_and_no_secret(path):
    sealing, plain = Keyring(path), Keyring(path, encrypt=False)
    key, unsealed = sealing.tenant("a"), plain.tenant("a")
    assert unsealed.secret is None and key.secret is not None
    assert (unsealed.salt, unsealed.tag) == (key.salt, key.tag)  # its blocks keep their names
    other = plain.tenant("b")
    assert sealing.tenant("b").salt == other.salt and sealing.tenant("b").secret is not None


@pytest.mark.parametrize("names", [[""], ["{i}"], ["", "{i}", "shared"]], ids=["same", "own", "both"])
def test_eight_processes_that_start_together_agree(path, names):
    wanted = [[name.format(i=i) for name in names] for i in range(8)]
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(path), *own], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for own in wanted
    ]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        racer.stdin.write("\n")
        racer.stdin.flush()
    keyring = Keyring(path)
    for own, racer in zip(wanted, racers, strict=True):
        got = racer.communicate(timeout=60)[0].splitlines()
        assert racer.returncode == 0
        keys = [keyring.tenant(name) for name in own]
        assert got == [f"{key.salt} {key.secret.hex()}" for key in keys]
    assert keyring.tenants() == sorted({name for own in wanted for name in own})


def test_what_another_process_forgot_is_noticed_soon(path):
    mine, theirs = Keyring(path), Keyring(path)
    old = theirs.lately("gone")
    assert mine.lately("gone") == old and mine.forget("gone")
    assert theirs.tenants() == [] and mine.lately("gone") != old
    time.sleep(2 * FRESH_S)
    assert theirs.lately("gone") == mine.lately("gone")


def test_forgetting_destroys_the_keys_for_everybody(path):
    mine, theirs = Keyring(path), Keyring(path)
    old, kept = mine.tenant("gone"), mine.tenant("kept")
    assert theirs.tenant("gone") == old
    cipher = seal.cipher(old.secret, bytes(16))
    before = os.open(path, os.O_RDONLY)  # what a file system might still show of the old file
    assert mine.forget("gone")
    assert not mine.forget("gone")
    assert theirs.tenants() == ["kept"]
    content = path.read_text() + os.read(before, 1 << 16).decode()
    os.close(before)
    assert old.salt not in content and old.secret.hex() not in content
    assert seal.cipher(old.secret, bytes(16)) is not cipher  # nor is the derived key kept
    new = theirs.tenant("gone")
    assert not {new.salt, new.secret, new.tag} & {old.salt, old.secret, old.tag}
    assert mine.tenant("gone") == new and mine.tenant("kept") == kept


def test_rewrites_within_one_tick_of_the_clock_are_noticed(path, monkeypatch):
    """Same inode, same size, same second: only a stamp that always grows tells the files apart."""
    mine, theirs = Keyring(path), Keyring(path)
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)  # as quick as it can be
    for _ in range(200):
        assert mine.tenant("a") == theirs.tenant("a")
        mine.forget("a")


def test_readers_never_see_half_a_file(path):
    Keyring(path).tenant("steady")
    steady = Keyring(path).tenant("steady")
    failures: list[str] = []
    over = threading.Event()

    def watch() -> None:
        keyring = Keyring(path)
        try:
            while not over.is_set():
                if keyring.tenant("steady") != steady:
                    failures.append("another key")
        except StoreError:
            failures.append(traceback.format_exc())

    watchers = [threading.Thread(target=watch) for _ in range(3)]
    for watcher in watchers:
        watcher.start()
    writer = Keyring(path)
    end = time.monotonic() + 2
    while time.monotonic() < end:
        writer.tenant("x")
        writer.forget("x")
    over.set()
    for watcher in watchers:
        watcher.join()
    assert not failures, failures[0]


def damaged(path: Path) -> dict[str, bytes]:
    whole = path.read_bytes()
    document = json.loads(whole)
    tenant = document["tenants"]["a"]

    def with_tenant(entry: object) -> bytes:
        return json.dumps({**document, "tenants": {"a": entry}}).encode()

    return {
        "empty": b"",
        "zeros": bytes(len(whole)),
        "half": whole[: len(whole) // 2],
        "binary": b"\xff\xfe" + whole,
        "a list": b"[1, 2]",
        "nested": b"[" * 100_000,
        "no version": json.dumps({"tenants": document["tenants"]}).encode(),
        "no tenants": json.dumps({"kvire keyring": 1}).encode(),
        "tenants a list": json.dumps({**document, "tenants": []}).encode(),
        "short salt": with_tenant({**tenant, "salt": tenant["salt"][:-2]}),
        "short secret": with_tenant({**tenant, "secret": tenant["secret"][:-2]}),
        "no secret": with_tenant({"salt": tenant["salt"]}),
        "no hex": with_tenant({**tenant, "secret": "z" * 64}),
        "null": with_tenant({**tenant, "secret": None}),
        "more": with_tenant({**tenant, "more": 1}),
        "text": with_tenant("text"),
    }


DAMAGES = [
    "empty", "zeros", "half", "binary", "a list", "nested", "no version", "no tenants", "tenants a list", "short salt",
    "short secret", "no secret", "no hex", "null", "more", "text",
]  # fmt: skip


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_is_refused_and_left_as_it_is(path, how, caplog):
    caplog.set_level(logging.DEBUG)
    keyring = Keyring(path)
    key = keyring.tenant("a")
    content = damaged(path)[how]
    assert set(damaged(path)) == set(DAMAGES)
    path.write_bytes(content)
    for use in (
        lambda: keyring.tenant("a"),
        lambda: keyring.tenant("a"),  # not only the first time
        lambda: Keyring(path).tenant("new"),
        lambda: Keyring(path).tenants(),
        lambda: Keyring(path).forget("a"),
    ):
        with pytest.raises(StoreError, match=r"damaged.*restore it from a backup, or move it away") as caught:
            use()
        assert caught.value.__cause__ is None
        shown = "".join(traceback.format_exception(caught.value)) + caplog.text
        assert key.salt not in shown and key.secret.hex() not in shown
    assert path.read_bytes() == content


def test_a_newer_file_is_refused_by_that_name(path):
    Keyring(path).tenant("a")
    path.write_text(path.read_text().replace('"kvire keyring": 1', '"kvire keyring": 2'))
    with pytest.raises(StoreError, match="newer Kvire"):
        Keyring(path).tenant("a")


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o660, 0o666])
def test_a_file_that_others_may_read_is_refused(path, bits):
    Keyring(path).tenant("a")
    path.chmod(bits)
    with pytest.raises(StoreError, match=r"others may read.*chmod 600"):
        Keyring(path).tenant("a")
    path.chmod(0o600)
    Keyring(path).tenant("a")


@pytest.mark.parametrize("bits", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_to_is_refused(path, bits):
    path.parent.mkdir(parents=True)
    path.parent.chmod(bits)
    with pytest.raises(StoreError, match=r"others may write.*chmod 700"):
        Keyring(path).tenant("a")
    assert not path.exists()


def test_links_and_folders_in_the_files_place_are_refused(path, tmp_path):
    Keyring(tmp_path / "real" / "keyring.json").tenant("a")
    path.parent.mkdir(parents=True, mode=0o700)
    path.symlink_to(tmp_path / "real" / "keyring.json")
    with pytest.raises(StoreError, match="no regular file"):
        Keyring(path).tenant("a")
    path.unlink()
    path.mkdir()
    with pytest.raises(StoreError, match="no regular file"):
        Keyring(path).tenant("a")


def test_a_planted_temporary_link_is_not_followed(path, tmp_path):
    path.parent.mkdir(parents=True, mode=0o700)
    (path.parent / ".keyring.json.new").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="KVIRE_KEY_FILE"):
        Keyring(path).tenant("a")
    assert not (tmp_path / "elsewhere").exists()


def test_what_a_crash_left_is_taken_over(path):
    keyring = Keyring(path)
    keyring.tenant("a")
    left = path.parent / ".keyring.json.new"
    left.write_text("secrets of a writer that was killed")
    left.chmod(0o644)
    keyring.tenant("b")
    assert mode(path) == 0o600 and [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_says_what_to_do(path):
    path.parent.mkdir(parents=True)
    path.parent.chmod(0o500)
    with pytest.raises(StoreError, match="KVIRE_KEY_FILE"):
        Keyring(path).tenant("a")


def test_a_folder_that_cannot_be_made_says_what_to_do(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"keyring\.json cannot be"):
        Keyring(tmp_path / "file" / "keyring.json").tenant("a")


def test_a_full_disk_changes_nothing(path, monkeypatch):
    keyring = Keyring(path)
    key = keyring.tenant("a")
    content = path.read_bytes()

    def fail(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(StoreError, match="No space left"):
            keyring.tenant("b")
    assert path.read_bytes() == content
    assert keyring.tenant("a") == key and keyring.tenants() == ["a"]


def without_locks(_descriptor: int, _operation: int) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def test_a_file_system_without_locks_is_refused_with_what_to_do(tmp_path):
    """As NFS without lockd, or Lustre without its flock option."""
    path = tmp_path / "home" / "keyring.json"
    known = Keyring(path).tenant("known")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fcntl, "flock", without_locks)
        keyring = Keyring(path)
        assert keyring.tenant("known") == known, "what is there can be read without a lock"
        for change in (keyring.tenant, keyring.forget):
            with pytest.raises(StoreError, match=r"cannot be locked: No locks available; set KVIRE_KEY_FILE"):
                change("known" if change == keyring.forget else "new")
    assert Keyring(path).tenants() == ["known"]


def test_a_lock_that_stays_held_is_not_waited_for_for_ever(path, monkeypatch):
    monkeypatch.setattr("kvire.store.keyring.LOCK_TIMEOUT_S", 0.05)
    Keyring(path).tenant("known")
    holder = os.open(path.parent, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with pytest.raises(StoreError, match="stays locked by another process"):
        Keyring(path).tenant("new")
    os.close(holder)
    assert Keyring(path).tenant("new").name == "new"


def test_a_hard_linked_backup_keeps_its_content(tmp_path):
    path, backup, other = tmp_path / "home" / "keyring.json", tmp_path / "backup.json", tmp_path / "other.json"
    keys = [Keyring(path).tenant(name) for name in ("a", "b")]
    backup.hardlink_to(path)
    content = path.read_bytes()
    Keyring(path).tenant("c")
    assert backup.read_bytes() == content
    other.hardlink_to(path)
    assert Keyring(path).forget("a")
    assert [Keyring(backup).tenant(key.name) for key in keys] == keys
    assert Keyring(other).tenants() == ["a", "b", "c"]
    assert Keyring(path).tenants() == ["b", "c"]


def test_the_default_place(monkeypatch, tmp_path):
    monkeypatch.delenv("KVIRE_KEY_FILE", raising=False)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path() == tmp_path / ".local" / "share" / "kvire" / "keyring.json"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert default_path() == tmp_path / "data" / "kvire" / "keyring.json"
    monkeypatch.setenv("KVIRE_KEY_FILE", str(tmp_path / "mine"))
    assert default_path() == Keyring().path == tmp_path / "mine"


def test_the_file_must_lie_outside_the_store(tmp_path):
    keyring = Keyring(tmp_path / "store" / "keys" / "keyring.json")
    (tmp_path / "link").symlink_to(tmp_path / "store")
    for store in (tmp_path / "store", tmp_path / "link", tmp_path):
        with pytest.raises(StoreError, match="inside the store"):
            keyring.check_outside(store)
    keyring.check_outside(tmp_path / "store2")
    keyring.check_outside(tmp_path / "store" / "other")
