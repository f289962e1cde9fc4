"""Byte planes: nothing is lost whatever the floats are, and nothing is believed of what a payload says about itself."""

import struct
import sys
import tracemalloc

import numpy as np
import pytest
import zstandard
from codec.samples import UNSEALED, block, encoded, frames, read
from hypothesis import given, settings
from hypothesis import strategies as st

from kvire.codec.codec import RAW, codec_for
from kvire.codec.codecs import planes
from kvire.codec.codecs.planes import Planes, compress, decompress
from kvire.core.errors import FrameDamaged, FrameForeign


def normal(dtype: str, count: int = 10_000) -> np.ndarray:
    values = np.random.default_rng(1).normal(size=count)
    if dtype == "bfloat16":  # its bytes are the upper half of float32's
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2")
    return values.astype(dtype)


def round_trip(kv: bytes, width: int) -> None:
    payload = compress(memoryview(kv), width)
    if payload is not None:
        assert len(payload) < len(kv)
        out = bytearray(len(kv))
        decompress(payload, memoryview(out))
        assert out == kv


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=70), st.integers(0, 40), st.binary(max_size=5), st.sampled_from([2, 4]))
def test_any_bytes_survive(pattern, repeat, end, width):
    round_trip(pattern * repeat + end, width)


@pytest.mark.parametrize(("dtype", "width"), [("float16", 2), ("bfloat16", 2), ("float32", 4)])
def test_floats_get_shorter_and_survive_bit_for_bit(dtype, width):
    kv = normal(dtype).tobytes()
    assert len(compress(memoryview(kv), width)) < 0.95 * len(kv)
    round_trip(kv, width)


@pytest.mark.parametrize("dtype", ["<f2", "<f4"])
def test_every_kind_of_float_survives(dtype):
    bits = np.arange(1 << 16).astype(dtype.replace("f", "u"))  # all float16; of float32 the subnormals,
    specials = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0], dtype).tobytes()
    kv = bits.tobytes() + specials * 100 + (bits << bits.dtype.type(8 * (bits.itemsize - 1))).tobytes()  # and the rest
    assert compress(memoryview(kv), bits.itemsize) is not None
    round_trip(kv, bits.itemsize)


def test_only_what_a_tier_gains_by_is_compressed():
    assert codec_for("bfloat16", 100e6) == Planes(2)
    assert codec_for("float16", 10e6) == Planes(2)
    assert codec_for("float32", 10e6) == Planes(4)
    assert codec_for("int8", 10e6) == RAW  # no exponents
    for dtype in ("bfloat16", "float16", "float32"):
        assert codec_for(dtype, 1e9) == RAW


def test_without_zstandard_frames_are_raw_and_compressed_ones_stay_unread(monkeypatch):
    record, _ = block(20_000)
    kv = normal("float16").tobytes()
    compressed = encoded(frames(UNSEALED, Planes(2)), record, kv)
    planes._zstandard.cache_clear()
    monkeypatch.setitem(sys.modules, "zstandard", None)
    try:
        assert codec_for("bfloat16", 1e6) == RAW
        assert read(frames(UNSEALED), record, encoded(frames(UNSEALED, Planes(2)), record, kv)) == kv
        with pytest.raises(FrameForeign, match="codec"):
            read(frames(UNSEALED), record, compressed)
    finally:
        planes._zstandard.cache_clear()


@pytest.mark.parametrize("claimed", [0, 499, 501, 1 << 32, 1 << 62])
def test_a_plane_of_another_size_is_damage_before_it_is_unpacked(claimed):
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(claimed if claimed < 1000 else 1 << 20))
    if claimed > 1000:  # the frame's header says how long it will be: let it lie (RFC 8878, 3.1.1.1: 8-byte size)
        bomb = bomb[:4] + b"\xc0" + b"\x40" + struct.pack("<Q", claimed) + bomb[9:]
        assert zstandard.frame_content_size(bomb) == claimed
    payload = struct.pack("<QQ", 2, len(bomb)) + bomb + bytes(500)
    tracemalloc.start()
    with pytest.raises(FrameDamaged, match="codec"):
        decompress(payload, memoryview(bytearray(1000)))
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


def test_a_plane_that_says_nothing_of_its_size_or_has_more_behind_it_is_damage():
    honest = zstandard.ZstdCompressor(level=1).compress(bytes(500))
    silent = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(500))
    for top in (silent, honest + b"\0", honest[:-1]):
        with pytest.raises(FrameDamaged, match="codec"):
            decompress(struct.pack("<QQ", 2, len(top)) + top + bytes(500), memoryview(bytearray(1000)))
    decompress(struct.pack("<QQ", 2, len(honest)) + honest + bytes(500), memoryview(bytearray(1000)))


def test_a_payload_with_a_byte_more_or_less_is_damage():
    kv = normal("float16").tobytes()
    payload = compress(memoryview(kv), 2)
    for wrong in (payload + b"\0", payload[:-1]):
        with pytest.raises(FrameDamaged, match="codec"):
            decompress(wrong, memoryview(bytearray(len(kv))))
