"""GreedyDual-Size-Frequency (Cherkasova, HP Labs, 1998), for blocks of one size."""

from typing import ClassVar


class AgingFrequency:
    """See EvictionPolicy."""

    name: ClassVar[str] = "gdsf"
    about: ClassVar[str] = "uses over size, aging as others go; blocks are of one size"

    def rank(self, uses: int, start_tokens: int, last: float) -> float:  # noqa: ARG002 - the protocol's
        """See EvictionPolicy."""
        return last + uses


POLICY = AgingFrequency
