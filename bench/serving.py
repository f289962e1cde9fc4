"""The server beside llama.cpp's and vLLM's, interleaved: warm TTFT, sharing, decoding, memory.

    python bench/serving.py [--rounds 5] [--json FILE] [--peers DIR] [--without llama.cpp vLLM ...]

All servers run all the time; one is asked at a time (idle, each takes about one hundredth of a
core). A round runs every workload on every server, the order of servers turned round from one round
to the next. Seeds are new in every round, so what is called cold was never seen, save for the few
words with which the chat template begins every prompt. The first round is short and warms
everything up; each run begins with one short request that is not measured.

Peers take part if DIR holds their starters and .peers their environments; else they are skipped,
and the report says so. They are driven by DIR/load.py, which they share, or by workloads.py if that
is missing. Weights are float32 in Kvire and vLLM and four-bit in llama.cpp.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import peers
import reporting
import workloads
from limits import Roofline
from peers import Command, MissingPeerError, Server
from serving_rows import KVIRE, LLAMA, VLLM, VLLM_ALL, Row, Samples, memory, rows_of

from kvire.bench.arms.server import free_port
from kvire.bench.figures import number
from kvire.models.resolve import resolve

MODEL = "smollm2"
KV_MEMORY = "1GiB"  # 23,300 tokens in float32; vLLM gets twice that, llama.cpp 3 GiB
CONCURRENCY = 16
OWN_CLIENT = Path(workloads.__file__)
RUN_TIMEOUT_S = 900


@dataclass(frozen=True)
class Workload:
    """What the client is told.

    own: only workloads.py knows it.
    """

    name: str
    work: str
    options: tuple[str, ...] = ()
    own: bool = False


MANY = ("--concurrency", str(CONCURRENCY))
WORKLOADS = (
    Workload("docqa", "docqa"),
    Workload("multiturn", "multiturn"),
    Workload("shared", "shared", ("--doc-words", "300", "--max-tokens", "64", *MANY)),
    Workload("16 at once", "shared", ("--doc-words", "0", "--max-tokens", "128", *MANY)),
    Workload("again", "again", ("--doc-words", "790"), own=True),
)
WARM_UP = ("--doc-words", "200", "--max-tokens", "8")  # argparse takes the last of two values


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers end as well
    folder = resolve(MODEL)
    roofline = Roofline.measure(folder)
    samples: Samples = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    runs: list[dict[str, Any]] = []
    with ExitStack() as stack:
        servers, skipped = start(stack, options, folder)
        for i in range(options.rounds + 1):
            for workload in WORKLOADS:
                for server in servers if i % 2 else reversed(servers):
                    rows = drive(workload, server, options.peers, i)
                    if i:
                        runs.append({"round": i, "workload": workload.name, "system": server.name, "rows": rows})
                        for name, value in measures(workload, rows).items():
                            samples[workload.name][server.name][name].append(value)
        memory_mb = {server.name: server.memory_mb() for server in servers}
    roofline = roofline.measured_again()
    table = [*rows_of(samples, runs, roofline), memory(memory_mb[KVIRE], folder, KV_MEMORY)]
    prefill = statistics.median(samples["docqa"][KVIRE]["prefill tok/s"])
    reporting.write(
        options.json,
        {
            "machine": reporting.describe(),
            "limits": roofline.describe(),
            "break_even_mb_s": roofline.break_even_mb_s(prefill),
            "skipped": skipped,
            "memory_mb": memory_mb,
            "table": table,
            "samples": samples,
            "runs": runs,
        },
    )


def start(stack: ExitStack, options: argparse.Namespace, folder: Path) -> tuple[list[Server], list[str]]:
    """Kvire and every peer that is here; why others are not."""
    ports = [free_port() for _ in range(4)]
    makers = {
        KVIRE: lambda port: peers.kvire(port, MODEL, KV_MEMORY),
        LLAMA: lambda port: peers.llama_cpp(port, options.peers, CONCURRENCY),
        VLLM: lambda port: peers.vllm(port, options.peers, folder, all_cores=False),
        VLLM_ALL: lambda port: peers.vllm(port, options.peers, folder, all_cores=True),
    }
    servers, skipped = [], []
    for (name, make), port in zip(makers.items(), ports, strict=True):
        if name in options.without:
            skipped.append(f"{name}: left out by --without")
            continue
        try:
            command: Command = make(port)
        except MissingPeerError as missing:
            skipped.append(f"{name}: {missing}")
            continue
        servers.append(stack.enter_context(peers.running(name, command, port)))
    for line in skipped:
        print(f"skipped {line}", file=sys.stderr)
    return servers, skipped


def drive(workload: Workload, server: Server, peers: Path, turn: int) -> list[Row]:
    """One run of the client, as a process of its own; its rows, without the texts."""
    shared_client = peers / "load.py"
    program = shared_client if shared_client.exists() and not workload.own else OWN_CLIENT
    seed = 100_000 * turn + 10_000 * [w.name for w in WORKLOADS].index(workload.name) + 1
    wake(server)
    started = perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        call = [sys.executable, program, "--url", server.url, "--model", server.model, "--work", workload.work]
        call += [*workload.options, "--seed", str(seed), "--out", out]
        if turn == 0:
            call += WARM_UP
        subprocess.run(call, check=True, stdout=subprocess.DEVNULL, timeout=RUN_TIMEOUT_S)
        rows = json.loads(out.read_text(encoding="utf-8"))
    took = perf_counter() - started
    found = ", ".join(f"{k} {number(v)}" for k, v in measures(workload, rows).items())
    print(f"round {turn}, {workload.name}, {server.name}: {took:.1f} s; {found}", flush=True)
    return [{key: value for key, value in row.items() if key != "text"} for row in rows]


def wake(server: Server) -> None:
    """One token: a server that waited while others ran gets its weights back into memory before it
    is measured.
    """
    options = argparse.Namespace(url=server.url, model=server.model, max_tokens=1)
    workloads.chat(options, [workloads.message("user", "Hello")])


def measures(workload: Workload, rows: Sequence[Row]) -> dict[str, float]:
    """What one run of a workload says; times in ms."""
    if workload.work == "shared":
        total = sum(row["out"] for row in rows) / max(row["e2e_ms"] for row in rows) * 1e3
        # Per answer from its first token on: other prompts are still being read during a part of
        # it.
        decode = len(rows) * 1e3 / statistics.median(row["tpot_ms"] for row in rows)
        return {"output tok/s": total, "decode tok/s": decode}
    cold = next(row for row in rows if row["state"] == "cold")
    warm = [row for row in rows if row["state"] == "warm"]
    warm_ms = statistics.median(row["ttft_ms"] for row in warm)
    return {
        "cold TTFT ms": cold["ttft_ms"],
        "prefill tok/s": (cold["prompt"] - (cold["cached"] or 0)) / cold["ttft_ms"] * 1e3,
        "warm TTFT ms": warm_ms,
        "warm TTFT in decode steps": warm_ms / statistics.median(row["tpot_ms"] for row in warm),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the report, every request's times included")
    parser.add_argument("--peers", type=Path, default=peers.PEERS)
    parser.add_argument("--without", nargs="+", default=[], choices=[LLAMA, VLLM, VLLM_ALL])
    return parser.parse_args()


if __name__ == "__main__":
    main()
