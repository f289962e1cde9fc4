"""Looks at tiers on a disk that stalls: they end, nobody else waits, and the store says what is going on."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness.waiting import PATIENCE_S, until
from store.disk_cases import MIB, WatchedFiles, record_of
from store.stores import blocks, load_all, open_store, ready, save_all

from kvire.core.errors import TierUnavailable
from kvire.store.disk.tier import DiskTier
from kvire.store.health import FAILURES_TO_OPEN
from kvire.store.threads import AnswerLate, LookupThread


class StallingFiles(WatchedFiles):
    """Files of which every statement of the index waits while `stall` lasts; the thread that made it must not."""

    def __init__(self) -> None:
        super().__init__(self._maybe_wait)
        self.stalled = 0
        self._flows = threading.Event()
        self._flows.set()
        self._spared = threading.current_thread()

    def _maybe_wait(self, name: str, _: tuple[Any, ...]) -> None:
        if name.startswith("execute") and not self._flows.is_set():
            self.stalled += 1
            assert threading.current_thread() is not self._spared, "it waits for a disk that stalls"
            self._flows.wait(PATIENCE_S)

    @contextmanager
    def stall(self) -> Iterator[None]:
        self._flows.clear()
        try:
            yield
        finally:
            self._flows.set()


@contextmanager
def soon() -> Iterator[None]:
    """What does not come in a moment is late."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("kvire.store.threads.ANSWER_S", 0.02)
        yield


def test_a_look_at_a_stalled_index_ends_and_the_store_says_so(tmp_path: Path) -> None:
    files = StallingFiles()
    with open_store(tmp_path, DiskTier(tmp_path / "disk", 16 * MIB, files=files)) as store:
        records = blocks(store, 3)
        ids = [record.id for record in records]
        save_all(store, records)
        assert store.held(ids) == ["disk"] * 3 and store.stats().handles["disk"].late == ""
        unavailable = store.stats().handles["disk"].counts.unavailable
        with files.stall():
            with soon():
                assert store.held(ids) == [None] * 3
            disk = store.stats().handles["disk"]
            assert "no answer within" in disk.late
            assert (disk.counts.unavailable, disk.tier.blocks) == (unavailable + 1, 3)
        until(lambda: store.held(ids) == ["disk"] * 3)
        assert store.stats().handles["disk"].late == ""
        assert all(ready(load_all(store, records)))


def test_a_tier_that_is_late_in_a_row_is_left_alone_and_tried_again() -> None:
    calls, flows = [], threading.Event()

    def slow() -> str:
        calls.append(1)
        flows.wait(PATIENCE_S)
        return "there"

    thread = LookupThread("disk")
    thread.start()
    with soon():
        for _ in range(FAILURES_TO_OPEN + 2):
            with pytest.raises(AnswerLate):
                thread.ask(slow)
    assert len(calls) == 1, "while one answer is awaited, nobody else asks"
    assert "no answer within" in thread.error
    flows.set()
    with pytest.raises(AnswerLate, match="left alone for a moment"):
        thread.ask(slow)
    until(lambda: answer_of(thread, slow) == "there")
    assert thread.error == ""
    thread.stop(PATIENCE_S)


def answer_of(thread: LookupThread, call: Any) -> Any:
    try:
        return thread.ask(call)
    except AnswerLate:
        return None


def test_what_the_tier_raises_comes_back_and_a_bug_is_a_miss() -> None:
    def gone() -> None:
        raise TierUnavailable("gone")

    def bug() -> None:
        raise TypeError("a number was expected")

    thread = LookupThread("disk")
    thread.start()
    for call, said in ((gone, "^gone$"), (bug, "disk: a number was expected")):
        with pytest.raises(TierUnavailable, match=said):
            thread.ask(call)
    assert thread.ask(lambda: 5) == 5
    thread.stop(PATIENCE_S)


def test_a_look_changes_nothing(tmp_path: Path) -> None:
    """Neither threads nor what a load under way knows."""
    with DiskTier(tmp_path / "disk", 16 * MIB):
        pass
    tier = DiskTier(tmp_path / "disk")
    before = threading.active_count()
    known = dict(tier._reader._found)
    assert tier.held([record_of(1).id]) == [False]
    assert (threading.active_count(), tier._reader._found) == (before, known)
    tier.close()
