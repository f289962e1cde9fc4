"""Published frames: what this format's first version wrote is read, and all but byte planes written, bit for bit. The
format is frozen (docs/format.md): a change means a new version and new vectors beside these.
"""

import json
from pathlib import Path

import pytest
from codec.samples import read

from kvire.codec.codec import RAW
from kvire.codec.frame import Frames, Header
from kvire.codec.seal import SESSION, TenantKey
from kvire.core.keys import BlockKey
from kvire.core.record import BlockId, BlockRecord

VECTORS = json.loads((Path(__file__).parents[1] / "golden" / "frames.json").read_text())


def parts(vector: dict) -> tuple[TenantKey, BlockRecord, bytes, bytes]:
    tenant, record = vector["tenant"], vector["record"]
    key = TenantKey(
        tenant["name"],
        tenant["salt"],
        bytes.fromhex(tenant["secret"]) if tenant["secret"] else None,
        bytes.fromhex(tenant["tag"]),
    )
    kv = bytes.fromhex(vector["kv"])
    return (
        key,
        BlockRecord(
            BlockId(BlockKey(bytes.fromhex(record["key"])), record["group"]),
            BlockKey(bytes.fromhex(record["parent"])),
            BlockKey(bytes.fromhex(record["root"])),
            record["index"],
            tuple(record["token_ids"]),
            len(kv),
            bytes.fromhex(record["content"]),
            tenant["name"],
        ),
        kv,
        bytes.fromhex(vector["frame"]),
    )


@pytest.mark.parametrize("vector", VECTORS, ids=[vector["name"] for vector in VECTORS])
def test_published_frames_are_read(vector):
    key, record, kv, frame = parts(vector)
    frames = Frames(lambda _name: key)
    assert read(frames, record, frame) == kv
    assert frames.token_ids(frame, record.tenant)[1] == record.token_ids


RAW_VECTORS = [vector for vector in VECTORS if "planes" not in vector["name"]]  # zstd may write the same otherwise


@pytest.mark.parametrize("vector", RAW_VECTORS, ids=[vector["name"] for vector in RAW_VECTORS])
def test_published_frames_are_written(vector, monkeypatch):
    key, record, kv, frame = parts(vector)
    header = Header.parse(frame)
    monkeypatch.setattr(SESSION, "next", lambda: (header.session, header.counter))
    frames = Frames(lambda _name: key, RAW)
    out = bytearray(frames.frame_bytes(record))
    assert out[: frames.encode(record, memoryview(kv), memoryview(out))] == frame


def test_the_vectors_cover_every_codec_and_seal():
    headers = [Header.parse(bytes.fromhex(vector["frame"])) for vector in VECTORS]
    assert {(header.codec, header.seal) for header in headers} == {(0, 0), (0, 1), (1, 0), (1, 1)}
