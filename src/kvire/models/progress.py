"""Progress reports of long work (joining, converting, hashing)."""

import time
from collections.abc import Callable
from typing import Protocol


class Progress(Protocol):
    """Called from the working thread, with `done` rising to `total`; it should return quickly."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Report progress.

        stage: the current work, for people.
        done, total: in any unit, the same for both.
        """


def silent(stage: str, done: int, total: int) -> None:
    """Progress without a listener."""


class LateProgress:
    """Passes calls on only once the work has taken `after_s` seconds: short work stays silent."""

    def __init__(self, inner: Progress, after_s: float = 2.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._inner = inner
        self._clock = clock
        self._starts_at = clock() + after_s

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Pass the call on, if it is late enough."""
        if self._clock() >= self._starts_at:
            self._inner(stage, done, total)
