"""Workloads of chats against any OpenAI-compatible endpoint, each run in a process of its own.

    python bench/workloads.py --url http://127.0.0.1:8000/v1 --model NAME --work WORK
        --out FILE.json

docqa      one document, four questions one after another: the first is cold, the others warm
multiturn  a conversation of six turns
shared     --concurrency requests at once behind one system prompt of --doc-words words
again      one prompt five times: the first is cold, the others warm

FILE holds a list of {ttft_ms, tpot_ms, e2e_ms, prompt, out, cached, text, state} with state cold,
warm or load. Prompts are words drawn with --seed.
"""

import argparse
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvire.bench.client import Endpoint, ask_completion
from kvire.bench.work.prompts import message

VOCABULARY = ("harbour", "ledger", "orchard", "signal", "timber", "copper", "valley", "engine", "mirror", "winter")
QUESTIONS = ("What is it about?", "Which place comes first?", "What follows from it?", "Who would disagree?")
REPORT = Path(__file__).parents[1] / "demo" / "report.md"
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description="One workload against one endpoint.")
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--work", choices=list(WORKS), required=True)
    parser.add_argument("--doc-words", type=int, default=1500)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.write_text(json.dumps(WORKS[options.work](options)), encoding="utf-8")


def text(seed: int, count: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(VOCABULARY) for _ in range(count))


def docqa(options: argparse.Namespace) -> list[Row]:
    document = text(options.seed, options.doc_words)
    return one_by_one(options, [[message("user", f"{document}\n\n{question}")] for question in QUESTIONS])


def again(options: argparse.Namespace) -> list[Row]:
    """A text that makes sense: random words can be answered by special tokens, which have no text
    to be timed.
    """
    words = REPORT.read_text(encoding="utf-8").split()[: options.doc_words]
    prompt = f"Copy {options.seed}. {' '.join(words)}\n\nWhat is this report about?"
    return one_by_one(options, [[message("user", prompt)]] * 5)


def multiturn(options: argparse.Namespace) -> list[Row]:
    messages, rows = [message("user", text(options.seed, options.doc_words))], []
    for turn in range(6):
        rows.append(chat(options, messages) | {"state": "warm" if turn else "cold"})
        messages.append(message("assistant", rows[-1]["text"]))
        messages.append(message("user", text(options.seed + turn + 1, 40)))
    return rows


def shared(options: argparse.Namespace) -> list[Row]:
    system = message("system", text(options.seed, options.doc_words))
    prompts = [[system, message("user", text(options.seed + 1 + i, 60))] for i in range(options.concurrency)]
    with ThreadPoolExecutor(options.concurrency) as threads:
        rows = list(threads.map(lambda prompt: chat(options, prompt), prompts))
    return [row | {"state": "load"} for row in rows]


WORKS = {"docqa": docqa, "multiturn": multiturn, "shared": shared, "again": again}


def one_by_one(options: argparse.Namespace, prompts: list[list[dict[str, str]]]) -> list[Row]:
    return [chat(options, prompt) | {"state": "warm" if i else "cold"} for i, prompt in enumerate(prompts)]


def chat(options: argparse.Namespace, messages: list[dict[str, str]]) -> Row:
    """One streamed answer."""
    answer = ask_completion(Endpoint(options.url, options.model), messages, options.max_tokens)
    if answer.error is not None:
        raise RuntimeError(f"{options.url}: {answer.error} {answer.detail}")
    return {
        "ttft_ms": answer.ttft_s * 1e3,
        "tpot_ms": (answer.e2e_s - answer.ttft_s) * 1e3 / max(1, answer.output_tokens - 1),
        "e2e_ms": answer.e2e_s * 1e3,
        "prompt": answer.prompt_tokens,
        "out": answer.output_tokens,
        "cached": answer.cached_tokens,
        "text": "".join(answer.pieces),
    }


if __name__ == "__main__":
    main()
