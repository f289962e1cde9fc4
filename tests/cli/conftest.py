"""What the tests of `kvire store` share."""

import json
from pathlib import Path

import pytest
from harness.commands import command

from kvire.cli.store import forget
from kvire.store.keyring import Keyring


@pytest.fixture
def keyring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keyring:
    path = tmp_path / "keys" / "keyring.json"
    monkeypatch.setenv("KVIRE_KEY_FILE", str(path))
    monkeypatch.setattr(forget, "WRITERS_S", 0.0)
    return Keyring(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def kvire_store(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs `kvire store ...`; gives exit status, standard output (parsed, with --json) and standard error."""

    run = command(monkeypatch, capsys, "store")

    def parsed(*args: object, stdin: str = ""):
        code, out, err = run(*args, stdin=stdin)
        return code, json.loads(out) if "--json" in args and out else out, err

    return parsed
