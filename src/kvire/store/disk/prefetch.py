"""Brings blocks into the page cache before they are read."""

import logging
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from kvire.core.errors import TierUnavailable
from kvire.store.disk.access import DiskAccess
from kvire.store.disk.index import Location

log = logging.getLogger(__name__)

RUN_BYTES = 3 << 20  # read by one request of slots that follow each other: 88 % of the disk's speed, 75 by single slots
MOST_WAITING = 1 << 14


class ReadAhead:
    """A thread that reads what others will read soon, and throws it away. An error is theirs to meet, not its own."""

    def __init__(self, access: DiskAccess) -> None:
        self._access = access
        self._wanted: deque[Location] = deque(maxlen=MOST_WAITING)
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, places: Sequence[Location]) -> None:
        """Fetch these next, in this order."""
        with self._condition:
            if self._closed or not places:
                return
            self._wanted.extend(places)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="disk prefetch", daemon=True)
                self._thread.start()
            self._condition.notify()

    def close(self) -> None:
        """End the thread. Idempotent."""
        with self._condition:
            self._closed = True
            self._condition.notify()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._wanted and not self._closed:
                    self._condition.wait()
                if self._closed:
                    return
                run = self._next_run()
            try:
                self._fetch(run)
            except TierUnavailable:
                pass  # whoever reads will meet it
            except Exception:  # the next run may go well
                log.exception("reading ahead failed")

    def _next_run(self) -> list[Location]:
        """Slots that follow each other, from the first that is wanted on; called with the lock held."""
        run = [self._wanted.popleft()]
        while self._wanted and run[-1].is_before(self._wanted[0]) and len(run) * run[0].slot_bytes < RUN_BYTES:
            run.append(self._wanted.popleft())
        return run

    def _fetch(self, run: list[Location]) -> None:
        with self._access.reads() as folder, suppress(OSError):
            if folder is not None:
                first, last = run[0], run[-1]
                length = (len(run) - 1) * first.slot_bytes + last.frame_bytes
                folder.segments.read_ahead(first.slot, first.slot_bytes, length)
