"""What the tests of sessions share."""

from pathlib import Path

import pytest
from sessions.session_samples import opened

from kvire.sessions.folder import Sessions


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "home" / "keyring.json"


@pytest.fixture
def sessions(store: Path, keys: Path) -> Sessions:
    return opened(store, keys)
