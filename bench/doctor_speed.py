"""How fast `kvire doctor` reads a log, and how much memory it takes: seconds and peak RSS beside a plain JSON parse.

    python bench/doctor_speed.py --requests 100000

The log: a fifth each of growing chats, growing chats with a time stamp in front, documents with questions, short
questions after a long system prompt, and prompts that share nothing; 2 to 20 KB a request, about 1 GB in all.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

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


def timed(command: list[str]) -> tuple[float, float, str]:
    """Seconds, peak MiB, standard output."""
    code = (
        "import json,resource,subprocess,sys,time\nstart=time.perf_counter()\n"
        "done=subprocess.run(sys.argv[1:],capture_output=True,text=True,check=True)\n"
        "peak=resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss/1024\n"
        "print(json.dumps([time.perf_counter()-start,peak,done.stdout]))"
    )
    seconds, peak, out = json.loads(subprocess.check_output([sys.executable, "-c", code, *command]))
    return seconds, peak, out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        with log.open("w") as file:
            for request in requests(args.requests, random.Random(1)):
                file.write(json.dumps(request) + "\n")
        parse = f"import json\nfor line in open({str(log)!r}, 'rb'): json.loads(line)"
        seconds, peak, out = timed([sys.executable, "-m", "kvire.cli.main", "doctor", str(log), "--json"])
        figures = {
            "requests": args.requests,
            "log_mb": round(log.stat().st_size / 1e6),
            "json_parse_alone_s": round(timed([sys.executable, "-c", parse])[0], 1),
            "doctor_s": round(seconds, 1),
            "peak_rss_mib": round(peak),
        }
        found = json.loads(out)
    print(json.dumps(figures | {"ideal_share": found["ideal"]["share"], "notes": found["notes"]}, indent=1))
    for one in found["findings"]:
        print(one["cause"], one["where"], one["requests"], one["tokens"])
    if args.output:
        args.output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
