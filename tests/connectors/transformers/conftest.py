"""A tiny model in memory, and a store that outlives a StoredCache."""

from pathlib import Path

import pytest
from harness.plain_generate import load
from harness.waiting import PATIENCE_S
from models.tiny import make_tiny
from transformers import PreTrainedModel

from kvire.core.config import StoreConfig

MIB = 1 << 20


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama on disk."""
    return make_tiny("llama", tmp_path_factory.mktemp("llama"), tokenizer=False)


@pytest.fixture
def model(checkpoint: Path) -> PreTrainedModel:
    """A tiny llama in memory."""
    return load(checkpoint)


@pytest.fixture
def config(tmp_path: Path) -> StoreConfig:
    """A sealed store of the test's own."""
    return StoreConfig(path=tmp_path / "store", disk_bytes=64 * MIB, key_file=tmp_path / "keys" / "keyring.json")


@pytest.fixture(autouse=True)
def loading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models compute as fast as blocks are loaded: here, all loads are waited for."""
    monkeypatch.setattr("kvire.plan.cost.PrefillSpeed.seconds", lambda *_: PATIENCE_S)
