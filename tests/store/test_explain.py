"""Why a block was missed, said truthfully, and never anything about another tenant."""

import pytest
from store.blocks import records_of
from store.stores import MIB, BentTier, blocks, load_all, open_store, save_all

from kvire.core.record import BlockRecord
from kvire.store.disk.tier import DiskTier
from kvire.store.explain import REMEMBERED_NAMESPACES, Explanation, MissQuery, StoreMiss
from kvire.store.memory.tier import MemoryTier
from kvire.store.ticket import FailureReason
from kvire.store.tiered import TieredStore

PROMPT = list(range(1, 1 + 5 * 16))
OPENERS = {
    "memory": lambda _: MemoryTier(4 * MIB),
    "disk": lambda path: DiskTier(path / "disk", 64 * MIB),
}


def why(store: TieredStore, record: BlockRecord, failure=None) -> Explanation:
    answer = store.explain(MissQuery.of(record, failure))
    explanation = answer.wait(5)
    assert explanation is not None and answer.poll() == explanation
    return explanation


def prompt(store: TieredStore, token_ids=PROMPT, tenant: str = "", **fields: str) -> list[BlockRecord]:
    return records_of(token_ids, tenant=tenant, salt=store.tenant(tenant).salt, **fields)


@pytest.fixture(params=OPENERS)
def store(request, tmp_path):
    with open_store(tmp_path, OPENERS[request.param](tmp_path), encrypt=True) as opened:
        yield opened


def test_what_was_never_stored(store):
    assert why(store, prompt(store)[0]) == Explanation(StoreMiss.NEVER_STORED)


def test_what_was_stored_and_had_to_go(store):
    records = prompt(store)
    save_all(store, records)
    for handle in store._handles:
        handle.tier.delete([records[3].id], "room")
    assert why(store, records[3]).reason is StoreMiss.EVICTED
    store.clear()
    assert why(store, records[3]).reason is StoreMiss.NEVER_STORED, "clear leaves no trace"


def test_the_same_tokens_computed_otherwise_and_by_what_they_differ(store):
    save_all(store, prompt(store))
    store.note_namespace(prompt(store)[0].root, {"weights": "w", "kv_dtype": "float16", "salt": "secret"})
    other = prompt(store, kv_dtype="float32")[0]
    assert why(store, other) == Explanation(StoreMiss.OTHER_NAMESPACE)
    store.note_namespace(other.root, {"weights": "w", "kv_dtype": "float32", "salt": "other"})
    assert why(store, other) == Explanation(StoreMiss.OTHER_NAMESPACE, ("kv_dtype",))


def test_the_closest_of_several_namespaces_is_named(store):
    for fields in ({"weights": "v", "spec": "t"}, {"weights": "v"}):
        records = prompt(store, **fields)
        save_all(store, records)
        store.note_namespace(records[0].root, {"weights": "w", "spec": "s"} | fields)
    mine = prompt(store)[0]
    store.note_namespace(mine.root, {"weights": "w", "spec": "s"})
    assert why(store, mine).fields == ("weights",)


def test_only_the_last_namespaces_are_remembered(store):
    """Each cache_salt that a client makes up is one."""
    roots = [prompt(store, numerics=str(number))[0].root for number in range(REMEMBERED_NAMESPACES + 2)]
    for root in [*roots[:-1], roots[0], roots[-1]]:
        store._explainer.note_namespace(root, {"numerics": "a"})
    assert [*store._explainer._namespaces] == [*roots[3:-1], roots[0], roots[-1]][-REMEMBERED_NAMESPACES:]


def test_what_is_noted_is_known_after_a_restart(tmp_path):
    with open_store(tmp_path, DiskTier(tmp_path / "disk", 64 * MIB)) as store:
        save_all(store, prompt(store))
        store.note_namespace(prompt(store)[0].root, {"numerics": "a", "salt": "s"})
        assert store.flush(5)
    assert b'"salt"' not in b"".join(p.read_bytes() for p in (tmp_path / "disk").rglob("*") if p.is_file())
    with open_store(tmp_path, DiskTier(tmp_path / "disk", 64 * MIB)) as store:
        other = prompt(store, numerics="b")[0]
        store.note_namespace(other.root, {"numerics": "b", "salt": "s"})
        assert why(store, other) == Explanation(StoreMiss.OTHER_NAMESPACE, ("numerics",))


def test_where_a_prompt_leaves_the_closest_stored_one(store):
    """S24: the first block differs after so many tokens; and so does one further down."""
    save_all(store, prompt(store))
    changed = [*PROMPT[:7], 999, *PROMPT[8:]]
    assert why(store, prompt(store, changed)[0]) == Explanation(StoreMiss.NEVER_STORED, (), 7)
    later = [*PROMPT[:50], 999, *PROMPT[51:]]
    assert why(store, prompt(store, later)[3]).shared_tokens == 2
    save_all(store, prompt(store, [*PROMPT[:53], 5, 6, 7, *PROMPT[56:]]))
    assert why(store, prompt(store, [*PROMPT[:52], 999, *PROMPT[53:]])[3]).shared_tokens == 4
    after_all = prompt(store, PROMPT + [7] * 16)[5]
    assert why(store, after_all).shared_tokens is None, "nothing is stored below the last block"


def test_less_than_a_block_is_compared_too(store):
    records = prompt(store)
    save_all(store, records)
    query = MissQuery(records[0].id.key, records[0].root, tuple(PROMPT[16:21]))
    assert store.explain(query).wait(5) == Explanation(None, (), 5)


def test_nothing_is_said_about_another_tenant(store):
    save_all(store, prompt(store, tenant="other"))
    mine = prompt(store)
    assert why(store, mine[0]) == Explanation(StoreMiss.NEVER_STORED)
    theirs = prompt(store, tenant="other")
    forged = BlockRecord(**{f: getattr(theirs[1], f) for f in theirs[1].__slots__} | {"tenant": ""})
    assert why(store, forged).shared_tokens is None, "not even if somebody knows the keys"


def test_damage_and_silence_are_named(tmp_path):
    disk = BentTier()
    with open_store(tmp_path, disk) as store:
        records = blocks(store, 2)
        save_all(store, records)
        disk.spoil(records[0])
        ticket = load_all(store, records)
        assert why(store, records[0], ticket.failure(0)).reason is StoreMiss.DAMAGED
        assert why(store, records[0]).reason is StoreMiss.DAMAGED, "also for the next who asks"
        disk.dead = True
        ticket = load_all(store, records)
        assert ticket.failure(1).reason is FailureReason.UNAVAILABLE
        assert why(store, records[1], ticket.failure(1)).reason is StoreMiss.UNAVAILABLE
        disk.dead = False
        save_all(store, records)
        assert why(store, blocks(store, 1, seed=4)[0]).reason is StoreMiss.NEVER_STORED


def test_a_forgotten_tenant_leaves_no_trace(tmp_path):
    with open_store(tmp_path, MemoryTier(MIB)) as store:
        records = prompt(store, tenant="gone")
        save_all(store, records)
        store.forget("gone")
        assert why(store, records[0]) == Explanation(StoreMiss.NEVER_STORED)


def test_a_store_that_is_not_open_answers_what_it_knows(tmp_path):
    store = open_store(tmp_path, MemoryTier(MIB))
    assert store.explain(MissQuery.of(blocks(store, 1)[0])).poll() == Explanation(StoreMiss.NEVER_STORED)
    store.close()
