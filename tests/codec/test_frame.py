"""Frames: docs/format.md is what is written, and every codec and protection gives back what went in."""

import re
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from codec.samples import PROTECTIONS, SEALED, UNSEALED, block, encoded, frames, read
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvire.codec.buffers import aligned_buffer
from kvire.codec.codec import RAW
from kvire.codec.codecs.planes import Planes
from kvire.codec.frame import HEADER_BYTES, Header, prefix_bytes
from kvire.codec.seal import cipher
from kvire.core.errors import FrameDamaged, FrameForeign

FORMAT = Path(__file__).parents[2] / "docs" / "format.md"
TYPES = {"u8": "<B", "u16": "<H", "u32": "<I", "u64": "<Q"}
CODECS = {"raw": RAW, "planes2": Planes(2), "planes4": Planes(4)}
SIZES = [1, 2, 3, 15, 16, 17, 4095, 65_537, 368_640]


def smooth_kv(kv_bytes: int, dtype: str) -> bytes:
    """KV whose exponents repeat, so that byte planes pay; a few bytes at the end are no whole element."""
    values = np.random.default_rng(kv_bytes).normal(size=kv_bytes // 2 + 2).astype(dtype)
    return values.tobytes()[:kv_bytes]


def documented_fields() -> dict[str, tuple[int, str]]:
    """Name -> (offset, struct format), from the header's table."""
    rows = re.findall(r"^\| (\d+) \| ([\w ]+?) \| (\w+) \|", FORMAT.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: (int(at), TYPES.get(kind) or f"<{kind.split()[0]}s") for at, kind, name in rows}


@pytest.mark.parametrize("key", PROTECTIONS.values(), ids=PROTECTIONS)
def test_the_documented_offsets_are_what_is_written(key):
    record, kv = block(1000, token_count=5)
    frame = encoded(frames(key), record, kv)
    got = {name: struct.unpack_from(kind, frame, at)[0] for name, (at, kind) in documented_fields().items()}
    assert sum(struct.calcsize(kind) for _, kind in documented_fields().values()) == HEADER_BYTES
    sealed = key is SEALED
    assert got == {
        "magic": b"KVIRE\x01FR",
        "version": 1,
        "codec": 0,
        "seal": int(sealed),
        "group": record.id.group,
        "zero": 0,
        "key": record.id.key,
        "parent": record.parent,
        "root": record.root,
        "index": record.index,
        "token_count": 5,
        "kv_bytes": 1000,
        "stored_bytes": 1000,
        "content": record.content,
        "session": got["session"] if sealed else bytes(16),
        "counter": got["counter"] if sealed else 0,
        "tenant_tag": key.tag,
    }
    start = 256  # the first multiple of 64 behind 192 + 4 * 5 + 16
    assert len(frame) == start + 1000 + 16
    if not sealed:
        assert struct.unpack_from("<5i", frame, 192) == record.token_ids
        assert frame[192 + 4 * 5 : start - 16] == bytes(28)
        assert frame[start : start + 1000] == kv


@pytest.mark.parametrize("token_count", [1, 11, 12, 13, 16, 27, 28, 29, 1024])
def test_payloads_start_at_multiples_of_64_bytes(token_count):
    """As pools' slabs and buffers do, so that copies between them run at full speed."""
    start = prefix_bytes(token_count)
    assert start % 64 == 0 and 0 <= start - (192 + 4 * token_count + 16) < 64
    record, kv = block(640, token_count=token_count)
    frame = encoded(frames(UNSEALED), record, kv)
    assert frame[start : start + 640] == kv
    assert frames(UNSEALED).token_ids(memoryview(frame)[:start], "")[1] == record.token_ids
    assert np.frombuffer(aligned_buffer(token_count), np.uint8).ctypes.data % 64 == 0


@pytest.mark.parametrize("kv_bytes", SIZES)
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("key", PROTECTIONS.values(), ids=PROTECTIONS)
def test_what_goes_in_comes_out(key, codec, kv_bytes):
    record, noise = block(kv_bytes, token_count=1 + kv_bytes % 40)
    for kv in (noise, smooth_kv(kv_bytes, "float16"), smooth_kv(kv_bytes, "float32"), bytes(kv_bytes)):
        frame = encoded(frames(key, codec), record, kv)
        most = frames(key, codec).frame_bytes(record)
        assert len(frame) == most if codec == RAW else len(frame) <= most
        for reader in CODECS.values():  # a tier may hold what another version of the options wrote
            assert read(frames(key, reader), record, frame) == kv
        assert frames(key).verify(memoryview(frame), "") == Header.parse(frame)


def test_planes_are_written_where_they_are_shorter_and_raw_elsewhere():
    record, noise = block(65_536)
    assert Header.parse(encoded(frames(SEALED, Planes(2)), record, noise)).codec == 0
    header = Header.parse(encoded(frames(SEALED, Planes(2)), record, smooth_kv(65_536, "float16")))
    assert header.codec == 1
    assert header.stored_bytes < 0.95 * 65_536


def test_an_unsealed_frame_is_read_straight_into_its_destination():
    record, kv = block(4096)
    out = bytearray(4096)
    reading = frames(UNSEALED).reading(record, memoryview(out))
    assert [len(b) for b in reading.buffers] == [prefix_bytes(16), 4096, 16]
    reading.buffers[1][:] = kv
    assert out == kv


def test_two_reads_at_once_share_no_memory():
    reader = frames(SEALED)
    blocks = [block(4096, seed=seed) for seed in range(3)]
    outs = [bytearray(4096) for _ in blocks]
    readings = [reader.reading(record, memoryview(out)) for (record, _), out in zip(blocks, outs, strict=True)]
    for (record, kv), reading in zip(blocks, readings, strict=True):
        reading.buffers[0][:] = encoded(reader, record, kv)
    for reading in readings:
        reading.finish(reader.frame_bytes(blocks[0][0]))
    assert outs == [kv for _, kv in blocks]


def test_scratch_memory_is_used_again_but_never_while_a_failed_read_may_write_to_it():
    reader = frames(SEALED)
    record, kv = block(4096)
    frame = encoded(reader, record, kv)
    first = reader.reading(record, memoryview(bytearray(4096)))
    first.buffers[0][:] = frame
    first.finish(len(frame))
    second = reader.reading(record, memoryview(bytearray(4096)))
    assert second.buffers[0].obj is first.buffers[0].obj
    # `second` times out: no finish. Whoever reads next must get other memory, as the tier may still write.
    third = reader.reading(record, memoryview(bytearray(4096)))
    assert third.buffers[0].obj is not second.buffers[0].obj


@pytest.mark.parametrize("key", PROTECTIONS.values(), ids=PROTECTIONS)
def test_token_ids_need_the_first_bytes_only(key):
    record, kv = block(100_000, token_count=33)
    frame = encoded(frames(key), record, kv)
    header, ids = frames(key).token_ids(memoryview(frame)[: prefix_bytes(33)], "")
    assert ids == record.token_ids
    assert header.id == record.id and header.frame_bytes == len(frame)
    for length in (0, HEADER_BYTES - 1, HEADER_BYTES, prefix_bytes(33) - 1):
        with pytest.raises(FrameDamaged, match="length"):
            frames(key).token_ids(memoryview(frame)[:length], "")
    frame[200] ^= 1
    with pytest.raises(FrameDamaged):
        frames(key).token_ids(memoryview(frame)[: prefix_bytes(33)], "")


@pytest.mark.parametrize("key", PROTECTIONS.values(), ids=PROTECTIONS)
def test_any_field_of_the_record_that_differs_is_another_block(key):
    record, kv = block(500)
    frame = encoded(frames(key), record, kv)
    ids = list(record.token_ids)
    ids[7] -= 1
    others = [
        replace(record, id=record.id._replace(key=bytes(32))),
        replace(record, id=record.id._replace(group=record.id.group + 1)),
        replace(record, parent=bytes(32)),
        replace(record, root=bytes(32)),
        replace(record, index=record.index + 1),
        replace(record, token_ids=tuple(ids)),
        replace(record, token_ids=record.token_ids[:-1]),
        replace(record, kv_bytes=record.kv_bytes + 8),
        replace(record, content=bytes(16)),
    ]
    for other in others:
        with pytest.raises((FrameForeign, FrameDamaged)) as caught:
            # A longer frame does not fit into the buffers; the tier says so before anybody looks.
            read(frames(key), other, frame[: frames(key).frame_bytes(other)])
        fits = frames(key).frame_bytes(other) >= len(frame)
        assert caught.type is (FrameForeign if fits else FrameDamaged)
    assert read(frames(key), record, frame) == kv


def test_a_sealed_frame_opens_with_the_primitives_alone():
    """Known answer: docs/format.md, followed without the code under test."""
    record, kv = block(3000, token_count=7)
    frame = bytes(encoded(frames(SEALED), record, kv))
    session, counter = struct.unpack_from("<16sQ", frame, 152)
    aes = AESGCM(hkdf_sha256(SEALED.secret, session, b"kvire frame 1"))
    start = 256  # the first multiple of 64 behind 192 + 4 * 7 + 16
    ids = aes.decrypt(struct.pack("<IQ", 1, counter), frame[192:start], frame[:192])
    assert struct.unpack("<7i", ids[:28]) == record.token_ids and not any(ids[28:])
    assert aes.decrypt(struct.pack("<IQ", 2, counter), frame[start:], frame[:192]) == kv
    assert cipher(SEALED.secret, session) is cipher(SEALED.secret, session)  # derived once


def hkdf_sha256(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """RFC 5869 for 32 bytes, with hmac alone."""
    import hmac  # noqa: PLC0415

    pseudorandom = hmac.digest(salt, secret, "sha256")
    return hmac.digest(pseudorandom, info + b"\x01", "sha256")
