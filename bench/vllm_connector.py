"""Gain and cost of the store under vLLM: vLLM alone beside vLLM with KvireConnector.

Both run all the time and are asked in turns; the cost is that of prompts without any reuse.

    KVIRE_VLLM_PYTHON=... python bench/vllm_connector.py [--rounds 3] [--documents 3] [--json FILE]

A round asks both a question about documents that neither has seen (no reuse: TTFT), and sends both
sixteen short prompts at once (no reuse: throughput). Then vLLM alone is asked another question
about each document, which its own prefix cache knows; and vLLM with the store is ended, started
again, and asked the same: only the disk knows it. Model: SmolLM2-135M in float32; answers of both
are compared word for word. docs/vllm.md says how to set up the Python.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peers
import reporting
import workloads
from limits import Roofline
from peers import Command, Server
from reporting import Bar, figure, ratios

from kvire.bench.arms.server import free_port
from kvire.models.resolve import resolve

MODEL = "smollm2"
DOC_WORDS = 1622  # 1,668 tokens with the question
AT_ONCE = 16
ALONE, STORED = "vLLM alone", "vLLM with the store"
WRITTEN_S = 3.0  # what was computed is on the disk by then


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers end as well
    folder = resolve(MODEL)
    roofline = Roofline.measure(folder)
    found: dict[str, list[float]] = {}
    pairs: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory() as place:
        store = Path(place)
        with running(folder, None) as alone:
            warm_up(alone)
            for number in range(options.rounds):
                one_round(alone, folder, store, options.documents, number, found, pairs)
    roofline = roofline.measured_again()
    different = sum(one != other for one, other in pairs)
    report = {
        "machine": reporting.describe(),
        "limits": roofline.describe(),
        "break_even_mb_s": roofline.break_even_mb_s(1e3 / statistics.median(found["cold ms per token"])),
        "answers_compared": len(pairs),
        "answers_different": different,
        "table": rows(found),
        "samples": found,
    }
    reporting.write(options.json, report)
    print(f"{len(pairs)} answers compared, {different} different")


def one_round(
    alone: Server,
    folder: Path,
    store: Path,
    documents: int,
    number: int,
    found: dict[str, list[float]],
    pairs: list[tuple[str, str]],
) -> None:
    seeds = [1000 * (number + 1) + i for i in range(documents)]
    with running(folder, store) as stored:
        warm_up(stored)
        for i, seed in enumerate(seeds):
            order = (alone, stored) if (i + number) % 2 else (stored, alone)
            answers = {server.name: ask(server, seed, 0) for server in order}
            pairs.append((answers[ALONE]["text"], answers[STORED]["text"]))
            add(found, "cold ms", answers[ALONE]["ttft_ms"])
            add(found, "cold with the store ms", answers[STORED]["ttft_ms"])
            add(found, "cold ms per token", answers[ALONE]["ttft_ms"] / answers[ALONE]["prompt"])
        for turn in range(2):
            for server in (alone, stored) if turn else (stored, alone):
                add(found, f"{server.name}, tok/s", many(server, 7_000_000 + 2 * number + turn))
        warm = [ask(alone, seed, 1) for seed in seeds]
        time.sleep(WRITTEN_S)
    with running(folder, store) as again:
        warm_up(again)
        for seed, known in zip(seeds, warm, strict=True):
            answer = ask(again, seed, 1)
            pairs.append((known["text"], answer["text"]))
            add(found, "device warm ms", known["ttft_ms"])
            add(found, "after a restart ms", answer["ttft_ms"])
            add(found, "tokens loaded", answer["cached"] or 0)
    print(f"round {number + 1}: " + ", ".join(f"{k} {number(v[-1])}" for k, v in found.items()), flush=True)


def rows(found: dict[str, list[float]]) -> list[dict[str, Any]]:
    cold, warm, again = found["cold ms"], found["device warm ms"], found["after a restart ms"]
    alone = reporting.medians({"vLLM alone: cold": cold, "prefix on the device": warm}, "ms")
    speed = reporting.medians({name: found[f"{name}, tok/s"] for name in (ALONE, STORED)}, "tok/s")
    kept = ratios(found["cold with the store ms"], cold)
    output = ratios(found[f"{STORED}, tok/s"], found[f"{ALONE}, tok/s"])
    to_device = ratios(again, warm)
    return [
        figure("docqa after a restart: TTFT", "ms", again, baseline=alone),
        figure("after a restart: TTFT / cold", "x", ratios(again, cold), baseline=alone, bar=Bar("<=", 0.125)),
        figure("after a restart: TTFT / device", "x", to_device, baseline=alone, bar=Bar("<=", 1.3)),
        figure("nothing to reuse: TTFT with / without", "x", kept, baseline=alone, bar=Bar("<=", 1.03)),
        figure("nothing to reuse: output with / without", "x", output, baseline=speed, bar=Bar(">=", 0.97)),
    ]


def add(found: dict[str, list[float]], name: str, value: float) -> None:
    found.setdefault(name, []).append(value)


def ask(server: Server, seed: int, question: int) -> workloads.Row:
    content = f"Report {seed}:\n{workloads.text(seed, DOC_WORDS)}\n\n{workloads.QUESTIONS[question]}"
    return workloads.chat(_told(server, 16), [workloads.message("user", content)])


def many(server: Server, seed: int) -> float:
    """Output tokens a second of AT_ONCE short prompts."""
    prompts = [[workloads.message("user", workloads.text(seed + 1000 * i, 60))] for i in range(AT_ONCE)]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        answers = list(threads.map(lambda prompt: workloads.chat(_told(server, 64), prompt), prompts))
    return sum(row["out"] for row in answers) / max(row["e2e_ms"] for row in answers) * 1e3


def warm_up(server: Server) -> None:
    """The first request of a process pays for what is made once."""
    workloads.chat(_told(server, 8), [workloads.message("user", workloads.text(os.getpid(), 200))])


@contextmanager
def running(folder: Path, store: Path | None) -> Iterator[Server]:
    """A server of vLLM's, with the store or alone."""
    port = free_port()
    python = os.environ.get("KVIRE_VLLM_PYTHON")
    if python is None:
        sys.exit("set KVIRE_VLLM_PYTHON to a Python that can import vLLM (docs/vllm.md)")
    words: list[str | Path] = [
        python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        folder,
        "--port",
        str(port),
    ]
    words += ["--dtype", "float32", "--max-model-len", "8192", "--enforce-eager", "--gpu-memory-utilization", "0.2"]
    words += ["--enable-prompt-tokens-details"]
    if store is not None:
        words += ["--kv-transfer-config", json.dumps(transfer(store))]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",  # with a connector it would be one more, and so another number of threads
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(reporting.ROOT / "src"),
    }
    command = Command(words, str(folder), reporting.ROOT, environment)
    with peers.running(ALONE if store is None else STORED, command, port) as server:
        yield server


def transfer(store: Path) -> dict[str, Any]:
    return {
        "kv_connector": "KvireConnector",
        "kv_connector_module_path": "kvire.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "store": str(store / "store"),
            "key_file": str(store / "keys" / "keyring.json"),
            "disk_size": "4GB",
        },
    }


def _told(server: Server, max_tokens: int) -> argparse.Namespace:
    return argparse.Namespace(url=server.url, model=server.model, max_tokens=max_tokens)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--documents", type=int, default=3)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
