"""Kvire's connector beside vLLM's other KV stores: a prompt after a restart.

    KVIRE_VLLM_PYTHON=... python bench/vllm_tiers.py [--rounds 3] [--tokens 1668] [--json FILE]

Each store has an engine of its own (SmolLM2-135M, float32), which computes a prompt of random
tokens; a second engine, started on the blocks that the first one stored, is asked the same, or
refuses to start. Time to the first token, without a server around it.

LMCache is measured if KVIRE_LMCACHE_PYTHON names a Python that imports vllm and lmcache.
"""

import argparse
import os
import random
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import reporting
from reporting import figure

sys.path.append(str(reporting.ROOT / "tests"))

from connectors.vllm.engine_process import PYTHON, EngineGoneError, Vllm

from kvire.models.resolve import resolve

LMCACHE_PYTHON = "KVIRE_LMCACHE_PYTHON"
RAM_BYTES = 1 << 30
LMCACHE = {
    "LMCACHE_LOCAL_CPU": "True", "LMCACHE_MAX_LOCAL_CPU_SIZE": "1", "LMCACHE_CHUNK_SIZE": "32",
    "LMCACHE_MAX_LOCAL_DISK_SIZE": "4", "LMCACHE_TRACK_USAGE": "false",
}  # fmt: skip


def ways(folder: Path) -> dict[str, dict[str, Any] | None]:
    """Each by name, as kv_transfer_config; None: nothing."""
    store = {"store": str(folder / "store"), "key_file": str(folder / "keys" / "k.json"), "disk_size": "4GB"}
    tiers = [{"type": "fs", "root_dir": str(folder / "fs")}]
    return {
        "vLLM alone": None,
        "KvireConnector": {
            "kv_connector": "KvireConnector",
            "kv_connector_module_path": "kvire.connectors.vllm",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": store,
        },
        "OffloadingConnector": {
            "kv_connector": "OffloadingConnector",
            "kv_connector_extra_config": {"cpu_bytes_to_use": RAM_BYTES},
        },
        "OffloadingConnector, fs tier": {
            "kv_connector": "OffloadingConnector",
            "kv_connector_extra_config": {
                "spec_name": "TieringOffloadingSpec",
                "cpu_bytes_to_use": RAM_BYTES,
                "secondary_tiers": tiers,
            },
        },
        "SimpleCPUOffloadConnector": {
            "kv_connector": "SimpleCPUOffloadConnector",
            "kv_connector_extra_config": {"cpu_bytes_to_use": RAM_BYTES},
        },
        "ExampleConnector": {
            "kv_connector": "ExampleConnector",
            "kv_connector_extra_config": {"shared_storage_path": str(folder / "example")},
        },
        "LMCacheConnectorV1": {"kv_connector": "LMCacheConnectorV1"},
    }


def main() -> None:
    options = _options()
    if PYTHON not in os.environ:
        sys.exit(f"set {PYTHON} to a Python that can import vLLM (docs/vllm.md)")
    found: dict[str, dict[str, list[float]]] = {}
    refused: dict[str, str] = {}
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as place:
            for name, transfer in ways(Path(place)).items():
                if name in refused:
                    continue
                try:
                    told = one_way(name, transfer, Path(place), options.tokens, number)
                except EngineGoneError as error:
                    refused[name] = last_error(str(error))
                    print(f"{name}: {refused[name]}", flush=True)
                    continue
                for key, value in told.items():
                    found.setdefault(name, {}).setdefault(key, []).append(value)
                print(f"{name}: " + ", ".join(f"{k} {number(v)}" for k, v in told.items()), flush=True)
    table = [
        figure(f"{name}: {key}", key.rsplit(" ", 1)[1], values)
        for name, by_key in found.items()
        for key, values in by_key.items()
    ]
    reporting.write(options.json, {"machine": reporting.describe(), "table": table, "refused": refused})


def one_way(name: str, transfer: dict[str, Any] | None, folder: Path, tokens: int, number: int) -> dict[str, float]:
    """Cold, warm on the device, and by the next engine."""
    dice = random.Random(number)
    prompt = [dice.randrange(1000, 40_000) for _ in range(tokens)]
    with started(name, transfer, folder) as first:
        cold, device = (asked(first, prompt) for _ in range(2))
    with started(name, transfer, folder) as second:
        again = asked(second, prompt)
    return {
        "cold ms": cold["first_s"][0] * 1e3,
        "device ms": device["first_s"][0] * 1e3,
        "after a restart ms": again["first_s"][0] * 1e3,
        "found after a restart tokens": again["cached"][0] or 0,
    }


def asked(engine: Vllm, prompt: list[int]) -> Any:
    answer = engine("generate", prompts=[prompt], max_tokens=2)
    engine("generate", prompts=[prompt[:8]], max_tokens=2)  # what is saved when a request is over is saved by now
    return answer


def started(name: str, transfer: dict[str, Any] | None, folder: Path) -> Vllm:
    """An engine that has answered something: the first request of a process pays for what is made
    once.
    """
    more = {} if transfer is None else {"kv_transfer_config": transfer | {"kv_role": "kv_both"}}
    is_lmcache = name.startswith("LMCache")
    if is_lmcache and LMCACHE_PYTHON not in os.environ:
        raise EngineGoneError(f"Error: not tried, {LMCACHE_PYTHON} is not set")
    engine = Vllm(
        resolve("smollm2"), None, folder / f"{name}.log", kv_bytes=1 << 30,
        python=os.environ[LMCACHE_PYTHON] if is_lmcache else None,
        arguments={"block_size": 32, "max_model_len": 8192, **more},
        environment={"VLLM_CPU_NUM_OF_RESERVED_CPU": "1", "OMP_NUM_THREADS": str(os.cpu_count() or 1)}
        | ({**LMCACHE, "LMCACHE_LOCAL_DISK": f"file://{folder / 'lmcache'}/"} if is_lmcache else {}),
    )  # fmt: skip
    engine("generate", prompts=[[5] * 200], max_tokens=2)
    return engine


def last_error(log: str) -> str:
    """The last exception that a log shows, or its last line."""
    errors = re.findall(r"^(?:\[rank\d+\]: )?(\w*(?:Error|Exception)\b.*)", log, re.MULTILINE)
    return (errors or log.strip().splitlines() or [""])[-1][:300]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1668)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
