"""Rows of serving.py's report: every figure with its baseline, its physical limit and its bar."""

import statistics
from pathlib import Path
from typing import Any

from limits import Roofline
from reporting import Bar, figure, medians, ratios

from kvire.core.memory import parse_size
from kvire.models.checkpoint import open_checkpoint

KVIRE, LLAMA, VLLM, VLLM_ALL = "Kvire", "llama.cpp", "vLLM", "vLLM on all cores"

Row = dict[str, Any]
Samples = dict[str, dict[str, dict[str, list[float]]]]  # workload, system, measure -> one value a round
Found = dict[str, list[float]]  # system -> one value a round


def rows_of(samples: Samples, runs: list[dict[str, Any]], roofline: Roofline) -> list[Row]:
    """The figures, each with its bar."""
    return [
        *docqa(samples["docqa"], own_rows(runs, "docqa"), roofline),
        *multiturn(samples["multiturn"], own_rows(runs, "multiturn"), roofline),
        *throughput("shared", samples["shared"], own_rows(runs, "shared"), roofline),
        *throughput("16 at once", samples["16 at once"], own_rows(runs, "16 at once"), roofline),
        *again(samples["again"]),
    ]


def own_rows(runs: list[dict[str, Any]], workload: str) -> list[Row]:
    """Kvire's rows in the last round, whose lengths set the limits."""
    return next(run["rows"] for run in reversed(runs) if (run["workload"], run["system"]) == (workload, KVIRE))


def docqa(found: dict[str, Found], rows: list[Row], roofline: Roofline) -> list[Row]:
    prompt = rows[0]["prompt"]
    cold, warm = measure_of(found, "cold TTFT ms"), measure_of(found, "warm TTFT ms")
    least_cold, least_warm = roofline.prefill_s(prompt) * 1e3, roofline.prefill_s(1, prompt) * 1e3
    one_read = "one read of the weights and the prompt's KV"
    table = [
        figure(
            f"docqa, {prompt} tokens: cold TTFT", "ms", cold[KVIRE], baseline=medians(others(cold), "ms"),
            limit=least_cold, limit_is="the prompt's arithmetic",
        ),
        figure(
            f"docqa, {prompt} tokens: warm TTFT", "ms", warm[KVIRE], baseline=medians(others(warm), "ms"),
            limit=least_warm, limit_is=one_read,
        ),
        figure(
            "docqa: cold TTFT / warm TTFT", "x", ratios(cold[KVIRE], warm[KVIRE]), bar=Bar(">=", 15),
            baseline="no reuse 1 x",
            limit=statistics.median(cold[KVIRE]) / least_warm, limit_is=one_read,
        ),
    ]  # fmt: skip
    return table + beside("docqa warm TTFT", "ms", warm, LLAMA, Bar(">", 1), least_warm, smaller_is_better=True)


def multiturn(found: dict[str, Found], rows: list[Row], roofline: Roofline) -> list[Row]:
    warm = measure_of(found, "warm TTFT ms")
    before, last = rows[-2], rows[-1]
    reused = before["prompt"] + before["out"]
    least = roofline.prefill_s(max(1, last["prompt"] - reused), reused) * 1e3
    row = figure(
        f"multiturn, up to {last['prompt']} tokens: warm TTFT", "ms", warm[KVIRE], baseline=medians(others(warm), "ms"),
        limit=least, limit_is="the last turn's new tokens",
    )  # fmt: skip
    return [row, *beside("multiturn warm TTFT", "ms", warm, LLAMA, Bar(">", 2), least, smaller_is_better=True)]


def throughput(name: str, found: dict[str, Found], rows: list[Row], roofline: Roofline) -> list[Row]:
    """Output tokens a second over the whole run, prompts included; and, without sharing, of
    decoding alone.
    """
    sharing = name == "shared"
    out = rows[0]["out"]
    prompts = [row["prompt"] for row in rows]
    context = statistics.mean(prompts) + out / 2
    common = max(row["cached"] for row in rows) if sharing else 0
    new_tokens = sum(prompts) - (len(rows) - 1) * common
    step_s = roofline.decode_s(len(rows), context)
    least_s = roofline.prefill_s(new_tokens) + (out - 1) * step_s
    limit = len(rows) * out / least_s
    limit_is = f"arithmetic of {new_tokens} prompt tokens and {out - 1} steps"
    total = measure_of(found, "output tok/s")
    table = [
        figure(
            f"{name}: output", "tok/s", total[KVIRE], baseline=medians(others(total), "tok/s"),
            limit=limit, limit_is=limit_is,
        )
    ]  # fmt: skip
    if sharing:
        table += beside("shared output", "tok/s", total, LLAMA, Bar(">=", 2.5), limit)
        return table + best_vllm("shared output", total, Bar(">", 1), limit)
    decode = measure_of(found, "decode tok/s")
    table += best_vllm("16 at once, output", total, Bar(">=", 1), limit)
    decode_row = figure(
        "16 at once: decode", "tok/s", decode[KVIRE], baseline=medians(others(decode), "tok/s"),
        limit=len(rows) / step_s, limit_is="arithmetic of a step, or its reads",
    )  # fmt: skip
    return [*table, decode_row, *best_vllm("16 at once, decode", decode, Bar(">=", 1), len(rows) / step_s)]


def again(found: dict[str, Found]) -> list[Row]:
    steps, warm = measure_of(found, "warm TTFT in decode steps"), measure_of(found, "warm TTFT ms")
    row = figure(
        "same 1,000-token prompt again: TTFT / TPOT", "decode steps", steps[KVIRE], bar=Bar("<=", 1.5),
        baseline=medians(others(steps), "steps"), limit=1.0, limit_is="one step",
    )  # fmt: skip
    return [
        row,
        figure("same 1,000-token prompt again: TTFT", "ms", warm[KVIRE], baseline=medians(others(warm), "ms")),
    ]


def memory(peak_mb: float, folder: Path, kv_memory: str) -> Row:
    """Peak of the server's resident memory; its weights are a mapped file, which counts."""
    weights_mb, pool_mb = open_checkpoint(folder).weights_bytes / 1e6, parse_size(kv_memory) / 1e6
    bar = Bar("<=", round(1.3 * weights_mb + pool_mb + 600))
    return figure(
        "server's peak memory", "MB", [peak_mb], bar=bar, limit=weights_mb + pool_mb,
        limit_is=f"weights {weights_mb:.0f} MB and pool {pool_mb:.0f} MB",
    )  # fmt: skip


def measure_of(found: dict[str, Found], name: str) -> Found:
    return {system: values[name] for system, values in found.items()}


def others(found: Found) -> Found:
    return {system: values for system, values in found.items() if system != KVIRE}


def beside(
    what: str, unit: str, found: Found, peer: str, bar: Bar, limit: float, *, smaller_is_better: bool = False
) -> list[Row]:
    """How many times better than `peer`, within each round; nothing if the peer took no part."""
    if peer not in found:
        return []
    own, theirs = found[KVIRE], found[peer]
    times = ratios(theirs, own) if smaller_is_better else ratios(own, theirs)
    typical = statistics.median(theirs)
    best = typical / limit if smaller_is_better else limit / typical
    name = f"{what}: {peer} / Kvire" if smaller_is_better else f"{what}: Kvire / {peer}"
    row = figure(
        name, "x", times, bar=bar, limit=best, limit_is="Kvire at its limit", baseline=medians({peer: theirs}, unit)
    )
    return [row]


def best_vllm(what: str, found: Found, bar: Bar, limit: float) -> list[Row]:
    """Against vLLM as it sets itself up, and with every core given to it: the bar is for both."""
    return [row for peer in (VLLM, VLLM_ALL) for row in beside(what, "tok/s", found, peer, bar, limit)]
