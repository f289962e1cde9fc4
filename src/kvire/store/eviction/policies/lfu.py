"""Least frequently used."""

from typing import ClassVar


class LeastFrequentlyUsed:
    """See EvictionPolicy."""

    name: ClassVar[str] = "lfu"
    about: ClassVar[str] = "least often used since it came"

    def rank(self, uses: int, start_tokens: int, last: float) -> float:  # noqa: ARG002 - the protocol's
        """See EvictionPolicy."""
        return float(uses)


POLICY = LeastFrequentlyUsed
