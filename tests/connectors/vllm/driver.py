"""A vLLM engine as a process of its own, told what to do by lines of JSON: one command in, one answer out.

Runs under vLLM's Python, which has neither pytest nor the tests' packages. Started with a JSON object: model, options
of the store (or null for vLLM alone), and vLLM's own arguments.
"""
# ruff: noqa: PLC0415 - vLLM may only be imported after its environment is set, and in the main process

import json
import os
import sys
import time
from typing import Any

ANSWER = "answer: "  # vLLM prints, too
PATIENCE_S = 30.0  # as in harness/waiting.py

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def transfer(options: dict[str, Any]) -> Any:
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector="KvireConnector",
        kv_connector_module_path="kvire.connectors.vllm",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=options,
    )


def events_to(endpoint: str | None) -> dict[str, Any]:
    from vllm.config import KVEventsConfig

    if endpoint is None:
        return {}
    return {"kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint)}


def listen(endpoint: str) -> Any:
    import zmq

    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.connect(endpoint)
    socket.subscribe("")
    return socket


def margin(choices: Any) -> float:
    best = sorted((choice.logprob for choice in choices.values()), reverse=True)
    return float(best[0] - best[1])


class Driver:
    def __init__(self, start: dict[str, Any]) -> None:
        from vllm import LLM

        options, endpoint = start["options"], start.get("events")
        self.events_of = listen(endpoint) if endpoint else None
        arguments = {} if options is None else {"kv_transfer_config": transfer(options)}
        arguments |= events_to(endpoint)
        self.llm = LLM(
            start["model"],
            enforce_eager=True,
            gpu_memory_utilization=0.1,
            kv_cache_memory_bytes=start.get("kv_bytes", 64 << 20),
            disable_log_stats=False,
            **{"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 2048}
            | start.get("arguments", {})
            | arguments
            | events_to(endpoint),
        )
        self.number = 0

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int = 8,
        salts: list[str | None] | None = None,
        aborts: dict[str, int] | None = None,
        *,
        gaps: bool = False,
    ) -> dict[str, Any]:
        """All at once. aborts: after so many steps, the prompt of that number. gaps: also tell how much likelier each
        token was than the next best one, in nat.
        """
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        began, names = time.perf_counter(), {}
        for i, prompt in enumerate(prompts):
            wanted: dict[str, Any] = {"prompt_token_ids": prompt}
            if salts and salts[i]:
                wanted["cache_salt"] = salts[i]
            self.number += 1
            sampling = SamplingParams(
                temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=2 if gaps else None
            )
            names[str(self.number)] = names[engine.add_request(str(self.number), wanted, sampling)] = i
        tokens: list[list[int]] = [[] for _ in prompts]
        cached: list[int | None] = [None] * len(prompts)
        first: list[float | None] = [None] * len(prompts)
        margins: list[list[float]] = [[] for _ in prompts]
        steps = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                i = names[output.request_id]
                tokens[i] = list(output.outputs[0].token_ids)
                cached[i] = output.num_cached_tokens
                if gaps:
                    margins[i] = [margin(choices) for choices in output.outputs[0].logprobs]
                first[i] = first[i] or time.perf_counter() - began
            steps += 1
            for number, after in (aborts or {}).items():
                if after == steps:
                    engine.abort_request([name for name, i in names.items() if i == int(number)])
        seconds = time.perf_counter() - began
        return {"tokens": tokens, "cached": cached, "first_s": first, "seconds": seconds, "gaps": margins}

    def leave(self, prompts: list[list[int]], when: str) -> dict[str, Any]:
        """Ask for long answers to all at once, and abort all as soon as vLLM's scheduler has one that is "asked" for,
        "seated", "preempted" or "loading"; what is left of them then.
        """
        from vllm import SamplingParams
        from vllm.v1.request import RequestStatus

        statuses = {
            "asked": RequestStatus.WAITING, "seated": RequestStatus.RUNNING,
            "preempted": RequestStatus.PREEMPTED, "loading": RequestStatus.WAITING_FOR_REMOTE_KVS,
        }  # fmt: skip
        engine, scheduler, names = self.llm.llm_engine, self._scheduler(), []
        sampling = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True, detokenize=False)
        for prompt in prompts:
            self.number += 1
            names.append(engine.add_request(str(self.number), {"prompt_token_ids": prompt}, sampling))
        while not any(request.status is statuses[when] for request in scheduler.requests.values()):
            assert engine.has_unfinished_requests(), f"none of them was ever {when}"
            engine.step()
        engine.abort_request(names)
        end = time.monotonic() + PATIENCE_S
        while any(self._left().values()) and time.monotonic() < end:
            engine.step()
        return self._left()

    def _scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def _left(self) -> dict[str, int]:
        """What vLLM and the connector have of requests; the engine runs in this process."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        scheduler = self._scheduler()
        pool, side = scheduler.kv_cache_manager.block_pool, scheduler.connector._scheduler
        return {
            "requests": len(scheduler.requests),
            "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            "tracked": len(side._tracked) + len(side._excluded),
            "loads": len(get_kv_transfer_group()._worker._loading),
        }

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            if hasattr(metric, "value"):
                labels = {k: v for k, v in metric.labels.items() if k not in {"model_name", "engine"}}
                name = metric.name.removeprefix("vllm:") + "".join(f" {value}" for value in labels.values())
                found[name] = found.get(name, 0) + metric.value
        return found

    def events(self) -> list[list[Any]]:
        """Events about the store's blocks that were published until now: [kind, hash, parent, tokens, group's index,
        kind and window].
        """
        from msgspec.msgpack import Decoder
        from vllm.distributed.kv_events import KVEventBatch

        found: list[list[Any]] = []
        while self.events_of.poll(500):
            for event in Decoder(type=KVEventBatch).decode(self.events_of.recv_multipart()[-1]).events:
                if getattr(event, "ownership", None) == "kvire":
                    parent, tokens = getattr(event, "parent_block_hash", None), getattr(event, "token_ids", [])
                    kind = getattr(event, "kv_cache_spec_kind", None)
                    window = getattr(event, "kv_cache_spec_sliding_window", None)
                    found.append(
                        [type(event).__name__, event.block_hashes[0], parent, tokens, event.group_idx, kind, window]
                    )
        return found

    def forget_device(self, *, connector: bool = False) -> bool:
        """Empty vLLM's own prefix cache; the connector's as well, if asked."""
        return bool(self.llm.reset_prefix_cache(reset_connector=connector))


def main() -> None:
    driver = Driver(json.loads(sys.argv[1]))
    print(ANSWER + json.dumps("ready"), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("do")
        print(ANSWER + json.dumps(getattr(driver, name)(**command)), flush=True)


if __name__ == "__main__":
    main()
