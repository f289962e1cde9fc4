"""Is the planner right? Times to first token, predicted and measured: SmolLM2, float16 pool.

    python bench/plan_check.py [--repeats 5] [--json FILE]

Calibrates as `kvire plan --calibrate` does, at 256, 1,024 and 3,072 tokens; then measures other
prompts in other engines at 512, 2,048 and 4,096: nothing kept (E), the pool (G), the memory tier
(R), the disk tier with its pages dropped from the page cache (D). The plan never sees those times.
Bar: the prediction misses them by 25 % at most.
"""

import argparse
from pathlib import Path
from typing import Any

import limits
import reporting
from reporting import Bar, figure

from kvire.bench.figures import number
from kvire.cli.plan.calibrate import LENGTHS, REPEATS, calibration_record, collect
from kvire.plan.calibration import Asked, measured_machine, measured_tiers
from kvire.plan.cards import card
from kvire.plan.check import WITHIN
from kvire.plan.hardware import break_even_bytes_per_s
from kvire.plan.plan import Money, Plan, predictor
from kvire.plan.read_shape import read_shape
from kvire.plan.serve import STATES, PromptShape
from kvire.plan.shape import Storage
from kvire.plan.sizing import ServingUse

MODEL, KV_DTYPE, BLOCK_TOKENS = "smollm2", "float16", 16
CHECKED = (512, 2048, 4096)


def main() -> None:
    options = _options()
    record = calibration_record(MODEL, KV_DTYPE, LENGTHS, REPEATS)
    plan = _plan(record)
    predict = predictor(plan)
    measured = collect(MODEL, KV_DTYPE, CHECKED, options.repeats)
    rows = [_row(asked, predict(*asked), times) for asked, times in sorted(measured.ttft_s.items())]
    even = break_even_bytes_per_s(plan.shape, plan.storage, plan.who, CHECKED[-1])
    speeds = {"read_gb_s": limits.read_gb_s(), "matmul_gflops": limits.matmul_gflops()}
    described = {"machine": reporting.describe(), "limits": speeds, "break_even_mb_s": even / 1e6}
    reporting.write(options.json, {**described, "calibration": record, "table": rows})


def _plan(record: dict[str, Any]) -> Plan:
    return Plan(
        title=MODEL, source="", verified=True, shape=read_shape(card(MODEL).config),
        storage=Storage(KV_DTYPE, BLOCK_TOKENS), use=ServingUse(), prompt=PromptShape(1), tiers=measured_tiers(record),
        money=Money(), who=measured_machine(record),
    )  # fmt: skip


def _row(asked: Asked, predicted_s: float, times: list[float]) -> dict[str, Any]:
    """How far the prediction is from each measured time. Raw times stand beside it."""
    misses = [100 * abs(predicted_s / seconds - 1) for seconds in times]
    middle = reporting.summary(times)["median"]
    baseline = f"predicted {number(1e3 * predicted_s)} ms, measured {number(1e3 * middle)} ms"
    new = "" if asked.state == "E" else f", {asked.new_tokens} new"
    name = f"{asked.tokens:,} tokens{new}, {STATES[asked.state]} ({asked.state}): the plan misses the TTFT by"
    row = figure(name, "%", misses, baseline=baseline, bar=Bar("<=", 100 * WITHIN))
    return row | {"predicted_s": predicted_s, "ttft_s": times}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=reporting.ROOT / "docs" / "results" / "plan_check.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
