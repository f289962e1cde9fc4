"""The main job, on a real model: `make demo`.

`--picture demo/cache_off_and_on.svg` draws README's picture anew.

1. Three questions about a long report, cold and then warm: what is reused, and what that saves.
2. The process is killed and started again: the same question, warm from disk.
3. Four clients in a pool that holds barely two of them: answers stay the same.
4. A token's price with the cache off and on, as the text grows.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic, sleep

from plot import Series, draw_svg, draw_terminal, exponent
from rich.console import Console
from rich.table import Table

from kvire import LLM
from kvire.core.memory import format_size
from kvire.engine.result import Result

HERE = Path(__file__).parent
PICTURE = HERE.parent / "build" / "demo" / "cache_off_and_on.svg"
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
console = Console(highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description="What Kvire is for, shown on a real model.")
    parser.add_argument("--picture", type=Path, default=PICTURE, metavar="FILE", help="by default %(default)s")
    picture = parser.parse_args().picture
    started = monotonic()
    with console.status("loading smollm2 (the first time, its weights are converted once)") as status:
        llm = LLM("smollm2", progress=lambda stage, done, total: status.update(f"{stage}: {done / total:.0%}"))
    with llm:
        warm_and_cold(llm)
        answers = alone(llm)
    kill_and_restart()
    small_pool(answers)
    cache_off_and_on(picture)
    console.print(f"\n[dim]The demo took {monotonic() - started:.0f} s.[/]")
    console.print(
        "\nServe it, or a model of your own (a transformers directory, a .gguf file or a hub id):\n"
        "  [bold].venv/bin/kvire serve smollm2[/]\n"
        "  [bold].venv/bin/kvire chat smollm2[/]\n"
        "README.md shows the use of each part."
    )


def warm_and_cold(llm: LLM) -> None:
    console.rule("1. A long document, read once")
    report = (HERE / "report.md").read_text(encoding="utf-8")
    script = json.loads((HERE / "questions.json").read_text(encoding="utf-8"))
    asked = [q for q in script["questions"] if q["demo"]]
    table = Table("question", "")
    for name in ("prompt", "reused", "from", "TTFT", "TPOT", "tok/s", "KV"):
        table.add_column(name, justify="right")
    cold: dict[str, Result] = {}
    for state in ("cold", "warm"):
        for q in asked:
            if state == "cold":
                llm.clear_cache()
            with console.status(f"{state}: {q['question']}"):
                result = llm.chat(conversation(script["system"], report, q["question"]), max_tokens=40, temperature=0)
            table.add_row(*row(llm, q["question"], state, result))
            must(q["answer_contains"] in result.text, f"{q['question']} -> {result.text!r}")
            if state == "cold":
                cold[q["question"]] = result
                must(result.usage.cached_tokens == 0, "cold means nothing reused")
                console.print(f"[bold]{q['question']}[/]\n  {result.text.strip()}")
            else:
                must(result.token_ids == cold[q["question"]].token_ids, "warm and cold answers are the same")
                must(result.usage.cached_tokens > 0, "warm means reused")
    console.print(table)
    console.print("Each warm answer is the cold one, token for token; the report was not read again.")


def conversation(system: str | None, report: str, question: str) -> list[dict]:
    head = [{"role": "system", "content": system}] if system else []
    return [*head, {"role": "user", "content": f"Report:\n{report}\n\nQuestion: {question}"}]


def row(llm: LLM, question: str, state: str, result: Result) -> list[str]:
    usage, timing = result.usage, result.timing
    kv_bytes = usage.total_tokens * llm.engine.paged.spec.bytes_per_token
    return [
        question,
        state,
        str(usage.prompt_tokens),
        str(usage.cached_tokens),
        tier(result.cache.as_dict()),
        f"{timing.ttft_s * 1e3:.0f} ms",
        f"{timing.tpot_s * 1e3:.0f} ms",
        f"{1 / timing.tpot_s:.1f}",
        format_size(kv_bytes),
    ]


def tier(cache: dict) -> str:
    """Where most of the reused tokens came from."""
    sources = {name: cache[f"{name}_tokens"] for name in ("device", "memory", "disk", "remote")}
    return max(sources, key=lambda name: sources[name]) if cache["reused_tokens"] else "-"


def kill_and_restart() -> None:
    console.rule("2. Killed, started again, and warm from disk")
    report = (HERE / "report.md").read_text(encoding="utf-8")
    script = json.loads((HERE / "questions.json").read_text(encoding="utf-8"))
    question = next(q for q in script["questions"] if q["demo"])
    table = Table("question", "")
    for name in ("prompt", "reused", "from", "TTFT"):
        table.add_column(name, justify="right")
    lives = []
    with tempfile.TemporaryDirectory(prefix="kvire-demo-") as folder:
        messages = Path(folder) / "messages.json"
        messages.write_text(json.dumps(conversation(script["system"], report, question["question"])), encoding="utf-8")
        for state in ("first process", "killed, restarted"):
            with console.status(f"{state}: loading, answering"):
                lives.append(life := one_life(folder, messages))
            cache = life["cache"]
            table.add_row(
                question["question"], state, str(cache["prompt_tokens"]), str(cache["reused_tokens"]), tier(cache),
                f"{life['ttft_s'] * 1e3:.0f} ms",
            )  # fmt: skip
    console.print(table)
    must(lives[0]["cache"]["reused_tokens"] == 0, "the first process knows nothing")
    must(lives[1]["cache"]["disk_tokens"] > 0, "the second one finds what the first one left")
    must(lives[0]["token_ids"] == lives[1]["token_ids"], "both answers are the same")
    console.print(
        "kill -9 came a second after the answer. The next process found the report's KV on disk, sealed (AES-256-GCM)."
    )


def one_life(folder: str, messages: Path) -> dict:
    """What a process of its own answers; it is killed a second later, which is what writing in the
    background takes.
    """
    command = [sys.executable, HERE / "one_life.py", folder, messages]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        sleep(1)
        process.kill()
    must(bool(line), "the process answers")
    return json.loads(line)


CLIENTS = (
    "Write a short story about a lighthouse.",
    "Explain how bread is made.",
    "Describe a walk in the mountains.",
    "What is a library good for?",
)
ANSWER_TOKENS = 96


def alone(llm: LLM) -> list[list[int]]:
    """Each client's answer with all the memory it wants."""
    return [ask(llm, text) for text in CLIENTS]


def ask(llm: LLM, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    return llm.chat(messages, max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True).token_ids


def small_pool(answers: list[list[int]]) -> None:
    console.rule("3. Four clients, a pool for barely two")
    with console.status("four clients at once"), LLM("smollm2", kv_memory="14MiB", max_num_seqs=4) as llm:
        prompts = [llm.encode_chat([{"role": "user", "content": text}]) for text in CLIENTS]
        results = llm.generate([list(p) for p in prompts], max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True)
        preemptions = llm.engine.scheduler.preemptions
        pool_tokens = llm.engine.pool.num_blocks * llm.engine.pool.block_size
    wanted = sum(len(p) + ANSWER_TOKENS for p in prompts)
    must(preemptions > 0, "the pool was meant to be too small")
    must([r.token_ids for r in results] == answers, "every answer is what it was with plenty of memory")
    console.print(
        f"The four need {wanted} tokens of KV, the pool holds {pool_tokens}. "
        f"{preemptions} preemptions, every answer the same as alone, token for token."
    )


def cache_off_and_on(picture: Path) -> None:
    console.rule("4. What one more token costs, with the cache off and on")
    off, on = [], []
    with console.status("measuring") as status, LLM("smollm2", kv_memory="256MiB") as llm:
        ids = list(llm.encode((HERE / "report.md").read_text(encoding="utf-8"))) * 2
        for n in LENGTHS:
            status.update(f"{n} tokens")
            on.append(step_with_cache(llm, ids[:n]))
            off.append(step_without_cache(llm, ids[:n]))
    series = [
        Series("cache off, one token", LENGTHS, off),
        Series("cache on, one token", LENGTHS, on),
        Series("cache off, whole text", LENGTHS, cumulative(off)),
        Series("cache on, whole text", LENGTHS, cumulative(on)),
    ]
    draw_terminal(console, series)
    for s in series:
        console.print(f"{s.name:<22} grows with length to the power {exponent(s):.2f}")
    picture.parent.mkdir(parents=True, exist_ok=True)
    draw_svg(picture, series)
    console.print(
        "Cache off: each token computes all earlier text again, linear a token, quadratic a text. Cache on: a token "
        f"reads the stored KV only. (Whole text: the measured steps, integrated over length.) {picture}"
    )


def step_without_cache(llm: LLM, ids: list[int]) -> float:
    """Seconds to get the next token when every earlier one is computed again (best of a few)."""
    times = []
    for _ in range(4 if len(ids) <= 1024 else 2):
        llm.clear_cache()
        times.append(llm.generate(ids, max_tokens=1, temperature=0).timing.ttft_s)
    return min(times)


def step_with_cache(llm: LLM, ids: list[int]) -> float:
    """Seconds for the next token when the KV of all earlier ones is there (mean of eight, best of
    two).
    """
    runs = [llm.generate(ids, max_tokens=9, temperature=0, ignore_eos=True) for _ in range(2)]
    return min(run.timing.tpot_s for run in runs)


def cumulative(steps: list[float]) -> list[float]:
    """Seconds to write the whole text: steps integrated over length, constant below the first
    point.
    """
    total = [steps[0] * LENGTHS[0]]
    for i in range(1, len(steps)):
        total.append(total[-1] + (steps[i - 1] + steps[i]) / 2 * (LENGTHS[i] - LENGTHS[i - 1]))
    return total


def must(holds: bool, what: str) -> None:  # noqa: FBT001
    if not holds:
        console.print(f"[bold red]This does not hold:[/] {what}", markup=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
