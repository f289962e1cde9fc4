"""Blocks, keys and frames for the tests of this folder."""

import random

from kvire.codec.codec import RAW, Codec
from kvire.codec.frame import Frames
from kvire.codec.seal import TenantKey
from kvire.core.keys import BlockKey
from kvire.core.record import BlockId, BlockRecord

SECRET, OTHER_SECRET = bytes(range(32)), bytes(range(32, 64))
SEALED = TenantKey("", "ab" * 32, SECRET, b"tag of tenant 01")
UNSEALED = TenantKey("", "ab" * 32, None, b"tag of tenant 01")
OTHER = TenantKey("other", "cd" * 32, OTHER_SECRET, b"tag of tenant 02")
OTHER_UNSEALED = TenantKey("other", "cd" * 32, None, b"tag of tenant 02")
PROTECTIONS = {"sealed": SEALED, "unsealed": UNSEALED}


def frames(key: TenantKey, codec: Codec = RAW) -> Frames:
    """Frames of a store that hands out this key, whoever asks."""
    return Frames(lambda _name: key, codec)


def block(kv_bytes: int, token_count: int = 16, seed: int = 0) -> tuple[BlockRecord, bytes]:
    """A record and its KV, different in everything for every seed."""
    rng = random.Random(seed)
    kv = rng.randbytes(kv_bytes)
    record = BlockRecord(
        id=BlockId(BlockKey(rng.randbytes(32)), seed % 3),
        parent=BlockKey(rng.randbytes(32)),
        root=BlockKey(rng.randbytes(32)),
        index=rng.randrange(1 << 16),
        token_ids=tuple(rng.randrange(1 << 16, 1 << 31) for _ in range(token_count)),
        kv_bytes=kv_bytes,
        content=rng.randbytes(16),
    )
    return record, kv


def encoded(writer: Frames, record: BlockRecord, kv: bytes) -> bytearray:
    """The block's frame, exactly."""
    out = bytearray(writer.frame_bytes(record))
    return out[: writer.encode(record, memoryview(kv), memoryview(out))]


def read(reader: Frames, record: BlockRecord, frame: bytes) -> bytes:
    """What a tier that holds `frame` gives back as the record's KV; raises what Reading.finish raises."""
    kv = bytearray(record.kv_bytes)
    reading = reader.reading(record, memoryview(kv))
    start = 0
    for buffer in reading.buffers:
        part = frame[start : start + len(buffer)]
        buffer[: len(part)] = part
        start += len(part)
    assert len(frame) <= start, "a tier refuses a frame that is longer than the buffers"
    reading.finish(len(frame))
    return bytes(kv)
