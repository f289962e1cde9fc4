"""Chats that go on after a restart: history and exact token ids, beside the disk tier's blocks.

    sessions/<tenant tag>/<HMAC of the name>   one session (sessions/session_file.py)
    sessions/.new                              one being written; a crash leaves at most this

A session holds a conversation's text, so it is sealed like blocks are, and is deleted with its
tenant. Unlike a block it is never evicted: without room, a write is refused. Files are replaced in
one step; all writers, in any process, come one by one.
"""

import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from kvire.codec.seal import TenantKey
from kvire.core.config import StoreConfig
from kvire.core.memory import format_size
from kvire.sessions.session_file import Session, SessionError, check_name, damaged, file_name, pack, unpack, unpack_head
from kvire.store.keyring import Keyring
from kvire.store.place import MOST_SESSION_BYTES, SESSION_SHARE, session_bytes, session_bytes_beside

FOLDER, TEMPORARY = "sessions", ".new"
FILE_SYSTEM_BLOCK_BYTES = 4096
NEW_ENTRIES_BYTES = 2 * FILE_SYSTEM_BLOCK_BYTES  # growth of folders by a new name in a new folder
LOCK_TIMEOUT_S = 5.0
_SAFELY = os.O_NOFOLLOW | os.O_CLOEXEC


class SessionConflictError(SessionError):
    """The session changed since it was loaded."""


def open_sessions(config: StoreConfig, blocks_bytes: int | None = None) -> "Sessions | None":
    """Sessions of the store's folder; None without a folder: a remote store keeps none.

    blocks_bytes: size limit of the folder's disk tier, if the config leaves that to the folder.
    """
    if config.path is None:
        return None
    keyring = Keyring(config.key_file, encrypt=config.encrypt)
    if config.disk_bytes is not None:
        return Sessions(config.path, keyring, session_bytes(config.disk_bytes))
    return Sessions(config.path, keyring, session_bytes_beside(blocks_bytes or 0))


class Sessions:
    """Sessions of all tenants in one store's folder. Thread-safe, and safe beside other processes.

    limit_bytes: size limit of all together, counted as `du` does.

    Makes nothing before the first save. Every method raises SessionError for a session that cannot
    be used, and StoreError for keys that cannot.
    """

    def __init__(self, store: Path, keyring: Keyring, limit_bytes: int) -> None:
        self.store = store
        self.limit_bytes = limit_bytes
        self._keyring = keyring

    @property
    def sealed(self) -> bool:
        """Whether sessions can be read with the tenant's key only."""
        return self._keyring.encrypt

    def load(self, tenant: str, name: str) -> Session | None:
        """The session; None if there is none of that name.

        An unreadable one stays in place.
        """
        check_name(name)
        key = self._keyring.tenant(tenant)
        with _errors("read"), suppress(FileNotFoundError), self._tenant_folder(key.tag) as folder:
            return unpack(self._read(folder, file_name(key, name)), key, name)
        return None

    def save(self, tenant: str, session: Session) -> Session:
        """Keep the session, durably; returns it with its new revision.

        Raises SessionConflictError if it was saved by others, or removed, since this one was
        loaded; and SessionError if there is no room.
        """
        saved = replace(session, revision=secrets.token_hex(16))
        with _errors("kept"), self._locked() as root:
            # Only now: a forget of the tenant either came before, or removes the files written
            # here.
            key = self._keyring.tenant(tenant)
            file = file_name(key, session.name)
            with suppress(FileExistsError):
                os.mkdir(key.tag.hex(), 0o700, dir_fd=root)
            with _opened_folder(key.tag.hex(), root) as folder:
                if self._revision(folder, key, file) != session.revision:
                    raise SessionConflictError(
                        "somebody else continued this session, or removed it; load it again, or take another name"
                    )
                content = pack(saved, key)
                self._check_room(root, len(content))
                _write(root, content)
                os.rename(TEMPORARY, file, src_dir_fd=root, dst_dir_fd=folder)
                os.fsync(folder)
            os.fsync(root)
        return saved

    def delete(self, tenant: str, name: str) -> bool:
        """Remove the session, readable or not; whether there was one."""
        check_name(name)
        if tenant not in self._keyring.tenants():
            return False
        key = self._keyring.tenant(tenant)
        with _errors("removed"), suppress(FileNotFoundError), self._locked(make=False) as root:
            with _opened_folder(key.tag.hex(), root) as folder:
                os.unlink(file_name(key, name), dir_fd=folder)
            return True
        return False

    def names(self, tenant: str) -> list[str]:
        """Names of the tenant's readable sessions."""
        if tenant not in self._keyring.tenants():
            return []
        key = self._keyring.tenant(tenant)
        found = []
        with _errors("listed"), suppress(FileNotFoundError), self._tenant_folder(key.tag) as folder:
            for file in _names(folder):
                with suppress(SessionError, OSError):
                    found.append(unpack_head(self._read(folder, file), key, file).name)
        return sorted(found)

    def forget(self, tenant: str) -> int:
        """Remove all of the tenant's sessions, before its key is destroyed; returns how many.

        See also delete_tenant.
        """
        return self.delete_tenant(self._keyring.tenant(tenant).tag) if tenant in self._keyring.tenants() else 0

    def delete_tenant(self, tag: bytes) -> int:
        """The same by the tenant's tag, after its key is destroyed: no write with that key
        follows.
        """
        with _errors("removed"), suppress(FileNotFoundError), self._locked(make=False) as root:
            with _opened_folder(tag.hex(), root) as folder:
                files = _names(folder)
                for file in files:
                    os.unlink(file, dir_fd=folder)
            os.rmdir(tag.hex(), dir_fd=root)
            return len(files)
        return 0

    def _revision(self, folder: int, key: TenantKey, file: str) -> str:
        try:
            return unpack_head(self._read(folder, file), key, file).revision
        except FileNotFoundError:
            return ""

    def _read(self, folder: int, file: str) -> bytes:
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | _SAFELY, dir_fd=folder), "rb") as opened:
            status = os.fstat(opened.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_SESSION_BYTES:
                raise damaged()
            return opened.read(MOST_SESSION_BYTES)

    def _check_room(self, root: int, new_bytes: int) -> None:
        """Raise SessionError if the new file does not fit.

        The file that is replaced still counts: the limit holds at every moment.
        """
        with suppress(FileNotFoundError):
            os.unlink(TEMPORARY, dir_fd=root)
        needed = -(-new_bytes // FILE_SYSTEM_BLOCK_BYTES) * FILE_SYSTEM_BLOCK_BYTES + NEW_ENTRIES_BYTES
        if (taken := _taken_bytes(root)) + needed > self.limit_bytes:
            raise SessionError(
                f"there is no room for this session: it needs {format_size(needed)}, and all sessions together take "
                f"{format_size(taken)} of at most {format_size(self.limit_bytes)}. Remove some, or give the store more "
                f"room (sessions get 1/{SESSION_SHARE} of --disk-size, at most {format_size(MOST_SESSION_BYTES)})"
            )

    @contextmanager
    def _tenant_folder(self, tag: bytes) -> Iterator[int]:
        with (
            _opened_folder(self.store) as store,
            _opened_folder(FOLDER, store) as root,
            _opened_folder(tag.hex(), root) as folder,
        ):
            yield folder

    @contextmanager
    def _locked(self, *, make: bool = True) -> Iterator[int]:
        """The folder of all sessions, locked against changes by others."""
        if make:
            self.store.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _opened_folder(self.store) as store:
            with suppress(FileExistsError):
                if make:
                    os.mkdir(FOLDER, 0o700, dir_fd=store)
                    _sync_way_to(self.store)
            with _opened_folder(FOLDER, store) as root:
                _lock(root)
                yield root


@contextmanager
def _opened_folder(path: Path | str, within: int | None = None) -> Iterator[int]:
    """A handle of a folder. The store's own may be reached through links; nothing inside it."""
    follow = 0 if within is None else os.O_NOFOLLOW
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | follow, dir_fd=within)
    try:
        yield folder
    finally:
        os.close(folder)


def _sync_way_to(store: Path) -> None:
    """Sync the folders above the first session: they may be new, and must survive a power loss,
    too.
    """
    for folder in (store, *store.absolute().parents):
        with suppress(PermissionError), _opened_folder(folder) as opened:
            os.fsync(opened)


def _lock(folder: int) -> None:
    """Lock it against all others until it is closed."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            return fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.005)


@contextmanager
def _errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        links = " (links are not followed)" if e.errno in {errno.ELOOP, errno.ENOTDIR} else ""
        raise SessionError(f"this session cannot be {what}: {e.strerror}{links}") from e


def _write(root: int, content: bytes) -> None:
    """The temporary file, whole and on the disk."""
    with os.fdopen(
        os.open(TEMPORARY, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFELY, 0o600, dir_fd=root), "wb"
    ) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _names(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def _taken_bytes(folder: int) -> int:
    """Disk space of a folder with all its content, in bytes."""
    taken = os.fstat(folder).st_blocks * 512
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                with _opened_folder(entry.name, folder) as inner:
                    taken += _taken_bytes(inner)
            else:
                taken += entry.stat(follow_symlinks=False).st_blocks * 512
    return taken
