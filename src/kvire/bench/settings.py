"""What a run is to measure: frozen, and checked before anything starts."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from kvire.bench.metrics import Slo
from kvire.bench.states import TierState
from kvire.bench.work.prompts import Writer
from kvire.bench.work.traces import TraceScale, digest, read_arrivals, trace_work
from kvire.bench.work.workloads import SHORT, SHORT_TOKENS, BenchWork, WorkSize, maker
from kvire.core.errors import ConfigError

TRACE = "trace"


@dataclass(frozen=True, slots=True)
class GridCell:
    """One workload at one size.

    context_tokens: about how long its longest prompts are.
    """

    workload: str
    context_tokens: int
    at_once: int

    def __str__(self) -> str:
        many = f", {self.at_once} at once" if self.at_once > 1 else ""
        return f"{self.workload}, {self.context_tokens:,} tokens{many}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One run of `kvire bench`.

    states: to measure.
    scripts: documents, conversations or agents in a pass; at least one per client.
    rate_per_s: of an open loop.
    nonce: makes the prompts of this run new to every server.
    trace: a file to replay beside the workloads.
    """

    workloads: tuple[str, ...]
    contexts: tuple[int, ...]
    at_once: tuple[int, ...]
    states: tuple[TierState, ...]
    nonce: str
    repeats: int = 5
    scripts: int = 2
    output_tokens: int = 16
    seed: int = 0
    rate_per_s: float | None = None
    slo: Slo = field(default_factory=Slo)
    trace: Path | None = None
    trace_scale: TraceScale = field(default_factory=TraceScale)

    def __post_init__(self) -> None:
        for workload in self.workloads:
            maker(workload)
        if not self.workloads and self.trace is None:
            raise ConfigError("there is nothing to measure: name a --workload or a --trace")
        if not self.states:
            raise ConfigError("--state names no state: give letters of E, G, R, D, N, W and Z")
        _at_least("--repeats", 1, self.repeats)
        _at_least("--scripts", 1, self.scripts)
        _at_least("--output-tokens", 2, self.output_tokens)
        _at_least("--context", 64, *self.contexts)
        _at_least("--concurrency", 1, *self.at_once)
        if self.rate_per_s is not None and not 0 < self.rate_per_s < inf:
            raise ConfigError(f"--rate is a number of requests a second above 0, got {self.rate_per_s:g}")
        if self.trace is not None:
            if not (0 < self.trace_scale.lengths <= 1 and 0 < self.trace_scale.speed < inf):
                raise ConfigError("--scale lies between 0 and 1, and --speed is a number above 0")
            _at_least("--requests", 1, self.trace_scale.requests)
            read_arrivals(self.trace)

    def cells(self) -> Iterator[GridCell]:
        """Every workload at every size."""
        for at_once in self.at_once:
            for workload in self.workloads:
                contexts = (SHORT_TOKENS,) if workload == SHORT else self.contexts
                for context_tokens in contexts:
                    yield GridCell(workload, context_tokens, at_once)
        if self.trace is not None:
            yield GridCell(TRACE, max(self.contexts), 1)

    def work(self, cell: GridCell, write: Writer, repeat: int) -> BenchWork:
        """The prompts of one repeat: the same for every server, new in every repeat."""
        scripts = max(self.scripts, cell.at_once)  # with fewer, clients would have nothing to send
        size = WorkSize(cell.context_tokens, scripts, cell.at_once, self.output_tokens)
        if cell.workload == TRACE:
            assert self.trace is not None
            again = Writer(write.scale, write.seed + repeat, write.nonce)
            return trace_work(read_arrivals(self.trace), self.trace_scale, again, size)
        return maker(cell.workload)(write, size, f"{cell}/{repeat}")

    def trace_digest(self) -> str | None:
        """Which requests are replayed; None without a trace."""
        return None if self.trace is None else digest(read_arrivals(self.trace), self.trace_scale)

    def states_of(self, work: BenchWork) -> tuple[TierState, ...]:
        """Those that a work has: without a probe nothing is to be found anywhere."""
        return tuple(state for state in self.states if work.probe or state in {TierState.E, TierState.Z})


def _at_least(option: str, least: int, *values: int) -> None:
    if not values or min(values) < least:
        raise ConfigError(f"{option} must be at least {least}, got {min(values, default='nothing')}")
