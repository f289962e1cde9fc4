"""How fast `kvire doctor` reads a log and `kvire replay` a trace, and how much memory they take.

Needs no model.

    python bench/log_tools.py [--rounds 3] [--requests 100000] [--json FILE] [--traces DIR]

The log is made: a fifth each of growing chats, growing chats with a time stamp in front, documents
with questions, short questions after a long system prompt, and prompts that share nothing; 2 to 20
KB a request, about 1 GB in all. The trace is Mooncake's conversation trace, 12,031 requests, in
DIR; without it replay takes no part.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import reporting
from reporting import Bar, figure

KVIRE = [sys.executable, "-m", "kvire.cli.main"]
WORDS = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in ("", "n", "r", "st", "ling", "ton")]
TURNS = 12


def text(rng: random.Random, size_bytes: int) -> str:
    return " ".join(rng.choices(WORDS, k=max(1, size_bytes // 4)))


def requests(count: int, rng: random.Random) -> Iterator[dict]:
    system, long_system = text(rng, 1500), text(rng, 6000)
    chats: list[list[dict]] = [[], []]
    for i in range(count):
        kind = i % 5
        if kind < 2:
            chat = chats[kind]
            if len(chat) >= 2 * TURNS:
                chat.clear()
            if chat:
                chat.append({"role": "assistant", "content": text(rng, 700)})
            chat.append({"role": "user", "content": text(rng, 400)})
            stamp = f"Now: 2026-11-30T{i // 3600 % 24:02d}:{i // 60 % 60:02d}:{i % 60:02d}Z\n" if kind else ""
            messages = [{"role": "system", "content": stamp + system}, *chat]
        elif kind == 2:
            messages = [{"role": "user", "content": f"{text(rng, rng.randrange(3000, 19000))}\n\n{text(rng, 80)}?"}]
        elif kind == 3:
            messages = [{"role": "system", "content": long_system}, {"role": "user", "content": text(rng, 120)}]
        else:
            messages = [{"role": "user", "content": text(rng, rng.randrange(2000, 20000))}]
        yield {"timestamp": i * 0.5, "body": {"model": "gpt-4.1", "messages": messages}}


def timed(command: list[str]) -> tuple[float, float]:
    """Seconds, peak MiB."""
    code = (
        "import json,resource,subprocess,sys,time\nstart=time.perf_counter()\n"
        "subprocess.run(sys.argv[1:],stdout=subprocess.DEVNULL,stderr=subprocess.DEVNULL,check=True)\n"
        "peak=resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss/1024\n"
        "print(json.dumps([time.perf_counter()-start,peak]))"
    )
    seconds, peak = json.loads(subprocess.check_output([sys.executable, "-c", code, *command]))
    return seconds, peak


def main() -> None:
    options = _options()
    trace = options.traces / "mooncake_conversation_trace.jsonl"
    found: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        with log.open("w", encoding="utf-8") as file:
            for request in requests(options.requests, random.Random(1)):
                file.write(json.dumps(request) + "\n")
        size_gb = log.stat().st_size / 1e9
        parse = f"import json\nfor line in open({str(log)!r}, 'rb'): json.loads(line)"
        for _ in range(options.rounds):
            found["parse"].append(timed([sys.executable, "-c", parse])[0])
            for name, value in zip(
                ("doctor", "doctor MiB"), timed([*KVIRE, "doctor", str(log), "--json"]), strict=True
            ):
                found[name].append(value)
            if trace.exists():
                for name, value in zip(
                    ("replay", "replay MiB"), timed([*KVIRE, "replay", str(trace), "--json"]), strict=True
                ):
                    found[name].append(value)
    log_is = f"doctor, {options.requests:,} requests, {size_gb:.2f} GB"
    table = [
        figure(
            log_is,
            "s",
            found["doctor"],
            limit=statistics.median(found["parse"]),
            limit_is="parsing the JSON",
            bar=Bar("<", 60),
        ),
        figure(f"{log_is}: peak memory", "MiB", found["doctor MiB"]),
    ]
    if trace.exists():
        table += [
            figure(
                "replay, 12,031 requests of the conversation trace, default sizes and policies",
                "s",
                found["replay"],
                bar=Bar("<", 10),
            ),
            figure("replay: peak memory", "MiB", found["replay MiB"]),
        ]
    skipped = [] if trace.exists() else [f"replay: {trace} is not here"]
    reporting.write(options.json, {"machine": reporting.describe(), "skipped": skipped, "table": table})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--traces", type=Path, default=reporting.ROOT.parent / "shared" / "traces")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
