"""vLLM's real tiered offloading over the store, as a process of its own: one command in, one answer out.

Everything but the GPU is vLLM's: its requests and hashes, the connector's scheduler side, the manager of the tiers and
its CPU tier in shared memory. What a GPU would bring into a row of the CPU tier is made up here, as bytes that
depend on all tokens up to the block's end; so whatever is found later can be checked byte by byte.
"""
# ruff: noqa: PLC0415 - vLLM may only be imported after its environment is set

import json
import os
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

ANSWER = "answer: "  # vLLM prints, too
TOKENS, HEADS, WIDTH, LAYERS = 16, 2, 32, 2
TIER = {"type": "KvireTier", "module_path": "kvire.connectors.vllm.secondary"}
MOST_STEPS, STEP_S = 2000, 0.01

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


class Engine:
    """One engine's scheduler side. chunks: of its CPU tier. facts: what its workers say that differs."""

    def __init__(
        self, model: str, options: dict[str, Any], *, chunks: int = 64, algorithm: str = "sha256",
        facts: dict[str, str] | None = None, extra: dict[str, Any] | None = None, connector: str = "KvireOffloading",
        groups: list[int | None] | None = None, config: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        from kvire.connectors.vllm.connector import KvireFacts
        from kvire.connectors.vllm.messages import Facts

        page_bytes = 2 * TOKENS * HEADS * WIDTH * 4 * LAYERS * len(groups or [None])
        tiers = {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": chunks * page_bytes,
            "secondary_tiers": [TIER | options],
        }
        transfer = KVTransferConfig(
            kv_connector=f"{connector}Connector",
            kv_connector_module_path="kvire.connectors.vllm.secondary",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            engine_id=f"kvire-test-{os.getpid()}-{time.monotonic_ns()}",
            kv_connector_extra_config=tiers | (extra or {}),
        )
        wanted = EngineArgs(
            model, dtype="float32", skip_tokenizer_init=True, max_model_len=2048, block_size=TOKENS,
            enforce_eager=True, kv_transfer_config=transfer, **config or {},
        ).create_engine_config()  # fmt: skip
        hash_of = get_hash_fn_by_name(algorithm)
        init_none_hash(hash_of)
        self.hasher = get_request_block_hasher(TOKENS, hash_of)
        self.connector = self._connector(connector, wanted, groups or [None])
        self.scheduler = self.connector.connector_scheduler
        self.manager = self.scheduler.manager
        self.number = 0
        self.longest_s = 0.0  # that vLLM's scheduler thread was ever kept by a call
        said = Facts("attention=test", "float32", f"full layers={LAYERS} test window=0", (page_bytes,))
        said = Facts(*(getattr(said, name) if name not in (facts or {}) else facts[name] for name in said.__slots__))
        self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): KvireFacts(said)})

    def _connector(self, name: str, wanted: Any, windows: list[int | None]) -> Any:
        import torch
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

        common = {"block_size": TOKENS, "num_kv_heads": HEADS, "head_size": WIDTH, "dtype": torch.float32}
        specs = [
            FullAttentionSpec(**common) if window is None else SlidingWindowSpec(**common, sliding_window=window)
            for window in windows
        ]
        cache = KVCacheConfig(
            num_blocks=100,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec([f"layer.{number}.{i}" for i in range(LAYERS)], spec)
                for number, spec in enumerate(specs)
            ],
        )
        assert name in {"KvireOffloading", "Offloading"}
        return KVConnectorFactory.create_connector(wanted, KVConnectorRole.SCHEDULER, cache)

    def request(self, tokens: list[int], **more: Any) -> tuple[Any, Any, list[bytes]]:
        """A request that vLLM met: itself, its context, and the keys of its blocks, group by group."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self.number += 1
        if "lora" in more:
            from vllm.lora.request import LoRARequest

            more["lora_request"] = LoRARequest(more.pop("lora"), 1, "/nowhere")
        if "image" in more:
            from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

            name = more.pop("image")
            more["mm_features"] = [MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset=0, length=4))]
        request = Request(
            f"r{self.number}", tokens, SamplingParams(max_tokens=1), None, block_hasher=self.hasher, **more
        )
        self.connector.on_new_request(request)
        state = self.scheduler._req_status[request.request_id]
        state.update_offload_keys()
        return request, state.req_context, [key for group in state.group_states for key in group.offload_keys]

    def call(self, what: Callable[..., Any], *arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return what(*arguments)
        finally:
            self.longest_s = max(self.longest_s, time.perf_counter() - began)

    def step(self) -> None:
        from vllm.v1.kv_offload.base import ScheduleEndContext

        self.call(self.manager.on_schedule_end, ScheduleEndContext((), ()))

    def finish(self, context: Any) -> None:
        self.call(self.manager.on_request_finished, context)
        self.scheduler._req_status.pop(context.req_id, None)

    def rows(self, ids: Any, values: list[bytes] | None = None) -> list[bytes]:
        """Of the CPU tier; `values` are written first."""
        import numpy as np

        rows = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        for row, value in zip(ids, values or (), strict=bool(values)):
            rows[row] = np.frombuffer(value, np.uint8)
        return [rows[row].tobytes() for row in ids]

    def content(self, tokens: list[int], **more: Any) -> list[bytes]:
        """What belongs into each block of a prompt, group by group."""
        size = self.manager.primary_tier.get_kv_memoryview().strides[0]
        chunk_tokens = self.scheduler.config.kv_group_configs[0].tokens_per_chunk
        found = []
        for group in range(len(self.scheduler.config.kv_group_configs)):
            for end in range(chunk_tokens, len(tokens) + 1, chunk_tokens):
                seed = sha256(json.dumps([group, tokens[:end], more]).encode()).digest()
                found.append((seed * (size // len(seed) + 1))[:size])
        return found

    def wait(self) -> None:
        for _ in range(MOST_STEPS):
            if not self.manager.has_pending_work():
                return
            self.step()
            time.sleep(STEP_S)
        raise TimeoutError("jobs that never end")


class Driver:
    def __init__(self, model: str) -> None:
        self.model = model
        self.engines: dict[str, Engine] = {}

    def open(self, name: str, options: dict[str, Any], **more: Any) -> str:
        """What was wrong; "" for nothing."""
        try:
            self.engines[name] = Engine(self.model, options, **more)
        except Exception as error:  # noqa: BLE001 - told to the test
            return f"{type(error).__name__}: {error}"
        return ""

    def store(self, name: str, prompts: list[list[int]], **more: Any) -> int:
        """Blocks that vLLM brought into its CPU tier, and offered to the tiers behind it."""
        engine, stored = self.engines[name], 0
        for tokens in prompts:
            _, context, keys = engine.request(tokens, **more)
            output = engine.call(engine.manager.prepare_store, keys, context)
            if output is not None and output.keys_to_store:
                contents = dict(zip(keys, engine.content(tokens, **more), strict=True))
                engine.rows(output.store_spec.chunk_ids, [contents[key] for key in output.keys_to_store])
                engine.call(engine.manager.complete_store, output.keys_to_store, context)
                stored += len(output.keys_to_store)
            engine.finish(context)
            engine.step()
        return stored

    def find(self, name: str, prompts: list[list[int]], **more: Any) -> list[int]:
        """Leading blocks of each prompt that vLLM got; wrong bytes are an error."""
        from vllm.v1.kv_offload.base import LookupResult

        engine, found = self.engines[name], []
        for tokens in prompts:
            _, context, keys = engine.request(tokens, **more)
            results: list[Any] = []
            for _ in range(MOST_STEPS):
                results = [engine.call(engine.manager.lookup, key, context) for key in keys]
                engine.step()
                if all(one in {LookupResult.HIT, LookupResult.MISS} for one in results):
                    break
                time.sleep(STEP_S)
            here = next((i for i, one in enumerate(results) if one is not LookupResult.HIT), len(results))
            spec = engine.manager.prepare_load(keys[:here], context)
            assert engine.rows(spec.chunk_ids) == engine.content(tokens, **more)[:here], "wrong bytes"
            engine.manager.complete_load(keys[:here], context)
            engine.finish(context)
            found.append(here)
        return found

    def give_up(self, name: str, prompts: list[list[int]], **more: Any) -> None:
        """Ask for prompts, and cancel them as soon as their loads have begun."""
        engine = self.engines[name]
        for tokens in prompts:
            _, context, keys = engine.request(tokens, **more)
            for key in keys:
                engine.call(engine.manager.lookup, key, context)
            engine.step()
            engine.finish(context)

    def settle(self, name: str, timeout_s: float = 20) -> bool:
        """All jobs are over, and all that was saved is in its tiers."""
        engine = self.engines[name]
        engine.wait()
        return all(tier._store.flush(timeout_s) for tier in engine.manager.secondary_tiers)

    def evict(self, name: str, count: int) -> None:
        """Fill the CPU tier with other things, so that what was in it is gone."""
        self.store(name, [[1000 + self.engines[name].number + i] * TOKENS for i in range(count)])
        self.settle(name)

    def reset(self, name: str) -> None:
        self.engines[name].manager.reset_cache()

    def say_how_fast(self, name: str, token_s: float, bytes_per_s: float) -> None:
        """What a token is said to take to compute, and how fast every tier of the store is said to be."""
        from kvire.plan.cost import PrefillSpeed, Speed

        for tier in self.engines[name].manager.secondary_tiers:
            tier._requests._reuse.prefill = PrefillSpeed(token_s)
            tier._requests._reuse.measured({"disk": Speed(0.0, bytes_per_s, 1)})

    def longest_s(self, name: str) -> float:
        return self.engines[name].longest_s

    def stats(self, name: str) -> dict[str, float]:
        """The tier's own counters since the last call, checked against what vLLM's registry was told of."""
        engine = self.engines[name]
        for tier in engine.manager.secondary_tiers:
            tier._transfers._fetcher._tiers_due = 0.0
        told = type(engine.manager.secondary_tiers[0]).build_metric_definitions({})
        found = {}
        for metric, values in engine.manager.get_stats().data["data"].items():
            if metric in told:
                for labels, amount in values.items():
                    assert len(labels) == len(told[metric].labelnames)
                    found[" ".join([metric.removeprefix("vllm:kvire_tier_"), *labels])] = amount
        return found

    def close(self, name: str) -> bool:
        """Shut down, as vLLM does; whether its CPU tier is gone from shared memory."""
        engine = self.engines.pop(name)
        place = Path(engine.manager.primary_tier._mmap_region.mmap_path)
        assert place.exists()
        engine.connector.shutdown()
        return not place.exists()


def main() -> None:
    driver = Driver(sys.argv[1])
    print(ANSWER + json.dumps("ready"), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("do")
        print(ANSWER + json.dumps(getattr(driver, name)(**command)), flush=True)


if __name__ == "__main__":
    main()
