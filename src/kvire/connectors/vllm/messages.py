"""What the two sides of the connector tell each other; plain values, because vLLM pickles them
between processes.
"""

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

    patience_s: what computing them would take, and so the longest that a load under way is waited
        for.
    """

    request_id: str
    moves: list[Move]
    patience_s: float


@dataclass(slots=True)
class StepPlan:
    """From the scheduler to the workers, for one step.

    used: keys of blocks whose requests ended, in order.
    idle: no token is computed in this step.
    step: its number, if the time that it takes says how fast prompts are computed.
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
    saved: blocks that the store took whole.
    speeds: of tiers that were read, as measured there.
    step: the last one that was begun of those that have a number.
    """

    failed: dict[str, int] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)
    saved: list[BlockKey] = field(default_factory=list)
    speeds: dict[str, Speed] = field(default_factory=dict)
    step: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it says nothing."""
        return not (self.failed or self.saved or self.speeds) and self.step is None

    def merge(self, other: "Outcome") -> "Outcome":
        """Of several workers: what one has not, none has; a load takes as long as its slowest."""
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
    """What a worker's cache is like, told once at start.

    numerics: kernels.
    spec: layout, as text.
    block_bytes: by group.
    """

    numerics: str
    kv_dtype: str
    spec: str
    block_bytes: tuple[int, ...]
