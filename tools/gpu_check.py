"""Is Kvire right on this machine's GPU, and how fast is it there? Takes less than six minutes.

    python tools/gpu_check.py [--json FILE] [--model NAME] [--device cpu]

Parts run one after the other, each within a time of its own; one that fails does not stop the
others. Exit code 1: something was wrong; 2: there is no GPU to check. Checks that did not fit into
their part's time are counted as not reached. --device cpu rehearses the same code with smaller
sizes. gpu_speed.py has the baselines of the figures.

right    every family and pool dtype: logprobs of prompts (in chunks, beside decodes) and of
         answers, cold and warm, against the model's own uncached forward on the same device, and
         that one against the CPU's
traffic  random traffic, every answer against an engine that reuses nothing
         (tests/harness/differential.py)
speed    prefill and decode, decode attention, blocks to the host and back, break-even bandwidth
"""

# ruff: noqa: E402 - what is imported lies beside the package, not in it

import argparse
import faulthandler
import json
import random
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "bench"), str(ROOT / "tests")]

import gpu_speed
import reporting
import torch
from models.tiny import FAMILIES, make_tiny
from transformers.utils import logging as transformers_logging

from kvire import LLM
from kvire.core.config import EngineConfig
from kvire.core.dtypes import KV_DTYPES
from kvire.core.errors import ConfigError, UnsupportedModelError
from kvire.core.spec import KVSpec
from kvire.engine.build import build_engine
from kvire.engine.device import choose_device, prepare
from kvire.engine.engine import Engine
from kvire.models.families import kv_groups
from kvire.models.loader import load_model
from kvire.models.resolve import resolve

REHEARSAL = 0.5  # share of each part's time
GIVE_UP_S = 480  # a kernel that never ends cannot be interrupted otherwise

# Nats between a token's logprob over the cache and without one, on tiny models whose logits reach
# +-30. float32: no token may differ by more. Others: the typical token, since rounding may send one
# to another expert.
TOLERANCE_NATS = {"float32": 0.002, "float16": 0.02, "bfloat16": 0.1, "int8": 0.3}
CPU_TOLERANCE_NATS = 0.01  # the typical token, uncached on the device against uncached on the CPU: TF32 gives more
PROMPT_TOKENS = (90, 3, 41, 33, 64)  # the tiny models' windows are 24 tokens


@dataclass
class Check:
    """What every part gets, and what came out so far."""

    device: torch.device
    folder: Path
    model: str
    results: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    not_reached: list[str] = field(default_factory=list)
    deadline: float = 0.0

    @property
    def rehearsal(self) -> bool:
        """On the CPU everything is smaller."""
        return self.device.type == "cpu"

    def out_of_time(self, what: str) -> bool:
        """Whether the part's time is over; then `what` counts as not reached."""
        if monotonic() < self.deadline:
            return False
        self.not_reached.append(what)
        return True

    def hold(self, text: str, *, ok: bool) -> None:
        """Print a finding; it is a fault unless ok."""
        print(f"  {'ok   ' if ok else 'WRONG'} {text}", flush=True)
        if not ok:
            self.faults.append(text)


def main() -> int:
    options = _options()
    try:
        device = choose_device(EngineConfig(device=options.device))
    except ConfigError as error:
        print(f"gpu_check: {error}\n--device cpu rehearses the check without a GPU.", file=sys.stderr)
        return 2
    prepare(device)
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    faulthandler.dump_traceback_later(GIVE_UP_S, exit=True)
    started = monotonic()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model if options.model != "smollm2" else gpu_speed.smollm2(Path(folder))
        check = Check(device, Path(folder), model)
        check.results["machine"] = describe() | gpu_speed.describe(device)
        print(json.dumps(check.results["machine"]), flush=True)
        for name, time_s, part in PARTS:
            run_part(check, name, time_s, part)
            check.results |= {"faults": check.faults, "not_reached": check.not_reached}
            if options.json:  # after each part: a hang later must not cost what was found
                options.json.write_text(json.dumps(check.results, indent=1) + "\n", encoding="utf-8")
    print(f"\n{len(check.faults)} wrong, {len(check.not_reached)} not reached, {monotonic() - started:.0f} s")
    for text in check.faults:
        print(f"WRONG: {text}")
    return 1 if check.faults else 0


def describe() -> dict[str, Any]:
    """Machine, versions and commit; the commit only where there is git."""
    try:
        return reporting.describe()
    except FileNotFoundError:
        return {"torch": torch.__version__}


def run_part(check: Check, name: str, time_s: float, part: Callable[[Check], Any]) -> None:
    """Run one part; what it raises is a fault."""
    print(f"\n{name}", flush=True)
    started = monotonic()
    check.deadline = started + (REHEARSAL if check.rehearsal else 1) * time_s
    try:
        check.results[name] = part(check)
    except Exception as error:  # noqa: BLE001 - the other parts must run
        traceback.print_exc()
        check.faults.append(f"{name}: {type(error).__name__}: {error}")
    print(f"  {name} took {monotonic() - started:.0f} s", flush=True)


# --- right ---


def right(check: Check) -> list[dict[str, Any]]:
    """Every family in float32 first, then with the other pools."""
    rows = []
    dtypes = ("float32", *(dtype for dtype in KV_DTYPES if dtype != "float32"))
    for dtype in dtypes:
        for family in FAMILIES:
            if check.out_of_time(f"{family} with a {dtype} pool"):
                continue
            try:
                rows.append(one_family(check, family, dtype))
            except UnsupportedModelError as error:
                print(f"  refused {family} with a {dtype} pool: {error}", flush=True)
            except Exception as error:  # noqa: BLE001 - the other families must run
                traceback.print_exc()
                check.hold(f"{family} with a {dtype} pool: {type(error).__name__}: {error}", ok=False)
    return rows


def one_family(check: Check, family: str, dtype: str) -> dict[str, Any]:
    """Cold and warm through the engine, against the uncached forward."""
    path = check.folder / family
    if not path.exists():
        make_tiny(family, path)
    rng = random.Random(family)
    prompts = [[rng.randrange(256) for _ in range(n)] for n in PROMPT_TOKENS]
    options = {"block_size": 8, "max_batch_tokens": 48, "max_num_seqs": 4, "kv_memory": "32MiB", "kv_dtype": dtype}
    with LLM(str(path), device=check.device.type, attention="portable", **options) as llm:
        wanted = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
        cold = llm.generate(prompts, prompt_logprobs=0, **wanted)
        warm = llm.generate(prompts, **wanted)
    reused = sum(result.cache.reused_tokens for result in warm)
    model = load_model(path).model
    on_cpu = uncached(model, prompts, cold, torch.device("cpu")) if dtype == "float32" else None
    expected = uncached(model.to(check.device), prompts, cold, check.device)
    again = uncached(model, prompts, warm, check.device)
    differences = []
    for result, scores in zip(cold, expected, strict=True):
        found = [entry.logprob for entry in [*result.prompt_logprobs[1:], *result.logprobs]]
        differences.append(torch.tensor(found) - scores)
    for result, scores in zip(warm, again, strict=True):
        differences.append(
            torch.tensor([entry.logprob for entry in result.logprobs]) - scores[-len(result.token_ids) :]
        )
    apart = torch.cat(differences).abs()
    row = {"family": family, "pool": dtype, "reused_tokens": reused}
    row |= {"median_nats": float(apart.median()), "max_nats": float(apart.max())}
    judged = row["max_nats"] if dtype == "float32" else row["median_nats"]
    text = f"{family:<16} {dtype:<9} off by {row['median_nats']:.2g} nats typically, {row['max_nats']:.2g} at most"
    check.hold(f"{text}; {reused} tokens reused", ok=judged <= TOLERANCE_NATS[dtype] and reused > 0)
    if on_cpu is not None and not check.rehearsal:
        row["cpu_median_nats"] = float((torch.cat(expected) - torch.cat(on_cpu)).abs().median())
        text = f"{family:<16} uncached, device and CPU differ by {row['cpu_median_nats']:.2g} nats typically"
        check.hold(text, ok=row["cpu_median_nats"] <= CPU_TOLERANCE_NATS)
    return row


@torch.inference_mode()
def uncached(model: Any, prompts: list[list[int]], results: list[Any], device: torch.device) -> list[torch.Tensor]:
    """Logprobs of every token but the first of prompt + answer, without any cache; on the CPU."""
    scores = []
    for prompt, result in zip(prompts, results, strict=True):
        ids = torch.tensor([[*prompt, *result.token_ids]], device=device)
        logprobs = model(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        scores.append(logprobs.gather(1, ids[0, 1:, None])[:, 0].cpu())
    return scores


# --- traffic ---


def traffic(check: Check) -> dict[str, Any]:
    """Episodes of random traffic as long as there is time, on a tiny llama and on the model."""
    from harness.differential import SMOLLM2, TINY  # noqa: PLC0415 - its own part: it may fail alone

    path = str(make_tiny("llama", check.folder / "traffic-llama"))
    subjects = [replace(TINY, build=partial(engine, check, path), attention=("portable",))]
    if check.model == "smollm2":  # random weights of a large model answer by chance
        subjects.append(replace(SMOLLM2, build=partial(engine, check, "smollm2"), attention=("portable",)))
    tallies, started, time_s = {}, monotonic(), check.deadline - monotonic()
    for i, subject in enumerate(subjects, 1):
        check.deadline = started + time_s * i / len(subjects)
        tallies[subject.name] = episodes(check, subject)
    return tallies


def engine(check: Check, name: str, *, num_blocks: int, **options: Any) -> Engine:
    """An engine over `num_blocks` blocks of 16 tokens."""
    config = json.loads((resolve(name) / "config.json").read_text(encoding="utf-8"))
    block_bytes = 16 * KVSpec(kv_groups(config), block_size=16).bytes_per_token
    fixed = {"device": check.device.type, "block_size": 16, "kv_memory": num_blocks * block_bytes}
    return build_engine(name, EngineConfig(**fixed, **options))[0]


def episodes(check: Check, subject: Any) -> dict[str, Any]:
    """One episode after the other; the tally of all."""
    from harness.differential import Tally, prove  # noqa: PLC0415

    total = Tally()
    for seed in count():
        if seed and monotonic() >= check.deadline:
            break
        total.add(prove(subject, seed, 8 if check.rehearsal else 24, deterministic=False))
        print(
            f"  {subject.name}: {total.requests} requests, {total.wrong} wrong, {total.harmless} near-ties", flush=True
        )
    check.hold(f"{subject.name}: {total.wrong} of {total.requests} wrong {total.faults[:3]}", ok=total.wrong == 0)
    return vars(total)


def speed(check: Check) -> dict[str, Any]:
    """See gpu_speed.py."""
    return gpu_speed.measure(check.device, check.model, check.hold, check.out_of_time)


PARTS: tuple[tuple[str, float, Callable[[Check], Any]], ...] = (
    ("right", 140, right),
    ("traffic", 70, traffic),
    ("speed", 90, speed),
)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, help="write what was found, after each part")
    parser.add_argument("--model", default="smollm2", help="for speed; SmolLM2 also for traffic, if installed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
