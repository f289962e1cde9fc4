"""The same prompts to every engine on this machine: first token, decoding, sixteen at once.

    python bench/field.py [--rounds 5] [--json FILE] [--page FILE.html]
        [--peers DIR] [--without NAME ...]

Kvire, llama.cpp and vLLM are servers; OpenVINO GenAI and transformers have none that reuses a
prefix and answer in a process of their own (field_worker.py). Everybody runs all the time and is
asked in turns. A round: a new report and a question (cold), two more questions about it
(warm), an answer of 32 tokens alone (decode), sixteen short prompts at once (output). Servers are
timed to the first token of the stream; the others by an answer of one token. Weights: float32 in
Kvire, vLLM and transformers; four-bit in llama.cpp and OpenVINO, which is what they read of GGUF.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peers
import reporting
import workloads
from limits import Roofline
from peers import MissingPeerError, Server
from reporting import figure, medians

from kvire.bench.arms.server import free_port
from kvire.bench.figures import number
from kvire.models.embedded import EMBEDDED, find_embedded
from kvire.models.resolve import resolve
from kvire.report.charts import Labels, Series, bars
from kvire.report.page import Page

MODEL = "smollm2"
DOC_WORDS = 1622  # 1,668 tokens with the question
AT_ONCE, LONG, ALONE = 16, 64, 32
KVIRE, LLAMA, VLLM, OPENVINO, TRANSFORMERS = "Kvire", "llama.cpp", "vLLM", "OpenVINO GenAI", "transformers"
COLD, WARM, DECODE, MANY = "cold TTFT", "warm TTFT", "decode alone", "16 at once, output"
UNITS = {COLD: "ms", WARM: "ms", DECODE: "tok/s", MANY: "tok/s"}
FOUR_BIT = "its weights are four-bit, an eighth of the bytes that Kvire reads for a token in float32"
WHY = {
    LLAMA: f"{FOUR_BIT}.",
    OPENVINO: f"{FOUR_BIT}; where it is faster than this machine's float32 arithmetic, it computes in a narrower type.",
    VLLM: "with all cores its linear layers come closer to what the arithmetic allows; what is read back is slower.",
}
Found = dict[str, dict[str, list[float]]]


@dataclass(frozen=True)
class System:
    """How one system is asked.

    first: seconds to the first token of an answer to one message.
    answers: seconds for so many tokens each.
    """

    name: str
    first: Callable[[str], float]
    answers: Callable[[Sequence[str], int], float]


def main() -> None:
    options = _options()
    folder = resolve(MODEL)
    roofline = Roofline.measure(folder)
    found: Found = defaultdict(lambda: defaultdict(list))
    with ExitStack() as stack:
        everybody, skipped = start(stack, options, folder)
        for number in range(options.rounds + 1):
            turned = everybody if number % 2 else everybody[::-1]
            for system in turned:
                for what, value in one_round(system, number).items():
                    if number:  # the first round warms everything up
                        found[what][system.name].append(value)
            print(f"round {number}: {said(found)}", flush=True)
    roofline = roofline.measured_again()
    report = {
        "machine": reporting.describe(),
        "limits": roofline.describe(),
        "break_even_mb_s": roofline.break_even_mb_s(1668e3 / statistics.median(found[COLD][KVIRE])),
        "skipped": skipped,
        "table": rows(found, roofline),
        "samples": found,
    }
    reporting.write(options.json, report)
    if options.page:
        page(report).write(options.page)


def one_round(system: System, number: int) -> dict[str, float]:
    seed = 1_000_000 + 1000 * number
    report = f"Report {seed}:\n{workloads.text(seed, DOC_WORDS)}\n\n"
    short = f"{seed}: what is a quire?"
    system.first(short)
    alone = [system.answers([short], tokens) for tokens in (1, ALONE + 1)]
    prompts = [workloads.text(seed + 1 + i, 60) for i in range(AT_ONCE)]
    return {
        COLD: 1e3 * system.first(report + workloads.QUESTIONS[0]),
        WARM: 1e3 * statistics.median(system.first(report + question) for question in workloads.QUESTIONS[1:3]),
        DECODE: ALONE / (alone[1] - alone[0]),
        MANY: AT_ONCE * LONG / system.answers(prompts, LONG),
    }


def rows(found: Found, roofline: Roofline) -> list[dict[str, Any]]:
    limits = {
        COLD: (1e3 * roofline.prefill_s(1668), "the prompt's arithmetic in float32"),
        WARM: (1e3 * roofline.prefill_s(12, 1656), "one read of the weights and the prompt's KV"),
        DECODE: (1 / roofline.decode_s(1, ALONE), "reads of float32 weights"),
        MANY: (AT_ONCE / roofline.decode_s(AT_ONCE, 120), "a step's arithmetic or reads, prefill left out"),
    }
    table = []
    for what, systems_ in found.items():
        for name, samples in systems_.items():
            limit, limit_is = limits[what] if name == KVIRE else (None, "")
            table.append(figure(f"{what}: {name}", UNITS[what], samples, limit=limit, limit_is=limit_is))
        for name, samples in systems_.items():
            if name != KVIRE:
                own = systems_[KVIRE]
                better = zip(samples, own, strict=True) if UNITS[what] == "ms" else zip(own, samples, strict=True)
                beside = medians({KVIRE: own, name: samples}, UNITS[what])
                times = [x / y for x, y in better]
                table.append(figure(f"{what}: Kvire better than {name} by", "x", times, baseline=beside))
    return table


def page(report: dict[str, Any]) -> Page:
    """The same as a page with pictures."""
    found: Found = report["samples"]
    loses = [row for row in report["table"] if " better than " in row["figure"] and row["median"] < 1]
    shown = Page("Kvire beside the field", "One machine, one model, the same words; everybody asked in turns.")
    shown.facts({key: value for key, value in report["machine"].items() if isinstance(value, str | int)})
    for what, systems_ in found.items():
        names = list(systems_)
        series = Series(
            what,
            [statistics.median(systems_[name]) for name in names],
            low=[min(systems_[name]) for name in names],
            high=[max(systems_[name]) for name in names],
        )
        best = "less is better" if UNITS[what] == "ms" else "more is better"
        labels = Labels(what, f"Median and range over rounds of {what}; {best}.", "", f"{UNITS[what]}, {best}")
        shown.figure(bars(names, [series], labels))
    shown.heading("What loses")
    for row in loses:
        shown.text(
            f"{row['figure'].replace('better than', 'over')[:-3]}: {number(row['median'])} x. {row['baseline']}."
        )
    for name, why in WHY.items():
        if any(f" better than {name} " in row["figure"] for row in loses):
            shown.text(f"Why {name}: {why}")
    shown.heading("Everything")
    keys = ("figure", "median", "min", "max", "unit", "baseline")
    shown.table(keys, [[row[key] for key in keys] for row in report["table"]])
    for line in report["skipped"]:
        shown.note(f"Left out: {line}")
    return shown


def start(stack: ExitStack, options: argparse.Namespace, folder: Path) -> tuple[list[System], list[str]]:
    """Everybody who is here; why others are not."""
    [gguf] = find_embedded(EMBEDDED[MODEL]).files
    makers: dict[str, Callable[[int], System]] = {
        KVIRE: lambda port: served(stack, KVIRE, peers.kvire(port, MODEL, "1GiB"), port),
        LLAMA: lambda port: served(stack, LLAMA, peers.llama_cpp(port, options.peers, AT_ONCE), port),
        VLLM: lambda port: served(stack, VLLM, peers.vllm(port, options.peers, folder, all_cores=True), port),
        OPENVINO: lambda _: stack.enter_context(worked(OPENVINO, "openvino", gguf)),
        TRANSFORMERS: lambda _: stack.enter_context(worked(TRANSFORMERS, "transformers", gguf)),
    }
    everybody, skipped = [], []
    for name, make in makers.items():
        if name in options.without:
            skipped.append(f"{name}: left out by --without")
            continue
        try:
            everybody.append(make(free_port()))
        except MissingPeerError as missing:
            skipped.append(f"{name}: {missing}")
    return everybody, skipped


def served(stack: ExitStack, name: str, command: peers.Command, port: int) -> System:
    server = stack.enter_context(peers.running(name, command, port))
    return System(
        name,
        lambda content: ask(server, content, 1)["ttft_ms"] / 1e3,
        lambda contents, tokens: at_once(server, contents, tokens),
    )


def ask(server: Server, content: str, max_tokens: int) -> workloads.Row:
    told = argparse.Namespace(url=server.url, model=server.model, max_tokens=max_tokens)
    return workloads.chat(told, [workloads.message("user", content)])


def at_once(server: Server, contents: Sequence[str], tokens: int) -> float:
    with ThreadPoolExecutor(len(contents)) as threads:
        answers = list(threads.map(lambda content: ask(server, content, tokens), contents))
    assert all(answer["out"] == tokens for answer in answers), "everybody writes as much"
    return max(answer["e2e_ms"] for answer in answers) / 1e3


@contextmanager
def worked(name: str, engine: str, gguf: Path) -> Iterator[System]:
    """An engine in a process of its own, in its environment of .peers."""
    python = peers.ENVIRONMENTS / engine / "bin/python"
    if not python.exists():
        raise MissingPeerError(f"{engine} is missing from {peers.ENVIRONMENTS.name}")
    worker = Path(__file__).with_name("field_worker.py")
    process = subprocess.Popen(
        [python, worker, engine, gguf],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None

    def reply() -> dict[str, Any]:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"{name} ended with status {process.wait()}")
        return json.loads(line)

    def answers(contents: Sequence[str], tokens: int) -> float:
        print(json.dumps({"contents": list(contents), "max_tokens": tokens}), file=process.stdin, flush=True)
        return reply()["seconds"]

    try:
        print(f"{name} {reply()['version']} answers", flush=True)
        yield System(name, lambda content: answers([content], 1), answers)
    finally:
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.wait(30)


def said(found: Found) -> str:
    return "; ".join(f"{what}: {medians(systems_, UNITS[what])}" for what, systems_ in found.items())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--peers", type=Path, default=peers.PEERS)
    parser.add_argument("--without", nargs="+", default=[], choices=[LLAMA, VLLM, OPENVINO, TRANSFORMERS])
    options = parser.parse_args()
    if options.rounds < 1:
        sys.exit("--rounds must be at least 1")
    return options


if __name__ == "__main__":
    main()
