"""Whatever happens to a frame, nobody takes it for what it is not: damaged, foreign, or exactly the block asked for."""

import struct
import tracemalloc
from contextlib import suppress
from dataclasses import replace

import pytest
import xxhash
from codec.samples import OTHER, OTHER_UNSEALED, PROTECTIONS, SEALED, UNSEALED, block, encoded, frames, read
from hypothesis import given, settings
from hypothesis import strategies as st

from kvire.codec.codec import RAW
from kvire.codec.codecs.planes import Planes
from kvire.codec.frame import HEADER_BYTES, TAG_BYTES, Header, prefix_bytes
from kvire.core.errors import FrameDamaged, FrameForeign

FRAME_BYTES = 64 << 10
both = pytest.mark.parametrize("key", PROTECTIONS.values(), ids=PROTECTIONS)

# Where a flipped bit looks like somebody else's frame: version, codec, seal; and, sealed, the tenant's tag.
FOREIGN_BYTES = {"unsealed": {8, 9, 10, 11}, "sealed": {8, 9, 10, 11, *range(176, 192)}}


def sample(key, frame_bytes: int = FRAME_BYTES, seed: int = 0):
    record, kv = block(frame_bytes - prefix_bytes(16) - TAG_BYTES, seed=seed)
    frame = encoded(frames(key), record, kv)
    assert len(frame) == frame_bytes
    return record, kv, frame


def forged(header: bytes, ids: bytes, payload: bytes) -> bytes:
    """A checksummed frame as anybody can make one."""
    tag = lambda number, section: xxhash.xxh3_128_digest(header + struct.pack("<I", number) + section)
    return header + ids + tag(1, ids) + payload + tag(2, payload)


@pytest.mark.slow
@pytest.mark.parametrize("protection", PROTECTIONS)
def test_every_flipped_bit_is_found(protection):
    key = PROTECTIONS[protection]
    record, _, frame = sample(key)
    reader = frames(key)
    missed, foreign = [], set()
    for i in range(FRAME_BYTES):
        for bit in range(8):
            frame[i] ^= 1 << bit
            try:
                read(reader, record, frame)
                missed.append((i, bit))
            except FrameDamaged:
                pass
            except FrameForeign:
                foreign.add(i)
            frame[i] ^= 1 << bit
    assert not missed
    assert foreign == FOREIGN_BYTES[protection]
    assert read(reader, record, frame)  # the frame itself is sound


@pytest.mark.parametrize(
    ("at", "kind", "value"),
    [
        (8, "<H", 0),
        (14, "<H", 1),
        (116, "<I", 0),
        (116, "<I", (1 << 20) + 1),
        (120, "<QQ", (0, 0)),
        (120, "<QQ", ((1 << 40) + 1, (1 << 40) + 1)),
        (128, "<Q", 1),  # raw, and shorter than the KV
        (152, "<Q", 1),  # a session or a counter without a seal
        (168, "<Q", 1),
    ],
)
def test_a_header_that_nobody_writes_is_damage_by_itself(at, kind, value):
    """Whoever reads headers only, to list or rebuild, has no tag to rely on."""
    _, _, frame = sample(UNSEALED)
    Header.parse(frame)
    struct.pack_into(kind, frame, at, *(value if isinstance(value, tuple) else (value,)))
    with pytest.raises(FrameDamaged, match="header"):
        Header.parse(frame[:HEADER_BYTES])


def test_planes_that_are_no_shorter_than_the_kv_are_damage():
    _, _, frame = sample(UNSEALED)
    frame[10] = 1
    with pytest.raises(FrameDamaged, match="header"):
        Header.parse(frame)


@both
def test_a_damaged_tenant_tag_is_damage_where_a_checksum_can_tell(key):
    record, _, frame = sample(key)
    frame[180] ^= 1
    with pytest.raises((FrameDamaged, FrameForeign)) as caught:
        read(frames(key), record, frame)
    assert caught.value.cause == ("checksum" if key is UNSEALED else "sealed")


@both
def test_every_length_but_its_own_is_damage(key):
    record, _, frame = sample(key)
    reader = frames(key)
    for length in range(FRAME_BYTES):
        with pytest.raises(FrameDamaged, match="length"):
            read(reader, record, memoryview(frame)[:length])
    for extra in (b"\0", bytes(16), bytes(frame)):
        with pytest.raises(FrameDamaged, match="length"):
            reader.verify(memoryview(bytes(frame) + extra), "")


@both
@pytest.mark.parametrize("fill", [b"\0", b"\xff"])
def test_filled_pages_are_damage(key, fill):
    record, _, frame = sample(key)
    for start in range(0, FRAME_BYTES, 512):
        for end in (start + 512, FRAME_BYTES):
            damaged = bytes(frame[:start]) + fill * (end - start) + bytes(frame[end:])
            with pytest.raises((FrameDamaged, FrameForeign)) as caught:
                read(frames(key), record, damaged)
            # A page of 0xff at the front claims a version of 65,535; magic is looked at first.
            assert caught.type is FrameDamaged


@both
def test_another_block_in_its_place_is_foreign_and_sections_of_two_frames_are_damage(key):
    record, _, frame = sample(key)
    _, _, other = sample(key, seed=1)
    with pytest.raises(FrameForeign, match="block"):
        read(frames(key), record, other)
    for cut in (192, 192 + 64 + 16, 4096, FRAME_BYTES - 16):
        for mixed in (frame[:cut] + other[cut:], other[:cut] + frame[cut:]):
            with pytest.raises(FrameDamaged):
                read(frames(key), record, mixed)


@both
def test_an_older_write_of_the_same_block_does_not_mix_with_a_newer_one(key):
    record, kv, older = sample(key)
    newer_kv = bytes(reversed(kv))
    newer = encoded(frames(key), record, newer_kv)
    assert read(frames(key), record, older) == kv  # each is whole,
    assert read(frames(key), record, newer) == newer_kv
    for cut in (4096, FRAME_BYTES // 2):  # a torn one is neither
        with pytest.raises(FrameDamaged):
            read(frames(key), record, newer[:cut] + older[cut:])


@pytest.mark.parametrize(
    ("mine", "theirs", "cause"),
    [(SEALED, OTHER, "sealed"), (UNSEALED, OTHER_UNSEALED, "tenant"), (SEALED, OTHER_UNSEALED, "tenant")],
)
def test_another_tenants_frame_is_foreign(mine, theirs, cause):
    record, _, frame = sample(theirs)
    for look in (
        lambda: read(frames(mine), record, frame),
        lambda: frames(mine).verify(memoryview(frame), ""),
        lambda: frames(mine).token_ids(frame, ""),
    ):
        with pytest.raises(FrameForeign) as caught:
            look()
        assert caught.value.cause == cause


@both
def test_frames_of_other_versions_are_left_alone(key):
    record, _, frame = sample(key)
    for version in (2, 3, 255, 65_535):
        struct.pack_into("<H", frame, 8, version)
        for look in (
            lambda: read(frames(key), record, frame),
            lambda: frames(key).verify(memoryview(frame[:1000]), ""),  # a newer one may have any length
            lambda: frames(key).token_ids(frame, ""),
        ):
            with pytest.raises(FrameForeign, match="version"):
                look()
    struct.pack_into("<H", frame, 8, 0)  # there was none
    with pytest.raises(FrameDamaged):
        read(frames(key), record, frame)


@pytest.mark.parametrize("at", [10, 11])
def test_a_codec_or_seal_of_somebody_newer_is_left_alone(at):
    record, _, frame = sample(UNSEALED)
    frame[at] = 7
    with pytest.raises(FrameForeign):
        read(frames(UNSEALED), record, frame)


def test_a_wrong_secret_opens_nothing():
    record, _, frame = sample(SEALED)
    wrong = replace(SEALED, secret=bytes(32))
    for look in (
        lambda: read(frames(wrong), record, frame),
        lambda: frames(wrong).verify(memoryview(frame), ""),
        lambda: frames(wrong).token_ids(frame, ""),
    ):
        with pytest.raises(FrameDamaged, match="seal"):
            look()


def test_a_sealing_store_reads_nothing_that_is_not_sealed():
    """Anybody can compute a checksum; taking one for a seal would let whoever writes to the store in."""
    record, kv, unsealed = sample(UNSEALED)
    _, _, sealed = sample(SEALED)
    with pytest.raises(FrameForeign, match="unsealed"):
        read(frames(SEALED), record, unsealed)
    with pytest.raises(FrameForeign, match="unsealed"):
        frames(SEALED).token_ids(unsealed, "")
    with pytest.raises(FrameForeign, match="sealed"):
        read(frames(UNSEALED), record, sealed)
    header = bytes(sealed[:11]) + b"\0" + bytes(sealed[12:192])  # the sealed header, said to be checksummed
    with pytest.raises((FrameForeign, FrameDamaged)):
        read(frames(SEALED), record, forged(header, struct.pack("<16i", *record.token_ids), kv))


def test_verify_without_a_key_finds_what_can_be_found():
    _, _, unsealed = sample(UNSEALED)
    _, _, sealed = sample(SEALED)
    for frame in (unsealed, sealed):
        assert frames(OTHER).verify(memoryview(frame), None) == Header.parse(frame)
    for at in (40, 200, 300, FRAME_BYTES - 1):  # header, token ids, payload, tag
        unsealed[at] ^= 1
        with pytest.raises(FrameDamaged, match="checksum"):
            frames(OTHER).verify(memoryview(unsealed), None)
        unsealed[at] ^= 1
    with pytest.raises(FrameDamaged, match="length"):
        frames(OTHER).verify(memoryview(sealed)[:-1], None)


@pytest.mark.parametrize(
    ("at", "kind", "values"),
    [
        (116, "<I", [0, 17, 1 << 20, (1 << 20) + 1, (1 << 32) - 1]),
        (120, "<Q", [0, 1, 1 << 40, (1 << 40) + 1, 1 << 63, (1 << 64) - 1]),
        (128, "<Q", [0, 1, 1 << 40, (1 << 40) + 1, 1 << 63, (1 << 64) - 1]),
    ],
    ids=["token_count", "kv_bytes", "stored_bytes"],
)
@pytest.mark.parametrize("codec", [0, 1])
@both
def test_lengths_that_lie_allocate_nothing(key, codec, at, kind, values):
    record, _, frame = sample(key)
    frame[10] = codec
    reader = frames(key)
    out = bytearray(record.kv_bytes)
    reader.give_scratch(memoryview(bytearray(2 * FRAME_BYTES)))  # what an honest read needs is there
    for value in values:
        struct.pack_into(kind, frame, at, value)
        tracemalloc.start()
        for look in (
            lambda: reader.verify(memoryview(frame), ""),
            lambda: reader.token_ids(frame, ""),
            lambda: finish(reader, record, frame, out),
        ):
            with pytest.raises((FrameDamaged, FrameForeign)):
                look()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < FRAME_BYTES + 16_384


def finish(reader, record, frame, out):
    reading = reader.reading(record, memoryview(out))
    start = 0
    for buffer in reading.buffers:
        buffer[:] = frame[start : start + len(buffer)]
        start += len(buffer)
    reading.finish(len(frame))


headers = st.builds(
    struct.Struct("<8sHBBHH32s32s32sIIQQ16s16sQ16s").pack,
    st.sampled_from([b"KVIRE\x01FR", b"KVIRE\x01FS"]),
    st.sampled_from([1, 1, 1, 0, 2, 65_535]),
    st.integers(0, 3),
    st.integers(0, 2),
    st.integers(0, 2),
    st.sampled_from([0, 0, 0, 1]),
    *[st.binary(min_size=32, max_size=32)] * 3,
    st.integers(0, 20),
    st.integers(0, 20) | st.integers(0, (1 << 32) - 1),
    st.integers(0, 50) | st.integers(0, (1 << 64) - 1),
    st.integers(0, 50) | st.integers(0, (1 << 64) - 1),
    st.binary(min_size=16, max_size=16),
    st.just(bytes(16)) | st.binary(min_size=16, max_size=16),
    st.just(0) | st.integers(0, (1 << 64) - 1),
    st.sampled_from([SEALED.tag, OTHER.tag]),
)


@settings(max_examples=1500, deadline=None)
@given(
    head=headers | st.binary(max_size=300),
    ids=st.binary(max_size=84),
    payload=st.binary(max_size=60),
    key=st.sampled_from([SEALED, UNSEALED]),
    codec=st.sampled_from([RAW, Planes(2)]),
)
def test_no_bytes_do_more_harm_than_a_miss(head, ids, payload, key, codec):
    """Arbitrary headers, some with sections and checksums to match, so that the parser's depths are reached as well."""
    record, _ = block(40, token_count=4)
    reader = frames(key, codec)
    most = reader.frame_bytes(record)
    for frame in (head + ids + payload, forged(head[:HEADER_BYTES], ids, payload)):
        for look in (
            lambda frame=frame: reader.verify(memoryview(frame), ""),
            lambda frame=frame: reader.verify(memoryview(frame), None),
            lambda frame=frame: reader.token_ids(frame, ""),
        ):
            with suppress(FrameDamaged, FrameForeign):
                look()
        with pytest.raises((FrameDamaged, FrameForeign)):  # it is not the record's block, whatever it is
            read(reader, record, frame[:most])


@settings(max_examples=500, deadline=None)
@given(
    payload=st.binary(min_size=1, max_size=99)
    | st.builds(
        lambda width, top, rest: struct.pack("<QQ", width, top) + rest,
        st.sampled_from([0, 1, 2, 3, 4, 1 << 63]),
        st.integers(0, 40) | st.integers(0, (1 << 64) - 1),
        st.binary(max_size=80),
    )
)
def test_a_forged_payload_of_planes_is_damage(payload):
    """Right in everything that a checksum covers: header and tags fit the record, and the payload is nonsense."""
    record, kv = block(100)
    honest = encoded(frames(UNSEALED), record, kv)
    header = bytearray(honest[:192])
    header[10] = 1
    struct.pack_into("<Q", header, 128, len(payload))
    frame = forged(bytes(header), struct.pack("<16i", *record.token_ids), payload)
    with pytest.raises(FrameDamaged):
        read(frames(UNSEALED), record, frame)
