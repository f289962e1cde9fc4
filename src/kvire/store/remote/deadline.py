"""How long a call may still take."""

from time import monotonic

from kvire.core.errors import TierUnavailable


class Deadline:
    """The end of one call, whatever the other side does meanwhile. On the monotonic clock."""

    __slots__ = ("_end", "timeout_s")

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = monotonic() + timeout_s

    def left_s(self) -> float:
        """Seconds left, more than 0. Raises TierUnavailable when there are none."""
        left = self._end - monotonic()
        if left <= 0:
            raise TierUnavailable(f"no answer within {self.timeout_s:g} s")
        return left
