"""Running `kvire` in the test's own process: importing torch anew each time would take minutes."""

import io
import sys
from collections.abc import Sequence
from typing import Protocol

import pytest

from kvire.cli.main import app


class Command(Protocol):
    """Called with further words: exit status, standard output, and standard error on one line."""

    def __call__(self, *words: object, stdin: str = "") -> tuple[int, str, str]: ...


def in_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: Sequence[object], stdin: str = ""
) -> tuple[int, str, str]:
    """Exit status, standard output, standard error of `kvire WORDS`; importing torch anew each time
    takes minutes.
    """
    monkeypatch.setattr(sys, "argv", ["kvire", *map(str, words)])
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    capsys.readouterr()
    try:
        app()
        code = 0
    except SystemExit as left:
        code = int(left.code or 0)
    return code, *capsys.readouterr()


def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *first: object) -> Command:
    """The command that begins with these words; its standard error as one line."""

    def run(*words: object, stdin: str = "") -> tuple[int, str, str]:
        code, out, err = in_process(monkeypatch, capsys, (*first, *words), stdin)
        return code, out, " ".join(err.split())

    return run
