"""The user's cache folder, and atomic creation of files in it."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """KVIRE_CACHE_DIR, else XDG_CACHE_HOME/kvire, else ~/.cache/kvire. It need not exist yet."""
    if own := os.environ.get("KVIRE_CACHE_DIR"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "kvire"
    return Path.home() / ".cache" / "kvire"


def models_folder() -> Path:
    """Folder of converted models, one subfolder each."""
    return cache_folder() / "models"


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as JSON, atomically: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump(value, out, indent=1, sort_keys=True)
            out.flush()
            os.fsync(out.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def sync_tree(folder: Path) -> None:
    """Push every file of `folder`, and the folders themselves, to the disk."""
    for path in sorted(folder.rglob("*")):
        _sync(path)
    _sync(folder)


def sync_folder(folder: Path) -> None:
    """Push the names in `folder` to the disk: after a rename, so that it survives a power cut."""
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
