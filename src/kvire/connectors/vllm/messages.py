"""What the two sides of the connector tell each other; plain values, because vLLM pickles them between processes."""

from dataclasses import dataclass, field
from typing import NamedTuple

from kvire.core.keys import BlockKey
from kvire.core.record import BlockId, BlockRecord
from kvire.plan.cost import Speed


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a request, whatever the group: its name, its place, its tokens. content: keys.content_ids."""

    key: BlockKey
    parent: BlockKey
    root: BlockKey
    index: int
    token_ids: tuple[int, ...]
    content: bytes

    def record(self, part: int, kv_bytes: int) -> BlockRecord:
        """As the store knows one part of it: what one worker keeps for one group."""
        return BlockRecord(
            BlockId(self.key, part), self.parent, self.root, self.index, self.token_ids, kv_bytes, self.content
        )


class Move(NamedTuple):
    """KV of `block` between the store and vLLM's block `block_id` of a group."""

    block: Block
    group: int
    block_id: int


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks to bring for a request that waits for them, in order of the prompt."""

    request_id: str
    moves: list[Move]


@dataclass(slots=True)
class Plan:
    """From the scheduler to the workers, for one step. used: keys of blocks whose requests ended, in order. idle: no
    token is computed in this step.
    """

    loads: list[Load] = field(default_factory=list)
    saves: list[Move] = field(default_factory=list)
    used: list[BlockKey] = field(default_factory=list)
    idle: bool = False


@dataclass(slots=True)
class Outcome:
    """From the workers to the scheduler. failed: index of the first block that could not be loaded, by request.
    saved: blocks that the store took whole. speeds: of tiers that were read, as measured there.
    """

    failed: dict[str, int] = field(default_factory=dict)
    saved: list[BlockKey] = field(default_factory=list)
    speeds: dict[str, Speed] = field(default_factory=dict)

    def merge(self, other: "Outcome") -> "Outcome":
        """Of several workers: what one has not, none has; a load takes as long as its slowest."""
        theirs = set(other.saved)
        self.saved = [key for key in self.saved if key in theirs]
        for request_id, index in other.failed.items():
            self.failed[request_id] = min(index, self.failed.get(request_id, index))
        for tier, speed in other.speeds.items():
            mine = self.speeds.get(tier, speed)
            self.speeds[tier] = min(mine, speed, key=lambda one: one.bytes_per_s)
        return self


@dataclass(frozen=True, slots=True)
class Facts:
    """What a worker's cache is like, told once at start. numerics: kernels. spec: layout, as text. block_bytes: by
    group.
    """

    numerics: str
    kv_dtype: str
    spec: str
    block_bytes: tuple[int, ...]
