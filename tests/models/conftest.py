"""A cache folder of its own for every test; one for the session where a real model is converted."""

from pathlib import Path

import pytest

from kvire.models.resolve import resolve


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("KVIRE_CACHE_DIR", str(folder))
    return folder


@pytest.fixture(scope="session")
def real_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("real-models")


def _converted(name: str, folder: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVIRE_CACHE_DIR", str(folder))
        return resolve(name)


@pytest.fixture(scope="session")
def smollm2(real_cache: Path) -> Path:
    """SmolLM2-135M-Instruct, converted."""
    return _converted("smollm2", real_cache)


@pytest.fixture(scope="session")
def gemma3(real_cache: Path) -> Path:
    """Gemma 3 270M base, converted."""
    return _converted("gemma3-270m", real_cache)
