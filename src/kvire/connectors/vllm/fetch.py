"""Loads blocks into memory of our own, for both ways into vLLM.

A load can be given up at any moment, in any state of a tier.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from time import monotonic
from typing import NamedTuple

import numpy as np

from kvire.connectors.vllm.pages import Rows
from kvire.core.record import BlockRecord
from kvire.store.ticket import LoadState, Ticket, Wanted
from kvire.store.tiered import TieredStore

PIECE_BYTES = 64 << 20  # of a load, in our own memory at once; at least one block
STALLED_S = 5.0  # a load without progress for so long is given up
TIERS_EVERY_S = 1.0  # interval of reading their counters


class Fetched(NamedTuple):
    """Blocks that a load brought.

    rows: the memory that was read into, uint8.
    arrived: which rows hold a whole verified block.
    is_over: whether the load was followed to its end.
    """

    rows: Rows
    arrived: list[bool]
    is_over: bool


class Fetcher:
    """For several threads, each of which has memory of its own."""

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self._memory = threading.local()
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()  # (what, label)
        self._tiers_before: Counter[tuple[str, str]] = Counter()
        self._tiers_due = 0.0

    def count(self, what: str, label: str, amount: float) -> None:
        """Add to a counter of metrics.py."""
        with self._lock:
            self._counts[what, label] += amount  # type: ignore[assignment]  # seconds are fractions

    def take_counts(self) -> Counter[tuple[str, str]]:
        """(counter, label) counted since the last call; now and then with the tiers'
        own counters.
        """
        with self._lock:
            counts, self._counts = self._counts, Counter()
        if monotonic() >= self._tiers_due:
            self._tiers_due = monotonic() + TIERS_EVERY_S
            now = self._tier_counts()
            counts += now - self._tiers_before
            self._tiers_before = now
        return counts

    def fetch(
        self, records: Sequence[BlockRecord], given_up: threading.Event, deadline: float, *, in_order: bool = False
    ) -> Fetched:
        """Load blocks of one size.

        The rows are the caller's until it fetches again in the same thread.

        given_up: ends the load, as does `deadline` (monotonic).
        in_order: a block is useless without all earlier ones.
        """
        rows = self._rows(len(records), records[0].kv_bytes)
        ticket = self._store.load([Wanted(record, row.data) for record, row in zip(records, rows, strict=True)])
        is_over = follow(ticket, given_up, deadline, in_order=in_order)
        arrived = [state is LoadState.READY for state in ticket.states()]
        if in_order and False in arrived:
            first = arrived.index(False)
            arrived[first:] = [False] * (len(arrived) - first)
        if not ticket.finished or ticket.active:
            self._memory.rows = None  # a late read may still write there
        self._note(ticket, arrived, in_order=in_order)
        return Fetched(rows, arrived, is_over)

    def _rows(self, count: int, row_bytes: int) -> Rows:
        """Memory of this thread's own, kept for the next piece: new memory costs more than the
        copy.
        """
        memory: Rows | None = getattr(self._memory, "rows", None)
        if memory is None or memory.size < count * row_bytes:
            memory = self._memory.rows = np.empty(count * row_bytes, np.uint8)
        return memory[: count * row_bytes].reshape(count, row_bytes)

    def _tier_counts(self) -> Counter[tuple[str, str]]:
        counts: Counter[tuple[str, str]] = Counter()
        for name, level in self._store.stats().handles.items():
            counts["refused_writes", name] = sum(level.tier.refused.values())
            counts["unavailable", name] = level.counts.unavailable
            counts["damaged", name] = level.counts.damaged
        return counts

    def _note(self, ticket: Ticket, arrived: Sequence[bool], *, in_order: bool) -> None:
        for number, is_there in enumerate(arrived):
            source, failure = ticket.source(number), ticket.failure(number)
            if is_there and source is not None:
                self.count("loaded_blocks", source.name, 1)
                self.count("loaded_bytes", source.name, ticket.wanted[number].record.kv_bytes)
            elif failure is not None:
                self.count("failed_blocks", failure.reason, 1)
            elif not in_order:
                self.count("failed_blocks", "given_up", 1)


def follow(ticket: Ticket, given_up: threading.Event, deadline: float, *, in_order: bool) -> bool:
    """Wait for a load: True if it finished, False if given up, late or stalled for STALLED_S.

    in_order: do not wait for blocks after a missing one.
    """
    moved_at = monotonic()
    while not ticket.finished:
        seen = ticket.changed
        ticket.wait(min(0.1, max(0.0, deadline - monotonic())), seen=seen)
        if ticket.changed != seen:
            moved_at = monotonic()
        if in_order:
            _leave_what_follows_a_failure(ticket)
        if given_up.is_set() or monotonic() > min(moved_at + STALLED_S, deadline):
            ticket.cancel()
            return False
    return True


def _leave_what_follows_a_failure(ticket: Ticket) -> None:
    states = ticket.states()
    if LoadState.FAILED not in states:
        return
    first = states.index(LoadState.FAILED)
    for later in range(first + 1, len(states)):
        ticket.claim(later)
    if all(state is LoadState.READY for state in states[:first]):
        ticket.cancel()
