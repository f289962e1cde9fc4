"""A trace: requests in order of arrival, each a chain of blocks. formats.py reads them."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One prompt.

    blocks: numbers in Trace.parents, first to last; the last may be partly filled, and tokens
        behind it have no block.
    session: "" if unknown.
    """

    time_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    session: str = ""


@dataclass(slots=True)
class Trace:
    """Requests by time.

    A block is its content and everything before it: the same id below another parent is another
    block.

    parents: of each block, -1 for a first one.
    depths: of each block, its place in its chain, from 0.
    skipped: lines that could not be read, with the reason.
    notes: assumptions, and limits on possible hits.
    is_timed: whether requests have times; otherwise they come in order, all at once.
    """

    name: str
    format: str
    block_tokens: int
    requests: list[TraceRequest] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_timed: bool = True

    @property
    def input_tokens(self) -> int:
        """Of all prompts."""
        return sum(request.input_tokens for request in self.requests)

    @property
    def working_set_tokens(self) -> int:
        """Tokens of its different blocks; a partly filled one takes a whole block."""
        return len({block for request in self.requests for block in request.blocks}) * self.block_tokens

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last."""
        return self.requests[-1].time_s - self.requests[0].time_s if self.requests else 0.0

    def hit_tokens(self, request: TraceRequest, blocks: int) -> int:
        """Tokens reused if so many first blocks are there; at least one token is always
        computed.
        """
        return min(blocks * self.block_tokens, request.input_tokens - 1)

    def append(self, chain: list[int], numbers: dict[Hashable, int], key: Hashable) -> None:
        """Extend a chain by the block that `key` names in `numbers`, a new one if it is missing."""
        if (number := numbers.get(key)) is None:
            number = numbers[key] = len(self.parents)
            self.parents.append(chain[-1] if chain else -1)
            self.depths.append(len(chain))
        chain.append(number)

    def part(self, requests: Sequence[TraceRequest]) -> "Trace":
        """The same blocks, other requests."""
        return replace(self, requests=list(requests))

    def halves(self) -> tuple["Trace", "Trace"]:
        """Every second session; for unknown sessions, the first and second half of the requests."""
        names = list(dict.fromkeys(request.session for request in self.requests))
        if len(names) > 1:
            first = set(names[::2])
            return (
                self.part([r for r in self.requests if r.session in first]),
                self.part([r for r in self.requests if r.session not in first]),
            )
        middle = len(self.requests) // 2
        return self.part(self.requests[:middle]), self.part(self.requests[middle:])

    def spread(self) -> "Trace":
        """Requests of one time stamp, spread evenly until the next; their order stays."""
        groups = [list(group) for _, group in groupby(self.requests, key=lambda request: request.time_s)]
        ends = [group[0].time_s for group in groups[1:]] + [groups[-1][0].time_s if groups else 0.0]
        return self.part([r for group, end in zip(groups, ends, strict=True) for r in _spread(group, end)])

    def coarse(self, factor: int) -> "Trace":
        """Blocks of `factor` times as many tokens, without the partial one at a prompt's end."""
        numbers: dict[Hashable, int] = {}
        coarse = replace(self, block_tokens=self.block_tokens * factor, requests=[], parents=[], depths=[])
        for request in self.requests:
            chain: list[int] = []
            for block in request.blocks[factor - 1 :: factor]:
                coarse.append(chain, numbers, block)
            coarse.requests.append(
                TraceRequest(request.time_s, request.input_tokens, request.output_tokens, tuple(chain), request.session)
            )
        return coarse


def _spread(group: Sequence[TraceRequest], end_s: float) -> Iterator[TraceRequest]:
    for place, request in enumerate(group):
        time_s = request.time_s + (end_s - request.time_s) * place / len(group)
        yield TraceRequest(time_s, request.input_tokens, request.output_tokens, request.blocks, request.session)
