"""Prediction beside measurement: the rows of a `kvire bench` report, and how far off
the plan was.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvire.core.errors import ConfigError

SCHEMA = "kvire.bench/1"
WITHIN = 0.25  # the share of the measured time that a prediction may miss

# (state, prompt tokens, new tokens) to seconds until the first token; None for a state that cannot
# be predicted.
Predict = Callable[[str, int, int], float | None]


@dataclass(frozen=True, slots=True)
class Checked:
    """One row of a report.

    tokens: of its prompts, in the middle.
    measured_s: median time to the first token.
    predicted_s: None where the plan says nothing, and `why` says why.
    """

    workload: str
    state: str
    tokens: int
    samples: int
    measured_s: float
    predicted_s: float | None
    why: str = ""

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured."""
        return None if self.predicted_s is None else self.predicted_s / self.measured_s - 1

    @property
    def within(self) -> bool | None:
        """Whether it is off by no more than WITHIN; None where nothing was predicted."""
        return None if self.error is None else abs(self.error) <= WITHIN


def check_times(report: Mapping[str, Any], predict: Predict, planned: Mapping[str, Any] | None = None) -> list[Checked]:
    """Every row with times; rows outside of the plan say why.

    planned: by the report's names (layers, kv_dtype), in what the measured model must be the
        planned one.

    Raises ConfigError for another schema, or a report without such rows.
    """
    if report.get("schema") != SCHEMA:
        raise ConfigError(f"the report has schema {report.get('schema')!r}, not {SCHEMA}: see kvire bench --json")
    others = {
        str(arm.get("name")): _other(arm, planned or {}) for arm in report.get("arms", ()) if isinstance(arm, Mapping)
    }
    rows = [_row(row, predict, others) for row in report.get("rows", ())]
    found = [row for row in rows if row is not None]
    if not found:
        raise ConfigError("the report has no rows with a state, context_tokens and samples with ttft_s")
    return found


def _row(row: Mapping[str, Any], predict: Predict, others: Mapping[str, str]) -> Checked | None:
    samples = [s for s in row.get("samples", ()) if (s.get("ttft_s") or 0) > 0 and not s.get("error")]
    asked, state = row.get("context_tokens"), row.get("state")
    if not samples or not isinstance(asked, int) or not isinstance(state, str):
        return None
    tokens = _middle([s.get("prompt_tokens") for s in samples]) or asked
    predicted, why = None, _beyond(row, others)
    if not why:
        predicted = predict(state, tokens, _new_tokens(samples, tokens))
        why = f"no speed known for state {state}: calibrate with that tier" if predicted is None else ""
    measured = statistics.median(s["ttft_s"] for s in samples)
    return Checked(row.get("workload", ""), state, tokens, len(samples), measured, predicted, why)


def _other(arm: Mapping[str, Any], planned: Mapping[str, Any]) -> str:
    """Why the plan does not speak of an arm; empty if it does."""
    if arm.get("kind") == "url":
        return f"{arm.get('name')} is another server: the plan knows this engine's speed"
    model = arm.get("model") or {}
    differs = [
        f"{name} {model[name]}, planned for {value}"
        for name, value in planned.items()
        if model.get(name, value) != value
    ]
    return f"measured with {'; '.join(differs)}" if differs else ""


def _beyond(row: Mapping[str, Any], others: Mapping[str, str]) -> str:
    """Why the plan does not speak of a row; empty if it does."""
    if why := others.get(str(row.get("arm")), ""):
        return why
    if row["state"] == "unproved":
        return "the bench could not prove the state"
    if row.get("concurrency", 1) != 1 or row.get("rate_per_s"):
        return "several requests at once: the plan predicts one alone"
    return ""


def _new_tokens(samples: Sequence[Mapping[str, Any]], tokens: int) -> int:
    """At the prompts' end, tokens that were computed by the server's own count; else one, as for a
    repeated prompt.
    """
    counted = [
        s["prompt_tokens"] - s["cached_tokens"]
        for s in samples
        if isinstance(s.get("prompt_tokens"), int) and isinstance(s.get("cached_tokens"), int)
    ]
    return min(tokens, max(1, _middle(counted) or 1))


def _middle(numbers: Sequence[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return round(statistics.median(known)) if known else None
