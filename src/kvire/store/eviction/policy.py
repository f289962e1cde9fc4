"""The protocol of an eviction policy, and the known policies: one per file of folder policies."""

from functools import cache
from typing import ClassVar, Protocol

from kvire.core.discovery import parts

FOLDER = "kvire.store.eviction.policies"


class EvictionPolicy(Protocol):
    """Ranks blocks for eviction.

    The least rank is evicted first; of equal ranks the least recently used block, then the later
    one of a prompt. Whatever the ranks, a block is never evicted before one that follows it in a
    prompt.

    name: for `kvire replay --policy`.
    about: a line for help texts.
    """

    name: ClassVar[str]
    about: ClassVar[str]

    def rank(self, uses: int, start_tokens: int, last: float) -> float:
        """Rank of a block that is used now. Never falls as a block is used again.

        uses: number of uses since it was stored.
        start_tokens: tokens before it in its prompt.
        last: the highest rank evicted so far, 0 at first.
        """


@cache
def policies() -> dict[str, EvictionPolicy]:
    """All by name."""
    found: list[type[EvictionPolicy]] = parts(FOLDER, "POLICY")
    return {policy.name: policy() for policy in found}
