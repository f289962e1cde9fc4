"""Remaining time of a call."""

from time import monotonic

from kvire.core.errors import TierUnavailable


class Deadline:
    """The end of one call, however slow the server is. On the monotonic clock."""

    __slots__ = ("_end", "timeout_s")

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = monotonic() + timeout_s

    def left_s(self) -> float:
        """Seconds left, more than 0. Raises TierUnavailable if there are none."""
        left = self._end - monotonic()
        if left <= 0:
            raise TierUnavailable(f"no answer within {self.timeout_s:g} s")
        return left
