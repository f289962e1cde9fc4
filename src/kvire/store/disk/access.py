"""Access to a disk tier's folder: opening, reopening after replacement, pauses after failures.

The folder may be removed, filled, locked away or damaged at any time.
"""

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from kvire.core.errors import BlockMissing, FrameDamaged, StoreError, TierUnavailable
from kvire.store.disk.files import Files
from kvire.store.disk.folder import DiskFolder, no_store
from kvire.store.disk.index import JournalFullError, is_damage
from kvire.store.disk.segments import IndexDamagedError
from kvire.store.health import Outage

# Seconds by which the clock follows the wall clock, per second: eight hours in 48 minutes, so that
# blocks in use are touched meanwhile; a wall clock that is wrong for a moment hardly matters.
FOLLOW_PACE = 10.0
FOLLOW_AT_MOST_S = 1.0  # elapsed seconds counted per call, at most: when the wall clock was set is not known


def since_boot() -> float:
    """Seconds since boot, including suspension (time.monotonic leaves it out)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class FollowingClock:
    """Elapsed time that gradually follows the wall clock. Thread-safe.

    wall: seconds since the epoch, may jump.
    elapsed: seconds since any moment, steady, also while suspended.
    """

    def __init__(self, wall: Callable[[], float], elapsed: Callable[[], float]) -> None:
        self._wall = wall
        self._elapsed = elapsed
        self._lock = threading.Lock()
        self._now = wall()
        self._at = elapsed()

    def now(self) -> float:
        """Seconds since the epoch."""
        with self._lock:
            at = self._elapsed()
            passed, self._at = at - self._at, at
            self._now += passed
            most = FOLLOW_PACE * min(max(passed, 0.0), FOLLOW_AT_MOST_S)
            self._now += max(-most, min(most, self._wall() - self._now))
            return self._now

    def latest(self) -> float:
        """The later of this clock and the wall clock: a stamp beyond it is in the future for every
        process.
        """
        return max(self.now(), self._wall())


log = logging.getLogger(__name__)

GLANCE_S = 0.01
ERRORS = (OSError, sqlite3.Error, JournalFullError, IndexDamagedError, StoreError)


class DiskAccess:
    """One process's access to the folder at `path`. Thread-safe.

    Times are those of a FollowingClock, so that a jump of the wall clock shows only gradually.
    """

    def __init__(
        self,
        path: Path,
        capacity_bytes: int | None,
        new_bytes: Callable[[Path], int] | None,
        files: Files,
        wall: Callable[[], float],
        elapsed: Callable[[], float],
    ) -> None:
        self.path = path
        self.reading = Outage(f"reading from {path}", elapsed)
        self.writing = Outage(f"writing to {path}", elapsed)
        self.unavailable = 0
        self._capacity_bytes = capacity_bytes
        self._new_bytes = new_bytes
        self._files = files
        self._clock = FollowingClock(wall, elapsed)
        # Guards _folder, _closed, _new_bytes, and `users` and `stale` of every folder opened here.
        # A call holds it to take a folder and to leave it, not while it uses it. Opening happens
        # under it, so that two calls do not open the folder twice.
        self._lock = threading.Lock()
        self._folder: DiskFolder | None = None
        self._closed = False

    def now(self) -> float:
        """Seconds since the epoch, by a clock that does not jump."""
        return self._clock.now()

    def latest(self) -> float:
        """See FollowingClock."""
        return self._clock.latest()

    def open(self) -> None:
        """Open the folder now, making missing parts.

        Raises StoreError if `path` cannot hold a store.
        """
        try:
            with self._lock:
                self._current(make=True)
        except NotADirectoryError as error:
            raise StoreError(f"{self.path} is not a folder: choose another one for the store") from error
        except (OSError, sqlite3.Error, JournalFullError, IndexDamagedError) as error:
            raise StoreError(f"the store in {self.path} cannot be opened: {error}") from error

    def reads(self) -> AbstractContextManager[DiskFolder | None]:
        """The folder, for one call that reads; None if there is none.

        Every error becomes TierUnavailable.
        """
        return self._used(self.reading, make=False)

    @contextmanager
    def writes(self) -> Iterator[DiskFolder]:
        """The folder, for one call that writes; it is made if it is missing.

        Errors as in `reads`.
        """
        with self._used(self.writing, make=True) as folder:
            assert folder is not None
            yield folder

    def changes(self) -> AbstractContextManager[DiskFolder | None]:
        """The folder, for one call that changes existing content; None if there is none.

        Errors as in `reads`.
        """
        return self._used(self.writing, make=False)

    @contextmanager
    def glance(self) -> Iterator[DiskFolder | None]:
        """The folder if it is open already, for one short query; None if that would have to
        wait.
        """
        folder = None
        # Another call may hold the lock for as long as opening takes.
        if self._lock.acquire(timeout=GLANCE_S):
            try:
                if (folder := self._folder) is not None:
                    folder.users += 1
            finally:
                self._lock.release()
        try:
            yield folder
        except ERRORS as error:
            raise TierUnavailable(f"{self.path}: {error}") from error
        finally:
            if folder is not None:
                self._left(folder)

    def close(self) -> None:
        """Refuse all calls from now on; calls in progress end normally. Idempotent."""
        with self._lock:
            self._closed = True
            self._let_go()

    @contextmanager
    def _used(self, outage: Outage, *, make: bool) -> Iterator[DiskFolder | None]:
        outage.check()
        folder = None
        try:
            with self._lock:
                if (folder := self._current(make=make)) is not None:
                    folder.users += 1
            yield folder
        except ERRORS as error:
            self.unavailable += 1
            outage.failed(error)
            self._after(error, folder)
            raise TierUnavailable(f"{self.path}: {error}") from error
        except (BlockMissing, FrameDamaged):
            outage.passed()
            raise
        else:
            outage.passed()
        finally:
            if folder is not None:
                self._left(folder)

    def _current(self, *, make: bool) -> DiskFolder | None:
        """The folder now at the path, opened if needed. Called with the lock held."""
        if self._closed:
            raise TierUnavailable(f"{self.path} is closed")
        if self._folder is not None:
            if self._folder.current():
                return self._folder
            self._let_go()
        for _ in range(2):
            try:
                self._folder = DiskFolder.open(
                    self._files, self.path, self._capacity_bytes, self._new_bytes, self.now()
                )
            except FileNotFoundError:
                if not make:
                    return None
                if self._capacity_bytes is None and self._new_bytes is None:
                    raise no_store(self.path) from None
                self._files.make_folder(self.path)
            else:
                self._new_bytes = _always(self._folder.capacity_bytes)  # should the folder or its index be lost
                return self._folder
        raise FileNotFoundError(f"{self.path} vanishes as often as it is made")

    def _after(self, error: Exception, folder: DiskFolder | None) -> None:
        """Let go of a folder whose index is damaged or whose connection is unusable."""
        damaged = is_damage(error)
        if folder is None or not (damaged or isinstance(error, sqlite3.ProgrammingError)):
            return
        with self._lock:
            if self._folder is folder:
                self._let_go()
        if damaged:
            # Outside the lock, since it takes long: other calls open the folder anew meanwhile, and
            # the folder's lock file keeps all but one of them from making the index.
            log.warning("the index of %s is damaged and made again from its segments: %s", self.path, error)
            with suppress(*ERRORS):
                folder.remake()

    # Called with the lock held. A folder in use is retired by its last user (`_left`), so that no
    # call loses its connection in the middle.
    def _let_go(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.stale = True
            if folder.users == 0:
                folder.retire()

    def _left(self, folder: DiskFolder) -> None:
        with self._lock:
            folder.users -= 1
            if folder.stale and folder.users == 0:
                folder.retire()


def _always(size_bytes: int) -> Callable[[Path], int]:
    return lambda _path: size_bytes
