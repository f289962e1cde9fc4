"""What store/tier.py promises, held against every tier there is."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from store.blocks import chain, frame_of, tenant_key

from kvire.core.errors import BlockMissing, FrameDamaged, TierUnavailable
from kvire.core.keys import BlockKey
from kvire.core.record import BlockId, BlockRecord
from kvire.core.tier_kind import TierKind
from kvire.store.disk.tier import DiskTier
from kvire.store.memory.tier import MemoryTier
from kvire.store.remote.open import open_remote
from kvire.store.tier import Tier

MIB = 1 << 20
TAG = tenant_key("").tag
OTHER = tenant_key("other")
TTL_S = 1.0


def _remote(url: str) -> Tier:
    return open_remote(url, timeout_s=5.0, ttl_s=None)


OPENERS: dict[str, Callable[[pytest.FixtureRequest, Path], Tier]] = {
    "memory": lambda _, __: MemoryTier(64 * MIB),
    "disk": lambda _, path: DiskTier(path / "disk", 64 * MIB),
    "redis": lambda request, _: _remote(request.getfixturevalue("redis_url")),
    "cluster": lambda request, _: _remote(request.getfixturevalue("cluster_url")),
    "s3": lambda request, _: _remote(request.getfixturevalue("s3_url")),
    "file": lambda _, path: _remote(f"file://{path / 'objects'}"),
    "objects": lambda _, __: _remote("memory://"),
}


@pytest.fixture(params=OPENERS)
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    """One tier, empty."""
    opened = OPENERS[request.param](request, tmp_path)
    opened.clear()
    yield opened
    opened.close()


def put(tier: Tier, record: BlockRecord, version: int = 0, ttl_s: float | None = None) -> bytes:
    frame = frame_of(record, version=version)
    assert tier.write(record, frame, tenant_key(record.tenant).tag, ttl_s=ttl_s)
    return bytes(frame)


def get(tier: Tier, block_id: BlockId, room: int = 20_000) -> bytes:
    out = bytearray(room)
    return bytes(out[: tier.read(block_id, [memoryview(out)])])


def test_what_was_written_is_read(tier):
    records = chain(5)
    frames = {record.id: put(tier, record) for record in records}
    assert tier.held([record.id for record in records]) == [True] * 5
    assert {block_id: get(tier, block_id) for block_id in frames} == frames


def test_what_was_not_written_is_missing(tier):
    there, *others = chain(4)
    put(tier, there)
    assert tier.held([others[0].id, there.id, others[1].id]) == [False, True, False]
    with pytest.raises(BlockMissing):
        get(tier, others[2].id)
    assert tier.held([]) == []


def test_groups_of_one_key_are_different_blocks(tier):
    first, second = chain(1, group=0)[0], chain(1, group=1)[0]
    assert first.id.key == second.id.key
    frame = put(tier, first)
    assert tier.held([first.id, second.id]) == [True, False]
    other = put(tier, second)
    assert (get(tier, first.id), get(tier, second.id)) == (frame, other)


def test_the_newest_frame_counts_whatever_its_length(tier):
    for old_bytes, new_bytes in ((6_000, 6_000), (500, 9_000), (9_000, 500)):
        old = chain(1, seed=old_bytes, kv_bytes=old_bytes)[0]
        new = chain(1, seed=old_bytes, kv_bytes=new_bytes)[0]
        assert old.id == new.id
        put(tier, old)
        frame = put(tier, new, version=1)
        assert get(tier, old.id) == frame


def test_buffers_are_filled_in_order(tier):
    record = chain(1)[0]
    frame = put(tier, record)
    sizes = [1, 191, 80, 4_000, len(frame) - 4_272, 0, 100]
    buffers = [memoryview(bytearray(size)) for size in sizes]
    assert tier.read(record.id, buffers) == len(frame)
    assert b"".join(buffers)[: len(frame)] == frame


def test_a_frame_longer_than_the_buffers_is_damaged_and_one_as_long_is_not(tier):
    record = chain(1)[0]
    frame = put(tier, record)
    assert get(tier, record.id, room=len(frame)) == frame
    with pytest.raises(FrameDamaged, match="length"):
        get(tier, record.id, room=len(frame) - 1)
    assert get(tier, record.id) == frame  # whatever went wrong before, the next read is whole


def test_a_tier_keeps_a_copy_and_hands_out_copies(tier):
    record = chain(1)[0]
    frame = frame_of(record)
    original = bytes(frame)
    assert tier.write(record, frame, TAG)
    frame[:] = bytes(len(frame))
    out = bytearray(len(original))
    tier.read(record.id, [memoryview(out)])
    out[:] = bytes(len(out))
    assert get(tier, record.id) == original


def test_delete_removes_what_is_named_and_counts_it(tier):
    records = chain(4)
    for record in records[:3]:
        put(tier, record)
    assert tier.delete([records[0].id, records[2].id, records[3].id], "damaged") == 2
    assert tier.held([record.id for record in records]) == [False, True, False, False]
    with pytest.raises(BlockMissing):
        get(tier, records[0].id)
    assert tier.delete([records[0].id], "damaged") == 0


def test_delete_tenant_removes_that_tenants_blocks_only(tier):
    mine, theirs = chain(3), chain(3, tenant="other")
    for record in mine + theirs:
        put(tier, record)
    assert tier.delete_tenant(OTHER.tag) == 3
    assert tier.held([record.id for record in mine + theirs]) == [True] * 3 + [False] * 3
    assert tier.delete_tenant(OTHER.tag) == 0


def test_clear_really_clears_and_the_tier_goes_on(tier):
    records = chain(6)
    for record in records:
        put(tier, record)
    assert tier.clear() == 6
    assert tier.held([record.id for record in records]) == [False] * 6
    assert list(tier.entries()) == []
    frame = put(tier, records[0])
    assert get(tier, records[0].id) == frame


def test_entries_say_what_is_there(tier):
    before = time.time()
    records = chain(3) + chain(2, seed=1, tenant="other")
    frames = {record.id: put(tier, record) for record in records}
    tier.pin([records[1].id], pinned=True)
    entries = {entry.id: entry for entry in tier.entries()}
    assert entries.keys() == frames.keys()
    for record in records:
        entry = entries[record.id]
        assert (entry.parent, entry.root, entry.index) == (record.parent, record.root, record.index)
        assert entry.tenant_tag == tenant_key(record.tenant).tag
        assert entry.frame_bytes == len(frames[record.id])
        assert entry.pinned == (record is records[1])
        assert before - 2 <= entry.created <= time.time() + 2  # object stores say whole seconds
        assert entry.expires is None


def test_pins_are_counted_and_can_be_ended(tier):
    records = chain(2)
    put(tier, records[0])
    assert tier.pin([record.id for record in records], pinned=True) == 1
    assert [entry.pinned for entry in tier.entries()] == [True]
    assert tier.pin([records[0].id], pinned=False) == 1
    assert [entry.pinned for entry in tier.entries()] == [False]


def test_looking_changes_nothing(tier):
    record = chain(1)[0]
    put(tier, record)
    before = list(tier.entries())
    for _ in range(3):
        tier.held([record.id])
    assert list(tier.entries()) == before


def test_touching_takes_anything(tier):
    record = chain(1)[0]
    tier.touch([])
    tier.touch([record.id])
    put(tier, record)
    tier.touch([record.id, BlockId(BlockKey(b"x" * 32), 7), record.id])
    assert tier.held([record.id]) == [True]


def test_a_block_with_a_time_to_live_goes(tier):
    lasting, passing = chain(2)
    put(tier, lasting)
    put(tier, passing, ttl_s=TTL_S)
    assert tier.held([lasting.id, passing.id]) == [True, True]
    end = time.monotonic() + TTL_S + 3
    while tier.held([passing.id]) == [True] and time.monotonic() < end:
        time.sleep(0.05)
    assert tier.held([lasting.id, passing.id]) == [True, False]
    with pytest.raises(BlockMissing):
        get(tier, passing.id)


def test_counters_follow(tier):
    record, absent = chain(2)
    frame = put(tier, record)
    get(tier, record.id)
    with pytest.raises(BlockMissing):
        get(tier, absent.id)
    stats = tier.stats()
    assert (stats.writes, stats.written_bytes) == (1, len(frame))
    assert (stats.reads, stats.read_bytes) == (1, len(frame))
    assert stats.unavailable == 0


def test_readers_see_whole_frames_while_the_block_is_replaced(tier):
    """S11: the old frame, the new one or none, never a mixture."""
    record = chain(1, kv_bytes=60_000)[0]
    versions = {bytes(frame_of(record, version=version)) for version in range(4)}
    put(tier, record)
    done = threading.Event()
    seen: list[bytes] = []
    errors: list[Exception] = []

    def read() -> None:
        try:
            while not done.is_set():
                with suppress(BlockMissing, TierUnavailable):  # moto's server does not stand being asked so fast
                    seen.append(get(tier, record.id, room=80_000))
        except Exception as error:  # noqa: BLE001 - shown below
            errors.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for round_ in range(40):
        with suppress(TierUnavailable):
            put(tier, record, version=round_ % 4)
    time.sleep(0.05)
    done.set()
    for reader in readers:
        reader.join(20)
    assert not errors
    assert seen and set(seen) <= versions


def test_any_order_of_calls_does_what_a_dict_does(tier):
    rng = random.Random(5)
    records = chain(4) + chain(4, seed=1, tenant="other") + chain(2, seed=2, kv_bytes=900)
    model: dict[BlockId, bytes] = {}
    for _ in range(200):
        record = rng.choice(records)
        match rng.randrange(10):
            case 0 | 1 | 2 | 3:
                model[record.id] = put(tier, record, version=rng.randrange(3))
            case 4 | 5 | 6:
                if record.id in model:
                    assert get(tier, record.id) == model[record.id]
                else:
                    with pytest.raises(BlockMissing):
                        get(tier, record.id)
            case 7:
                assert tier.delete([record.id], "damaged") == (model.pop(record.id, None) is not None)
            case 8:
                tier.touch([record.id])
                assert tier.pin([record.id], pinned=rng.random() < 0.5) == (record.id in model)
            case 9 if rng.random() < 0.3:
                gone = [other.id for other in records if other.tenant == "other" and other.id in model]
                assert tier.delete_tenant(OTHER.tag) == len(gone)
                for block_id in gone:
                    del model[block_id]
        assert tier.held([other.id for other in records]) == [other.id in model for other in records]
    assert {entry.id for entry in tier.entries()} == set(model)


def test_a_closed_tier_answers_and_is_closed_twice(tier):
    record = chain(1)[0]
    put(tier, record)
    tier.close()
    tier.close()
    with pytest.raises((BlockMissing, TierUnavailable)):
        get(tier, record.id)
    with pytest.raises(TierUnavailable):
        tier.write(record, frame_of(record), TAG)
    tier.touch([record.id])
    tier.stats()


def test_a_tier_says_what_it_is(tier):
    assert tier.name and tier.local == (tier.kind is not TierKind.REMOTE)
