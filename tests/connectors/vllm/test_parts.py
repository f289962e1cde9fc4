"""The connector's parts that need no vLLM: groups, pages, names, speeds, remote tiers, events."""

import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from connectors.vllm.small_engine import BLOCK_BYTES, FULL, NAMESPACE, Request, SmallEngine

from kvire.connectors.identity import connector_namespace, files_with_weights
from kvire.connectors.options import SharedStore
from kvire.connectors.vllm.events import Announcer
from kvire.connectors.vllm.groups import read_groups
from kvire.connectors.vllm.messages import Facts, Move, Outcome
from kvire.connectors.vllm.pages import DevicePages, HostPages, open_pages
from kvire.connectors.vllm.requests import Tracked, exclusion
from kvire.connectors.vllm.secondary_requests import Requests
from kvire.connectors.vllm.steps import Steps
from kvire.core.config import StoreConfig
from kvire.core.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from kvire.core.keys import BlockKey
from kvire.core.record import BlockId
from kvire.core.spec import first_needed
from kvire.plan.cost import PrefillSpeed, Speed
from kvire.store.reuse.chain import Identity
from kvire.store.reuse.look import Part
from kvire.store.reuse.planner import Reuse
from kvire.store.tiered import TieredStore

OURS = Identity("", "salt", BlockKey(bytes(32)))


def test_importing_it_needs_neither_vllm_nor_torch_nor_our_engine() -> None:
    program = (
        "import sys, kvire.connectors.vllm, kvire.connectors.vllm.scheduler, kvire.connectors.vllm.worker\n"
        "import kvire.connectors.identity, kvire.connectors.options\n"
        "heavy = {'torch', 'transformers', 'vllm', 'kvire.engine', 'kvire._native', 'kvire.attention', 'kvire.cache'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_vllm_before_the_oldest_is_refused() -> None:
    program = (
        "import sys, types\n"
        "sys.modules['vllm'] = vllm = types.ModuleType('vllm')\n"
        "from kvire.connectors.vllm.identity import check_options\n"
        "from kvire.core.errors import ConfigError\n"
        "for vllm.__version__ in sys.argv[1:]:\n"
        "    try:\n"
        "        check_options(None)\n"
        "    except ConfigError as error:\n"
        "        print(error)\n"
        "    except AttributeError:\n"
        "        pass  # it would look at the options now\n"
    )
    versions = ["0.9.2", "0.30.0", "0.31.0", "1.0.0", "0.1.dev1+g0123456", "dev"]
    done = subprocess.run([sys.executable, "-c", program, *versions], capture_output=True, text=True, check=True)
    refused = done.stdout.splitlines()
    assert ["this is 0.9.2" in refused[0], "this is 0.30.0" in refused[1]] == [True, True], refused
    assert len(refused) == 2 and all("0.31 or newer" in line for line in refused)


# Groups


class FullAttentionSpec(SimpleNamespace):
    """Named, and with the fields, as in vLLM: they are told apart by their names."""


class SlidingWindowSpec(SimpleNamespace):
    pass


class MambaSpec(SimpleNamespace):
    pass


def config_of(*specs: Any, **more: Any) -> Any:
    groups = [SimpleNamespace(layer_names=[f"l{i}"], kv_cache_spec=spec, **more) for i, spec in enumerate(specs)]
    return SimpleNamespace(kv_cache_groups=groups)


def test_groups_that_are_known() -> None:
    groups, block_size = read_groups(
        config_of(FullAttentionSpec(block_size=16), SlidingWindowSpec(block_size=16, sliding_window=100))
    )
    assert block_size == 16
    assert [(group.kind, group.window) for group in groups] == [("full", None), ("sliding", 100)]
    # a token at 200 looks at the tokens from 101 on, which is in block 6
    assert [first_needed(group.window, 200, 16) for group in groups] == [0, 6]
    assert first_needed(groups[1].window, 99, 16) == 0


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (config_of(MambaSpec(block_size=16)), "MambaSpec"),
        (config_of(FullAttentionSpec(block_size=16), FullAttentionSpec(block_size=32)), "16, 32 tokens"),
        (config_of(FullAttentionSpec(block_size=16), is_eagle_group=True), "draft model"),
        (config_of(FullAttentionSpec(block_size=16), host_resident=True), "not kept where"),
        (config_of(FullAttentionSpec(block_size=16, kv_quant_mode=SimpleNamespace(name="NVFP4"))), "NVFP4"),
        (config_of(), "no tokens"),
    ],
)
def test_groups_that_are_not_are_refused_by_name(config: Any, said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        read_groups(config)


# Pages


@pytest.mark.parametrize("kind", [HostPages, DevicePages])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_pages_come_back_as_they_were_whatever_the_strides(kind: type, dtype: torch.dtype) -> None:
    blocks, pieces = 6, 2
    layers = []
    for _ in range(3):  # tokens before heads in memory, and twice as many kernel blocks as blocks
        layer = torch.randn(blocks * pieces, 4, 2, 8).to(dtype).transpose(1, 2)
        layers.append(layer)
    views = [layer.view(torch.uint8).unflatten(0, (blocks, -1)) for layer in layers]
    pages = kind(views)
    rows = np.zeros((2, pages.row_bytes), np.uint8)
    pages.gather([4, 1], rows)
    first = torch.cat([layer[8:10].contiguous().view(torch.uint8).flatten() for layer in layers])
    assert torch.equal(torch.from_numpy(rows[0]), first), "a row is pages in order, each [heads, tokens, content]"
    before = [layer.view(torch.uint8).clone() for layer in layers]
    pages.scatter([2, 5], rows)
    for layer, old in zip(layers, before, strict=True):
        now = layer.view(torch.uint8)
        assert torch.equal(now[4:6], old[8:10]) and torch.equal(now[10:12], old[2:4])
        assert torch.equal(now[:4], old[:4]) and torch.equal(now[6:10], old[6:10]), "and nothing else"


def test_a_cache_of_another_kind_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="not one tensor"):
        open_pages([[torch.zeros(4, 1, 1, 1)]], 4)


# Names


def test_a_namespace_tells_apart_what_decides_kv(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    asked: dict[str, Any] = {
        "engine": "vllm 1", "numerics": "n", "kv_dtype": "float32", "spec": "s", "block_size": 16, "shard": "tp=1",
    }  # fmt: skip
    config = {"hidden": 4, "dtype": torch.float32}
    name = connector_namespace(tmp_path, config, **asked)
    assert connector_namespace(tmp_path, config, **asked) == name
    assert connector_namespace([tmp_path / "model.safetensors"], config, **asked) == name
    others = [connector_namespace(tmp_path, config | {"hidden": 5}, **asked)]
    for field, value in asked.items():
        changed = value + 1 if isinstance(value, int) else value + "'"
        others.append(connector_namespace(tmp_path, config, **asked | {field: changed}))
    (tmp_path / "model.safetensors").write_bytes(b"weightz")
    others.append(connector_namespace(tmp_path, config, **asked))
    assert len({name.root, *(other.root for other in others)}) == len(others) + 1


def test_products_with_fewer_bits_are_named() -> None:
    """Whoever set it, vLLM's VLLM_FLOAT32_MATMUL_PRECISION or a program around it: torch is asked where it computes."""
    program = (
        "import sys, types, torch\n"
        "sys.modules['vllm'] = types.ModuleType('vllm')\n"
        "from kvire.connectors.vllm.groups import Group\n"
        "from kvire.connectors.vllm.identity import facts_of\n"
        "layer = types.SimpleNamespace(get_attn_backend=lambda: types.SimpleNamespace(get_name=lambda: 'CPU'))\n"
        "compilation = types.SimpleNamespace(static_forward_context={'l0': layer})\n"
        "config = types.SimpleNamespace(compilation_config=compilation)\n"
        "group = types.SimpleNamespace(layers=['l0'], kind='full', window=None)\n"
        "for precision in ('highest', 'medium'):\n"
        "    torch.set_float32_matmul_precision(precision)\n"
        "    print(facts_of(config, [group], {'l0': torch.zeros(2, 4, 16, 8)}, [1024]).numerics)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["attention=CPU", "attention=CPU matmul=bf16"]


def test_a_folder_without_weights_has_no_name(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no weight files"):
        files_with_weights(tmp_path)
    (tmp_path / "b.gguf").touch()
    assert files_with_weights(tmp_path / "b.gguf") == (tmp_path / "b.gguf",)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({}, None),
        ({"mm_features": ["image"]}, "multimodal"),
        ({"prompt_embeds": 1}, "prompt_embeds"),
        ({"prompt_is_token_ids": [True]}, "prompt_embeds"),
        ({"lora_request": 1}, "lora"),
        ({"resumable": True}, "streaming_input"),
    ],
)
def test_what_depends_on_more_than_tokens_is_neither_looked_up_nor_kept(
    store: TieredStore, more: dict[str, Any], why: str | None
) -> None:
    request = Request("a", list(range(30)))
    for name, value in more.items():
        setattr(request, name, value)
    assert exclusion(request) == why
    engine = SmallEngine(store)
    engine.add(request)
    for _ in range(8):
        engine.step()
    assert (store.stats().saves > 0) == (why is None)
    assert engine.scheduler.take_counts()["excluded_requests", why or ""] == (1 if why else 0)
    engine.close()


def test_names_are_the_same_however_tokens_arrive() -> None:
    whole, growing = Request("a", list(range(40))), Request("b", list(range(13)))
    names = []
    for request in (whole, growing):
        chain = Tracked(request, OURS, 4).chain
        chain.extend()
        for token in range(len(request.all_token_ids), 40):
            request.all_token_ids.append(token)
            chain.extend()
        names.append([chain.record(index, 0, 1) for index in range(len(chain.keys))])
    assert names[0] == names[1]
    assert [record.index for record in names[0]] == list(range(10))


# Speeds


def measured(*plans: dict[str, int], ends: Sequence[int], step_s: float = 1.0) -> PrefillSpeed:
    """What is known after steps of `plans` were planned one after the other, in no time, and ended in order."""
    now, prefill = [0.0], PrefillSpeed()
    steps = Steps(prefill, clock=lambda: now[0])
    numbers = [steps.planned(dict.fromkeys(counts, 0), counts) for counts in plans]
    for index in ends:
        now[0] += step_s
        steps.ended(numbers[index])
    return prefill


def test_a_step_says_how_fast_prompts_are_computed() -> None:
    assert measured({"a": 100}, ends=[0]).seconds(0, 100) == pytest.approx(1.0)


def test_a_step_that_was_planned_while_another_ran_is_timed_from_its_end() -> None:
    """As vLLM plans ahead. Steps of decoding between say nothing, but when they ended."""
    prefill = measured({"a": 100}, {"b": 1}, {"a": 100}, ends=[0, 1, 2])
    assert prefill.samples == 2
    assert prefill.seconds(0, 100) == pytest.approx(1.0)


def test_steps_that_say_nothing_of_prefill_are_not_measured() -> None:
    for counts in ({"a": 1, "b": 1}, {"a": 50, "b": 50}, {"a": 31}, {}):
        assert not measured(counts, ends=[0]).known
    assert not measured({"a": 100}, ends=[]).known, "it never ended"


# Errors


def test_whatever_a_look_raises_the_request_is_computed(store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's scheduler asks: an exception would end its engine."""
    engine = SmallEngine(store)
    tier = Requests(Reuse(store, NAMESPACE, [Part(BLOCK_BYTES)], 4), None)
    engine.run(Request("stored", list(range(30))))
    assert store.flush(10)

    def broken(ids: Sequence[BlockId]) -> list[str | None]:
        raise sqlite3.DatabaseError(f"database disk image is malformed ({len(ids)} blocks)")

    monkeypatch.setattr(store, "held", broken)
    engine.cached.clear()
    assert engine.run(Request("asked", list(range(30)))).stored_tokens == 0
    tier.meet(Request("asked", list(range(30))))
    context = SimpleNamespace(req_id="asked", get_offload_key_position=lambda key: 4)
    record = tier.record(bytes(8), context)
    assert record is not None and tier.has(record, "asked") is False
    engine.close()


# Remote tiers


class Bent:
    """A store whose remote tiers answer when they are told to."""

    def __init__(self, store: TieredStore) -> None:
        self.store = store
        self.answers = threading.Event()
        self.asked: list[Sequence[BlockId]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def remote_speed(self) -> Speed:
        return Speed(0.01, 1e9)

    def held(self, ids: Sequence[BlockId]) -> list[None]:
        return [None] * len(ids)

    def held_remotely(self, ids: Sequence[BlockId], timeout_s: float) -> list[str | None]:
        self.asked.append(ids)
        self.answers.wait(timeout_s)
        return ["disk"] * 3 + [None] * (len(ids) - 3)


def test_a_remote_tier_is_asked_beside_and_once(store: TieredStore) -> None:
    bent: Any = Bent(store)
    engine = SmallEngine(bent)
    request = Request("a", list(range(30)))
    assert engine.scheduler.match(request, 4) is None
    assert engine.scheduler.match(request, 4) is None
    bent.answers.set()
    deadline = time.monotonic() + 10
    while (found := engine.scheduler.match(request, 0)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert found == 12
    assert len(bent.asked) == 1 and len(bent.asked[0]) == 7
    engine.close()


def test_a_remote_tier_that_does_not_answer_is_not_waited_for(store: TieredStore) -> None:
    engine = SmallEngine(Bent(store))  # type: ignore[arg-type]
    engine.scheduler._probe._timeout_s = 0.05
    began = time.monotonic()
    while engine.scheduler.match(Request("a", list(range(30))), 0) is None:
        assert time.monotonic() - began < 10
        time.sleep(0.001)
    assert time.monotonic() - began < 5
    engine.close()


# Events


def three_blocks() -> Tracked:
    request = Request("a", list(range(12)), cache_salt="s")
    request.block_hashes = [bytes([i]) for i in range(3)]
    tracked = Tracked(request, OURS, 4)
    tracked.chain.extend()
    return tracked


def test_events_say_what_came_and_what_went() -> None:
    announcer, tracked = Announcer(1, on=True), three_blocks()
    keys = tracked.chain.keys
    for index in range(len(keys)):
        announcer.offered(tracked, index, [0])
    assert announcer.take() == [], "not before the store took it"
    announcer.saved(keys[:2])
    first, second = announcer.take()
    assert (first.came, first.hash, first.parent, first.cache_salt) == (True, b"\0", None, "s")
    assert (second.hash, second.parent, second.token_ids, second.cache_salt) == (b"\1", b"\0", (4, 5, 6, 7), None)
    announcer.found(tracked, [["disk"], [None], ["disk"]])
    assert [(event.came, event.hash) for event in announcer.take()] == [(False, b"\1"), (True, b"\2")]
    announcer.clear()
    assert [(event.came, event.hash) for event in announcer.take()] == [(False, b"\0"), (False, b"\2")]


def test_events_tell_each_groups_share_of_a_block() -> None:
    """Of two groups and two workers: a share is there when both workers have it."""
    announcer, tracked = Announcer(2, on=True), three_blocks()
    keys = tracked.chain.keys

    def taken() -> list[tuple[bool, bytes, int]]:
        return [(event.came, event.hash, event.group) for event in announcer.take()]

    announcer.offered(tracked, 0, [0])  # the second group's window has moved on
    announcer.offered(tracked, 1, [0, 1])
    announcer.saved(keys[:2])
    assert taken() == [(True, b"\0", 0), (True, b"\1", 0), (True, b"\1", 1)]
    announcer.found(tracked, [["disk", None, "disk", None], ["disk", "disk", "disk", None], ["ram", "disk"] * 2])
    assert taken() == [(False, b"\1", 1), (True, b"\2", 0), (True, b"\2", 1)]
    announcer.gone(keys[2])
    assert taken() == [(False, b"\2", 0), (False, b"\2", 1)]
    announcer.clear()
    assert taken() == [(False, b"\0", 0), (False, b"\1", 0)]


def test_of_several_workers_the_least_counts() -> None:
    one = Outcome({"a": 3}, {"a"}, [BlockKey(b"x"), BlockKey(b"y")], {"disk": Speed(0.0, 5.0)}, step=7)
    two = Outcome({"a": 2, "b": 1}, set(), [BlockKey(b"y")], {"disk": Speed(0.0, 4.0)}, step=7)
    both = one.merge(two)
    assert (both.late, both.step) == ({"a"}, 7)
    assert both.failed == {"a": 2, "b": 1}
    assert both.saved == [b"y"]
    assert both.speeds["disk"].bytes_per_s == 4.0


# One process, two sides


def test_both_sides_of_one_process_use_one_store(tmp_path: Path) -> None:
    config = StoreConfig(
        path=tmp_path / "s", ram_bytes=1 << 20, disk_bytes=16 << 20, key_file=tmp_path / "k" / "k.json"
    )
    worker = SharedStore(config, kv_dtype="float32", buffer_bytes=1 << 20, moves_kv=True)
    scheduler = SharedStore(config, kv_dtype="float32", buffer_bytes=1 << 20, moves_kv=False)
    assert scheduler.store is worker.store
    worker.close()
    worker.close()
    assert scheduler.store.held([BlockId(BlockKey(bytes(32)), 0)]) == [None], "still open"
    scheduler.close()
    alone = SharedStore(config, kv_dtype="float32", buffer_bytes=1 << 20, moves_kv=False)
    assert list(alone.store.stats().handles) == ["disk"], "in another process a memory tier would be empty"
    alone.close()
    with pytest.raises(ConfigError, match="ram alone"):
        SharedStore(StoreConfig(ram_bytes=1 << 20), kv_dtype="float32", buffer_bytes=1 << 20, moves_kv=False)


def test_several_workers_have_a_block_only_together(store: TieredStore) -> None:
    """Each keeps its share under a number of its own."""
    engine = SmallEngine(store)
    facts = Facts("test", "float64", "test", (BLOCK_BYTES,))
    two = type(engine.scheduler)(store, FULL, 4, namespace=NAMESPACE, facts=facts, workers=2)
    request = Request("a", list(range(30)))
    engine.add(request)
    for _ in range(8):
        engine.step()
    assert store.flush(10)
    assert two.match(Request("b", list(range(30))), 0) == 0, "the second worker has nothing"
    second = type(engine.worker)(store, engine.worker._pages, part=1)
    table = request.tables[0]
    tracked = engine.scheduler._tracked["a"]
    second.save([Move(tracked.chain.record(index, 0, BLOCK_BYTES), table[index]) for index in range(7)])
    assert store.flush(10)
    assert two.match(Request("c", list(range(30))), 0) == 28
    second.close()
    two.close()
    engine.close()
