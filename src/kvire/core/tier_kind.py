"""The kinds of tiers: reports count tokens by kind, and unmeasured tiers are ordered by kind.

A tier of another kind brings its own TierKind: nothing here, nor in any report, has to know it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class TierKind:
    """Where a tier's bytes are stored.

    name: in reports, as `{name}_tokens`, and in metrics.
    latency_s, bytes_per_s: a guess at its speed, until something has been read.
    is_in_process: whether it ends with this process, and its lookups never wait.
    """

    name: str
    latency_s: float
    bytes_per_s: float
    is_in_process: bool = False

    MEMORY: ClassVar["TierKind"]
    DISK: ClassVar["TierKind"]
    REMOTE: ClassVar["TierKind"]

    def __str__(self) -> str:
        return self.name


TierKind.MEMORY = TierKind("memory", 1e-5, 8e9, is_in_process=True)
TierKind.DISK = TierKind("disk", 1e-4, 1e9)
TierKind.REMOTE = TierKind("remote", 5e-3, 1e8)

KINDS = (TierKind.MEMORY, TierKind.DISK, TierKind.REMOTE)  # that every report names, fastest first


class LoadedTokens:
    """Tokens loaded from tiers, with those of the usual kinds by name.

    loaded_tokens: by the kind's name.
    """

    __slots__ = ()

    loaded_tokens: Mapping[str, int]

    @property
    def memory_tokens(self) -> int:
        """From memory tiers."""
        return self.loaded_tokens.get(TierKind.MEMORY.name, 0)

    @property
    def disk_tokens(self) -> int:
        """From disk tiers."""
        return self.loaded_tokens.get(TierKind.DISK.name, 0)

    @property
    def remote_tokens(self) -> int:
        """From remote tiers."""
        return self.loaded_tokens.get(TierKind.REMOTE.name, 0)


def every_kind(loaded_tokens: Mapping[str, int]) -> dict[str, int]:
    """The usual kinds first, even with no tokens, then the other kinds with tokens."""
    return {kind.name: 0 for kind in KINDS} | dict(loaded_tokens)
