"""A ticket alone: states, claims, cancelling, deadlines, and the count of reads that may still write."""

import threading
import time

import pytest
from store.blocks import chain, wanted

from kvire.core.tier_kind import TierKind
from kvire.store.ticket import FailureReason, LoadFailure, LoadState, Ticket

MISSING = LoadFailure(FailureReason.MISSING, "nowhere")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ticket(clock) -> Ticket:
    return Ticket(wanted(chain(4)), timeout_s=0.5, clock=clock)


def test_a_load_of_nothing_is_finished():
    empty = Ticket([], timeout_s=0.5)
    assert empty.finished and empty.active == 0 and empty.wait(0)


def test_a_block_goes_from_waiting_to_ready_and_counts_as_active_in_between(ticket):
    assert ticket.state(0) is LoadState.WAITING
    assert ticket.begin(0, attached=True)
    assert (ticket.state(0), ticket.active) == (LoadState.READING, 1)
    ticket.ready(0, TierKind.DISK)
    assert (ticket.state(0), ticket.active, ticket.source(0)) == (LoadState.READY, 0, TierKind.DISK)
    assert not ticket.finished and ticket.source(1) is None


def test_a_claimed_block_is_never_read(ticket):
    assert ticket.claim(0)
    assert ticket.state(0) is LoadState.CLAIMED
    assert not ticket.begin(0, attached=True)
    assert ticket.claim(0), "it stays claimed"


def test_what_is_being_read_or_was_read_cannot_be_claimed(ticket):
    ticket.begin(0, attached=True)
    ticket.begin(1, attached=False)
    assert not ticket.claim(0) and not ticket.claim(1)
    ticket.ready(0, TierKind.MEMORY)
    assert not ticket.claim(0)
    assert ticket.state(0) is LoadState.READY


def test_a_failed_block_says_why_and_can_be_claimed(ticket):
    ticket.begin(2, attached=True)
    ticket.fail(2, MISSING)
    assert (ticket.state(2), ticket.failure(2), ticket.active) == (LoadState.FAILED, MISSING, 0)
    assert ticket.claim(2)
    assert ticket.failure(2) == MISSING
    assert ticket.failure(0) is None


def test_cancelling_gives_up_all_but_reads_into_the_callers_memory(ticket):
    ticket.begin(0, attached=True)
    ticket.begin(1, attached=False)
    ticket.begin(2, attached=True)
    ticket.ready(2, TierKind.DISK)
    ticket.cancel()
    assert ticket.states() == [LoadState.READING, LoadState.CLAIMED, LoadState.READY, LoadState.CLAIMED]
    assert ticket.active == 1 and not ticket.finished
    assert not ticket.attach(1), "it was given up: nothing may be copied into its memory"
    ticket.wait_again(0)
    assert ticket.state(0) is LoadState.CLAIMED, "nobody tries again"
    assert ticket.active == 0 and ticket.finished


def test_a_read_without_result_waits_for_the_next(ticket):
    ticket.begin(0, attached=True)
    ticket.wait_again(0)
    assert (ticket.state(0), ticket.active) == (LoadState.WAITING, 0)
    assert ticket.begin(0, attached=False) and ticket.attach(0)
    assert ticket.active == 1


def test_past_the_deadline_remote_blocks_fail_and_local_ones_do_not(ticket, clock):
    ticket.begin(0, attached=True)
    ticket.ask_remotely([1, 2])
    ticket.begin(1, attached=False)
    clock.now += 0.499
    assert ticket.states()[1:3] == [LoadState.READING, LoadState.WAITING]
    clock.now += 0.002
    assert ticket.states() == [LoadState.READING, LoadState.FAILED, LoadState.FAILED, LoadState.WAITING]
    assert ticket.failure(1).reason is FailureReason.UNAVAILABLE
    assert not ticket.attach(1) and not ticket.begin(2, attached=False)
    ticket.begin(3, attached=True)
    ticket.wait_again(3)
    ticket.ask_remotely([3])  # too late for a second start
    assert ticket.state(3) is LoadState.FAILED


def test_each_remote_block_gives_the_others_time(ticket, clock):
    ticket.ask_remotely([0, 1])
    clock.now += 0.4
    ticket.begin(0, attached=False)
    assert ticket.attach(0)
    ticket.ready(0, TierKind.REMOTE)
    clock.now += 0.4
    assert ticket.state(1) is LoadState.WAITING
    clock.now += 0.2
    assert ticket.state(1) is LoadState.FAILED


def test_a_copy_under_way_is_not_failed_by_the_deadline(ticket, clock):
    ticket.ask_remotely([0])
    ticket.begin(0, attached=False)
    ticket.attach(0)
    clock.now += 10
    assert (ticket.state(0), ticket.active) == (LoadState.READING, 1)
    ticket.ready(0, TierKind.REMOTE)
    assert ticket.state(0) is LoadState.READY


def test_giving_up_fails_what_waits_and_lets_reads_end(ticket):
    ticket.begin(0, attached=True)
    ticket.give_up(LoadFailure(FailureReason.UNAVAILABLE, "closed"))
    assert ticket.states() == [LoadState.READING] + [LoadState.FAILED] * 3
    ticket.ready(0, TierKind.DISK)
    assert ticket.finished


def test_waiting_ends_with_a_change_with_the_end_and_with_the_time():
    ticket = Ticket(wanted(chain(2)), timeout_s=0.2)
    assert not ticket.wait(0.01)
    seen = ticket.changed
    assert not ticket.wait(0.01, seen=seen)
    threading.Timer(0.02, lambda: ticket.fail(0, MISSING)).start()
    assert ticket.wait(5, seen=seen) and ticket.changed > seen
    assert not ticket.finished
    ticket.ask_remotely([1])
    start = time.monotonic()
    assert ticket.wait(5), "the deadline ends the load though nobody says anything"
    assert time.monotonic() - start < 1


def test_one_block_is_claimed_or_read_and_never_both():
    for _ in range(300):
        ticket = Ticket(wanted(chain(1)), timeout_s=1)
        outcome = []
        both = threading.Barrier(2)

        def claim(ticket=ticket, outcome=outcome, both=both) -> None:
            both.wait()
            outcome.append(ticket.claim(0))

        thread = threading.Thread(target=claim)
        thread.start()
        both.wait()
        outcome.append(ticket.begin(0, attached=True))
        thread.join()
        assert sorted(outcome) == [False, True]
