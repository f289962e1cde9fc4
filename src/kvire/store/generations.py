"""Distinguishes work begun before a forget or clear from work begun after it."""

import threading
from collections.abc import Callable
from typing import NamedTuple

from kvire.codec.seal import TenantKey


class Generation(NamedTuple):
    """When work began: the number of forgets and clears so far here, and the tag of its tenant's
    key.
    """

    number: int
    tag: bytes


class Generations:
    """Generations of work that carries KV. Thread-safe.

    Such work keeps the generation in which it began, and asks before and after it stores anything
    whether that generation is still current.

    tenant: the keyring's, whose keys other processes can forget, too.
    """

    def __init__(self, tenant: Callable[[str], TenantKey]) -> None:
        self._tenant = tenant
        self._lock = threading.Lock()
        self._now = 0
        self._all_since = 0
        self._since: dict[str, int] = {}

    def now(self, tenant: str) -> Generation:
        """The generation of work that begins now. Raises StoreError."""
        now = self._now  # before the key: if a forget comes in between, the generation is from before it
        return Generation(now, self._tenant(tenant).tag)

    def is_current(self, tenant: str, generation: Generation) -> bool:
        """Whether work of that generation may still be stored. Raises StoreError."""
        return self.is_recent(tenant, generation) and self._tenant(tenant).tag == generation.tag

    def is_recent(self, tenant: str, generation: Generation) -> bool:
        """Whether this process neither forgot the tenant nor cleared the store since."""
        return generation.number >= self._all_since and generation.number >= self._since.get(tenant, 0)

    def end(self, tenant: str | None) -> None:
        """End earlier generations: their work may no longer be stored, of one tenant, or (None) of
        all.
        """
        with self._lock:
            self._now += 1
            if tenant is None:
                self._all_since = self._now
            else:
                self._since[tenant] = self._now
