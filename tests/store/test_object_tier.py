"""Blocks in object stores: an S3 server, a folder, memory. What every tier does is in test_contract.py."""

import os
import shutil
import stat
import sys
import threading
import time
from pathlib import Path

import pytest
from store.blocks import chain, frame_of, kv_of, tenant_key
from store.remote_stubs import settled, sockets

from kvire.codec.frame import Frames
from kvire.core.errors import BlockMissing, ConfigError, FrameDamaged, TierUnavailable
from kvire.core.record import BlockRecord
from kvire.store.remote.open import open_remote
from kvire.store.remote.tier import block_name
from kvire.store.tier import Tier

FRAMES = Frames(tenant_key)


@pytest.fixture(params=["s3", "file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return request.getfixturevalue("s3_url")
    return {"file": f"file://{tmp_path}/shared", "memory": "memory://"}[request.param]


def opened(url: str, **options: float) -> Tier:
    tier = open_remote(url, timeout_s=10, **options)
    tier.clear()
    return tier


def put(tier: Tier, record: BlockRecord, ttl_s: float | None = None) -> None:
    assert tier.write(record, frame_of(record), tenant_key(record.tenant).tag, ttl_s=ttl_s)


def load(tier: Tier, record: BlockRecord) -> None:
    out = memoryview(bytearray(record.kv_bytes))
    reading = FRAMES.reading(record, out)
    reading.finish(tier.read(record.id, reading.buffers))
    assert out == kv_of(record)


def test_another_process_finds_the_blocks(s3_url, tmp_path):
    record = chain(1)[0]
    for url in (s3_url, f"file://{tmp_path}"):
        first = opened(url)
        put(first, record)
        first.close()
        second = open_remote(url, timeout_s=10)
        load(second, record)
        second.close()


def test_a_pin_outlives_the_time_to_live(url):
    pinned, other = records = chain(2)
    tier = opened(url)
    for record in records:
        put(tier, record, ttl_s=0.4)
    assert tier.pin([pinned.id], pinned=True) == 1
    time.sleep(0.6)
    assert tier.held([pinned.id, other.id]) == [True, False]
    load(tier, pinned)
    with pytest.raises(BlockMissing):
        load(tier, other)
    listed = {entry.id: entry for entry in tier.entries()}  # with what waits to be removed
    assert (listed[pinned.id].pinned, listed[pinned.id].expires) == (True, None)
    assert not listed[other.id].pinned and listed[other.id].expires < time.time()
    assert tier.pin([pinned.id], pinned=False) == 1
    assert tier.held([pinned.id]) == [False]
    put(tier, other, ttl_s=60)  # written again, it lives again
    load(tier, other)
    tier.close()


def test_expired_blocks_can_be_removed(url):
    record = chain(1, tenant="other")[0]
    tier = opened(url)
    put(tier, record, ttl_s=0.01)
    time.sleep(0.05)
    assert tier.held([record.id]) == [False]
    assert tier.delete_tenant(tenant_key("other").tag) == 1
    assert list(tier.entries()) == []
    put(tier, record, ttl_s=0.01)
    time.sleep(0.05)
    assert tier.delete([record.id], "expired") == 1
    assert list(tier.entries()) == []
    tier.close()


def test_many_more_blocks_than_one_request_takes(tmp_path):
    tier = opened(f"file://{tmp_path}")
    records = chain(300, kv_bytes=50) + chain(5, seed=1, kv_bytes=50, tenant="other")
    for record in records:
        put(tier, record)
    ids = [record.id for record in records]
    assert tier.held(ids) == [True] * 305
    assert sorted(entry.id for entry in tier.entries()) == sorted(ids)
    assert tier.delete_tenant(tenant_key("other").tag) == 5
    assert tier.clear() == 300
    tier.close()


def test_files_of_a_folder_are_their_owners_alone(tmp_path):
    """Also where the folder was made before, open to all, by hand or by an older version."""
    folder = tmp_path / "shared"
    (folder / "kvire").mkdir(parents=True)
    for path in (folder, folder / "kvire"):
        path.chmod(0o755)
    before = os.umask(0o022)
    try:
        tier = opened(f"file://{folder}")
        assert stat.S_IMODE((folder / "kvire").stat().st_mode) == 0o700, "before anything lies there"
        put(tier, chain(1)[0])
        shutil.rmtree(folder)
        put(tier, chain(1)[0])
        tier.close()
    finally:
        os.umask(before)
    path = folder / block_name(chain(1)[0].id)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {stat.S_IMODE(above.stat().st_mode) for above in (path.parent, folder / "kvire", folder)} == {0o700}


def test_damaged_files_are_damage_and_vanished_ones_misses(tmp_path):
    """S43, S44: nothing, too little, too much, gone, and the whole folder gone."""
    record = chain(1)[0]
    tier = opened(f"file://{tmp_path}/shared")
    put(tier, record)
    path = tmp_path / "shared" / block_name(record.id)
    whole = path.read_bytes()
    for content in (b"", whole[:9], whole[:-1], whole[: len(whole) // 2], whole + b"x", bytes(len(whole))):
        path.write_bytes(content)
        with pytest.raises(FrameDamaged):
            load(tier, record)
        assert tier.held([record.id]) == [True]
        assert [entry.id for entry in tier.entries()] == [record.id]
    assert tier.delete([record.id], "damaged") == 1
    put(tier, record)
    path.unlink()
    with pytest.raises(BlockMissing):
        load(tier, record)
    (tmp_path / "shared").rename(tmp_path / "elsewhere")
    with pytest.raises(BlockMissing):
        load(tier, record)
    put(tier, record)
    load(tier, record)
    tier.close()


def test_a_folder_is_ones_own_and_no_folder_in_it_is_large(tmp_path):
    tier = opened(f"file://{tmp_path}/shared")
    for record in chain(300, kv_bytes=50):
        put(tier, record)
    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o700
    folders = [path for path in (tmp_path / "shared").rglob("*") if path.is_dir()]
    assert max(len(list(folder.iterdir())) for folder in folders) <= 256
    assert len(list((tmp_path / "shared/kvire/1").iterdir())) > 100
    tier.close()


def test_reading_is_given_up_in_time_whatever_the_store_does(tmp_path):
    """A file system that hangs: here a pipe that nobody writes to."""
    record = chain(1)[0]
    tier = open_remote(f"file://{tmp_path}", timeout_s=0.3)
    path = tmp_path / block_name(record.id)
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    started = time.monotonic()
    with pytest.raises((TierUnavailable, BlockMissing)):
        load(tier, record)
    assert time.monotonic() - started < 0.8
    os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))  # lets the one who hangs go on
    tier.close()


def test_no_bucket_no_blocks(s3_url):
    tier = open_remote(s3_url.replace("blocks", "no-such-bucket"), timeout_s=10)
    with pytest.raises((BlockMissing, TierUnavailable)):
        load(tier, chain(1)[0])
    with pytest.raises(TierUnavailable):
        put(tier, chain(1)[0])
    tier.close()


def test_closing_gives_thread_and_sockets_back(url):
    threads, before = threading.active_count(), sockets()
    tier = opened(url)
    put(tier, chain(1)[0])
    assert threading.active_count() == threads + 1
    tier.close()
    assert threading.active_count() == threads
    assert settled(sockets, before)


def test_what_cannot_work_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    for url, hint in {
        f"file://{tmp_path}/file": "no folder",
        "file://host/folder": "file:///folder",
        "memory://?x=1": "memory://",
        "s3://bucket?nonsense=1": "nonsense",
    }.items():
        with pytest.raises(ConfigError, match=hint):
            open_remote(url)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ConfigError, match="pip install"):
        open_remote("memory://")


def test_secrets_of_the_url_are_not_in_the_name(s3_url):
    assert open_remote(s3_url.replace("=test", "=hush")).name == "s3://blocks/kv"
