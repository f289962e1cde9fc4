"""Whether the blocks of a disk tier lie in the page cache, and out of it again.

Only segments count, which hold them; the index beside them is small, and mapped by whoever has it
open.
"""

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from kvire.store.disk.segments import SUFFIX


def drop(folder: Path) -> None:
    """Write the store's segments to their disk and ask the kernel to forget their pages.

    It may keep some.
    """
    for path in _files(folder):
        try:
            handle = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # a running server has removed it since
            continue
        try:
            os.fsync(handle)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def resident_bytes(folder: Path) -> int | None:
    """Bytes of the store's segments that lie in memory, by mincore(2); None where the system does
    not say.
    """
    try:
        return sum(_resident(path) for path in _files(folder))
    except (OSError, AttributeError):
        return None


def _resident(path: Path) -> int:
    """The kernel tells of pages only to who may write the file, which its owner may."""
    try:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
            return _resident_pages(view) * mmap.PAGESIZE
    except (FileNotFoundError, ValueError):  # a running server has removed it since; or it is empty
        return 0


def _resident_pages(view: mmap.mmap) -> int:
    vector = (ctypes.c_ubyte * -(-len(view) // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    byte = ctypes.c_char.from_buffer(view)
    failed = libc.mincore(ctypes.addressof(byte), len(view), vector)
    del byte  # so that the mapping can be closed
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(page & 1 for page in vector)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob(f"*{SUFFIX}")) if path.is_file())
