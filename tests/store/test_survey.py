"""What a listing amounts to, and what checking one frame says. The commands over it: tests/cli/test_store*.py."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from store.blocks import chain, frame_of, namespace, tenant_key

from kvire.core.errors import StoreError
from kvire.core.record import BlockId, BlockRecord
from kvire.store.check import Checker, CheckVerdict
from kvire.store.disk.tier import DiskTier
from kvire.store.keyring import Keyring
from kvire.store.survey import Survey
from kvire.store.tier import Buffer, Entry

FULL = "full layers=0 heads=1 k=4 v=4 window=0"
SLIDING = "sliding layers=1 heads=1 k=4 v=4 window=32"


def entry(record: BlockRecord, **changed) -> Entry:
    fields = {
        "id": record.id, "parent": record.parent, "root": record.root, "tenant_tag": tenant_key().tag,
        "index": record.index, "frame_bytes": 100, "created": 1.0, "used": 1.0, "expires": None, "pinned": False,
    }  # fmt: skip
    return Entry(**(fields | changed))


def survey(records: Sequence[BlockRecord], spec: str) -> Survey:
    noted = namespace(tenant_key().salt, spec=spec)
    return Survey([entry(record) for record in records], {noted.root: noted.public_fields()})


def test_what_a_hit_needs_depends_on_the_groups() -> None:
    for spec, whole, orphans in (
        (FULL, False, 3),
        (SLIDING, True, 0),
        (f"{FULL};{SLIDING}", False, 3),
        ("?", False, 0),
    ):
        [space] = survey(chain(5, spec=spec)[2:], spec).spaces
        assert [chain.whole for chain in space.chains()] == [whole], spec
        assert len(space.orphans()) == orphans, spec


def test_a_chain_that_goes_in_circles_ends() -> None:
    """Nobody can make such keys, but a header can claim anything."""
    one, two = chain(2, spec=FULL)
    entries = [entry(one, parent=two.id.key), entry(two)]
    [space] = Survey(entries, {}).spaces
    assert space.path(two.id.key) == [two.id.key, one.id.key]
    assert space.path(one.id.key) == [one.id.key]
    assert space.chains() == []


def test_digits_that_fit_several_blocks_name_none() -> None:
    records = [chain(1, seed=seed)[0] for seed in range(2)]
    alike = [entry(r, id=BlockId(bytes([1, 2, 3, i]) + bytes(28), 0)) for i, r in enumerate(records)]
    found = Survey(alike, {})
    with pytest.raises(StoreError, match="several blocks here begin with 010203"):
        found.find("010203")
    assert found.find("01020301")[1] == alike[1].id.key


class TornOnce(DiskTier):
    """The first read meets a block that is being replaced."""

    reads = 0

    def read(self, block_id: BlockId, buffers: Sequence[Buffer], timeout_s: float | None = None) -> int:
        length = super().read(block_id, buffers, timeout_s)
        self.reads += 1
        buffers[0][length - 1] ^= self.reads == 1
        return length


def test_damage_is_only_what_two_reads_find(tmp_path: Path) -> None:
    [record] = chain(1)
    with TornOnce(tmp_path / "store", 8 << 20) as tier:
        tier.write(record, frame_of(record), tenant_key().tag)
        [listed] = tier.entries()
        finding = Checker(tier, Keyring(tmp_path / "keys" / "keyring.json"), {}).check(listed)
        assert (finding.verdict, tier.reads) == (CheckVerdict.SOUND, 2)


def test_older_builds_are_those_that_nobody_reads_any_more() -> None:
    """All but the one used last of those that differ in nothing else, and those from before builds were noted."""
    salt, notes, entries = tenant_key().salt, {}, []

    def stored(used: float, **fields: str) -> bytes:
        name = namespace(salt, **fields)
        notes[name.root] = name.public_fields()
        entries.extend(entry(record, used=used) for record in chain(2, **fields))
        return name.root

    first, second = stored(1, build="torch 1"), stored(2, build="torch 2")
    stored(3, build="torch 3")
    stored(1, build="torch 1", weights="others")
    silent = stored(9, spec="from before")
    del notes[silent]["build"]
    unknown = stored(9, spec="not noted")
    del notes[unknown]
    assert {space.root for space in Survey(entries, notes).older_builds} == {first, second, silent}
