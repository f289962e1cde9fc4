"""How large a store gets: an existing folder keeps its limit, and all ways in give a new one the same size."""

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from store.disk_cases import MIB

from kvire.cli.options import STORE
from kvire.cli.store_config import store_config
from kvire.connectors.options import store_config as connector_config
from kvire.core.config import StoreConfig
from kvire.store.open import open_store
from kvire.store.place import block_bytes, default_disk_bytes, network_file_system

WayIn = Callable[[Path], StoreConfig | None]


def command(path: Path) -> StoreConfig | None:
    """`kvire serve --store PATH`."""
    given = {name: default for name, (_, default) in STORE.items()} | {"store": path}
    return store_config(given, {"prefix_cache": True, "kv_cache": "paged"}, default=True)


def connector(path: Path) -> StoreConfig | None:
    """An engine's options."""
    return connector_config({"store": str(path)}, "the options")


def library(path: Path) -> StoreConfig | None:
    """`LLM(store=path)`, `StoredCache.open(model, path)`."""
    return StoreConfig(path=path)


def limit_of(config: StoreConfig | None) -> int | None:
    assert config is not None
    with open_store(config) as store:
        return store.stats().handles["disk"].tier.limit_bytes


@pytest.mark.parametrize("way_in", [command, connector, library])
def test_an_existing_folder_keeps_its_limit(tmp_path: Path, way_in: WayIn) -> None:
    limit_bytes = limit_of(StoreConfig(path=tmp_path / "store", disk_bytes=64 * MIB))
    assert limit_bytes == block_bytes(64 * MIB)
    assert limit_of(way_in(tmp_path / "store")) == limit_bytes
    assert limit_of(StoreConfig(path=tmp_path / "store", disk_bytes=96 * MIB)) == block_bytes(96 * MIB)


def test_the_default_folder_keeps_its_limit_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVIRE_STORE", str(tmp_path / "store"))
    limit_bytes = limit_of(StoreConfig(path=tmp_path / "store", disk_bytes=64 * MIB))
    given = {name: default for name, (_, default) in STORE.items()}
    config = store_config(given, {"prefix_cache": True, "kv_cache": "paged"}, default=True)
    assert limit_of(config) == limit_bytes


@pytest.mark.parametrize("way_in", [command, connector, library])
def test_a_new_folder_gets_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way_in: WayIn) -> None:
    monkeypatch.setattr("kvire.store.place.DISK_BYTES", 80 * MIB)
    assert default_disk_bytes(tmp_path / "store") <= 80 * MIB
    assert limit_of(way_in(tmp_path / "store")) == block_bytes(default_disk_bytes(tmp_path / "store"))


def test_a_damaged_index_that_is_made_again_keeps_the_limit(tmp_path: Path) -> None:
    limit_bytes = limit_of(StoreConfig(path=tmp_path / "store", disk_bytes=64 * MIB))
    index = tmp_path / "store" / "index.db"
    with closing(sqlite3.connect(index)) as connection:
        [(page,)] = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'segments'")
        [(page_bytes,)] = connection.execute("PRAGMA page_size")
    with index.open("r+b") as file:
        file.seek((page - 1) * page_bytes)
        file.write(b"\xff" * page_bytes)
    assert limit_of(library(tmp_path / "store")) == limit_bytes


def test_an_index_that_is_lost_is_made_again_without_being_told_a_limit(tmp_path: Path) -> None:
    limit_of(StoreConfig(path=tmp_path / "store", disk_bytes=64 * MIB))
    (tmp_path / "store" / "index.db").write_bytes(b"\xff" * 4096)
    default_bytes = default_disk_bytes(tmp_path / "store")
    assert limit_of(library(tmp_path / "store")) == pytest.approx(block_bytes(default_bytes), rel=0.1)


def test_network_file_systems_are_known_by_their_mounts(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    line = "36 35 {}:{} / /mnt rw,noatime master:1 - {} server:/export rw\n"
    here, elsewhere = (os.major(device), os.minor(device)), (os.major(device), os.minor(device) + 1)
    for kind in ("nfs4", "virtiofs", "9p", "lustre"):
        assert network_file_system(tmp_path, line.format(*here, kind)) == kind
        assert network_file_system(tmp_path, line.format(*elsewhere, kind)) is None
    assert network_file_system(tmp_path, line.format(*here, "ext4") + "cut off\n") is None
    assert network_file_system(tmp_path / "not there", line.format(*here, "nfs")) is None


def test_a_store_on_a_network_file_system_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvire.store.open.network_file_system", lambda path: "nfs4")
    limit_of(library(tmp_path / "store"))
    assert "lies on nfs4: only one machine may use it" in caplog.text
