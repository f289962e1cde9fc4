"""Whether `kvire bench` measures what DIR/load.py measures: both ask one server about documents, in turn.

    python bench/bench_agrees.py [--rounds 7] [--system kvire|llama.cpp] [--json FILE] [--peers DIR]

In a round each client has a new document of the same length, made by load.py, and asks it four questions: the first is
cold, the others are warm. Who comes first changes from round to round. Printed is the median of the ratios within the
rounds, ours over load.py's, for the time to the first token, cold and warm, and the time per token; the bar is 5 %.
"""

import argparse
import importlib.util
import json
import statistics
import sys
from pathlib import Path
from types import ModuleType

import machine
import systems

from kvire.bench.client import Endpoint, ask
from kvire.bench.intervals import median_interval
from kvire.bench.load import Loop, run
from kvire.bench.prompts import Prompt, Script, message

MODEL, KV_MEMORY, SLOTS = "smollm2", "1GiB", 4
QUESTIONS = ("What are the main risks?", "Which region grew most?", "Summarise the costs.", "What does the board plan?")
BAR = 0.05
Figures = dict[str, float]


def main() -> int:
    options = _options()
    program = options.peers / "load.py"
    if not program.exists():
        sys.exit(f"{program} is not here: there is nothing to agree with")
    theirs, port = _module(program), systems.free_port()
    if options.system == "kvire":
        command = systems.kvire(port, MODEL, KV_MEMORY)
    else:
        command = systems.llama_cpp(port, options.peers, SLOTS)
    rounds: list[dict[str, Figures]] = []
    with systems.running(options.system, command, port) as server:
        warm_up(server, options, theirs)
        for turn in range(options.rounds):
            clients = {"ours": ours, "load.py": shared}
            order = list(clients) if turn % 2 else list(clients)[::-1]
            found = {name: clients[name](server, options, theirs, 10 * turn + order.index(name)) for name in order}
            rounds.append(found)
            print(f"round {turn + 1}: {json.dumps(found)}", flush=True)
    ratios = {name: [one["ours"][name] / one["load.py"][name] for one in rounds] for name in rounds[0]["ours"]}
    table = {name: median_interval(values).as_dict() for name, values in ratios.items()}
    for name, found in table.items():
        verdict = "agrees" if abs(found["median"] - 1) <= BAR else "DIFFERS"
        print(f"{name}: {found['median']:.3f} ({found['low']:.3f} to {found['high']:.3f}), {verdict}")
    if options.json:
        report = {
            "machine": machine.describe(),
            "system": options.system,
            "bar": BAR,
            "ratios": table,
            "rounds": rounds,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(any(abs(found["median"] - 1) > BAR for found in table.values()))


def ours(server: systems.Server, options: argparse.Namespace, theirs: ModuleType, number: int) -> Figures:
    document = theirs.words(1000 + options.seed + number, options.doc_words)
    prompts = (f"Report:\n{document}\n\nQuestion: {question}" for question in QUESTIONS)
    script = Script(tuple(Prompt((message("user", text),), options.max_tokens) for text in prompts))
    answers = [sample.answer for sample in run(Endpoint(server.url, server.model), [script], Loop(1)).samples]
    if errors := [answer.detail for answer in answers if answer.error]:
        raise RuntimeError(f"{server.url}: {errors[0]}")
    return _figures([(answer.ttft_s, answer.tpot_s or 0.0, answer.output_tokens) for answer in answers])


def shared(server: systems.Server, options: argparse.Namespace, theirs: ModuleType, number: int) -> Figures:
    fields = {"url": server.url, "model": server.model, "key": None, "max_tokens": options.max_tokens}
    fields |= {"seed": 1000 + options.seed + number, "doc_words": options.doc_words}
    rows = theirs.docqa(argparse.Namespace(**fields))
    return _figures([(row["ttft_ms"] / 1e3, row["tpot_ms"] / 1e3, row["out"]) for row in rows])


def warm_up(server: systems.Server, options: argparse.Namespace, theirs: ModuleType) -> None:
    answer = ask(Endpoint(server.url, server.model), [message("user", theirs.words(options.seed, 400))], 4)
    if answer.error is not None:
        raise RuntimeError(f"{server.url}: {answer.error} {answer.detail}")


def _figures(answers: list[tuple[float, float, int]]) -> Figures:
    assert len({out for _, _, out in answers}) == 1, "every answer has the length that was asked for"
    cold, *warm = answers
    return {
        "TTFT cold s": cold[0],
        "TTFT warm s": statistics.median(ttft for ttft, _, _ in warm),
        "TPOT s": statistics.median(tpot for _, tpot, _ in answers),
    }


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("shared_load", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--system", choices=["kvire", "llama.cpp"], default="kvire")
    parser.add_argument("--doc-words", type=int, default=1500)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--peers", type=Path, default=systems.PEERS)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
