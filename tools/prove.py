"""Proof in numbers: the tests of tests/proof, as large as asked for.

    python tools/prove.py differential --requests 20000 --seed 1
    python tools/prove.py canary --responses 20000
    python tools/prove.py pool --operations 1000000
    python tools/prove.py text --triples 10000

Prints how many there were, how many went wrong, and what none wrong of N means: with 95 %
confidence fewer than 3 in N do. --json adds the result to docs/results/proof.json. The exit status
is 1 if anything went wrong.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "bench")]

import kvire  # noqa: E402, F401, I001  (before torch: it sets how OpenMP threads wait)
import torch  # noqa: E402
from harness import canary  # noqa: E402
from harness.differential import SMOLLM2, TINY, Tally, prove, smollm2_engine  # noqa: E402
from reporting import describe  # noqa: E402

RESULTS = ROOT / "docs" / "results" / "proof.json"
EPISODE = 50  # requests of one engine
PROGRESS_S = 10.0


class Progress:
    """A line on stderr now and then."""

    def __init__(self, total: int) -> None:
        self.total, self.started, self.shown = total, time.monotonic(), 0.0

    def __call__(self, done: int, wrong: int = 0) -> None:
        """Say how many are done, and how many of them went wrong."""
        now = time.monotonic()
        if now - self.shown >= PROGRESS_S:
            self.shown = now
            print(f"{done} of {self.total}, {wrong} wrong, {now - self.started:.0f} s", file=sys.stderr, flush=True)


def differential(args: argparse.Namespace) -> dict[str, Any]:
    """Random traffic against the same engine that reuses nothing."""
    subject, tally = SMOLLM2 if args.model == "smollm2" else TINY, Tally()
    progress = Progress(args.requests)
    for episode, first in enumerate(range(0, args.requests, EPISODE)):
        deterministic = args.mode == "deterministic" or (args.mode == "both" and episode % 2 == 0)
        count = min(EPISODE, args.requests - first)
        try:
            tally.add(prove(subject, args.seed * 10**6 + first, count, deterministic=deterministic))
        except AssertionError as error:  # a broken promise ends its episode only; the run ends with status 1
            tally.requests += count
            tally.fault(str(error))
        progress(tally.requests, tally.wrong)
    counts = vars(tally) | {"faults": tally.faults[:5], "harmless_rate": tally.harmless / tally.requests}
    return {"n": tally.requests, "wrong": tally.wrong, "model": subject.name, "mode": args.mode, **counts}


def canaries(args: argparse.Namespace) -> dict[str, Any]:
    """Rounds of forty clients with a secret each."""
    small = args.model == "tiny"
    talk = canary.SecretTokens() if small else canary.SecretWords(smollm2_engine(4).tokenizer)
    build = canary.secret_engine if small else smollm2_engine
    per_round, total = canary.CLIENTS * canary.TURNS, canary.CanaryTally()
    progress = Progress(args.responses)
    for round_ in range(-(-args.responses // per_round)):
        engine = build(canary.small_pool(talk, canary.CLIENTS, canary.TURNS))
        tally = canary.run_canaries(
            engine,
            talk,
            args.seed * 10**6 + round_,
            clients=canary.CLIENTS,
            turns=canary.TURNS,
            on_turn=lambda done: progress(total.responses + done, total.foreign),
        )
        for name, value in vars(tally).items():
            setattr(total, name, getattr(total, name) + value)
    return {"n": total.responses, "wrong": total.foreign, "model": args.model, **vars(total)}


def pool(args: argparse.Namespace) -> dict[str, Any]:
    """Random programs on the block pool against a reference, its promises checked all along."""
    return _tests("tests/cache/test_block_pool_stateful.py", args.operations, KVIRE_POOL_OPERATIONS=args.operations)


def text(args: argparse.Namespace) -> dict[str, Any]:
    """Joined pieces of text against the whole, for random (text, pieces, stop string)."""
    return _tests("tests/engine/test_detokenizer.py", args.triples, KVIRE_TEXT_TRIPLES=args.triples)


def _tests(path: str, count: int, **environment: int) -> dict[str, Any]:
    """Run a test file whose size comes from the environment; it stops at the first fault."""
    variables = os.environ | {name: str(value) for name, value in environment.items()}
    command = [sys.executable, "-m", "pytest", path, "-x", "-o", "timeout=0"]
    run = subprocess.run(command, cwd=ROOT, env=variables, check=False)
    return {"n": count, "wrong": int(run.returncode != 0), "tests": path}


def main() -> None:
    """See the module's docstring."""
    args = _arguments()
    run: Callable[[argparse.Namespace], dict[str, Any]] = {
        "differential": differential,
        "canary": canaries,
        "pool": pool,
        "text": text,
    }[args.what]
    small_model = getattr(args, "model", "tiny") == "tiny"
    torch.set_num_threads(1 if small_model else torch.get_num_threads())
    started = time.monotonic()
    result = run(args)
    result |= {
        "seconds": round(time.monotonic() - started, 1),
        "upper_bound_95": 3 / result["n"] if not result["wrong"] else None,
        "seed": getattr(args, "seed", None),
    }
    bound = f"fewer than 1 in {result['n'] // 3}" if not result["wrong"] else "not meaningful"
    harmless = f", harmless rate {result['harmless_rate']:.5f}" if "harmless_rate" in result else ""
    print(
        f"{args.what}: N {result['n']}, wrong {result['wrong']}{harmless}, {result['seconds']} s, "
        f"95 % upper bound 3/N: {bound}"
    )
    for fault in result.get("faults", ()):
        print(f"  {fault}")
    if args.json:
        _write(args.json, args.what, result)
    sys.exit(1 if result["wrong"] else 0)


def _write(path: Path, what: str, result: dict[str, Any]) -> None:
    """Add a run to the file; an earlier one of the same kind, model and mode makes room for it."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    name = " ".join([what, *(str(result[key]) for key in ("model", "mode") if key in result)])
    when = datetime.now(UTC).strftime("%Y-%m-%d")
    known[name] = {"date": when, "machine": describe(), **result}
    path.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="what", required=True)
    for name, size, default in (
        ("differential", "requests", 20_000),
        ("canary", "responses", 20_000),
        ("pool", "operations", 1_000_000),
        ("text", "triples", 10_000),
    ):
        kind = kinds.add_parser(name)
        kind.add_argument(f"--{size}", type=int, default=default)
        kind.add_argument(
            "--json", type=Path, nargs="?", const=RESULTS, help="add the result to docs/results/proof.json"
        )
        if name in ("differential", "canary"):
            kind.add_argument("--seed", type=int, default=1)
            kind.add_argument("--model", choices=("tiny", "smollm2"), default="tiny")
        if name == "differential":
            kind.add_argument("--mode", choices=("deterministic", "fast", "both"), default="both")
    return parser.parse_args()


if __name__ == "__main__":
    main()
