"""Running `kvire` in the test's own process: importing torch anew each time would take minutes."""

import io
import sys
from typing import Protocol

import pytest

from kvire.cli.main import app


class Command(Protocol):
    """Called with further words: exit status, standard output, and standard error on one line."""

    def __call__(self, *words: object, stdin: str = "") -> tuple[int, str, str]: ...


def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *first: object) -> Command:
    """The command that begins with these words."""

    def run(*words: object, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvire", *map(str, (*first, *words))])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        try:
            app()
            code = 0
        except SystemExit as left:
            code = int(left.code or 0)
        out, err = capsys.readouterr()
        return code, out, " ".join(err.split())

    return run
