"""The figures of gpu_check.py, each beside the limit of the machine that it is compared with.

prefill, decode      tokens per second of the whole engine; no limit is given decode attention
bytes of KV read per second, beside what a plain copy on the device moves (reads + writes) blocks
bytes per second to the host and back, beside one large copy from pinned memory break-even
bandwidth from which loading a token's KV is faster than computing it: bytes per token x prefill
"""

import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from models.tiny import make_tiny

from kvire import LLM
from kvire.attention.params import AttentionParams
from kvire.attention.reference import PortableAttention
from kvire.cache.batch import Batch
from kvire.cache.paged import PagedKV
from kvire.cache.staging import BlockCopies
from kvire.core.dtypes import KV_DTYPES
from kvire.core.errors import ModelNotFoundError
from kvire.core.spec import KVGroup, KVSpec, LayerKind
from kvire.models.resolve import resolve

BLOCK_SIZE = 32
SHAPES = {"9/3 x 64 (SmolLM2-135M)": (9, 3, 64), "32/8 x 128 (Llama-3-8B)": (32, 8, 128)}
LOADS = ((1, 4096), (16, 2048))  # sequences, tokens of context each
REPEATS = 5

Hold = Callable[..., None]  # (text, *, ok)
OutOfTime = Callable[[str], bool]


def measure(device: torch.device, model: str, hold: Hold, out_of_time: OutOfTime) -> dict[str, Any]:
    """Everything, in order of importance."""
    figures: dict[str, Any] = {"limits": limits(device)}
    for name, value in figures["limits"].items():
        print(f"  limit: {name} {value:.1f}", flush=True)
    figures["engine"] = engine(device, model, hold)
    figures["blocks"] = blocks(device, figures["limits"], hold)
    figures["decode_attention"] = [
        attention(device, shape, load, dtype, figures["limits"])
        for shape in SHAPES
        for load in LOADS
        for dtype in ("float32", "float16")
        if not out_of_time(f"decode attention {shape} {load} {dtype}")
    ]
    return figures


def describe(device: torch.device) -> dict[str, Any]:
    """What the GPU is."""
    if device.type == "cpu":
        return {"device": "cpu"}
    found = torch.cuda.get_device_properties(device)
    return {
        "device": found.name,
        "memory_bytes": found.total_memory,
        "capability": f"{found.major}.{found.minor}",
        "cuda": torch.version.cuda,
        "tf32": torch.backends.cuda.matmul.allow_tf32,
    }


def smollm2(folder: Path) -> str:
    """SmolLM2 where it is installed, else a model of its shape with random weights."""
    try:
        resolve("smollm2")
        return "smollm2"
    except ModelNotFoundError:
        print("smollm2 is not installed: random weights in its shape take its place")
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    shape |= {"num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192}
    return str(make_tiny("llama", folder / "smollm2-shape", **shape))


def limits(device: torch.device) -> dict[str, float]:
    """GB/s of large copies."""
    small = device.type == "cpu"
    size = (1 << 27) if small else (1 << 30)
    a, b = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    host = torch.ones(size, dtype=torch.uint8, pin_memory=not small)
    return {
        "copy on the device GB/s, read + written": 2 * size / fastest(device, lambda: b.copy_(a)) / 1e9,
        "pinned host to device GB/s": size / fastest(device, lambda: a.copy_(host, non_blocking=True)) / 1e9,
        "device to pinned host GB/s": size / fastest(device, lambda: host.copy_(a, non_blocking=True)) / 1e9,
    }


def engine(device: torch.device, model: str, hold: Hold) -> dict[str, Any]:
    """Prefill and decode through LLM, and what they say of break-even."""
    small = device.type == "cpu"
    prompt_tokens, new_tokens, crowd = (256, 8, 4) if small else (2048, 64, 16)
    rng = random.Random(0)
    options = {"max_batch_tokens": 512 if small else 2048, "kv_memory": "256MiB" if small else "2GiB"}
    with LLM(model, device=device.type, attention="portable", **options) as llm:

        def prompt(tokens: int) -> list[int]:
            return [rng.randrange(llm.engine.vocab_size) for _ in range(tokens)]

        def answer(prompts: list[list[int]], tokens: int) -> list[Any]:
            return llm.generate(prompts, max_tokens=tokens, temperature=0.0, ignore_eos=True)

        answer([prompt(prompt_tokens)], 2)  # the first use of every kernel
        cold = [prompt(prompt_tokens) for _ in range(REPEATS)]
        ttft = [answer([one], 1)[0].timing.ttft_s for one in cold]
        warm = [answer([one], 1)[0].timing.ttft_s for one in cold]
        alone = [answer([prompt(16)], new_tokens)[0].timing.tpot_s for _ in range(3)]
        together = [r.timing.tpot_s for r in answer([prompt(16) for _ in range(crowd)], new_tokens)]
        spec = llm.engine.paged.spec
    found: dict[str, Any] = {
        "model": model,
        "prompt_tokens": prompt_tokens,
        "prefill_tok_s": prompt_tokens / statistics.median(ttft),
        "warm_ttft_s": statistics.median(warm),
        "cold_ttft_s": statistics.median(ttft),
        "decode_tok_s": 1 / statistics.median(alone),
        f"decode_{crowd}_tok_s": crowd / statistics.median(together),
        "samples_s": {"ttft": ttft, "tpot": alone, f"tpot_{crowd}": together},
    }
    per_token = {dtype: KVSpec(spec.groups, dtype, spec.block_size).bytes_per_token for dtype in KV_DTYPES}
    found["break_even_gb_s"] = {dtype: size * found["prefill_tok_s"] / 1e9 for dtype, size in per_token.items()}
    for name in ("prefill_tok_s", "decode_tok_s", f"decode_{crowd}_tok_s", "cold_ttft_s", "warm_ttft_s"):
        print(f"  {name} {found[name]:.4g}", flush=True)
    print("  break-even GB/s: " + ", ".join(f"{k} {v:.3g}" for k, v in found["break_even_gb_s"].items()), flush=True)
    hold("the same prompt again has its first token sooner", ok=found["warm_ttft_s"] < found["cold_ttft_s"])
    return found


def blocks(device: torch.device, limit: dict[str, float], hold: Hold) -> list[dict[str, Any]]:
    """Blocks of Llama-3-8B's shape in float16, in random order, to the host and back; every byte
    compared.
    """
    layers, count = (4, 16) if device.type == "cpu" else (32, 256)
    spec = KVSpec((KVGroup(LayerKind.FULL, tuple(range(layers)), 8, 128, 128),), "float16", BLOCK_SIZE)
    slabs = PagedKV(spec, 2 * count, device).slabs[0]
    slabs.copy_(torch.randn(slabs.shape, device=device))
    ids = random.Random(0).sample(range(2 * count), count)
    copies = BlockCopies(slabs)
    kept, rows = slabs[ids], []
    for kind, host in (("pinned", copies.host_blocks(count)), ("pageable", torch.empty(kept.shape, dtype=kept.dtype))):
        out_s = fastest(device, lambda to=host: copies.copy_out(ids, to).wait())
        slabs[ids] = 0
        in_s = fastest(device, lambda of=host: copies.copy_in(of, ids).wait())
        same = torch.equal(slabs[ids], kept) and torch.equal(host, kept.cpu())
        hold(f"blocks by {kind} memory are the same", ok=same)
        row = {
            "host": kind,
            "bytes": host.nbytes,
            "out_gb_s": host.nbytes / out_s / 1e9,
            "in_gb_s": host.nbytes / in_s / 1e9,
        }
        rows.append(row)
        print(
            f"  {count} blocks, {kind}: out {row['out_gb_s']:.1f} of {limit['device to pinned host GB/s']:.1f} GB/s, "
            f"in {row['in_gb_s']:.1f} of {limit['pinned host to device GB/s']:.1f} GB/s",
            flush=True,
        )
    return rows


def attention(
    device: torch.device, shape: str, load: tuple[int, int], dtype: str, limit: dict[str, float]
) -> dict[str, Any]:
    """One layer's decode attention over random blocks of a pool larger than any cache."""
    query_heads, kv_heads, width = SHAPES[shape]
    sequences, length = load
    spec = KVSpec((KVGroup(LayerKind.FULL, (0,), kv_heads, width, width),), dtype, BLOCK_SIZE)
    per_call = sequences * length // BLOCK_SIZE
    calls = max(2, ((256 << 20) if device.type == "cpu" else (1 << 30)) // (per_call * spec.block_bytes(0)))
    pool = PagedKV(spec, per_call * calls, device)
    pool.slabs[0].fill_(0.5)
    backend = PortableAttention()
    ones = torch.ones(sequences, dtype=torch.int64, device=device)
    order = torch.randperm(per_call * calls, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    plans = [
        backend.plan(
            pool, Batch(ones, ones, (ones,), (table,), (length,) * sequences, tuple(range(sequences + 1)), ones)
        )
        for table in order.to(device).view(calls, sequences, -1)
    ]
    query = torch.randn(sequences, query_heads, width, device=device)
    new = torch.zeros(sequences, kv_heads, width, device=device)
    params = AttentionParams(scale=1 / math.sqrt(width))

    def all_calls() -> None:
        for plan in plans:
            backend.attend(plan, 0, query, new, new, params)

    seconds = fastest(device, all_calls, repeats=3) / calls
    rate = sequences * length * spec.bytes_per_token / seconds / 1e9
    most = limit["copy on the device GB/s, read + written"]
    print(
        f"  decode attention {shape:<24} {sequences:>2} x {length} {dtype}: {rate:.1f} GB/s of KV, "
        f"{rate / most:.2f} of a copy",
        flush=True,
    )
    return {
        "shape": shape,
        "sequences": sequences,
        "context": length,
        "dtype": dtype,
        "kv_gb_s": rate,
        "call_s": seconds,
    }


def fastest(device: torch.device, work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Seconds, the device's own work included; the first call does not count."""
    times = []
    for _ in range(repeats + 1):
        wait(device)
        started = perf_counter()
        work()
        wait(device)
        times.append(perf_counter() - started)
    return min(times[1:])


def wait(device: torch.device) -> None:
    """Until the device has done everything asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
