"""Does `kvire bench` agree with DIR/load.py? Both ask one server about documents, in turn.

    python bench/bench_agrees.py [--rounds 7] [--system kvire llama.cpp] [--json FILE] [--peers DIR]

In a round each client has a new document of the same length, made by load.py, and asks it four
questions: the first is cold, the others are warm. Who comes first changes from round to round.
Printed is the median of the ratios within the rounds, ours over load.py's, for the time to the
first token, cold and warm, and the time per token; the bar is 5 %.
"""

import argparse
import importlib.util
import json
import statistics
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import peers
import reporting
from reporting import Bar, figure, medians

from kvire.bench.arms.server import free_port
from kvire.bench.client import Endpoint, ask_completion
from kvire.bench.load import Loop, send_all
from kvire.bench.work.prompts import BenchPrompt, Script, message

MODEL, KV_MEMORY, SLOTS = "smollm2", "1GiB", 4
QUESTIONS = ("What are the main risks?", "Which region grew most?", "Summarise the costs.", "What does the board plan?")
BAR = 0.05
SYSTEMS = ("kvire", "llama.cpp")
Figures = dict[str, float]


def main() -> int:
    options = _options()
    program = options.peers / "load.py"
    if not program.exists():
        sys.exit(f"{program} is not here: there is nothing to agree with")
    theirs = _module(program)
    rounds = {system: measure(system, options, theirs) for system in options.system}
    table = [row for system in rounds for row in rows(system, rounds[system])]
    reporting.write(options.json, {"machine": reporting.describe(), "table": table, "rounds": rounds})
    return int(not all(row["met"] for row in table))


def measure(system: str, options: argparse.Namespace, theirs: ModuleType) -> list[dict[str, Figures]]:
    port = free_port()
    own = system == "kvire"
    command = peers.kvire(port, MODEL, KV_MEMORY) if own else peers.llama_cpp(port, options.peers, SLOTS)
    rounds: list[dict[str, Figures]] = []
    with peers.running(system, command, port) as server:
        warm_up(server, options, theirs)
        for turn in range(options.rounds):
            clients = {"ours": ours, "load.py": shared}
            order = list(clients) if turn % 2 else list(clients)[::-1]
            found = {name: clients[name](server, options, theirs, 10 * turn + order.index(name)) for name in order}
            rounds.append(found)
            print(f"round {turn + 1}: {json.dumps(found)}", flush=True)
    return rounds


def rows(system: str, rounds: list[dict[str, Figures]]) -> list[dict[str, Any]]:
    """The ratios within the rounds, `kvire bench` over load.py."""
    return [
        figure(
            f"{system}: {name}, as `kvire bench` measures it over load.py",
            "x",
            [one["ours"][name] / one["load.py"][name] for one in rounds],
            baseline=medians({who: [one[who][name] for one in rounds] for who in ("ours", "load.py")}, "s"),
            bar=Bar("about", BAR),
        )
        for name in rounds[0]["ours"]
    ]


def ours(server: peers.Server, options: argparse.Namespace, theirs: ModuleType, number: int) -> Figures:
    document = theirs.words(1000 + options.seed + number, options.doc_words)
    prompts = (f"Report:\n{document}\n\nQuestion: {question}" for question in QUESTIONS)
    script = Script(tuple(BenchPrompt((message("user", text),), options.max_tokens) for text in prompts))
    answers = [sample.answer for sample in send_all(Endpoint(server.url, server.model), [script], Loop(1)).samples]
    if errors := [answer.detail for answer in answers if answer.error]:
        raise RuntimeError(f"{server.url}: {errors[0]}")
    return _figures([(answer.ttft_s, answer.tpot_s or 0.0, answer.output_tokens) for answer in answers])


def shared(server: peers.Server, options: argparse.Namespace, theirs: ModuleType, number: int) -> Figures:
    fields = {"url": server.url, "model": server.model, "key": None, "max_tokens": options.max_tokens}
    fields |= {"seed": 1000 + options.seed + number, "doc_words": options.doc_words}
    rows = theirs.docqa(argparse.Namespace(**fields))
    return _figures([(row["ttft_ms"] / 1e3, row["tpot_ms"] / 1e3, row["out"]) for row in rows])


def warm_up(server: peers.Server, options: argparse.Namespace, theirs: ModuleType) -> None:
    answer = ask_completion(Endpoint(server.url, server.model), [message("user", theirs.words(options.seed, 400))], 4)
    if answer.error is not None:
        raise RuntimeError(f"{server.url}: {answer.error} {answer.detail}")


def _figures(answers: list[tuple[float, float, int]]) -> Figures:
    assert len({out for _, _, out in answers}) == 1, "every answer has the length that was asked for"
    cold, *warm = answers
    return {
        "TTFT cold": cold[0],
        "TTFT warm": statistics.median(ttft for ttft, _, _ in warm),
        "TPOT": statistics.median(tpot for _, tpot, _ in answers),
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
    parser.add_argument("--system", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--doc-words", type=int, default=1500)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--peers", type=Path, default=peers.PEERS)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
