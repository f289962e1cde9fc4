"""Messages between the two sides; plain values, because vLLM pickles them between processes."""

from dataclasses import dataclass, field
from typing import NamedTuple

from kvire.core.keys import BlockKey
from kvire.core.record import BlockRecord
from kvire.plan.cost import Speed


class Move(NamedTuple):
    """KV between the store and vLLM.

    record: of a group's part of a block.
    place: block id, or row of the CPU tier.
    """

    record: BlockRecord
    place: int


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Blocks to bring for a request that waits for them, group by group, in order of the prompt.

    patience_s: time of computing them, and so the longest wait for a load.
    """

    request_id: str
    moves: list[Move]
    patience_s: float


@dataclass(slots=True)
class StepPlan:
    """From the scheduler to the workers, for one step.

    used: keys of blocks whose requests ended, in order.
    idle: no token is computed in this step.
    step: its number, if its duration measures the speed of prompts.
    """

    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[Move] = field(default_factory=list)
    used: list[BlockKey] = field(default_factory=list)
    idle: bool = False
    step: int | None = None


@dataclass(slots=True)
class Outcome:
    """From the workers to the scheduler.

    failed: index of the first block that could not be loaded, by request.
    late: requests whose loads took longer than computing.
    saved: blocks that the store took completely.
    speeds: of the tiers that were read.
    step: the last started step with a number.
    """

    failed: dict[str, int] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)
    saved: list[BlockKey] = field(default_factory=list)
    speeds: dict[str, Speed] = field(default_factory=dict)
    step: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not (self.failed or self.saved or self.speeds) and self.step is None

    def merge(self, other: "Outcome") -> "Outcome":
        """The outcome of several workers: a block missing in one is missing; the slowest load
        counts.
        """
        theirs = set(other.saved)
        self.saved = [key for key in self.saved if key in theirs]
        self.late |= other.late
        for request_id, index in other.failed.items():
            self.failed[request_id] = min(index, self.failed.get(request_id, index))
        for tier, speed in other.speeds.items():
            mine = self.speeds.get(tier, speed)
            self.speeds[tier] = min(mine, speed, key=lambda one: one.bytes_per_s)
        self.step = self.step if other.step is None else other.step
        return self


@dataclass(frozen=True, slots=True)
class Facts:
    """A worker's cache, reported once at start.

    numerics: kernels.
    spec: layout, as text.
    block_bytes: by group.
    """

    numerics: str
    kv_dtype: str
    spec: str
    block_bytes: tuple[int, ...]
