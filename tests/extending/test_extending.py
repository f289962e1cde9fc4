"""Adding a part takes one file: each test adds a toy of a kind, without a change anywhere else, and uses it.

docs/extending.md shows the same parts.
"""

import zlib
from dataclasses import replace

import pytest
from codec.samples import SEALED, UNSEALED, block, encoded, frames, read
from extending.page import shown
from harness.engines import SPEC, Answer, drive, engine_of, tiny_llama
from replay.traces import random_trace
from store.blocks import frame_of, records_of

from kvire.attention.cpu import best_attention
from kvire.codec import codec as codec_module
from kvire.codec.codec import RAW, codec_for, codecs
from kvire.codec.frame import Header
from kvire.core import discovery, dtypes
from kvire.core.dtypes import KV_DTYPES, KVDType
from kvire.core.errors import ConfigError, FrameDamaged
from kvire.core.spec import KVGroup, KVSpec, LayerKind
from kvire.engine.request import Request, SamplingParams
from kvire.replay.caches import RankCache
from kvire.replay.simulate import run_store, simulate
from kvire.replay.store_tiers import StoreTier, StoreTiers
from kvire.store.eviction import policy as policy_module
from kvire.store.eviction.policy import policies
from kvire.store.memory.tier import MemoryTier

CODEC = shown("class Deflated")


@pytest.fixture
def add_codec(add_file):
    add_file(codec_module.FOLDER, "deflated", CODEC)
    codecs.cache_clear()
    yield codecs()[77]
    codecs.cache_clear()


@pytest.mark.parametrize("key", [SEALED, UNSEALED], ids=["sealed", "checksummed"])
def test_a_codec_is_a_file(add_codec, key):
    record, _ = block(4096)
    kv = bytes(range(256)) * 16
    frame = encoded(frames(key, add_codec()), record, kv)
    assert Header.parse(frame).codec == 77 and len(frame) < 4096
    assert read(frames(key), record, frame) == kv  # whoever reads finds the codec by its id
    with pytest.raises(FrameDamaged, match="codec"):
        add_codec.decode(zlib.compress(kv[:-1]), memoryview(bytearray(4096)))


def test_tiers_choose_among_all_codecs(add_codec):
    assert codec_for("int8", 100) == add_codec()
    assert codec_for("int8", 1e9) == RAW


def test_a_module_without_the_part_is_left_out(add_file):
    add_file(codec_module.FOLDER, "nothing_here", "VALUE = 1\n")
    assert [found.id for found in discovery.parts(codec_module.FOLDER, "CODEC")] == [1]


@pytest.mark.parametrize("is_scaled", [False, True])
def test_a_dtype_is_a_record(monkeypatch, is_scaled):
    record = KVDType("float8_e4m3fn", 1, is_scaled=is_scaled, note="a toy")
    monkeypatch.setitem(KV_DTYPES, record.name, record)
    spec = KVSpec((KVGroup(LayerKind.FULL, (0,), 2, 16, 16),), record.name, 16)
    assert spec.block_bytes(0) == 2 * (16 * 2 * 16 + (16 * 2 * dtypes.SCALE_BYTES if is_scaled else 0))
    cached, computed = (answer(record.name, prefix_cache=cached) for cached in (True, False))
    assert cached.token_ids == computed.token_ids
    assert cached.cache.reused_tokens >= 32 and computed.cache.reused_tokens == 0
    with pytest.raises(ConfigError, match="native kernels do not read KV in float8_e4m3fn"):
        best_attention("native", kv_dtype=record.name)


def answer(dtype: str, *, prefix_cache: bool) -> Answer:
    """Of the second of two requests with one prompt."""
    spec = replace(SPEC, dtype=dtype)
    engine = engine_of(tiny_llama(), spec, 64, kv_dtype=dtype, prefix_cache=prefix_cache)
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    for name in ("first", "second"):
        answers = drive(engine, [Request(name, tuple(range(40)), params)])
    return answers["second", 0]


POLICY = shown("class UsedAgain")


@pytest.fixture
def add_policy(add_file):
    add_file(policy_module.FOLDER, "used_again", POLICY)
    policies.cache_clear()
    yield policies()["used-again"]
    policies.cache_clear()


def test_an_eviction_policy_is_a_file(add_policy):
    """The store's memory tier and both forms of the replay run it as it is."""
    trace = random_trace(3, requests=120)
    hits = [
        run_store(trace, StoreTiers([StoreTier(trace, 12, add_policy)])).tokens,
        simulate(trace, RankCache(trace, 12, add_policy)).tokens,
    ]
    assert hits[0] == hits[1] != simulate(trace, RankCache(trace, 12, policies()["lru"])).tokens
    tier = MemoryTier(3 * 4096, policy=add_policy)
    again, once, new = ([*records_of(range(start, start + 16), kv_bytes=600)] for start in (0, 100, 200))
    for record in (*again, *once):
        tier.write(record, frame_of(record), b"t" * 16)
    for record in (*again, *again, *once):
        tier.touch([record.id])
    for record in (*new, *records_of(range(300, 316), kv_bytes=600)):
        tier.write(record, frame_of(record), b"t" * 16)
    assert [tier.held([record.id])[0] for record in (*again, *once)] == [True, False]
    tier.close()
