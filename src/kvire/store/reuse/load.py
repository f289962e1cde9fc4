"""Loads of a prompt's blocks into an engine's memory, and whether to wait or compute meanwhile.

Computing starts from the front; loading may start from the back. Blocks are claimed before they are
computed, so that no block is written by both. Where the computed front meets loaded blocks, it
jumps over them.
"""

from collections.abc import Sequence
from time import monotonic
from typing import NamedTuple

from kvire.core.report import MissReason
from kvire.core.tier_kind import TierKind
from kvire.plan.cost import PrefillSpeed, Speed, Way, choose
from kvire.store.explain import Explanation, StoreMiss
from kvire.store.reuse.look import Found
from kvire.store.ticket import FailureReason, LoadState, Ticket

_FAILURES = {FailureReason.DAMAGED: MissReason.DAMAGED, FailureReason.UNAVAILABLE: MissReason.UNAVAILABLE}
_KNOWN_NOTHING = (MissReason.NEVER_STORED, MissReason.SHORTER_THAN_BLOCK)


class Miss(NamedTuple):
    """Why reuse ended.

    token: position of the first token not reused for this reason; None if that is not known.
    detail: the fields of the namespace that differ, if that is the reason.
    """

    reason: MissReason
    token: int | None = None
    detail: str | None = None


def reason_of(failure: FailureReason, *, was_there: bool) -> MissReason | None:
    """Why a load did not bring a block; None if no tier is known to have had it.

    was_there: a lookup found it in a tier.
    """
    return _FAILURES.get(failure, MissReason.EVICTED if was_there else None)


def explained(miss: Miss, found: Explanation | None, begin_token: int) -> Miss:
    """The engine's own reason of a miss, refined by the store's explanation.

    found: None if there is no explanation yet.
    begin_token: first token of the block that was asked about.
    """
    if found is None or miss.token is None:
        return miss
    knows_nothing = miss.reason in _KNOWN_NOTHING
    shared_until = begin_token + (found.shared_tokens or 0)
    if found.shared_tokens and shared_until > miss.token:
        return Miss(MissReason.DIVERGED if knows_nothing else miss.reason, shared_until)
    if knows_nothing and found.reason not in {None, StoreMiss.NEVER_STORED}:
        return Miss(MissReason(str(found.reason)), miss.token, ", ".join(found.fields) or None)
    return miss


# A load is judged by its arrived blocks after this time to begin, plus this share of the time of
# computing.
BEGIN_S, BEGIN_SHARE = 0.01, 0.005
# After PATIENCE times that, a load that is too slow is called off.
PATIENCE = 4.0
# Longest wait for a remote tier's lookup, as a share of the time of computing.
PROBE_SHARE = 0.015
# Tokens computed at once while blocks may still arrive: small steps meet them sooner, large ones
# are faster per token.
LEAST_CHUNK_TOKENS, PROBE_CHUNK_TOKENS = 64, 128
CHUNK_SHARE = 0.25  # of the remaining load


class Load:
    """A load in progress: the blocks of `found` that `ticket` brings.

    known, stop: see Found.
    speed: the expected speed.
    all_or_nothing: a part with a window needs the end of the span, so a piece of it is of no use.
    told: whether a remote tier began to give blocks that were not certain.
    waited_s: time spent waiting for it so far.
    lost: it is all or nothing, and a block is missing.
    """

    def __init__(self, ticket: Ticket, found: Found, *, all_or_nothing: bool) -> None:
        self.ticket = ticket
        self.known, self.stop = found.known, found.stop
        self.speed = found.speed
        self.all_or_nothing = all_or_nothing
        self.started_s = monotonic()
        self.told = False
        self.lost = False
        self.waited_s = 0.0
        self._waits_since: float | None = None
        self._jumped = self._claimed = False
        self._unsure: int | None = None  # the first block computed before any tier said whether it is stored
        self._at: dict[int, list[int]] = {}  # block index -> places in the ticket
        for place, (index, _) in enumerate(found.needed):
            self._at.setdefault(index, []).append(place)
        self._first = min(self._at, default=found.stop)
        self._bytes = [len(wanted.out) for wanted in ticket.wanted]
        self._given_up: set[int] = set()  # blocks that are computed elsewhere while a read is under way

    def frontier(self, index: int) -> int:
        """End of the jump from block `index`: the first block from there on that is not loaded."""
        if self.all_or_nothing:  # blocks outside every window are neither loaded nor missed
            return self.stop if self._is_ready([at for at in self._at if at >= index]) else index
        while index < self.stop and self._is_ready((index,)):
            index += 1
        return index

    def jumped(self) -> None:
        """The sequence took over loaded blocks."""
        self._jumped = True

    def is_quiet(self, within_s: float) -> bool:
        """Whether no read into the blocks is in progress, nor will be soon."""
        end = monotonic() + within_s
        while self.ticket.active and (left_s := end - monotonic()) > 0:
            self.ticket.wait(left_s, seen=self.ticket.changed)
        return not self.ticket.active

    def source(self, index: int) -> TierKind:
        """Tier kind that gave block `index`; of several parts, the slowest.

        If no part of it is needed, that of the next needed block.
        """
        kinds = {self.ticket.source(place) for place in self._at[max(index, self._first)]}
        return max((kind for kind in kinds if kind is not None), key=lambda kind: kind.latency_s)

    def claim(self, index: int, stop: int) -> int:
        """Take blocks from `index` on for computing.

        Returns the first one, up to `stop`, that cannot be taken.
        """
        if not self.told and self.known < self.stop:
            begun, states = (LoadState.READING, LoadState.READY), self.ticket.states()
            self.told = any(states[p] in begun for at, places in self._at.items() if at >= self.known for p in places)
        for at in range(index, min(stop, self.stop)):
            if at not in self._given_up and not all(self.ticket.claim(place) for place in self._at[at]):
                return at
        return stop

    def computed(self, first: int, stop: int) -> tuple[int, MissReason] | None:
        """The first miss among the claimed blocks from `first` to `stop`, and its reason."""
        self._claimed = self._claimed or stop > first
        missed = None
        for index in range(first, min(stop, self.stop)):
            reason = self.why(index)
            if missed is None and reason is not None:
                missed = index, reason
            if reason is None and self.failure(index) is None and self._unsure is None:
                self._unsure = index
        return missed

    def give_up(self, index: int) -> None:
        """Block `index` is computed into other memory, even if its read still arrives."""
        self._given_up.add(index)

    def is_reading(self, index: int) -> bool:
        """Whether some of block `index` is being read at this moment."""
        return any(self.ticket.state(place) is LoadState.READING for place in self._at.get(index, ()))

    def failure(self, index: int) -> FailureReason | None:
        """Why block `index` could not be loaded; None if it can be, or was not tried."""
        failures = [self.ticket.failure(place) for place in self._at.get(index, ())]
        return next((failure.reason for failure in failures if failure is not None), None)

    def why(self, index: int) -> MissReason | None:
        """Why block `index` is computed; None if no tier is known to have it."""
        failure = self.failure(index)
        if failure is not None:
            return reason_of(failure, was_there=index < self.known)
        return MissReason.SLOWER if index < self.known or self.told else None

    def why_lost(self) -> MissReason | None:
        """Why an all-or-nothing load is given up; None if no tier is known to have the block."""
        failed = self._first_failed()
        return MissReason.SLOWER if failed is None else self.why(failed)

    def end(self) -> tuple[int, MissReason] | None:
        """Begin no further read. Returns the first block that only now is a miss, and why."""
        self.ticket.cancel()
        self.note_waiting(waits=False)
        if self._jumped and self._unsure is not None:  # a remote tier had the prompt, but was too slow to say so
            return self._unsure, MissReason.SLOWER
        return None

    @property
    def met(self) -> bool:
        """Whether part was loaded and part computed: from both ends, or because a tier was slow."""
        return self._jumped and self._claimed

    def note_waiting(self, *, waits: bool) -> None:
        """The sequence starts or stops waiting: adds up `waited_s`."""
        now = monotonic()
        if self._waits_since is not None:
            self.waited_s += now - self._waits_since
        self._waits_since = now if waits else None

    def chunk_tokens(self, front_tokens: int, block_size: int, prefill: PrefillSpeed, most_tokens: int) -> int:
        """How many tokens to compute now, from `front_tokens` on, at most `most_tokens`.

        0 while waiting is better.
        """
        states = self.ticket.states()
        missing = self._missing(states, front_tokens // block_size)
        if not missing:  # nothing more will arrive: compute the rest
            self.lost = self.all_or_nothing
            return most_tokens
        elapsed_s = monotonic() - self.started_s
        stop = self.stop * block_size
        span = stop - front_tokens
        if not self.all_or_nothing:
            span = max(block_size, min(span, block_size * len(missing)))
        compute_s = prefill.seconds(stop - span, stop)
        if self.ticket.probing:
            patient = elapsed_s < PROBE_SHARE * compute_s
            return 0 if patient or self.all_or_nothing else min(PROBE_CHUNK_TOKENS, most_tokens)
        begun_s = 2 * self.speed.latency_s + BEGIN_S + BEGIN_SHARE * compute_s
        speed = self.speed if elapsed_s < begun_s else self._observed(states, elapsed_s)
        choice = choose(speed, prefill, stop - span, stop, sum(self._bytes[place] for place in missing))
        late = elapsed_s > PATIENCE * begun_s
        if self.all_or_nothing:
            self.lost = self._first_failed() is not None or (late and choice.load_s > choice.compute_s)
            return most_tokens if self.lost else 0
        if choice.way is Way.LOAD:
            return 0
        if choice.way is Way.COMPUTE and late:
            self.ticket.cancel()
            return most_tokens
        meanwhile = max(LEAST_CHUNK_TOKENS, prefill.tokens_within(front_tokens, CHUNK_SHARE * choice.load_s))
        return min(meanwhile, most_tokens)

    def _is_ready(self, indices: Sequence[int]) -> bool:
        return all(
            index in self._at
            and index not in self._given_up
            and all(self.ticket.state(place) is LoadState.READY for place in self._at[index])
            for index in indices
        )

    def _first_failed(self) -> int | None:
        """The first block that could not be loaded."""
        return next((index for index in sorted(self._at) if self.failure(index) is not None), None)

    def _missing(self, states: Sequence[LoadState], index: int) -> list[int]:
        """Places from block `index` on whose blocks may still arrive."""
        waiting = (LoadState.WAITING, LoadState.READING)
        return [
            place
            for at, places in self._at.items()
            if at >= index and at not in self._given_up
            for place in places
            if states[place] in waiting
        ]

    def _observed(self, states: Sequence[LoadState], elapsed_s: float) -> Speed:
        """Speed of the tiers so far; assumes half a block if nothing has arrived."""
        arrived = sum(self._bytes[place] for place, state in enumerate(states) if state is LoadState.READY)
        return Speed(0.0, max(arrived, 0.5 * self._bytes[0]) / elapsed_s)
