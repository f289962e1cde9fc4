"""Real vLLM engines for tests."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from connectors.vllm.engine_process import NEEDS_VLLM, Vllm
from models.tiny import make_tiny

from kvire.core.config import StoreConfig
from kvire.store.open import open_store
from kvire.store.tiered import TieredStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    """A store on disk."""
    config = StoreConfig(path=tmp_path / "store", disk_bytes=64 << 20, key_file=tmp_path / "keys" / "k.json")
    store = open_store(config)
    yield store
    store.close()


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose heads are as wide as vLLM's CPU kernel wants them."""
    return make_tiny("llama", tmp_path_factory.mktemp("llama"), head_dim=32)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Vllm]]:
    """Start an engine: start(model, options, ...); those still there at the end are ended."""
    engines: list[Vllm] = []

    def begin(model: Path, options: dict[str, Any] | None, **more: Any) -> Vllm:
        engines.append(Vllm(model, options, tmp_path / f"engine{len(engines)}.log", **more))
        return engines[-1]

    yield begin
    for engine in engines:
        if engine.process.poll() is None:
            engine.kill()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start vLLM take long, and need it."""
    for item in items:
        if "start" in getattr(item, "fixturenames", ()) and item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.engine)
            item.add_marker(NEEDS_VLLM)
