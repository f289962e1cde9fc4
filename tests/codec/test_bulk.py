"""Checksums and copies of many buffers at once: the same as one by one, with and without the compiled kernels."""

import os
import random
import subprocess
import sys

import pytest
import xxhash
from codec.samples import OTHER_UNSEALED, SEALED, UNSEALED, block, encoded, frames, read

from kvire.codec import buffers
from kvire.codec.buffers import aligned_buffer
from kvire.codec.codec import RAW, Codec
from kvire.codec.frame import Frames, finish_all, prefix_bytes
from kvire.core.errors import FrameDamaged, FrameForeign
from kvire.core.native import native_module

LENGTHS = [256, 257, 319, 320, 321, 1023, 1024, 1025, 1087, 1088, 1089, 2048, 4096, 65_537]
HEADS = [0, 1, 63, 64, 65, 196, 255, 256]
KV_BYTES = 4096


@pytest.fixture(params=["kernels", "without"])
def native(request, monkeypatch):
    if request.param == "without":
        monkeypatch.setattr(buffers, "native_module", lambda: None)
    elif native_module() is None:
        pytest.skip("installed without the compiled kernels")
    return request.param == "kernels"


def pieces_of(seed: int = 0) -> list[tuple[bytes, bytes]]:
    """A head and data for each pair of lengths, and some more around the ends of stripes and blocks."""
    rng = random.Random(seed)
    sizes = [(head, length) for head in HEADS for length in LENGTHS]
    sizes += [(196, length) for length in range(256, 2400, 7)]
    return [(rng.randbytes(head), rng.randbytes(length)) for head, length in sizes]


def test_checksums_are_those_of_the_library(native):
    pieces = pieces_of()
    assert buffers.checksums(pieces) == [xxhash.xxh3_128_digest(head + data) for head, data in pieces]
    assert buffers.checksums([]) == []
    short = [(b"", b""), (b"head", b"x" * 255), (b"h" * 257, b"x" * 256)]  # what the kernel does not take
    assert buffers.checksums(short) == [xxhash.xxh3_128_digest(head + data) for head, data in short]


def test_copies_are_made_and_are_what_is_hashed(native):
    pieces = [(head, memoryview(data), memoryview(bytearray(len(data) + 2))[1:-1]) for head, data in pieces_of(1)]
    tags = buffers.copied_checksums(pieces)
    assert tags == [xxhash.xxh3_128_digest(head + bytes(data)) for head, data, _ in pieces]
    assert all(target == data for _, data, target in pieces)
    assert all(target.obj[0] == target.obj[-1] == 0 for _, _, target in pieces), "nothing around is touched"


def test_every_instruction_set_gives_the_same():
    if native_module() is None:
        pytest.skip("installed without the compiled kernels")
    code = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from codec.test_bulk import pieces_of\nfrom kvire.codec.buffers import checksums\n"
        "import kvire._native as n, hashlib\n"
        "print(n.isa(), hashlib.sha256(b''.join(checksums(pieces_of()))).hexdigest())"
    )
    seen = {}
    for isa in ("", "baseline"):
        environment = os.environ | {"KVIRE_ISA": isa}
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        name, digest = run.stdout.split()
        seen[name] = digest
    assert len(set(seen.values())) == 1 and "baseline" in seen


def test_nonsense_is_refused_before_anything_is_copied():
    if (module := native_module()) is None:
        pytest.skip("installed without the compiled kernels")
    target, data = bytearray(256), bytes(range(256))
    sound = (b"", data, target)
    for wrong in (
        (b"", data, bytearray(255)), (b"", data[:-1], bytearray(255)), (b"h" * 257, data, bytearray(256)),
        (b"", data), (b"", data, data), (b"", 7, target), 7,
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError, BufferError, RuntimeError)):
            module.copied_checksums([sound, wrong])
        assert not any(target)
    with pytest.raises((ValueError, TypeError)):
        module.checksums([(b"", data, target)])
    module.copied_checksums([sound])
    target.append(1)  # no buffer is held any longer


def by_itself(reader: Frames, record, frame: bytes) -> bytes | None:
    try:
        return read(reader, record, frame)
    except (FrameDamaged, FrameForeign):
        return None


def lent(reader: Frames, samples) -> list[bytes | None]:
    """What copy_out makes of frames that lie in memory."""
    outs = [aligned_buffer(record.kv_bytes) for record, _ in samples]
    views = [None if frame is None else memoryview(frame) for _, frame in samples]
    done = reader.copy_out([(record, out) for (record, _), out in zip(samples, outs, strict=True)], views)
    return [bytes(out) if is_done else None for out, is_done in zip(outs, done, strict=True)]


def in_a_run(reader: Frames, samples) -> list[bytes | None]:
    """What finish_all makes of frames that a tier has read."""
    outs = [aligned_buffer(record.kv_bytes) for record, _ in samples]
    readings = reader.readings([(record, out) for (record, _), out in zip(samples, outs, strict=True)])
    lengths = []
    for reading, (_, frame) in zip(readings, samples, strict=True):
        start = 0
        for buffer in reading.buffers if frame is not None else ():
            part = frame[start : start + len(buffer)]
            buffer[: len(part)] = part
            start += len(part)
        lengths.append(None if frame is None else len(frame))
    done = finish_all(readings, lengths)
    return [bytes(out) if is_done else None for out, is_done in zip(outs, done, strict=True)]


def variants(key, codec: Codec = RAW):
    """Blocks with frames: right ones between wrong ones of every kind."""
    samples, expected = [], []
    for seed in range(12):
        record, kv = block(KV_BYTES, seed=seed)
        frame = encoded(frames(key, codec), record, kv)
        samples.append((record, bytes(frame)))
        expected.append(kv)
        other, _ = block(KV_BYTES, seed=seed + 100)
        foreign = encoded(frames(OTHER_UNSEALED), record, kv)
        start = prefix_bytes(len(record.token_ids))
        for wrong in (
            None, frame[:-1], frame[: start - 1], b"", foreign, encoded(frames(key, codec), other, kv),
            *(flipped(frame, at) for at in (0, 20, 100, 190, 193, 240, start - 1, start, start + 777, -17, -16, -1)),
        ):  # fmt: skip
            samples.append((record, None if wrong is None else bytes(wrong)))
            expected.append(None)
    return samples, expected


def flipped(frame: bytes, at: int) -> bytes:
    changed = bytearray(frame)
    changed[at] ^= 0x10
    return bytes(changed)


@pytest.mark.parametrize("key", [SEALED, UNSEALED], ids=["sealed", "unsealed"])
def test_a_run_finds_what_single_reads_find(native, key):
    samples, expected = variants(key)
    reader = frames(key)
    assert in_a_run(reader, samples) == expected
    assert [None if frame is None else by_itself(reader, record, frame) for record, frame in samples] == expected


def test_frames_that_lie_in_memory_are_verified_as_they_are_copied(native):
    samples, expected = variants(UNSEALED)
    assert lent(frames(UNSEALED), samples) == expected
    sealed, _ = variants(SEALED)
    assert set(lent(frames(SEALED), sealed)) == {None}, "left to those who can open them"
    assert set(lent(frames(UNSEALED), sealed)) == {None} == set(lent(frames(SEALED), samples))


def test_every_flipped_bit_is_found_in_a_run_too():
    record, kv = block(KV_BYTES, seed=3)
    reader = frames(UNSEALED)
    frame = encoded(reader, record, kv)
    for start in range(0, len(frame), 64):
        wrong = []
        for bit in range(start * 8, min(start + 64, len(frame)) * 8):
            changed = bytearray(frame)
            changed[bit >> 3] ^= 1 << (bit & 7)
            wrong.append((record, bytes(changed)))
        assert set(lent(reader, wrong)) == {None} == set(in_a_run(reader, wrong))
