"""What vLLM's subscribers (routers, for one) are told: which blocks this engine could load, by vLLM's own hashes.

Other processes write and evict blocks, too, and nobody tells. So a block is announced when it was handed to the store
or found there, and taken back when a lookup or a load finds it gone.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from kvire.connectors.vllm.messages import Block
from kvire.connectors.vllm.requests import Tracked
from kvire.core.keys import BlockKey

MOST_ANNOUNCED = 1 << 17


class Event(NamedTuple):
    """A block came (with its parent's hash, tokens and salt) or went. hash, parent: vLLM's."""

    came: bool
    hash: bytes
    parent: bytes | None = None
    token_ids: tuple[int, ...] = ()
    cache_salt: str | None = None


class Announcer:
    """Remembers what was announced. Off, it does nothing."""

    def __init__(self, *, on: bool) -> None:
        self._on = on
        self._events: list[Event] = []
        self._announced: OrderedDict[BlockKey, bytes] = OrderedDict()
        self._offered: OrderedDict[BlockKey, Event] = OrderedDict()  # handed to the workers

    def found(self, tracked: Tracked, stored: Sequence[bool]) -> None:
        """A lookup: which of a request's blocks are there."""
        if self._on:
            for block, here in zip(tracked.blocks, stored, strict=False):
                if not here:
                    self.gone(block.key)
                elif block.key not in self._announced:
                    self._announce(block.key, _came(tracked, block))

    def offered(self, tracked: Tracked, block: Block) -> None:
        """A block is being handed to the store."""
        if self._on:
            self._offered[block.key] = _came(tracked, block)
            while len(self._offered) > MOST_ANNOUNCED:
                self._offered.popitem(last=False)

    def saved(self, keys: Sequence[BlockKey]) -> None:
        """The store took them."""
        for key in keys:
            if (event := self._offered.pop(key, None)) is not None and key not in self._announced:
                self._announce(key, event)

    def gone(self, key: BlockKey) -> None:
        """A block is not there (any more)."""
        if (known := self._announced.pop(key, None)) is not None:
            self._events.append(Event(came=False, hash=known))

    def take(self) -> list[Event]:
        """Since the last call, in order."""
        events, self._events = self._events, []
        return events

    def clear(self) -> None:
        """Nothing that was announced is to be had."""
        for key in list(self._announced):
            self.gone(key)
        self._offered.clear()

    def _announce(self, key: BlockKey, event: Event) -> None:
        self._announced[key] = event.hash
        self._events.append(event)
        if len(self._announced) > MOST_ANNOUNCED:
            self.gone(next(iter(self._announced)))


def _came(tracked: Tracked, block: Block) -> Event:
    hashes = tracked.request.block_hashes
    parent = bytes(hashes[block.index - 1]) if block.index else None
    salt = tracked.request.cache_salt if block.index == 0 else None  # vLLM's hashes take it in with the first block
    return Event(came=True, hash=bytes(hashes[block.index]), parent=parent, token_ids=block.token_ids, cache_salt=salt)
