"""How long work (joining, converting, hashing) tells a caller where it is."""

import time
from collections.abc import Callable
from typing import Protocol


class Progress(Protocol):
    """Called from the working thread, with `done` rising to `total`; it should return quickly."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """stage: what is being done, for people. done, total: in any unit, the same for both."""


def silent(stage: str, done: int, total: int) -> None:
    """Progress for those who did not ask."""


class LateProgress:
    """Passes calls on only once the work has taken `after_s` seconds: short work stays silent."""

    def __init__(self, inner: Progress, after_s: float = 2.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._inner = inner
        self._clock = clock
        self._starts_at = clock() + after_s

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Pass it on, if it is late enough."""
        if self._clock() >= self._starts_at:
            self._inner(stage, done, total)
