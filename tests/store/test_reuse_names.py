"""Identity: the names under which blocks are stored. What is stored today is found tomorrow, and by nobody else."""

import random
from hashlib import sha256

import pytest

from kvire.core.errors import StoreError
from kvire.core.keys import Namespace, block_keys, content_ids, divided, unsealed_salt
from kvire.core.record import BlockId
from kvire.store.reuse.chain import MOST_IDENTITIES, MOST_NOTED_SALTS, Chain, Names, Pages

MODEL = Namespace("w" * 64, "c" * 64, "float32/native-avx2", "float16", "full:30x3x64+64", 16)
SALTS = {"": "salt", "tenant": "salt of tenant"}


def names(salts: dict[str, str] | None = None, noted: dict | None = None) -> Names:
    salts, noted = SALTS if salts is None else salts, {} if noted is None else noted

    def salt_of(tenant: str) -> str:
        if tenant not in salts:
            raise StoreError("the key file cannot be read")
        return salts[tenant]

    return Names(MODEL, salt_of, noted.__setitem__)


@pytest.mark.parametrize(
    ("tenant", "cache_salt", "root"),
    [
        ("", "", "ec2ec8c89a600da6bf2bc4010cf48a1da849834802c15128edb19252ed0dd94b"),
        ("", "user 7", "8b71fc015029296f20373e4c88a5a41d24163ac2829a73ae5d566f92c61b18e8"),
        ("", "ü/\x00", "d3002835eb4a6d5d9e5fb44b2f2af6ea80fc317bc71f5558d5b717708324253b"),
        ("tenant", "", "335bcc762488a012ec4316468ee3b2a83a5d964e584aefcf3093852517fc4bdb"),
        ("tenant", "user 7", "1a0e234dad1178c5af6deadfa3a1e687eeb2df5d289bac540ccb30966b214628"),
        ("tenant", "ü/\x00", "9921a9431a6f7b32efc01b22b5d7933c8fe645e8281e0e8d16e04e1010bcac0a"),
    ],
)
def test_roots_of_stored_blocks_are_those_of_every_earlier_version(tenant: str, cache_salt: str, root: str) -> None:
    assert names().of(tenant, cache_salt).root.hex() == root


@pytest.mark.parametrize(
    ("tenant", "cache_salt", "root"),
    [
        ("", "", "89677f626c71a3001e3d4d9a6739aada78e2c844f931ca30a7420e3274285571"),
        ("", "user 7", "74e50c694bf01e627fc0e6403fbb097fc461652c0ff14541b3e77bf58fb661c3"),
        ("tenant", "", "1b01c704bc4aed95706d9c13c3eb7f789ff09e22be318d5ecd8e8b8dde49e7af"),
        ("tenant", "user 7", "9ee428512a000232c00ef58648bd760a55f7fc6e4aec8d6f8151d4d13fc16baa"),
    ],
)
def test_roots_without_a_store(tenant: str, cache_salt: str, root: str) -> None:
    assert Names(MODEL, unsealed_salt, {}.__setitem__).of(tenant, cache_salt).root.hex() == root


@pytest.mark.parametrize(
    ("cache_salt", "root"),
    [
        ("", "1f88be5b5cf1e4caec117a8e9b3eeca7e436120edb2527f74f8ecb78f8902ed2"),
        ("user 7", "9c66090cfa4b5fcad77d3a7d6aed1d51bb4d6d01b349d0585169e50cb1ed31d2"),
    ],
)
def test_roots_after_a_reset_depend_on_its_epoch(cache_salt: str, root: str) -> None:
    assert MODEL.with_salt(divided("salt", cache_salt=cache_salt, epoch="e0")).root.hex() == root
    after = names()
    before = after.of("", cache_salt)
    after.reset()
    assert after.of("", cache_salt).root not in {before.root, names().of("", cache_salt).root}


def test_pages_of_another_engine_are_named_as_by_every_earlier_version() -> None:
    record = Pages(names().of(), [b"sha of a page"]).record(0, 0, 100)
    assert record.id.key.hex() == "59fa602aaefa39dbf86442b99f8a4ba7b010c83147745a5bde982bebe217213b"
    assert record.content.hex() == "10015b5b4f8830f64ddceaacc43dc255"
    assert record.token_ids == (
        18464854, 1847354030, 297903028, 1092612331, 1508999190, -471028570, -553186710, -560050752,
    )  # fmt: skip
    assert record.parent == record.root == names().of().root


def test_no_two_of_tenants_and_salts_have_one_root() -> None:
    tenants = {"": "s", "a": "s/" + sha256(b"b").hexdigest(), "b": "t", "a/b": "u"}  # one looks like a divided salt
    identities = [names(tenants).of(tenant, cache_salt) for tenant in ("", "b", "a/b") for cache_salt in ("", "b", "x")]
    assert len({identity.root for identity in identities}) == len(identities)


def test_a_tenant_that_was_forgotten_begins_anew() -> None:
    salts = {"a": "first"}
    known = names(salts)
    before = known.of("a", "x")
    assert known.of("a", "x") == before
    salts["a"] = "second"
    assert known.of("a", "x").root != before.root


def test_a_tenant_without_keys_is_served_under_a_name_of_its_own_and_nothing_is_kept() -> None:
    salts = {"": "salt"}
    known, strangers = names(salts), names(salts)
    lost = known.of("lost")
    assert not lost.kept and known.of("lost") == lost, "its requests share blocks on the device"
    assert strangers.of("lost").root != lost.root
    before = known.of()
    del salts[""]
    after = known.of()
    assert after.root == before.root and not after.kept


def test_made_up_salts_take_no_memory_for_ever() -> None:
    noted: dict = {}
    known = names(noted=noted)
    tenant = known.of("tenant")
    for number in range(3 * MOST_IDENTITIES):
        known.of("tenant", f"salt {number}")
    assert len(known._known) == MOST_IDENTITIES
    assert tenant.root in noted and len(noted) == 1 + MOST_NOTED_SALTS
    assert known.of("tenant", "salt 0").salt == names().of("tenant", "salt 0").salt, "forgotten, and the same again"
    assert noted[tenant.root] == MODEL.public_fields()


def test_a_chain_names_blocks_as_tokens_come() -> None:
    rng = random.Random(1)
    token_ids, whole = [], [rng.randrange(50_000) for _ in range(100)]
    chain = Chain(names().of("tenant"), token_ids, 16)
    while len(token_ids) < len(whole):
        token_ids += whole[len(token_ids) : len(token_ids) + rng.randrange(1, 30)]
        chain.extend()
    assert chain.keys == block_keys(chain.root, whole, 16)
    contents = content_ids("salt of tenant", whole, range(16, 97, 16))
    for index, key in enumerate(chain.keys):
        record = chain.record(index, 3, 100)
        assert (record.id, record.index, record.tenant) == (BlockId(key, 3), index, "tenant")
        assert record.parent == (chain.keys[index - 1] if index else chain.root)
        assert record.token_ids == tuple(whole[index * 16 : (index + 1) * 16])
        assert record.content == contents[index]


@pytest.mark.parametrize("length", [10, 48, 70, 100, 150])
def test_a_fork_names_its_own_tokens(length: int) -> None:
    whole = list(range(100))
    chain = Chain(names().of(), whole, 16)
    chain.extend()
    chain.content(4)
    other = (whole + list(range(500, 550)))[:length]
    forked, alone = chain.fork(other), Chain(names().of(), other, 16)
    assert forked.extend() == alone.extend()
    assert [forked.content(i) for i in range(length // 16)] == [alone.content(i) for i in range(length // 16)]
    assert len(chain.extend()) == 6, "and the first one is as it was"


def test_a_question_is_about_the_tokens_of_the_prompt() -> None:
    chain = Chain(names().of("tenant"), list(range(100)), 16)
    chain.extend()
    whole = chain.query(2, 90)
    assert (whole.id, whole.content) == (BlockId(chain.keys[2], 0), chain.content(2))
    assert whole.later == tuple(chain.content(i) for i in (3, 4))
    part = chain.query(5, 90)
    assert part.token_ids == tuple(range(80, 90)) and part.id is part.content is None
    assert part.parent == chain.keys[4]
