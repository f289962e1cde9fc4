"""Fifty pages, 25,000 tokens, on gemma3-270m: first token cold, and from disk after a restart.

    python bench/fifty_pages.py [--rounds 3] [--tokens 25000] [--json FILE]

Each answer is a process of its own: `kvire generate gemma3-270m --raw --file PAGES --store FOLDER`.
The first computes and stores; the next comes after a restart while the kernel has the files in
memory still; the last after it had to forget them. A round is a text nobody has seen. The answers
of a round must be the same to the letter.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import reporting
import workloads
from reporting import Bar, figure, medians, ratios

MODEL = "gemma3-270m"
WORDS_PER_TOKEN = 0.98  # of workloads.text, whose words are a token each, nearly
COLD, CACHED, DISK = "computed", "restart, page cache", "restart, cold disk"


def main() -> None:
    options = _options()
    found: dict[str, list[float]] = {COLD: [], CACHED: [], DISK: []}
    tokens = stored_bytes = different = 0
    with tempfile.TemporaryDirectory(prefix="kvire-bench-") as name:
        folder = Path(name)
        for number in range(options.rounds):
            pages = folder / "pages.txt"
            pages.write_text(workloads.text(9000 + number, int(options.tokens * WORDS_PER_TOKEN)), encoding="utf-8")
            store = folder / f"store-{number}"
            texts = set()
            for state, times in found.items():
                if state is DISK:
                    drop_pages(store)
                answer = generate(pages, store)
                tokens, reused = answer["usage"]["prompt_tokens"], answer["usage"]["cached_tokens"]
                assert (reused == 0) if state is COLD else (reused >= tokens - 32), (state, reused, tokens)
                times.append(answer["timing"]["ttft_s"])
                texts.add(answer["text"])
                print(f"round {number + 1}, {state}: {answer['timing']['ttft_s']:.2f} s, {reused:,} reused", flush=True)
            different += len(texts) - 1
            stored_bytes = sum(path.stat().st_blocks * 512 for path in store.rglob("*"))
    report = {
        "machine": reporting.describe(),
        "break_even_mb_s": stored_bytes / statistics.median(found[COLD]) / 1e6,
        "answers_different": different,
        "stored_mb": stored_bytes / 1e6,
        "samples": found,
        "table": rows(found, tokens, different),
    }
    reporting.write(options.json, report)


def generate(pages: Path, store: Path) -> dict[str, Any]:
    program = Path(sys.executable).with_name("kvire")
    command = [program, "generate", MODEL, "--raw", "--file", pages, "--store", store, "--json"]
    command += ["--max-tokens", "16", "--temperature", "0"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=1800)
    return json.loads(done.stdout)


def drop_pages(folder: Path) -> None:
    """Let the kernel forget the store's files."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def rows(found: dict[str, list[float]], tokens: int, different: int) -> list[dict[str, Any]]:
    computed = medians({COLD: found[COLD]}, "s")
    table = [figure(f"{tokens:,} tokens, {state}: TTFT", "s", samples) for state, samples in found.items()]
    for state in (CACHED, DISK):
        times = ratios(found[COLD], found[state])
        table.append(figure(f"{tokens:,} tokens: computed / {state}", "x", times, baseline=computed))
    return [*table, figure("rounds with an answer that differs", "of all", [different], bar=Bar("<=", 0))]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=25_000)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
