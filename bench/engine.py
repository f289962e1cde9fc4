"""Prefill, decode and the price of a miss, interleaved with transformers and llama.cpp.

    python bench/engine.py [--rounds 5] [--json FILE] [--peers DIR]

Every round runs each system once, in turn, so that whatever else the machine does hits all of them.
llama.cpp takes part if DIR (default ../shared/peers) holds its starter and .peers its environment.
"""

import argparse
import json
import random
import statistics
import sys
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import peers
import reporting
import torch
from limits import Roofline
from reporting import figure, medians, ratios

from kvire import LLM
from kvire.bench.arms.server import free_port
from kvire.models.loader import load_model
from kvire.models.resolve import resolve

PREFILL_TOKENS = 1024
DECODE_TOKENS = 64
POOL = "256MiB"  # filled before measuring: a block's memory is touched for the first time only once
MISS, NO_CACHE, AGAIN = "miss with prefix cache, TTFT s", "no prefix cache, TTFT s", "kvire again, TTFT s"


def main() -> None:
    options = _options()
    samples: dict[str, list[float]] = defaultdict(list)
    folder = resolve("smollm2")
    model = load_model(folder).model
    roofline = Roofline.measure(folder)
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
    roofline = roofline.measured_again()
    reporting.write(
        options.json,
        {
            "machine": reporting.describe(),
            "limits": roofline.describe(),
            "break_even_mb_s": roofline.break_even_mb_s(statistics.median(samples["kvire prefill tok/s"])),
            "samples": samples,
            "table": table(samples, roofline),
        },
    )


def fill(llm: LLM) -> None:
    """Use every block once."""
    for i in range(llm.engine.pool.num_blocks * llm.engine.pool.block_size // PREFILL_TOKENS + 1):
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
    # ABBA, twice, so that each comes first equally often.
    times: dict[int, list[float]] = {id(kvire): [], id(plain): []}
    for order in ((kvire, plain), (plain, kvire)) * 2:
        fresh = [rng.randrange(1000, 40000) for _ in range(PREFILL_TOKENS)]
        for llm in order:
            times[id(llm)].append(ttft(llm, fresh))
    found[MISS] = statistics.median(times[id(kvire)])
    found[NO_CACHE] = statistics.median(times[id(plain)])
    found[AGAIN] = ttft(kvire, ids)
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
def llama_cpp(folder: Path) -> Iterator[str | None]:
    """The address of llama.cpp's server, or None if it is not here."""
    port = free_port()
    try:
        command = peers.llama_cpp(port, folder, slots=1)
    except peers.MissingPeerError as missing:
        print(f"llama.cpp takes no part: {missing}", file=sys.stderr)
        yield None
        return
    with peers.running("llama.cpp", command, port) as server:
        yield server.url.removesuffix("/v1")


def table(samples: dict[str, list[float]], roofline: Roofline) -> list[dict[str, Any]]:
    """Every figure beside its baseline and its limit; ratios within each round."""
    step_s = roofline.decode_s(1, DECODE_TOKENS * 1.5)
    prefill = PREFILL_TOKENS / roofline.prefill_s(PREFILL_TOKENS)
    found = [
        *beside(samples, "prefill tok/s", ("transformers", "llama.cpp"), prefill, "the prompt's arithmetic"),
        *beside(samples, "decode tok/s", ("transformers",), 1 / step_s, "reads of the weights"),
    ]
    with_cache, without, again = (samples[name] for name in (MISS, NO_CACHE, AGAIN))
    what = f"{PREFILL_TOKENS:,} tokens"
    return [
        *found,
        figure(
            f"{what} never seen: TTFT with prefix cache / without", "x", ratios(with_cache, without),
            baseline=medians({"without": without}, "s"), limit=1.0, limit_is="a miss costs nothing",
        ),
        figure(
            f"the same {what} again: TTFT", "ms", [1e3 * value for value in again],
            baseline=medians({"cold": with_cache}, "s"), limit=1e3 * roofline.prefill_s(1, PREFILL_TOKENS),
            limit_is="one read of the weights and the prompt's KV",
        ),
    ]  # fmt: skip


def beside(
    samples: dict[str, list[float]], what: str, others: tuple[str, ...], limit: float, limit_is: str
) -> list[dict[str, Any]]:
    """Kvire's own figure, and how many times a peer's it is."""
    own = samples[f"kvire {what}"]
    theirs = {peer: samples[f"{peer} {what}"] for peer in others if samples.get(f"{peer} {what}")}
    name, unit = what.split()
    rows = [figure(f"{name}, alone", unit, own, baseline=medians(theirs, unit), limit=limit, limit_is=limit_is)]
    for peer, rates in theirs.items():
        best = limit / statistics.median(rates)
        rows.append(
            figure(
                f"{name}: Kvire / {peer}", "x", ratios(own, rates), baseline=medians({peer: rates}, unit),
                limit=best, limit_is="Kvire at its limit",
            )
        )  # fmt: skip
    return rows


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the report, raw samples included")
    parser.add_argument("--peers", type=Path, default=peers.PEERS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
