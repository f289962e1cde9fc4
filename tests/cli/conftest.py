"""What the tests of `kvire store` share."""

import io
import json
import sys
from pathlib import Path

import pytest

from kvire.cli import store_tidy
from kvire.cli.main import app
from kvire.store.keyring import Keyring


@pytest.fixture
def keyring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keyring:
    path = tmp_path / "keys" / "keyring.json"
    monkeypatch.setenv("KVIRE_KEY_FILE", str(path))
    monkeypatch.setattr(store_tidy, "WRITERS_S", 0.0)
    return Keyring(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def kvire_store(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs `kvire store ...`; gives exit status, standard output (parsed, with --json) and standard error."""

    def run(*args: object, stdin: str = ""):
        monkeypatch.setattr(sys, "argv", ["kvire", "store", *map(str, args)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        try:
            app()
            code = 0
        except SystemExit as left:
            code = int(left.code or 0)
        out, err = capsys.readouterr()
        return code, json.loads(out) if "--json" in args and out else out, " ".join(err.split())

    return run
