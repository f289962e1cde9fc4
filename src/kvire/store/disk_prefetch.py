"""Has the kernel fetch blocks into its page cache before they are read."""

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from kvire.core.errors import TierUnavailable
from kvire.core.record import BlockId
from kvire.store.disk_access import DiskAccess

AT_ONCE = 32
MOST_WAITING = 1 << 14


class Prefetcher:
    """A thread, since the kernel makes those wait who ask for more than the disk's queue holds."""

    def __init__(self, access: DiskAccess) -> None:
        self._access = access
        self._wanted: deque[BlockId] = deque(maxlen=MOST_WAITING)
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, ids: Sequence[BlockId]) -> None:
        """Fetch these next, in this order."""
        with self._condition:
            if self._closed:
                return
            self._wanted.extend(ids)
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
                ids = [self._wanted.popleft() for _ in range(min(AT_ONCE, len(self._wanted)))]
            with suppress(TierUnavailable):
                self._fetch(ids)

    def _fetch(self, ids: list[BlockId]) -> None:
        with self._access.reads() as folder:
            places = {} if folder is None else folder.index.places(ids, self._access.now())
            for place in (places[block_id] for block_id in ids if block_id in places):
                assert folder is not None
                with suppress(FileNotFoundError):
                    folder.segments.read_ahead(place.slot, place.slot_bytes, place.frame_bytes)
