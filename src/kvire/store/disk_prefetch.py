"""Has the kernel fetch blocks into its page cache before they are read."""

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from kvire.core.errors import TierUnavailable
from kvire.store.disk_access import DiskAccess
from kvire.store.disk_index import Place

AT_ONCE = 32
MOST_WAITING = 1 << 14


class Prefetcher:
    """A thread, since the kernel makes those wait who ask for more than the disk's queue holds."""

    def __init__(self, access: DiskAccess) -> None:
        self._access = access
        self._wanted: deque[Place] = deque(maxlen=MOST_WAITING)
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, places: Sequence[Place]) -> None:
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
                places = [self._wanted.popleft() for _ in range(min(AT_ONCE, len(self._wanted)))]
            with suppress(TierUnavailable):
                self._fetch(places)

    def _fetch(self, places: list[Place]) -> None:
        with self._access.reads() as folder:
            for place in places if folder is not None else ():
                assert folder is not None
                with suppress(FileNotFoundError):
                    folder.segments.read_ahead(place.slot, place.slot_bytes, place.frame_bytes)
