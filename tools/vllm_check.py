"""Does vLLM with the store ever answer otherwise than without? Real engines, asked and killed.

    KVIRE_VLLM_PYTHON=... python tools/vllm_check.py [--requests 200] [--kills 0]
        [--model smollm2] [--json FILE]

Requests: prompts that begin with parts of one another, greedy, first of vLLM alone, then of vLLM
with the store, which is ended and started again LIVES times meanwhile; then all of them once more
on the warm store. Kills: engines that are killed with SIGKILL in the middle of requests, and
started again on the store as they left it.

An answer that differs is wrong, unless it diverges at a choice whose two likeliest tokens were
closer than rounding: such near-ties are counted and listed.

Exit status 1 if anything was wrong, or an engine did not start. docs/vllm.md says how to set up the
Python; a start takes half a minute of two cores. Progress on stderr.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "bench")]

from connectors.vllm.checks import Asked, Comparison, compare, killed_at_random, overlapping  # noqa: E402
from connectors.vllm.engine_process import PYTHON, Vllm  # noqa: E402
from reporting import describe  # noqa: E402

from kvire.models.resolve import resolve  # noqa: E402

LIVES = 3  # of the engine, on a store that grows
AT_ONCE = 8  # requests
MAX_TOKENS = 16
BLOCK = 32  # tokens
PLAIN_IDS = range(1000, 40000)  # of SmolLM2's vocabulary: no control tokens


class Engines:
    """Called, it starts an engine on one folder.

    starts: how many there were.
    """

    def __init__(self, model: Path, folder: Path) -> None:
        self._model = model
        self._folder = folder
        self.starts = 0

    def __call__(self, *, stored: bool = True, spawns: bool = True) -> Vllm:
        """With the store, or without.

        spawns: see Vllm.
        """
        options = {
            "store": str(self._folder / "store"),
            "key_file": str(self._folder / "keys" / "keyring.json"),
            "disk_size": "4GB",
        }
        self.starts += 1
        log = self._folder / f"engine{self.starts}.log"
        say(f"engine {self.starts} starts")
        return Vllm(
            self._model, options if stored else None, log, spawns=spawns, kv_bytes=512 << 20,
            arguments={"block_size": BLOCK, "max_model_len": 2048},
            environment={
                "OMP_NUM_THREADS": str(os.cpu_count() or 1),
                "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",  # with a connector it would be one more: other sums
            },
        )  # fmt: skip


def main() -> None:
    given = options()
    if PYTHON not in os.environ:
        sys.exit(f"set {PYTHON} to a Python that can import vLLM (docs/vllm.md)")
    prompts = overlapping(given.requests, given.seed, vocabulary=PLAIN_IDS, longest=given.longest)
    report: dict[str, Any] = {"machine": describe(), "model": given.model, "seed": given.seed}
    with tempfile.TemporaryDirectory() as folder:
        engines = Engines(resolve(given.model), Path(folder))
        with timed(report, "alone_s"), engines(stored=False) as alone:
            asked = expect(alone, prompts)
        with timed(report, "requests_s"):
            report["requests"] = traffic(engines, asked)
        if given.kills:
            with timed(report, "kills_s"):
                report["kills"] = kills(engines, asked, given.kills, given.seed)
        report["starts"] = engines.starts
    text = json.dumps(report, indent=2)
    if given.json:
        given.json.write_text(text + "\n")
    print(text)
    sys.exit(any(part["wrong"] for part in (report["requests"], report.get("kills", {"wrong": 0}))))


def expect(alone: Vllm, prompts: list[list[int]]) -> list[Asked]:
    """What vLLM says without the store."""
    asked: list[Asked] = []
    for start in range(0, len(prompts), AT_ONCE):
        some = prompts[start : start + AT_ONCE]
        answer = alone("generate", prompts=some, max_tokens=MAX_TOKENS, gaps=True)
        asked += zip(some, answer["tokens"], answer["gaps"], strict=True)
        say(f"{len(asked)} of {len(prompts)} answers without the store")
    return asked


def traffic(engines: Engines, asked: list[Asked]) -> dict[str, Any]:
    """A share of the requests in each life; all of them in one more."""
    found = Comparison()
    size = -(-len(asked) // LIVES)
    for share in (*(asked[start : start + size] for start in range(0, len(asked), size)), asked):
        with engines(spawns=engines.starts % 2 == 0) as engine:
            compare(engine, share, found, at_once=AT_ONCE, max_tokens=MAX_TOKENS)
            say(f"{found.requests} answers compared, {found.wrong} wrong, {found.near_ties} near-ties")
    return asdict(found)


def kills(engines: Engines, asked: list[Asked], count: int, seed: int) -> dict[str, Any]:
    """Engines that die. One that does not start ends the check."""

    def start(number: int) -> Vllm:
        return engines(spawns=number % 2 == 0)

    return {"kills": count, **asdict(killed_at_random(start, asked, count, max_tokens=MAX_TOKENS, seed=seed))}


@contextmanager
def timed(report: dict[str, Any], name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    report[name] = round(time.monotonic() - began, 1)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=200, help="prompts, each asked twice")
    parser.add_argument("--longest", type=int, default=600, help="tokens of a prompt")
    parser.add_argument("--kills", type=int, default=0, help="engines to kill")
    parser.add_argument("--model", default="smollm2", help="what `kvire serve` takes as a model")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts, and of the moments of the kills")
    parser.add_argument("--json", type=Path, help="also write the report there")
    given = parser.parse_args()
    if given.requests < AT_ONCE:
        parser.error(f"--requests is at least {AT_ONCE}")
    return given


if __name__ == "__main__":
    main()
