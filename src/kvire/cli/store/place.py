"""The store of a `kvire store` command, opened while engines may use it."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from kvire.cli.display import LoadProgress
from kvire.core.errors import StoreError, TierUnavailable
from kvire.core.keys import BlockKey
from kvire.core.record import BlockId
from kvire.models.progress import LateProgress, Progress
from kvire.sessions.folder import Sessions
from kvire.store.check import tenants_at_hand
from kvire.store.disk.folder import INDEX
from kvire.store.disk.segments import SUFFIX
from kvire.store.disk.tier import DiskTier
from kvire.store.keyring import Keyring, default_path
from kvire.store.place import default_store
from kvire.store.remote.backend import BLOCKS
from kvire.store.remote.open import open_remote
from kvire.store.remote.tier import RemoteTier
from kvire.store.survey import Survey
from kvire.store.tier import Entry

TIMEOUT_S = 10.0  # of one request to a remote tier: no first token waits for these commands
SQLITE_MAGIC = b"SQLite format 3\x00"
NOBODY = BlockId(BlockKey(bytes(32)), 0)
AT_ONCE = 256  # blocks in one call of a tier
PATIENCE_S, AGAIN_S = 10.0, 0.1  # for a folder whose journal is full, since others write to it

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OpenedStore:
    """One opened store.

    folder: of a disk tier, else None.
    tenants: names by tag, of the keys in the key file.
    """

    name: str
    tier: DiskTier | RemoteTier
    folder: Path | None
    keyring: Keyring
    tenants: Mapping[bytes, str]

    def notes(self) -> dict[BlockKey, dict[str, str]]:
        """Notes on namespaces; remote tiers keep none."""
        return self.tier.namespaces() if isinstance(self.tier, DiskTier) else {}

    def entries(self, report: Progress) -> Iterator[Entry]:
        """Every block."""
        expected, found = self.tier.stats().blocks, 0
        for entry in self.tier.entries():
            found += 1
            report("listing the blocks", found, max(expected, found + 1))
            yield entry
        report("listing the blocks", found, found)

    def survey(self, report: Progress) -> Survey:
        """Every block, by namespace."""
        return Survey(self.entries(report), self.notes())

    def delete(self, entries: Iterable[Entry], reason: str, report: Progress) -> int:
        """Remove blocks; how many were there."""
        return self._each(entries, lambda ids: self.tier.delete(ids, reason), "removing blocks", report)

    def pin(self, entries: Iterable[Entry], report: Progress, *, pinned: bool) -> int:
        """Pin or unpin blocks; how many were there."""
        return self._each(entries, lambda ids: self.tier.pin(ids, pinned=pinned), "marking blocks", report)

    def patiently(self, change: Callable[[], T]) -> T:
        """The result of a change, retried for a while: a folder in use can be too busy for a
        moment.
        """
        end = time.monotonic() + (0.0 if self.folder is None else PATIENCE_S)
        while True:
            try:
                return change()
            except TierUnavailable:
                if time.monotonic() > end:
                    raise
                time.sleep(AGAIN_S)

    def _each(
        self, entries: Iterable[Entry], change: Callable[[list[BlockId]], int], stage: str, report: Progress
    ) -> int:
        ids, changed = [entry.id for entry in entries], 0
        for start in range(0, len(ids), AT_ONCE):
            changed += self.patiently(partial(change, ids[start : start + AT_ONCE]))
            report(stage, min(start + AT_ONCE, len(ids)), len(ids))
        return changed

    def tag_of(self, tenant: str) -> bytes:
        """The tag that stands for a tenant in this store.

        Raises StoreError if its key is missing.
        """
        tags = [tag for tag, name in self.tenants.items() if name == tenant]
        if not tags:
            known = ", ".join(repr(name) for name in sorted(self.tenants.values())) or "none"
            raise StoreError(f"{self.keyring.path} has no key of a tenant {tenant!r}; it has those of: {known}")
        return tags[0]


@contextmanager
def opened(where: str | None, key_file: Path | None) -> Iterator[OpenedStore]:
    """The store at a folder or URL; None: the default folder.

    Creates nothing, neither a store nor a key file.

    Raises StoreError, also for a tier that stops answering while it is used, or ConfigError.
    """
    keyring = Keyring(key_file)
    if key_file is not None and not key_file.exists():
        raise StoreError(f"there is no key file {key_file}: leave --key-file out to use {default_path()}")
    tenants = tenants_at_hand(keyring)
    if where is not None and "://" in where:
        tier: DiskTier | RemoteTier = _remote(where)
        folder, name = None, tier.name
    else:
        folder = default_store() if where is None else Path(where).expanduser()
        tier, name = _disk(folder), str(folder)
    try:
        if isinstance(tier, DiskTier):
            tier.namespaces()  # opens it
        else:
            tier.held([NOBODY])
        yield OpenedStore(name, tier, folder, keyring, tenants)
    except TierUnavailable as error:
        raise StoreError(_why_not(name, error, remote=folder is None)) from error
    finally:
        tier.close()


def sessions_of(place: OpenedStore) -> Sessions:
    """The sessions of a folder's store."""
    assert place.folder is not None
    return Sessions(place.folder, place.keyring, 0)


@contextmanager
def late_progress() -> Iterator[Progress]:
    """Bars on standard error for stages of more than two seconds."""
    with LoadProgress() as bars:
        yield LateProgress(bars)


def _disk(folder: Path) -> DiskTier:
    """The tier of a folder that is a store already."""
    try:
        names = {path.name for path in folder.iterdir()}
        head = _first_bytes(folder / INDEX) if INDEX in names else b""
    except FileNotFoundError:
        raise StoreError(
            f"there is no store in {folder} yet: kvire serve and kvire chat make the default one, and every command "
            "that takes --store makes that one"
        ) from None
    except NotADirectoryError:
        raise StoreError(f"{folder} is a file: a store is a folder, or a URL such as redis://host:6379") from None
    except OSError as error:
        raise StoreError(f"the store in {folder} cannot be read ({error.strerror}): run this as its owner") from error
    again = f"the next start of what uses it makes it again from its segments (kvire serve MODEL --store {folder})"
    if INDEX not in names:
        if any(name.endswith(SUFFIX) for name in names):
            raise StoreError(f"the index of {folder} is lost: {again}")
        raise StoreError(f"{folder} is no store of Kvire, and is left alone: it has no {INDEX}")
    if len(head) == len(SQLITE_MAGIC) and head != SQLITE_MAGIC:
        raise StoreError(f"the index of {folder} is damaged: {again}")
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise StoreError(
            f"the store in {folder} cannot be opened: no permission to write there, which reading its index needs, "
            "too; run this as its owner"
        )
    return DiskTier(folder)


def _remote(url: str) -> RemoteTier:
    parts = urlsplit(url)
    if parts.scheme == "file" and not (Path(unquote(parts.path)) / BLOCKS).is_dir():
        raise StoreError(f"there is no store in {parts.path} yet: one is made when something is first stored there")
    return open_remote(url, timeout_s=TIMEOUT_S)


def _first_bytes(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return os.read(descriptor, len(SQLITE_MAGIC))
    finally:
        os.close(descriptor)


def _why_not(name: str, error: TierUnavailable, *, remote: bool) -> str:
    if remote:
        return f"{name} does not answer ({error}): is it running, and can it be reached from here?"
    return f"the store cannot be used: {error}"
