"""A whole run: every arm in every repeat, in turn, and the report of the results."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from kvire.bench import machine, results
from kvire.bench.arm import Arm, MeasuredPass
from kvire.bench.settings import Settings

StepBegun = Callable[[int, int, str], None]  # (step, of how many, what comes now)


def new_nonce() -> str:
    """Makes a run's prompts new to every server."""
    return secrets.token_hex(4)


def measure_arms(
    arms: Mapping[str, Arm], settings: Settings, progress: StepBegun, command: Sequence[str] = ()
) -> results.BenchReport:
    """Measure every arm and report.

    arms: by name, "A" first; they take turns within each repeat.

    Raises ConfigError.
    """
    steps = settings.repeats * sum(arm.steps() for arm in arms.values())
    found: dict[str, list[MeasuredPass]] = {name: [] for name in arms}
    scale, *_ = [arm.scale for arm in arms.values()]  # the first one's, for all; asking warms every server up
    done = 0
    for repeat in range(1, settings.repeats + 1):
        for name in list(arms) if repeat % 2 else list(arms)[::-1]:

            def say(what: str, name: str = name, repeat: int = repeat) -> None:
                nonlocal done
                done += 1
                which = f" {name}" if len(arms) > 1 else ""
                progress(min(done, steps), steps, f"repeat {repeat} of {settings.repeats}{which}: {what}")

            found[name].extend(arms[name].measure(repeat, scale, say))
    described = {name: {"name": name, **arm.describe(), "ideal_by": arm.judge.by} for name, arm in arms.items()}
    return {
        "schema": results.SCHEMA,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(command),
        "commit": machine.commit(),
        "machine": machine.machine_facts(),
        "model": next(iter(described.values()))["model"],
        "settings": plain(settings),
        "arms": list(described.values()),
        "rows": [row for name in arms for row in results.rows_of(name, described[name], found[name], settings)],
    }


def plain(settings: Settings) -> dict[str, object]:
    """Settings for JSON: options, seeds and limits of goodput among them."""
    return {
        **asdict(settings),
        "states": [str(state) for state in settings.states],
        "trace": settings.trace.name if settings.trace is not None else None,
        "trace_sha256": settings.trace_digest(),
    }
