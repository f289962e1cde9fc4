"""No store, as an object: it has the methods of Reuse, and never finds anything."""

from collections.abc import Iterable, Mapping

from kvire.core.keys import BlockKey, Namespace, unsealed_salt
from kvire.plan.cost import Choice, PrefillSpeed, Way
from kvire.store.explain import MissAnswer
from kvire.store.reuse.chain import Blocks, Chain, Identity, Names
from kvire.store.reuse.load import Load
from kvire.store.reuse.look import Found
from kvire.store.reuse.planner import COMPUTE_NOTHING, Memory, Reuse
from kvire.store.tiered import StoreStats


class NoReuse:
    """Reuse without a store: names without a secret, and no blocks found. See Reuse."""

    keeps = False

    def __init__(self, namespace: Namespace, *, prefill: PrefillSpeed | None = None) -> None:
        self.names = Names(namespace, unsealed_salt, _note_nothing)
        self.prefill = prefill or PrefillSpeed()

    def name(self, tenant: str = "", cache_salt: str = "") -> Identity:
        """See Reuse."""
        return self.names.of(tenant, cache_salt)

    def look(self, blocks: Blocks, first: int, limit: int | None = None) -> Found:
        """Nothing."""
        return Found.nothing(first, len(blocks.keys) if limit is None else limit)

    def hope(self, found: Found) -> Found:
        """See Reuse."""
        return found

    def worth(self, found: Found, *, can_meet: bool = True) -> Choice:
        """Nothing can be loaded."""
        del found, can_meet
        return COMPUTE_NOTHING

    def decided(self, choice: Choice) -> None:
        """See Reuse."""

    def load(self, blocks: Blocks, found: Found, memory: Memory, way: Way) -> Load:
        """Never called: no block is found."""
        del blocks, found, memory, way
        raise AssertionError("nothing is loaded without a store")

    def save(self, blocks: Blocks, indices: Iterable[int], memory: Memory) -> bool:
        """Keeps nothing."""
        del blocks, indices, memory
        return False

    def finished(self, blocks: Blocks, stop: int, *, keep: bool) -> None:
        """See Reuse."""

    def discard(self, keys: Iterable[BlockKey]) -> None:
        """See Reuse."""

    def why(self, chain: Chain, index: int, prompt_tokens: int) -> MissAnswer | None:
        """No store to ask."""
        del chain, index, prompt_tokens
        return None

    def stats(self) -> StoreStats:
        """Counters without tiers."""
        return StoreStats({}, 0, 0, 0, 0)

    def flush(self, timeout_s: float) -> bool:
        """Nothing is queued."""
        del timeout_s
        return True

    def close(self) -> None:
        """See Reuse."""


AnyReuse = Reuse | NoReuse


def _note_nothing(root: BlockKey, fields: Mapping[str, str]) -> None:
    del root, fields
