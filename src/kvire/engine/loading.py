"""A prompt's blocks on their way from the store into the pool, and whether to wait for them or to compute.

Computing goes on from the front; loading may come from the back. What is computed is claimed first, so that no block
is written by both. Where the computed front meets loaded blocks, it jumps over them.
"""

from collections.abc import Sequence as SequenceOf
from time import monotonic

from kvire.plan.cost import PrefillSpeed, Speed, Way, choose
from kvire.store.ticket import LoadState, Ticket
from kvire.store.tier import TierKind

# A load is judged by what has arrived once it had so long to begin, and for this share of what computing would take.
BEGIN_S, BEGIN_SHARE = 0.01, 0.005
# After so many times that, a load that brings too little is called off.
PATIENCE = 4.0
# The share of computing that it is worth to wait for a remote tier's word on what it holds.
PROBE_SHARE = 0.015
# Tokens computed at once while something may still come: small steps meet it sooner, large ones are faster per token.
LEAST_CHUNK_TOKENS, PROBE_CHUNK_TOKENS = 64, 128
CHUNK_SHARE = 0.25  # of what is still to be loaded
EVERYTHING = 1 << 30


class Load:
    """The blocks (index, group) of a sequence that `ticket` brings, up to block `stop`; from `known` on, perhaps.

    all_or_nothing: a group with a window needs the end of the span, so a part is of no use.
    """

    def __init__(
        self,
        ticket: Ticket,
        blocks: SequenceOf[tuple[int, int]],
        known: int,
        stop: int,
        speed: Speed,
        *,
        all_or_nothing: bool,
    ) -> None:
        self.ticket = ticket
        self.known, self.stop = known, stop
        self.speed = speed
        self.all_or_nothing = all_or_nothing
        self.started_s = monotonic()
        self.jumped = self.claimed = False  # whether some blocks were taken over, and some computed
        self.unsure: int | None = None  # the first block computed before anybody said whether it is stored
        self.told = False  # whether a remote tier began to give what is not certainly there
        self.waited_s = 0.0
        self.is_lost = False  # all or nothing, and it is nothing
        self._waits_since: float | None = None
        self._at: dict[int, list[int]] = {}  # block index -> places in the ticket
        for place, (index, _) in enumerate(blocks):
            self._at.setdefault(index, []).append(place)
        self._first = min(self._at, default=stop)
        self._bytes = [len(wanted.out) for wanted in ticket.wanted]
        self._given_up: set[int] = set()  # blocks that are computed elsewhere while a read is under way

    def frontier(self, index: int) -> int:
        """How far a front at block `index` can jump: the first block from there on that is not loaded."""
        if self.all_or_nothing:  # what no window reaches is not loaded, and not missed
            return self.stop if self._is_ready([at for at in self._at if at >= index]) else index
        while index < self.stop and self._is_ready((index,)):
            index += 1
        return index

    def is_quiet(self, within_s: float) -> bool:
        """Whether nothing is read into the blocks any more, or will have been before long."""
        end = monotonic() + within_s
        while self.ticket.active and (left_s := end - monotonic()) > 0:
            self.ticket.wait(left_s, seen=self.ticket.changed)
        return not self.ticket.active

    def _is_ready(self, indices: SequenceOf[int]) -> bool:
        return all(
            index in self._at
            and index not in self._given_up
            and all(self.ticket.state(place) is LoadState.READY for place in self._at[index])
            for index in indices
        )

    def source(self, index: int) -> TierKind:
        """Where block `index`, or if no group needs it the first one needed, came from; the slowest of its groups'."""
        kinds = {self.ticket.source(place) for place in self._at[max(index, self._first)]}
        return next(kind for kind in (TierKind.REMOTE, TierKind.DISK, TierKind.MEMORY) if kind in kinds)

    def is_stored(self, index: int) -> bool:
        """Whether block `index`, which did not fail, is certainly in some tier."""
        return index < self.known or self.told

    def failure(self, index: int) -> str | None:
        """Why block `index` could not be loaded; None if it can, or was not tried."""
        failures = [self.ticket.failure(place) for place in self._at.get(index, ())]
        return next((failure.reason for failure in failures if failure is not None), None)

    def claim(self, index: int, stop: int) -> int:
        """Take blocks from `index` on for computing; the first one, up to `stop`, that cannot be had."""
        if not self.told and self.known < self.stop:
            begun, states = (LoadState.READING, LoadState.READY), self.ticket.states()
            self.told = any(states[p] in begun for at, places in self._at.items() if at >= self.known for p in places)
        for at in range(index, min(stop, self.stop)):
            if at not in self._given_up and not all(self.ticket.claim(place) for place in self._at[at]):
                return at
        return stop

    def give_up(self, index: int) -> None:
        """Block `index` is computed into other memory, whatever still arrives."""
        self._given_up.add(index)

    def is_reading(self, index: int) -> bool:
        """Whether some of block `index` is being read at this moment."""
        return any(self.ticket.state(place) is LoadState.READING for place in self._at.get(index, ()))

    def first_failure(self) -> tuple[int, str] | None:
        """The first block that could not be loaded, and why."""
        return next(((index, reason) for index in sorted(self._at) if (reason := self.failure(index))), None)

    def note_waiting(self, *, waits: bool) -> None:
        """The sequence computes nothing now, or does again: adds up `waited_s`."""
        now = monotonic()
        if self._waits_since is not None:
            self.waited_s += now - self._waits_since
        self._waits_since = now if waits else None

    def chunk_tokens(self, front_tokens: int, block_size: int, prefill: PrefillSpeed) -> int:
        """How many tokens to compute now, from `front_tokens` on; 0 to wait for what is coming."""
        states = self.ticket.states()
        missing = self._missing(states, front_tokens // block_size)
        if not missing:
            return EVERYTHING  # nothing more will come: compute what is left
        elapsed_s = monotonic() - self.started_s
        stop = self.stop * block_size
        span = stop - front_tokens
        if not self.all_or_nothing:
            span = max(block_size, min(span, block_size * len(missing)))
        compute_s = prefill.seconds(stop - span, stop)
        if self.ticket.probing:
            patient = elapsed_s < PROBE_SHARE * compute_s
            return 0 if patient or self.all_or_nothing else PROBE_CHUNK_TOKENS
        begun_s = 2 * self.speed.latency_s + BEGIN_S + BEGIN_SHARE * compute_s
        speed = self.speed if elapsed_s < begun_s else self._observed(states, elapsed_s)
        choice = choose(speed, prefill, stop - span, stop, sum(self._bytes[place] for place in missing))
        late = elapsed_s > PATIENCE * begun_s
        if self.all_or_nothing:
            return EVERYTHING if self.first_failure() or (late and choice.load_s > choice.compute_s) else 0
        if choice.way is Way.LOAD:
            return 0
        if choice.way is Way.COMPUTE and late:
            self.ticket.cancel()
            return EVERYTHING
        return max(LEAST_CHUNK_TOKENS, prefill.tokens_within(front_tokens, CHUNK_SHARE * choice.load_s))

    def _missing(self, states: SequenceOf[LoadState], index: int) -> list[int]:
        """Places from block `index` on that may still arrive."""
        waiting = (LoadState.WAITING, LoadState.READING)
        return [
            place
            for at, places in self._at.items()
            if at >= index and at not in self._given_up
            for place in places
            if states[place] in waiting
        ]

    def _observed(self, states: SequenceOf[LoadState], elapsed_s: float) -> Speed:
        """What the tiers gave so far; half a block if nothing has arrived."""
        arrived = sum(self._bytes[place] for place, state in enumerate(states) if state is LoadState.READY)
        return Speed(0.0, max(arrived, 0.5 * self._bytes[0]) / elapsed_s)
