"""Folders of an earlier version, as it left them: this one finds every block in them, and keeps the pins and notes."""

import tarfile
from pathlib import Path

import pytest
from golden.make_store import KV_BYTES, LENGTHS
from store.blocks import chain, kv_of, wanted

from kvire.core.config import StoreConfig
from kvire.store.open import open_store
from kvire.store.ticket import LoadState

ARCHIVE = Path(__file__).parents[1] / "golden" / "store.tar.xz"


@pytest.mark.parametrize("how", ["plain", "sealed"])
def test_an_older_folder_is_taken_over_whole(tmp_path: Path, how: str) -> None:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    place = tmp_path / how
    config = StoreConfig(path=place / "store", key_file=place / "keyring.json", encrypt=how == "sealed")
    with open_store(config) as store:
        pinned = set()
        for number, (tenant, length) in enumerate(LENGTHS.items()):
            records = chain(length, number, tenant=tenant, salt=store.tenant(tenant).salt, kv_bytes=KV_BYTES)
            assert store.held([record.id for record in records]) == ["disk"] * length
            ticket = store.load(wanted(records))
            assert ticket.wait(20) and [ticket.state(i) for i in range(length)] == [LoadState.READY] * length
            assert [part.out for part in ticket.wanted] == [kv_of(record) for record in records]
            pinned |= {record.id for record in records[:2]}
        [handle] = store._handles
        assert {entry.id for entry in handle.tier.entries() if entry.pinned} == pinned
        assert list(handle.tier.namespaces().values()) == [{"weights": "w", "block_size": "16"}] * len(LENGTHS)
