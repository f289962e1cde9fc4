"""Sends scripts to a server: one after another, several at once, or as they arrive."""

import random
import resource
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Any

from kvire.bench.client import Endpoint, StreamedAnswer, ask_completion
from kvire.bench.work.prompts import BenchPrompt, Script

MOST_AT_ONCE = 512  # threads of an open loop
SATURATED = 0.5  # of one core: from here on, the client may be the limit


@dataclass(frozen=True, slots=True)
class Sample:
    """One request of a pass.

    script, turn: which one.
    sent_s: since the pass began.
    """

    script: int
    turn: int
    prompt: BenchPrompt
    sent_s: float
    answer: StreamedAnswer


@dataclass(frozen=True, slots=True)
class Pass:
    """All requests of scripts that were sent together, in the scripts' order.

    client_cpu: share of one core that this process took.
    late_s: how much later than due a request was sent at most.
    """

    samples: tuple[Sample, ...]
    wall_s: float
    client_cpu: float
    late_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Loop:
    """How many clients, or how often they come.

    at_once: clients of a closed loop.
    rate_per_s: of an open loop, with exponential times between arrivals; None for a closed loop, or
        for scripts that bring their own times of arrival.
    """

    at_once: int
    rate_per_s: float | None = None
    seed: int = 0

    def starts_s(self, scripts: Sequence[Script]) -> list[float] | None:
        """When each script is due; None for a closed loop."""
        if any(script.start_s is not None for script in scripts):
            return [script.start_s or 0.0 for script in scripts]
        if self.rate_per_s is None:
            return None
        rng, at, starts = random.Random(self.seed), 0.0, []  # noqa: S311 - arrivals, no secrets
        for _ in scripts:
            starts.append(at)
            at += rng.expovariate(self.rate_per_s)
        return starts


Extra = Callable[[int, int], Mapping[str, Any]]  # (script, turn) -> more fields of the request


def send_all(endpoint: Endpoint, scripts: Sequence[Script], loop: Loop, extra: Extra | None = None) -> Pass:
    """Send everything and wait for the last answer. Errors are part of the answers."""
    starts = loop.starts_s(scripts)
    began, cpu, lock = perf_counter(), _cpu_s(), threading.Lock()
    samples: list[Sample] = []
    late, stopped = 0.0, threading.Event()

    def play(index: int) -> None:
        nonlocal late
        for turn, prompt in enumerate(scripts[index].prompts):
            sent = perf_counter() - began
            if starts is not None and turn == 0:
                with lock:
                    late = max(late, sent - starts[index])
            answer = ask_completion(
                endpoint, prompt.messages, prompt.output_tokens, extra(index, turn) if extra else None
            )
            with lock:
                samples.append(Sample(index, turn, prompt, sent, answer))
            if answer.error is not None or stopped.is_set():
                return  # after an error, what would follow is another conversation

    workers = loop.at_once if starts is None else MOST_AT_ONCE
    threads = ThreadPoolExecutor(min(workers, len(scripts)))
    try:
        futures = []
        for index in range(len(scripts)):
            if starts is not None:
                sleep(max(0.0, began + starts[index] - perf_counter()))
            futures.append(threads.submit(play, index))
        for future in futures:
            future.result()
    finally:  # an interrupt does not wait for requests that have not been sent
        stopped.set()
        threads.shutdown(wait=False, cancel_futures=True)
    wall = perf_counter() - began
    samples.sort(key=lambda sample: (sample.turn, sample.script))
    return Pass(tuple(samples), wall, (_cpu_s() - cpu) / wall, late)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
