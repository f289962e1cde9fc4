"""Keys: published vectors, the same in every process; any changed input changes them."""

import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvire.core.keys import ContentChain, Namespace, block_key, block_keys, content_ids

GOLDEN = Path(__file__).parents[1] / "golden" / "keys.json"
BASE = Namespace("w" * 64, "c" * 64, "float32/native-avx2", "float16", "full:30x3x64+64", 32)


def vectors() -> list[dict]:
    return json.loads(GOLDEN.read_text())


def keys_of(vector: dict) -> list[str]:
    namespace = Namespace(**vector["namespace"])
    return [k.hex() for k in block_keys(namespace.root, vector["token_ids"], namespace.block_size)]


def test_golden_vectors() -> None:
    assert len(vectors()) >= 50
    for vector in vectors():
        assert Namespace(**vector["namespace"]).root.hex() == vector["root"]
        assert keys_of(vector) == vector["keys"]


@pytest.mark.parametrize("seed", ["0", "1", "12345", "random"])
def test_golden_vectors_in_another_process(seed: str) -> None:
    code = (
        "import json, sys; from kvire.core.keys import *\n"
        "for v in json.load(open(sys.argv[1])):\n"
        "    n = Namespace(**v['namespace'])\n"
        "    assert n.root.hex() == v['root']\n"
        "    assert [k.hex() for k in block_keys(n.root, v['token_ids'], n.block_size)] == v['keys']\n"
        "assert 'torch' not in sys.modules\n"
        "print('same')"
    )
    env = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run(
        [sys.executable, "-c", code, str(GOLDEN)], env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "same", done.stderr


@given(st.data())
def test_every_field_of_the_namespace_changes_the_root(data: st.DataObject) -> None:
    field = data.draw(st.sampled_from(fields(Namespace)))
    old = getattr(BASE, field.name)
    values = st.integers(1, 2**31) if isinstance(old, int) else st.text(max_size=80)
    new = data.draw(values.filter(lambda value: value != old))
    assert replace(BASE, **{field.name: new}).root != BASE.root


def test_a_value_cannot_move_from_one_field_to_the_next() -> None:
    assert replace(BASE, adapter="ab", salt="").root != replace(BASE, adapter="a", salt="b").root
    assert replace(BASE, adapter="", salt="ab").root != replace(BASE, adapter="ab", salt="").root


@given(st.lists(st.integers(0, 2**31 - 1), min_size=4, max_size=12), st.data())
def test_any_token_changes_its_key_and_all_after_it(token_ids: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(token_ids) - 1))
    other = list(token_ids)
    other[at] = data.draw(st.integers(0, 2**31 - 1).filter(lambda t: t != token_ids[at]))
    before, after = block_keys(BASE.root, token_ids, 2), block_keys(BASE.root, other, 2)
    assert before[: at // 2] == after[: at // 2]
    assert not set(before[at // 2 :]) & set(after[at // 2 :])


def test_neighbouring_sums_do_not_collide() -> None:
    """S12: a rolling hash collided when one token rose by 31 and its neighbour fell by 1."""
    assert block_key(BASE.root, [100, 100]) != block_key(BASE.root, [131, 99])


def test_only_full_blocks_have_keys_and_known_ones_are_kept() -> None:
    ids = list(range(100))
    keys = block_keys(BASE.root, ids, 32)
    assert len(keys) == 3
    assert block_keys(BASE.root, ids, 32, known=keys[:2]) == keys
    assert block_keys(BASE.root, ids[:31], 32) == []


def test_block_key_depends_on_its_parent() -> None:
    ids = list(range(32))
    assert block_key(BASE.root, ids) != block_key(block_key(BASE.root, ids), ids)
    assert block_key(BASE.with_salt("a").root, ids) != block_key(BASE.with_salt("b").root, ids)


@given(st.lists(st.integers(0, 200_000), max_size=40), st.integers(0, 40))
def test_content_ids_that_come_bit_by_bit_are_those_of_the_whole(token_ids: list[int], cut: int) -> None:
    ends = range(1, len(token_ids) + 1)
    chain = ContentChain("salt")
    found = [chain.add([token_id]) for token_id in token_ids[:cut]]
    twin = chain.copy()
    chain.add([7])  # of no concern to its copy
    assert found + [twin.add([token_id]) for token_id in token_ids[cut:]] == content_ids("salt", token_ids, ends)


def test_a_content_id_is_of_all_tokens_up_to_its_end_and_the_salt() -> None:
    ids = content_ids("salt", [1, 2, 3, 4], [2, 4])
    assert [found.hex() for found in ids] == ["ea712c685135caf37f0ce5fd5e008bb0", "4b909f411357cf745f75fcfa9083ae5b"]
    assert content_ids("salt", [1, 2, 3, 4], [4]) == ids[1:]
    assert not set(content_ids("salt", [9, 2, 3, 4], [2, 4])) & set(ids)
    assert not set(content_ids("pepper", [1, 2, 3, 4], [2, 4])) & set(ids)
