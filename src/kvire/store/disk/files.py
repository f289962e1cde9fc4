"""Every system call of the disk tier and every statement of its index, in one object without logic.

Tests replace it: to make any one call fail, to die before it, or to lose unsynced bytes. Nothing
here follows a symbolic link, and files made here are readable by their owner only.
"""

import errno
import fcntl
import os
import sqlite3
import stat
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

FILE_MODE, FOLDER_MODE = 0o600, 0o700
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FLOCK = struct.Struct("@hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid
_SAFELY = os.O_NOFOLLOW | os.O_CLOEXEC
MOST_VALUE_BYTES = 1 << 20  # of a row of the index; a longer value means damage, and is not read
_THROWN_AWAY = memoryview(bytearray(1 << 20))  # where bytes go that are only wanted in the kernel's memory


Description = tuple[tuple[str, None, None, None, None, None, None], ...]  # a statement's columns; their names are first
Answer = tuple[Description | None, list[tuple[Any, ...]]]  # of a statement: None if it gives no rows; and its rows


class Files:
    """System calls by name.

    Offsets and lengths in bytes; everything raises OSError, statements sqlite3.Error.
    """

    def make_folder(self, path: Path) -> None:
        """Make the folder and its parents, if they are missing."""
        path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)

    def open_folder(self, path: Path) -> int:
        """A handle of the folder: paths opened relative to it stay inside, even if the folder
        moves.
        """
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self, fd: int) -> None:
        """Close a file or folder."""
        os.close(fd)

    def names(self, folder: int) -> list[str]:
        """Names of the folder's entries."""
        return os.listdir(folder)

    def identity(self, path: Path) -> tuple[int, int]:
        """Device and inode: another file at the same path has others."""
        status = os.stat(path, follow_symlinks=False)  # noqa: PTH116 - every call of the tier asks; this is faster
        return status.st_dev, status.st_ino

    def is_regular(self, folder: int, name: str) -> bool | None:
        """Whether the name is a plain file; None if there is no such name."""
        try:
            return stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
        except FileNotFoundError:
            return None

    def mode(self, fd: int) -> int:
        """Permission bits of an open file or folder."""
        return stat.S_IMODE(os.fstat(fd).st_mode)

    def length(self, fd: int) -> int:
        """Length of an open file."""
        return os.fstat(fd).st_size

    def size(self, path: Path) -> int:
        """Bytes that the file takes on the disk, or will once they are written; 0 if it is
        missing.
        """
        try:
            status = path.lstat()
        except FileNotFoundError:
            return 0
        return max(status.st_size, status.st_blocks * 512)

    def beginning(self, path: Path, length: int) -> bytes:
        """The file's first bytes."""
        with path.open("rb") as file:
            return file.read(length)

    def open(self, folder: int, name: str) -> int:
        """Open a file for reading and writing; a link is no file: FileNotFoundError."""
        try:
            return os.open(name, os.O_RDWR | _SAFELY, dir_fd=folder)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise FileNotFoundError(errno.ENOENT, f"{name} is a symbolic link") from error
            raise

    def create(self, folder: int, name: str) -> int:
        """Make a new file; FileExistsError if the name exists, even as a dangling link."""
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFELY, FILE_MODE, dir_fd=folder)

    def allocate(self, fd: int, length: int) -> None:
        """Reserve the space now, so that a full disk shows here and not in the middle of a
        write.
        """
        os.posix_fallocate(fd, 0, length)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill the buffers in order; fewer bytes than they hold only at the end of the file."""
        return os.preadv(fd, buffers, offset)

    def write(self, fd: int, frame: memoryview, offset: int) -> None:
        """Write all of it."""
        done = 0
        while done < len(frame):
            done += os.pwrite(fd, frame[done:], offset + done)

    def sync(self, fd: int) -> None:
        """Return when the file's bytes are on the disk."""
        os.fdatasync(fd)

    def empty(self, fd: int) -> None:
        """Free the space of a file about to be removed, though others may hold it open."""
        os.ftruncate(fd, 0)

    def unlink(self, folder: int, name: str) -> None:
        """Remove a name; no error if it is missing."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)

    def is_cached(self, fd: int, offset: int) -> bool:
        """Whether the kernel has this byte in memory; False if that is not known."""
        try:
            return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
        except (OSError, AttributeError):
            return False

    def read_ahead(self, fd: int, offset: int, length: int) -> None:
        """Bring this range into the page cache.

        By reading it: the kernel splits a mere request into small ones.
        """
        for start in range(offset, offset + length, len(_THROWN_AWAY)):
            os.preadv(fd, [_THROWN_AWAY[: offset + length - start]], start)

    def lock(self, fd: int, byte: int) -> bool:
        """Lock one byte of a file for this open file; False if another holds it.

        The lock ends with the process or the fd.
        """
        return self._lock(fd, byte, fcntl.F_OFD_SETLK, fcntl.F_WRLCK)

    def unlock(self, fd: int, byte: int) -> None:
        """Release a locked byte."""
        self._lock(fd, byte, fcntl.F_OFD_SETLK, fcntl.F_UNLCK)

    def connect(self, path: Path, timeout_s: float) -> sqlite3.Connection:
        """A connection to the index, any thread's, in autocommit mode; the file has to exist."""
        uri = f"{path.absolute().as_uri()}?mode=rw"
        connection = sqlite3.connect(uri, uri=True, timeout=timeout_s, isolation_level=None, check_same_thread=False)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_VALUE_BYTES)
        return connection

    def execute(self, connection: sqlite3.Connection, sql: str, values: Sequence[Any] = ()) -> Answer:
        """One statement: its columns, and all its rows."""
        cursor = connection.execute(sql, values)
        return cursor.description, cursor.fetchall()

    def execute_many(self, connection: sqlite3.Connection, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        """One statement for many rows."""
        connection.executemany(sql, rows)

    @staticmethod
    def _lock(fd: int, byte: int, command: int, kind: int) -> bool:
        try:
            fcntl.fcntl(fd, command, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True
