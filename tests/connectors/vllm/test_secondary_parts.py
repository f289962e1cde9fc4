"""Rows of vLLM's CPU tier are touched while a job runs, and never afterwards: with tiers that stop in the middle. And
what a request is told of blocks that are there but do not come.
"""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from connectors.vllm.small_engine import Request
from harness.waiting import AT_ONCE_S, until
from store.blocks import KV_BYTES, TOKENS, kv_of, namespace
from store.stores import BentTier, blocks, load_all, open_store, save_all

from kvire.connectors.vllm import fetch
from kvire.connectors.vllm.messages import Move
from kvire.connectors.vllm.secondary_requests import Requests
from kvire.connectors.vllm.secondary_transfers import Job, Primary, Transfers
from kvire.core.record import BlockRecord
from kvire.store.reuse.look import Part
from kvire.store.reuse.planner import Reuse
from kvire.store.tiered import TieredStore

COUNT = 4


class Rows:
    """As vLLM's CPU tier: a memoryview over memory that it takes away at its end."""

    def __init__(self, records: list[BlockRecord]) -> None:
        self.array = np.zeros((2 * COUNT, records[0].kv_bytes), np.uint8)
        self.view = memoryview(self.array)


@pytest.fixture
def tier() -> BentTier:
    return BentTier()


@pytest.fixture
def opened(tmp_path: Path, tier: BentTier) -> Iterator[TieredStore]:
    with open_store(tmp_path, tier) as store:
        yield store
        tier.gate.set()


def moves(records: list[BlockRecord]) -> list[Move]:
    return [Move(record, row) for row, record in enumerate(records)]


def ended(transfers: Transfers) -> Job:
    found: list[Job] = []
    until(lambda: found.extend(transfers.finished()) or found)
    assert len(found) == 1
    return found[0]


def test_blocks_go_out_of_rows_and_into_others(opened: TieredStore) -> None:
    records = blocks(opened, COUNT)
    rows = Rows(records)
    transfers = Transfers(opened, Primary(rows.view))
    for row, record in enumerate(records):
        rows.array[row] = np.frombuffer(kv_of(record), np.uint8)
    transfers.save(Job(1, moves(records)))
    assert ended(transfers).done == [True] * COUNT
    assert opened.flush(10)
    missing = blocks(opened, 1, seed=1)
    transfers.load(Job(2, [Move(record, COUNT + row) for row, record in enumerate(records[1:] + missing)]))
    assert ended(transfers).done == [True] * (COUNT - 1) + [False]
    assert (rows.array[COUNT : 2 * COUNT - 1] == rows.array[1:COUNT]).all()
    assert not rows.array[-1].any()
    assert transfers.take_counts()["failed_blocks", "missing"] == 1
    transfers.close()


@pytest.mark.parametrize("how", ["drain", "stalled", "close"])
def test_a_load_that_was_given_up_never_writes_into_a_row(
    opened: TieredStore, tier: BentTier, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """vLLM may have given the row to another block by then."""
    monkeypatch.setattr(fetch, "STALLED_S", 0.5 if how == "stalled" else 60)
    records = blocks(opened, COUNT)
    save_all(opened, records)
    rows = Rows(records)
    transfers = Transfers(opened, Primary(rows.view))
    tier.gate.clear()
    transfers.load(Job(1, moves(records)))
    assert tier.waiting.wait(10)
    assert not transfers.finished()
    began = time.monotonic()
    if how == "close":
        transfers.close()
        rows.view.release()
    elif how == "drain":
        transfers.drain()
    if how != "close":
        assert ended(transfers).done == [False] * COUNT
    assert time.monotonic() - began < AT_ONCE_S
    rows.array[:] = 7
    tier.gate.set()
    load_all(opened, records)
    assert (rows.array == 7).all()
    transfers.close()


def test_a_load_that_stalls_is_given_up_once_and_not_piece_by_piece(
    opened: TieredStore, tier: BentTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "STALLED_S", 0.5)
    records = blocks(opened, COUNT)
    monkeypatch.setattr(fetch, "PIECE_BYTES", records[0].kv_bytes)
    save_all(opened, records)
    transfers = Transfers(opened, Primary(Rows(records).view))
    tier.gate.clear()
    transfers.load(Job(1, moves(records)))
    assert ended(transfers).done == [False] * COUNT
    counts = transfers.take_counts()
    assert sum(amount for (what, _), amount in counts.items() if what == "failed_blocks") == 1
    transfers.close()


class EndsBetween(Future[None]):
    """A job's future: it ends right after it was asked for the first time."""

    def done(self) -> bool:
        was_done = super().done()
        if not was_done:
            self.set_result(None)
        return was_done


def test_a_job_that_ends_while_it_is_asked_for_is_told_all_the_same(opened: TieredStore) -> None:
    """Else vLLM would keep its rows for ever, and its request waiting."""
    transfers = Transfers(opened, Primary(memoryview(np.zeros((1, 8), np.uint8))))
    job = Job(1, [])
    transfers._running.append((job, EndsBetween()))
    assert [*transfers.finished(), *transfers.finished()] == [job]
    transfers.close()


def test_what_finds_no_room_on_the_way_is_dropped_and_told(tmp_path: Path) -> None:
    tier = BentTier()
    with open_store(tmp_path, tier, buffer_bytes=1) as store:
        records = blocks(store, 20)
        transfers = Transfers(store, Primary(memoryview(np.zeros((20, records[0].kv_bytes), np.uint8))))
        tier.gate.clear()
        transfers.save(Job(1, moves(records)))
        done = ended(transfers).done
        assert 0 < sum(done) < 20
        counts = transfers.take_counts()
        assert counts["dropped_blocks", ""] == 20 - sum(done)
        assert counts["saved_blocks", ""] == sum(done)
        tier.gate.set()
        assert store.flush(10)
        assert len(tier.writes) == sum(done)
        transfers.save(Job(2, moves(records)))
        assert ended(transfers).done.count(True) >= sum(done)
        assert transfers.take_counts()["saved_blocks", ""] <= 20 - sum(done), "what is there is not copied again"
        transfers.close()


def test_the_rows_end_when_nobody_copies_any_more() -> None:
    view = memoryview(np.zeros((1, 8), np.uint8))
    primary = Primary(view)
    copying, go_on, is_closed = threading.Event(), threading.Event(), threading.Event()
    copier = threading.Thread(target=primary.use, args=(lambda _: copying.set() or go_on.wait(AT_ONCE_S),))
    closer = threading.Thread(target=lambda: primary.close() or is_closed.set())
    copier.start()
    assert copying.wait(AT_ONCE_S)
    closer.start()
    assert not is_closed.wait(0.2)
    go_on.set()
    assert is_closed.wait(AT_ONCE_S)
    view.release()
    assert primary.use(lambda _: True) is None
    copier.join()
    closer.join()


def test_vllm_gets_its_memory_back_in_the_middle_of_copies(opened: TieredStore) -> None:
    """Whoever still refers to a memoryview makes its release an error."""
    records = blocks(opened, COUNT)
    save_all(opened, records)
    began = time.monotonic()
    for _ in range(20):
        rows = Rows(records)
        transfers = Transfers(opened, Primary(rows.view))
        for number in range(20):
            (transfers.save if number % 2 else transfers.load)(Job(number, moves(records)))
        time.sleep(0.001)
        transfers.close()
        rows.view.release()
    assert time.monotonic() - began < AT_ONCE_S


def test_what_could_not_be_loaded_is_not_asked_for_again_by_the_same_request(
    opened: TieredStore, tier: BentTier
) -> None:
    """Else vLLM would try the same load in every step, and the request never begin."""
    requests = Requests(Reuse(opened, namespace(), [Part(KV_BYTES)], TOKENS), None)
    key, ends = bytes(32) + bytes(4), {}
    one, other = (SimpleNamespace(req_id=name, get_offload_key_position=ends.get) for name in ("one", "other"))
    for context in (one, other):
        requests.meet(Request(context.req_id, list(range(3 * TOKENS))))
    assert requests.record(key, one) is None, "vLLM never said which block that is"
    ends[key] = TOKENS + 1
    assert requests.record(key, one) is None, "no whole block"
    ends[key] = 2 * TOKENS
    record = requests.record(key, one)
    assert record is not None and record == requests.record(key, other)
    assert (record.index, record.token_ids) == (1, tuple(range(TOKENS, 2 * TOKENS)))
    save_all(opened, [record])
    assert requests.has(record, "one")
    requests.failed("one", [record.id])
    assert not requests.has(record, "one")
    assert requests.has(record, "other")
    requests.finished("one")
    assert requests.record(key, one) is None
    assert opened.flush(10)
    assert len(tier.touched) == 1 and record.id in tier.touched[0]
