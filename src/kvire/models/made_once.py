"""A folder of the cache that is made once, however many ask.

    models/<name>-<digest>/     complete: it was renamed into place in one step
    models/.partial-<same>/     being written; left behind only by a process that was killed
    models/.lock-<same>         held (flock) by the writer; the kernel frees it when it dies

Two processes at once: one writes, the other waits for the lock and finds the result. A partial
folder whose lock is free is garbage, and the next writer removes it.
"""

import fcntl
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from kvire.core.cache_folder import sync_folder, sync_tree
from kvire.core.errors import ConfigError
from kvire.core.memory import format_size
from kvire.models.progress import Progress

SPARE_BYTES = 64 << 20  # tokenizer, config and overhead of the file system


def make_once(target: Path, fill: Callable[[Path], None], progress: Progress) -> Path:
    """`target`, complete; `fill` writes a new one into the folder that it is given.

    Raises what `fill` raises, and ConfigError if the cache folder cannot be written.
    """
    if target.is_dir():
        return target
    try:
        return _made(target, fill, progress)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"converting {target.name} into {target.parent} failed: {error}. If that folder cannot be written or is "
            "full, set KVIRE_CACHE_DIR to another."
        ) from error


def remove_copy(folder: Path) -> None:
    """Remove a complete folder: out of the way first, so that nobody opens half of it."""
    aside = folder.with_name(f".partial-removed-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    shutil.rmtree(aside)


def need_room(folder: Path, size_bytes: int) -> None:
    """Raise ConfigError if the disk of `folder` has less room than this."""
    free = shutil.disk_usage(folder).free
    if size_bytes + SPARE_BYTES > free:
        raise ConfigError(
            f"converting needs {format_size(size_bytes + SPARE_BYTES)} in {folder.parent}, and {format_size(free)} "
            "are free. Make room, or set KVIRE_CACHE_DIR to a folder on another disk."
        )


def _made(target: Path, fill: Callable[[Path], None], progress: Progress) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_rubbish(target.parent)
    with _only_writer(target, progress):
        if target.is_dir():  # someone else finished it while we waited
            return target
        partial = _partial(target)
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir()
            fill(partial)
            sync_tree(partial)
            partial.rename(target)
            sync_folder(target.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def _partial(target: Path) -> Path:
    return target.parent / f".partial-{target.name}"


def _lock_file(target: Path) -> Path:
    return target.parent / f".lock-{target.name}"


@contextmanager
def _only_writer(target: Path, progress: Progress) -> Iterator[None]:
    """Hold the target's lock.

    The file stays: removing it would let two processes hold two locks.
    """
    with _lock_file(target).open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"another process is converting {target.name}: waiting", 0, 1)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_rubbish(folder: Path) -> None:
    """Delete partial folders of ended writers."""
    for partial in folder.glob(".partial-*"):
        with (folder / f".lock-{partial.name.removeprefix('.partial-')}").open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue  # its writer lives
            shutil.rmtree(partial, ignore_errors=True)
