"""Prefill, decode and the price of a miss, beside transformers and llama.cpp, in one interleaved run.

    python bench/engine.py [--rounds 5] [--json FILE] [--peers DIR]

Every round runs each system once, in turn, so that whatever else the machine does hits all of them.
llama.cpp takes part if DIR (default ../shared/peers) holds its starter and .peers its environment.
"""

import argparse
import json
import random
import socket
import statistics
import subprocess
import sys
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import machine
import torch

from kvire import LLM
from kvire.models.loader import load
from kvire.models.resolve import resolve

PREFILL_TOKENS = 1024
DECODE_TOKENS = 64
POOL = "256MiB"  # filled before measuring: a block's memory is touched for the first time only once
LLAMA_PORT = 18181


def main() -> None:
    options = _options()
    samples: dict[str, list[float]] = defaultdict(list)
    model = load(resolve("smollm2")).model
    with (
        LLM("smollm2", kv_memory=POOL) as kvire,
        LLM("smollm2", kv_memory=POOL, prefix_cache=False) as plain,
        llama_cpp(options.peers) as llama,
    ):
        fill(kvire)
        fill(plain)
        for i in range(options.rounds + 1):
            found = one_round(model, kvire, plain, llama, seed=i)
            if i:  # the first round warms everything up
                for name, value in found.items():
                    samples[name].append(value)
                print(f"round {i}: " + ", ".join(f"{k} {v:.4g}" for k, v in found.items()), flush=True)
    report = {
        "machine": machine.describe(),
        "limits": {"read_gb_s": machine.read_gb_s(), "matmul_gflops": machine.matmul_gflops()},
        "figures": {name: machine.summary(values) for name, values in samples.items()},
        "ratios": ratios(samples),
    }
    print(json.dumps({"limits": report["limits"], "ratios": report["ratios"]}, indent=2))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def fill(llm: LLM) -> None:
    """Use every block once."""
    for i in range(llm.engine.pool.num_blocks * 32 // PREFILL_TOKENS + 1):
        ttft(llm, [(31 * i + 7 * j) % 40000 + 1000 for j in range(PREFILL_TOKENS)])


def one_round(model: Any, kvire: LLM, plain: LLM, llama: str | None, seed: int) -> dict[str, float]:
    rng = random.Random(seed)
    ids = [rng.randrange(1000, 40000) for _ in range(PREFILL_TOKENS)]
    short = [rng.randrange(1000, 40000) for _ in range(DECODE_TOKENS)]
    found = {"kvire prefill tok/s": PREFILL_TOKENS / ttft(kvire, ids)}
    found["transformers prefill tok/s"] = PREFILL_TOKENS / transformers_prefill(model, ids)
    if llama:
        found["llama.cpp prefill tok/s"] = llama_prefill(llama, rng)
    found["kvire decode tok/s"] = 1 / decode(kvire, short)
    found["transformers decode tok/s"] = 1 / transformers_decode(model, short)
    # The price of a miss: the same kind of prompt, never seen, with the prefix cache on and off.
    # ABBA, twice, so that whoever comes first pays for it equally often.
    times: dict[int, list[float]] = {id(kvire): [], id(plain): []}
    for order in ((kvire, plain), (plain, kvire)) * 2:
        fresh = [rng.randrange(1000, 40000) for _ in range(PREFILL_TOKENS)]
        for llm in order:
            times[id(llm)].append(ttft(llm, fresh))
    found["miss with prefix cache, TTFT s"] = statistics.median(times[id(kvire)])
    found["no prefix cache, TTFT s"] = statistics.median(times[id(plain)])
    found["kvire again, TTFT s"] = ttft(kvire, ids)
    return found


def ttft(llm: LLM, ids: list[int]) -> float:
    return llm.generate(ids, max_tokens=1, temperature=0, ignore_eos=True).timing.ttft_s


def decode(llm: LLM, ids: list[int]) -> float:
    return llm.generate(ids, max_tokens=DECODE_TOKENS + 1, temperature=0, ignore_eos=True).timing.tpot_s


@torch.inference_mode()
def transformers_prefill(model: Any, ids: list[int]) -> float:
    prompt = torch.tensor([ids])
    started = perf_counter()
    model(prompt, use_cache=True, logits_to_keep=1).logits.argmax()
    return perf_counter() - started


def transformers_decode(model: Any, ids: list[int]) -> float:
    prompt = torch.tensor([ids])
    mask = torch.ones_like(prompt)
    times = []
    for tokens in (1, DECODE_TOKENS + 1):
        started = perf_counter()
        model.generate(
            prompt,
            attention_mask=mask,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        times.append(perf_counter() - started)
    return (times[1] - times[0]) / DECODE_TOKENS


def llama_prefill(url: str, rng: random.Random) -> float:
    """Tokens a second up to the first token, as llama.cpp counts the prompt's tokens."""
    words = " ".join(rng.choice(("market", "risk", "growth", "board", "audit", "cash", "flow")) for _ in range(1015))
    body = {"prompt": f"{rng.random()} {words}", "n_predict": 1, "temperature": 0, "cache_prompt": False}
    started = perf_counter()
    call = urllib.request.Request(f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(call, timeout=120) as answer:
        tokens = json.load(answer)["tokens_evaluated"]
    return tokens / (perf_counter() - started)


@contextmanager
def llama_cpp(peers: Path) -> Iterator[str | None]:
    python, starter = machine.ROOT / ".peers/llamacpp/bin/python", peers / "serve_llamacpp.py"
    if not (python.exists() and starter.exists()):
        print(f"llama.cpp takes no part: {starter} or {python} is missing", file=sys.stderr)
        yield None
        return
    server = subprocess.Popen(
        [python, starter, str(LLAMA_PORT), "1", "3600"], cwd=peers, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _wait_for_port(LLAMA_PORT)
        yield f"http://127.0.0.1:{LLAMA_PORT}"
    finally:
        server.kill()
        server.wait()


def _wait_for_port(port: int) -> None:
    for _ in range(300):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                sleep(1)
                return
        sleep(0.2)
    raise TimeoutError(f"nothing listens on port {port}")


def ratios(samples: dict[str, list[float]]) -> dict[str, float]:
    """Medians of the ratio within each round."""
    pairs = {
        "prefill: kvire / transformers": ("kvire prefill tok/s", "transformers prefill tok/s"),
        "prefill: kvire / llama.cpp": ("kvire prefill tok/s", "llama.cpp prefill tok/s"),
        "decode: kvire / transformers": ("kvire decode tok/s", "transformers decode tok/s"),
        "miss: TTFT with / without prefix cache": ("miss with prefix cache, TTFT s", "no prefix cache, TTFT s"),
        "same prompt again: TTFT / cold": ("kvire again, TTFT s", "miss with prefix cache, TTFT s"),
    }
    return {
        name: statistics.median(x / y for x, y in zip(samples[a], samples[b], strict=True))
        for name, (a, b) in pairs.items()
        if samples.get(a) and samples.get(b)
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the report, raw samples included")
    parser.add_argument("--peers", type=Path, default=machine.ROOT.parent / "shared" / "peers")
    return parser.parse_args()


if __name__ == "__main__":
    main()
