"""Files that are added to Kvire for the time of a test."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

AddFile = Callable[[str, str, str], None]


@pytest.fixture
def add_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AddFile]:
    """Puts a module into a package of Kvire, as if its file lay there."""
    added = []

    def add(package: str, name: str, source: str) -> None:
        folder = tmp_path / package
        folder.mkdir()
        (folder / f"{name}.py").write_text(source)
        home = importlib.import_module(package)
        monkeypatch.setattr(home, "__path__", [*home.__path__, str(folder)])
        added.append(f"{package}.{name}")

    yield add
    for name in added:
        sys.modules.pop(name, None)
