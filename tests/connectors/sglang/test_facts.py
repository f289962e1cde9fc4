"""Whose pages a server reads: what changes KV separates, the rest does not; what cannot be told apart is refused."""

import json
import sys

import pytest
import torch

from kvire.core.errors import ConfigError, KvireError, UnsupportedModelError

KEYS = [f"{number:064x}" for number in range(3)]


def slots(count: int) -> torch.Tensor:
    return torch.arange(4 * count)


@pytest.fixture
def finds(start, host_pool, arguments):
    """Stores pages; then says how many of them another server finds."""
    first = start()
    first.register_mem_pool_host(host_pool(16).fill())
    assert first.batch_set_v1(KEYS, slots(3)) == [True] * 3
    first.close()

    def ask(pool=None, name="kv", **options) -> int:
        second = start(**options)
        pool = pool or host_pool(16)
        if name == "kv":
            second.register_mem_pool_host(pool)
            return second.batch_exists(KEYS)
        second.register_mem_host_pool_v2(pool, name)
        return sum(second._held(name, KEYS))

    return ask


@pytest.mark.parametrize(
    ("argument", "value"),
    [("port", 1), ("random_seed", 8), ("served_model_name", "x"), ("mem_fraction_static", 0.1), ("enable_lora", False)],
)
def test_what_does_not_change_kv(finds, arguments, argument, value) -> None:
    setattr(arguments, argument, value)
    assert finds() == 3


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("attention_backend", "flashinfer"),
        ("dtype", "float16"),
        ("kv_cache_dtype", "fp8_e4m3"),
        ("quantization", "fp8"),
        ("json_model_override_args", '{"rope_theta": 5}'),
        ("a_quantization_nobody_knows_yet", "int2"),
    ],
)
def test_what_changes_kv(finds, arguments, argument, value) -> None:
    setattr(arguments, argument, value)
    assert finds() == 0


def test_other_weights(finds, arguments, tmp_path, checkpoint) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in checkpoint.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    arguments.model_path = str(copy)
    assert finds() == 3, "the same bytes elsewhere"
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert finds() == 0


def test_other_pages(finds, host_pool) -> None:
    assert finds() == 3
    assert finds(host_pool(16, "page_first")) == 0
    assert finds(host_pool(16, dtype=torch.float16)) == 0
    assert finds(host_pool(16, page_size=2)) == 0
    assert finds(name="swa") == 0
    tagged = host_pool(16)
    tagged.storage_format_tag = "packed"
    assert finds(tagged) == 0


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ({"tp_rank": 1, "tp_size": 2}, 0),
        ({"tp_size": 2}, 0),
        ({"pp_size": 2}, 0),
        ({"attn_cp_size": 2}, 0),
        ({"dp_rank": 3}, 3),
    ],
)
def test_ranks_have_their_own(finds, ranks, found) -> None:
    assert finds(ranks=ranks) == found


def test_latent_kv_is_the_same_on_every_rank_and_running_states_are_not(start, host_pool) -> None:
    def rank(number: int):
        storage = start(ranks={"is_mla_model": True, "tp_rank": number, "tp_size": 2})
        storage.register_mem_pool_host(host_pool(16).fill())
        storage.register_mem_host_pool_v2(host_pool(16).fill(), "mamba")
        return storage

    first, second = rank(0), rank(1)
    for pool in ("kv", "mamba"):
        assert first._pools[pool].write(KEYS, [0, 4, 8]).ok == [True] * 3
    first._store.flush(10)
    assert second.batch_exists(KEYS) == 3
    assert second._held("mamba", KEYS) == [False] * 3


def test_tenants(finds) -> None:
    assert finds(tenant="other") == 0


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"interface_v1": None}, '"interface_v1": 1'),
        ({"dsik_size": "1GB"}, "no option 'dsik_size'"),
        ({"store": 7}, "store in .* is a str"),
        ({"encrypt": "no"}, "encrypt in .* is a bool"),
        ({"ram": True}, "ram in .* is a str or int"),
        ({"remote": [1]}, "list of URLs"),
        ({"store": None, "remote": "redis://x", "disk_size": "1GB"}, "add store"),
        ({"disk_size": "many"}, "disk_size"),
    ],
)
def test_wrong_options_are_refused_by_name(start, extra, match) -> None:
    with pytest.raises(ConfigError, match=match):
        start(**extra)


@pytest.mark.parametrize(("argument", "value"), [("enable_lora", True), ("lora_paths", ["sql=/adapters/sql"])])
def test_adapters_are_refused(start, arguments, argument, value) -> None:
    """The hash of a page has an adapter's name and path: one that was trained anew would get the KV of the old one."""
    setattr(arguments, argument, value)
    with pytest.raises(UnsupportedModelError, match="adapter"):
        start()


def test_models_with_images_are_refused(start, arguments, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", "vision_config": {}}))
    arguments.model_path = str(tmp_path)
    with pytest.raises(UnsupportedModelError, match="images"):
        start()


def test_divided_contexts_are_refused(start) -> None:
    with pytest.raises(ConfigError, match="decode context"):
        start(ranks={"dcp_size": 2, "tp_size": 2, "is_mla_model": True, "logical_page_size": 8})


def test_weights_that_are_nowhere_here_are_refused(start, arguments) -> None:
    arguments.model_path = "s3://bucket/model"
    with pytest.raises(KvireError, match="no local folder"):
        start()
    arguments.model_path, arguments.revision = "org/name", "v2"
    with pytest.raises(KvireError, match="no local folder"):
        start()


def test_a_version_that_does_not_say_how_it_was_started_is_refused(start, monkeypatch) -> None:
    monkeypatch.delattr(sys.modules["sglang.srt.runtime_context"], "get_server_args")
    with pytest.raises(ConfigError, match=r"0\.5\.23"):
        start()
