"""Least recently used."""

from typing import ClassVar


class LeastRecentlyUsed:
    """See EvictionPolicy."""

    name: ClassVar[str] = "lru"
    about: ClassVar[str] = "least recently used, the end of a prompt first: what the store does"

    def rank(self, uses: int, start_tokens: int, last: float) -> float:  # noqa: ARG002 - the protocol's
        """See EvictionPolicy."""
        return 0.0  # the time of use alone decides


POLICY = LeastRecentlyUsed
