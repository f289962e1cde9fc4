"""One session's file: sealed, bound to its name, and any damage is told instead of read."""

import json
import traceback
from dataclasses import replace

import pytest
from sessions.session_samples import CHAT, SAID, files, opened

from kvire.sessions import session_file
from kvire.sessions.session_file import SessionError
from kvire.store.keyring import Keyring


@pytest.mark.parametrize("encrypt", [True, False], ids=["sealed", "plain"])
def test_at_rest_nothing_of_it_can_be_read_unless_asked_for(store, keys, encrypt):
    opened(store, keys, encrypt=encrypt).save("alice", replace(CHAT, name="about-the-vault"))
    (file,) = files(store)
    found = [text for text in (SAID, "noted", "40123", "about-the-vault") if text.encode() in file.read_bytes()]
    assert len(found) == (0 if encrypt else 4)
    for named in ("vault", "alice"):
        assert named not in str(file.relative_to(store))
    if not encrypt:
        assert json.loads(file.read_bytes().splitlines()[1])["messages"][0]["content"] == SAID


def test_two_saves_of_the_same_share_no_byte_run(sessions, store):
    """The key of each file is its own: the same text under the same key and nonce would show itself."""
    first = sessions.save("", CHAT)
    before = files(store)[0].read_bytes()
    sessions.save("", first)
    after = files(store)[0].read_bytes()
    head = len(session_file.MAGIC) + 2
    assert before[:head] == after[:head]
    assert sum(a == b for a, b in zip(before[head:], after[head:], strict=True)) < len(before) // 16


def test_the_same_random_bytes_seal_no_two_contents_alike(tmp_path):
    """As after a virtual machine's snapshot that is restored twice."""
    key = Keyring(tmp_path / "keyring.json").tenant("")
    head = len(session_file.MAGIC) + 2
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(session_file.os, "urandom", bytes)
        salts = {session_file.pack(replace(CHAT, model=model), key)[head : head + 32] for model in ("one", "two")}
    assert len(salts) == 2


@pytest.mark.parametrize("encrypt", [True, False], ids=["sealed", "plain"])
def test_a_file_that_was_moved_is_not_taken_for_another(store, keys, encrypt):
    sessions = opened(store, keys, encrypt=encrypt)
    sessions.save("", CHAT)
    (work,) = files(store)
    sessions.save("", replace(CHAT, name="play", messages=()))
    (play,) = set(files(store)) - {work}
    work.rename(play)
    with pytest.raises(SessionError, match="damaged"):
        sessions.load("", "play")
    assert sessions.names("") == []
    assert sessions.load("", "work") is None
    sessions.save("other", replace(CHAT, messages=()))
    (other,) = set(files(store)) - {play}
    play.rename(other)
    with pytest.raises(SessionError, match="damaged"):
        sessions.load("other", "work")


@pytest.mark.parametrize("encrypt", [True, False], ids=["sealed", "plain"])
def test_every_flipped_bit_and_every_cut_is_noticed(keys, encrypt):
    key = Keyring(keys, encrypt=encrypt).tenant("")
    whole = session_file.pack(CHAT, key)
    damaged = [whole[:length] for length in range(len(whole))] + [whole + b"\0"]
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        damaged.append(bytes(flipped))
    for content in damaged:
        with pytest.raises(SessionError):
            session_file.unpack(content, key, "work")
    assert session_file.unpack(whole, key, "work") == CHAT


@pytest.mark.parametrize("encrypt", [True, False], ids=["sealed", "plain"])
def test_damage_is_told_without_what_was_said_and_stays_where_it_is(store, keys, encrypt):
    sessions = opened(store, keys, encrypt=encrypt)
    sessions.save("", CHAT)
    (file,) = files(store)
    damaged = file.read_bytes()[:-40]
    file.write_bytes(damaged)
    with pytest.raises(SessionError) as error:
        sessions.load("", "work")
    told = "".join(traceback.format_exception(error.value))
    assert "vault" not in told
    assert str(store) not in str(error.value)
    assert file.read_bytes() == damaged


def test_s43_an_empty_file_hurts_nobody_and_can_be_removed(sessions, store):
    """It stays until somebody says so; listing and other sessions go on; nothing is written over it."""
    sessions.save("", CHAT)
    (file,) = files(store)
    file.write_bytes(b"")
    with pytest.raises(SessionError, match=r"damaged; remove the session, or go on under another name"):
        sessions.load("", "work")
    with pytest.raises(SessionError, match="damaged"):
        sessions.save("", CHAT)
    assert file.stat().st_size == 0
    sessions.save("", replace(CHAT, name="play"))
    assert sessions.names("") == ["play"]
    assert sessions.delete("", "work")
    assert sessions.load("", "work") is None
    sessions.save("", CHAT)
    assert sessions.names("") == ["play", "work"]


@pytest.mark.parametrize("encrypt", [True, False], ids=["sealed", "plain"])
def test_a_newer_version_is_left_alone(store, keys, encrypt, monkeypatch):
    sessions = opened(store, keys, encrypt=encrypt)
    with monkeypatch.context() as newer:
        newer.setattr(session_file, "VERSION", 2)
        sessions.save("", CHAT)
    (file,) = files(store)
    content = file.read_bytes()
    with pytest.raises(SessionError, match=r"newer Kvire \(version 2\)"):
        sessions.load("", "work")
    with pytest.raises(SessionError, match="newer"):
        sessions.save("", CHAT)
    assert file.read_bytes() == content
