"""The tenants' keys: one file, outside the store, with a random salt and secret for each tenant.

Losing the file makes every sealed block unreadable; `forget` does so on purpose for one tenant. The
file is replaced as a whole under a lock, and each process checks for a replacement before it hands
out a key, so that all agree.
"""

import fcntl
import hashlib
import json
import logging
import os
import secrets
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

from kvire.codec.seal import SECRET_BYTES, TAG_BYTES, TenantKey, forget_ciphers
from kvire.core.errors import StoreError
from kvire.core.keys import field

VERSION = 1
MAX_FILE_BYTES = 64 << 20
FRESH_S = 0.02  # how long the file is believed unchanged: a load asks for keys hundreds of times
# A rewrite takes two fsyncs. Requests wait for the lock, so a process that was stopped in the
# middle of one must not block them indefinitely.
LOCK_TIMEOUT_S = 2.0

log = logging.getLogger(__name__)


def default_path() -> Path:
    """$KVIRE_KEY_FILE, else kvire/keyring.json in the user's data folder."""
    if named := os.environ.get("KVIRE_KEY_FILE"):
        return Path(named)
    data_home = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data_home) / "kvire" / "keyring.json"


class _Stamp(NamedTuple):
    """Identifies the content at a path.

    Every rewrite raises mtime_ns, so that a reused inode is not taken for the old file.
    """

    device: int
    inode: int
    mtime_ns: int
    size: int

    @classmethod
    def of(cls, status: os.stat_result) -> "_Stamp":
        return cls(status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)


class Keyring:
    """The tenants' keys. Thread-safe, and safe beside other processes with the same file.

    path: default_path() unless given; made, with its folder, for the first tenant.
    encrypt: False hands out keys without secrets (frames are then checked, not sealed); the salts
        are the same either way.

    Raises StoreError whenever the file cannot be trusted; nothing is then repaired or replaced.
    """

    def __init__(self, path: Path | None = None, *, encrypt: bool = True) -> None:
        self.path = Path(path) if path is not None else default_path()
        self.encrypt = encrypt
        self._lock = threading.Lock()
        self._stamp: _Stamp | None = None
        self._keys: dict[str, TenantKey] = {}
        self._fresh_until = 0.0

    def tenant(self, name: str) -> TenantKey:
        """The tenant's key, made at first use."""
        key = self._known().get(name)
        return self._made(name) if key is None else key

    def lately(self, name: str) -> TenantKey:
        """As tenant(), but for the frames of a load.

        A forget in another process may be noticed up to FRESH_S later.
        """
        if monotonic() < self._fresh_until and (key := self._keys.get(name)) is not None:
            return key
        return self.tenant(name)

    def tenants(self) -> list[str]:
        """Names of all tenants that have a key."""
        return sorted(self._known())

    def check_outside(self, store: Path) -> None:
        """Raise StoreError if the file would be in the store's folder, beside the data it
        unlocks.
        """
        if self.path.resolve().is_relative_to(store.resolve()):
            raise StoreError(f"the key file {self.path} lies inside the store {store}: set KVIRE_KEY_FILE elsewhere")

    def forget(self, name: str) -> bool:
        """Destroy the tenant's salt and secret; returns whether there were any.

        The name gets new ones at its next use. All frames sealed with the old secret are unreadable
        from then on, in this process and, from its next use on, in every other. The old file's
        content is overwritten in place, unless it has other names (hard links): those are a user's
        backup. Backups, and copies that a file system keeps by itself (journals, snapshots,
        copy-on-write, worn flash), are out of reach.
        """
        with self._lock, self._locked_folder() as folder:
            tenants = self._read_tenants()
            if tenants.pop(name, None) is None:
                return False
            self._replace(folder, tenants)
            forget_ciphers()
            return True

    def _known(self) -> dict[str, TenantKey]:
        """Keys by tenant, from the current file."""
        stamp = self._current_stamp()
        with self._lock:
            if stamp != self._stamp:
                self._read_tenants()
            self._fresh_until = monotonic() + FRESH_S
            return self._keys

    def _made(self, name: str) -> TenantKey:
        with self._lock, self._locked_folder() as folder:
            tenants = self._read_tenants()
            if name not in tenants:  # else another process was first
                tenants[name] = {"salt": secrets.token_hex(32), "secret": secrets.token_hex(SECRET_BYTES)}
                self._replace(folder, tenants)
            return self._keys[name]

    def _current_stamp(self) -> _Stamp | None:
        try:
            return _Stamp.of(self.path.lstat())
        except FileNotFoundError:
            return None
        except OSError as e:
            raise StoreError(f"the key file {self.path} cannot be read: {e.strerror}") from e

    @contextmanager
    def _locked_folder(self) -> Iterator[int]:
        """The folder's descriptor, made if missing, locked against all other writers."""
        parent = self.path.parent
        try:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as e:
            raise self._unusable("made", e) from e
        try:
            if os.fstat(folder).st_mode & 0o022:
                raise StoreError(f"others may write to {parent}, which holds the key file: chmod 700 {parent}")
            self._lock_folder(folder)
            yield folder
        finally:
            os.close(folder)  # and with it the lock

    def _lock_folder(self, folder: int) -> None:
        """Lock the folder until it is closed.

        Raises StoreError: some network file systems have no locks.
        """
        deadline = monotonic() + LOCK_TIMEOUT_S
        try:
            while True:
                with suppress(BlockingIOError):
                    return fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if monotonic() > deadline:
                    raise StoreError(f"the key file {self.path} stays locked by another process: end that one")
                sleep(0.001)
        except OSError as e:
            raise self._unusable("locked", e) from e

    def _read_tenants(self) -> dict[str, dict[str, str]]:
        """Salts and secrets by tenant; {} without a file.

        Read again if the file is replaced meanwhile.
        """
        while True:
            stamp = self._current_stamp()
            try:
                tenants, read = _read(self.path)
                self._keys = {name: self._key(name, **entry) for name, entry in tenants.items()}
                self._stamp = read
            except FileNotFoundError:
                self._keys, self._stamp = {}, None
                return {}
            except (ValueError, TypeError, KeyError, RecursionError, OSError) as e:
                if stamp != self._current_stamp():
                    continue
                raise StoreError(
                    f"the key file {self.path} is damaged or cannot be read ({type(e).__name__}): restore it from a "
                    "backup, or move it away to begin with new keys; blocks sealed with the old ones are then never "
                    "read again"
                ) from None  # the cause may quote the file's content
            return tenants

    def _key(self, name: str, salt: str, secret: str) -> TenantKey:
        if len(bytes.fromhex(salt)) != 32 or len(bytes.fromhex(secret)) != SECRET_BYTES:
            raise ValueError
        tag = hashlib.sha256(field("kvire", b"tenant") + field("salt", salt.encode())).digest()[:TAG_BYTES]
        key = TenantKey(name, salt, bytes.fromhex(secret), tag)
        return key if self.encrypt else replace(key, secret=None)

    def _replace(self, folder: int, tenants: dict[str, dict[str, str]]) -> None:
        """Write the file anew, in one step and durably; then wipe the old one."""
        content = json.dumps({"kvire keyring": VERSION, "tenants": tenants}, indent=1).encode()
        try:
            old = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC) if self._stamp is not None else None
            try:
                _write(self.path, content, newer_than_ns=self._stamp.mtime_ns if self._stamp else 0)
                os.fsync(folder)
                if old is not None:
                    self._wipe(old)
            finally:
                if old is not None:
                    os.close(old)
        except OSError as e:
            raise self._unusable("written", e) from e
        self._read_tenants()

    def _wipe(self, descriptor: int) -> None:
        """Overwrite the old file, so that no key forgotten later remains in it."""
        status = os.fstat(descriptor)
        if status.st_nlink:
            log.warning("the key file %s has other names (hard links), which keep the keys it had", self.path)
            return
        os.pwrite(descriptor, bytes(status.st_size), 0)
        os.fsync(descriptor)

    def _unusable(self, what: str, cause: OSError) -> StoreError:
        return StoreError(
            f"the key file {self.path} cannot be {what}: {cause.strerror}; set KVIRE_KEY_FILE to a file in a folder of "
            "your own, outside the store"
        )


def _read(path: Path) -> tuple[dict[str, dict[str, str]], _Stamp]:
    """The file's tenants, and a stamp of its content.

    Raises the errors of opening and parsing, or StoreError.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        raise StoreError(f"the key file {path} is no regular file (links are not followed): put the file itself there")
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if status.st_mode & 0o077:
            raise StoreError(
                f"others may read the key file {path}: chmod 600 {path}, and forget its tenants if in doubt"
            )
        document: Any = json.loads(file.read(MAX_FILE_BYTES))
    version = document["kvire keyring"]
    if isinstance(version, int) and version > VERSION:
        raise StoreError(f"the key file {path} was written by a newer Kvire (version {version}): use that, or another")
    if version != VERSION:
        raise ValueError
    return {**document["tenants"]}, _Stamp.of(status)


def _write(path: Path, content: bytes, newer_than_ns: int) -> None:
    """Put a new file in the place of `path`: a reader finds the old one or the new one, whole.

    The caller holds the folder's lock: so the temporary name is always the same, and a crash leaves
    one file at most, which the next rewrite takes over.
    """
    temporary = path.with_name(f".{path.name}.new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(content)
        file.flush()
        mtime_ns = max(os.fstat(file.fileno()).st_mtime_ns, newer_than_ns + 1)
        os.utime(file.fileno(), ns=(mtime_ns, mtime_ns))
        os.fsync(file.fileno())
    temporary.rename(path)
