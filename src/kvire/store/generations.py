"""Tells work that was begun before a forget or clear from work begun after it."""

import threading
from collections.abc import Callable
from typing import NamedTuple

from kvire.codec.seal import TenantKey


class Generation(NamedTuple):
    """When something began: how many forgets and clears there had been here, and the tag of its
    tenant's key.
    """

    number: int
    tag: bytes


class Generations:
    """Work that carries KV takes along the generation in which it began, and asks before and after
    it stores anything whether that is still current. Thread-safe.

    tenant: the keyring's, whose keys other processes can forget, too.
    """

    def __init__(self, tenant: Callable[[str], TenantKey]) -> None:
        self._tenant = tenant
        self._lock = threading.Lock()
        self._now = 0
        self._all_since = 0
        self._since: dict[str, int] = {}

    def now(self, tenant: str) -> Generation:
        """For what begins now. Raises StoreError."""
        now = self._now  # before the key: if a forget comes in between, the generation is from before it
        return Generation(now, self._tenant(tenant).tag)

    def is_current(self, tenant: str, generation: Generation) -> bool:
        """Whether what began then may still be stored. Raises StoreError."""
        return self.is_recent(tenant, generation) and self._tenant(tenant).tag == generation.tag

    def is_recent(self, tenant: str, generation: Generation) -> bool:
        """Whether this process neither forgot the tenant nor cleared the store since."""
        return generation.number >= self._all_since and generation.number >= self._since.get(tenant, 0)

    def end(self, tenant: str | None) -> None:
        """Nothing that began before may be stored any more: of one tenant, or (None) of anybody."""
        with self._lock:
            self._now += 1
            if tenant is None:
                self._all_since = self._now
            else:
                self._since[tenant] = self._now
