"""KV events: the blocks that this engine could load, by vLLM's own hashes.

They are for vLLM's subscribers, such as routers.

As vLLM does for its own cache, each group's share of a block has its own event: where a window has
moved on, the store has a block of some groups only. Other processes write and evict blocks, too,
without notice. So a share is announced when it was handed to the store or found there, and
withdrawn when a lookup or a load misses it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from kvire.connectors.vllm.requests import Tracked
from kvire.core.keys import BlockKey
from kvire.store.reuse.look import Row

MOST_ANNOUNCED = 1 << 17


class Event(NamedTuple):
    """A group's share of a block was added (with its parent's hash, tokens and salt) or removed.

    hash, parent: vLLM's.
    """

    came: bool
    hash: bytes
    group: int
    parent: bytes | None = None
    token_ids: tuple[int, ...] = ()
    cache_salt: str | None = None


class Announcer:
    """Remembers the announced shares of `groups` groups. Off, it does nothing."""

    def __init__(self, groups: int, *, on: bool) -> None:
        self._groups = range(groups)
        self._on = on
        self._events: list[Event] = []
        self._announced: OrderedDict[tuple[BlockKey, int], bytes] = OrderedDict()  # by block and group
        self._offered: OrderedDict[BlockKey, list[Event]] = OrderedDict()  # handed to the workers

    def found(self, tracked: Tracked, rows: Sequence[Row]) -> None:
        """A lookup: the tier with each part of each block, group by group, worker by worker."""
        if self._on:
            for index, row in enumerate(rows):
                key = tracked.chain.keys[index]
                for group in self._groups:
                    if None in row[group :: len(self._groups)]:
                        self._gone(key, group)
                    elif (key, group) not in self._announced:
                        self._announce(key, _came(tracked, index, group))

    def offered(self, tracked: Tracked, index: int, groups: Sequence[int]) -> None:
        """These groups' shares of block `index` are being handed to the store."""
        if self._on:
            self._offered[tracked.chain.keys[index]] = [_came(tracked, index, group) for group in groups]
            while len(self._offered) > MOST_ANNOUNCED:
                self._offered.popitem(last=False)

    def saved(self, keys: Sequence[BlockKey]) -> None:
        """The store took all handed-over shares of them."""
        for key in keys:
            for event in self._offered.pop(key, ()):
                if (key, event.group) not in self._announced:
                    self._announce(key, event)

    def gone(self, key: BlockKey) -> None:
        """A block is not in the store (any more)."""
        for group in self._groups:
            self._gone(key, group)

    def take(self) -> list[Event]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def clear(self) -> None:
        """Withdraw everything announced."""
        for key, group in list(self._announced):
            self._gone(key, group)
        self._offered.clear()

    def _announce(self, key: BlockKey, event: Event) -> None:
        self._announced[key, event.group] = event.hash
        self._events.append(event)
        if len(self._announced) > MOST_ANNOUNCED:
            self._gone(*next(iter(self._announced)))

    def _gone(self, key: BlockKey, group: int) -> None:
        if (known := self._announced.pop((key, group), None)) is not None:
            self._events.append(Event(came=False, hash=known, group=group))


def _came(tracked: Tracked, index: int, group: int) -> Event:
    hashes = tracked.request.block_hashes
    parent = bytes(hashes[index - 1]) if index else None
    salt = tracked.request.cache_salt if index == 0 else None  # vLLM's hashes take it in with the first block
    return Event(
        came=True, hash=bytes(hashes[index]), group=group,
        parent=parent, token_ids=tracked.chain.tokens(index), cache_salt=salt,
    )  # fmt: skip
