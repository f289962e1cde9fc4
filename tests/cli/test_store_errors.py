"""What `kvire store` says where there is no store, or none that it may touch."""

import sqlite3
from pathlib import Path

import pytest
from cli.stores import fill

from kvire.store.keyring import Keyring


def newer_index(folder: Path) -> None:
    with sqlite3.connect(folder / "index.db") as index:
        index.executescript("ALTER TABLE written RENAME TO worn; PRAGMA user_version = 99")


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda folder: [path.unlink() for path in folder.iterdir()], "is no store of Kvire, and is left alone"),
        (lambda folder: (folder / "index.db").unlink(), "is lost: the next start of what uses it makes it again"),
        (lambda folder: (folder / "index.db").write_bytes(b"x" * 8192), "is damaged: the next start"),
        (newer_index, "was written by another version of Kvire (format 99, this one has 1)"),
        (lambda folder: folder.rename(folder.with_name("moved")), "there is no store in"),
        (lambda folder: [folder.rename(folder.with_name("moved")), folder.write_text("")], "is a file"),
    ],
    ids=["foreign", "no index", "damaged index", "newer", "missing", "a file"],
)
def test_what_is_no_store_is_left_alone(kvire_store, folder: Path, keyring: Keyring, break_it, says: str) -> None:
    fill(folder, keyring)
    break_it(folder)
    before = sorted(path.name for path in folder.parent.rglob("*") if not path.name.startswith("index.db-"))
    for command in (["stat"], ["ls"], ["verify"], ["scrub"], ["gc"], ["clear", "--yes"]):
        code, out, err = kvire_store(command[0], folder, *command[1:])
        assert (code, out) == (2, ""), command
        assert says in err, err
        assert "Traceback" not in err
    assert sorted(p.name for p in folder.parent.rglob("*") if not p.name.startswith("index.db-")) == before


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["stat", "STORE", "--key-file", "/nowhere/keys.json"], "there is no key file /nowhere/keys.json"),
        (["ls", "STORE", "--tenant", "nobody"], "no key of a tenant 'nobody'; it has those of: '', 'other'"),
        (["forget", "STORE", "--tenant", "nobody", "--yes"], "no key of a tenant 'nobody'"),
        (["pin", "--store", "STORE"], "say which blocks"),
        (["pin", "abcdef012345", "--store", "STORE"], "no blocks here begin with abcdef012345"),
        (["pin", "xyz", "--store", "STORE"], "at least 6 hexadecimal digits"),
        (["pin", "--prompt", "p.txt", "--store", "STORE"], "--prompt FILE and --model MODEL go together"),
        (["stat", "ftp://host"], "begins with one of redis://"),
        (["stat", "redis://127.0.0.1:1/0"], "does not answer"),
        (["stat", "file:///nowhere/at/all"], "there is no store in /nowhere/at/all yet"),
        (["warm", "smollm2"], "say what to compute"),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, list) else "",
)
def test_errors_say_what_is_wrong_and_what_to_do(kvire_store, folder: Path, keyring: Keyring, args, says: str) -> None:
    fill(folder, keyring)
    code, out, err = kvire_store(*[str(folder) if arg == "STORE" else arg for arg in args])
    assert (code, out) == (2, "")
    assert says in err
    assert "Traceback" not in err


def test_a_key_file_that_others_may_read_is_refused(kvire_store, folder: Path, keyring: Keyring) -> None:
    fill(folder, keyring)
    keyring.path.chmod(0o644)
    code, _, err = kvire_store("stat", folder)
    assert code == 2 and "chmod 600" in err


def test_looking_makes_no_keys_and_no_folder(kvire_store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVIRE_KEY_FILE", str(tmp_path / "keys" / "keyring.json"))
    monkeypatch.setenv("KVIRE_STORE", str(tmp_path / "cache" / "store"))
    code, _, err = kvire_store("stat")
    assert code == 2 and str(tmp_path / "cache" / "store") in err and "kvire serve" in err
    assert list(tmp_path.iterdir()) == []
