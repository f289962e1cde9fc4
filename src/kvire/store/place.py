"""Default folder of a store, and default size of a new one. An existing store keeps its limit."""

import os
import shutil
from pathlib import Path

from kvire.core.cache_folder import cache_folder

# Default share of the free disk space, the bytes of the store already there included.
DISK_SHARE = 0.1
DISK_BYTES = 20 * 10**9
LEAST_DISK_BYTES = 64 << 20
MOST_SESSION_BYTES = 64 << 20
SESSION_SHARE = 16  # sessions get 1 / SESSION_SHARE of a store folder's limit
NETWORK_KINDS = frozenset((
    "9p", "afs", "beegfs", "ceph", "cifs", "fuse.glusterfs", "fuse.sshfs", "gpfs", "lustre", "nfs", "nfs4", "smb3",
    "virtiofs",
))  # fmt: skip


def default_store() -> Path:
    """$KVIRE_STORE, else a folder in the cache folder."""
    return Path(os.environ.get("KVIRE_STORE") or cache_folder() / "store").expanduser()


def network_file_system(path: Path, mounts: str | None = None) -> str | None:
    """The type of a folder's file system if other machines may see it (nfs, virtiofs, ...).

    mounts: text of /proc/self/mountinfo; read if None.

    None for a local file system, and if the type is not known.
    """
    try:
        device = path.stat().st_dev
        text = Path("/proc/self/mountinfo").read_text() if mounts is None else mounts
    except OSError:
        return None
    for line in text.splitlines():
        mount, _, source = line.partition(" - ")
        fields, kind = mount.split(), source.partition(" ")[0]
        if len(fields) > 2 and fields[2] == f"{os.major(device)}:{os.minor(device)}" and kind in NETWORK_KINDS:
            return kind
    return None


def default_disk_bytes(path: Path) -> int:
    """Default size of a new store, leaving most of the disk free.

    At most DISK_BYTES, and a tenth of the bytes that are free or the store's already.
    """
    here = next((parent for parent in (path, *path.absolute().parents) if parent.is_dir()), Path("/"))
    own = sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file()) if path.is_dir() else 0
    return max(LEAST_DISK_BYTES, min(DISK_BYTES, int(DISK_SHARE * (shutil.disk_usage(here).free + own))))


def session_bytes(disk_bytes: int) -> int:
    """Share of a folder's `disk_bytes` for sessions (kvire.sessions); the rest is for blocks."""
    return min(MOST_SESSION_BYTES, disk_bytes // SESSION_SHARE)


def block_bytes(disk_bytes: int) -> int:
    """Share of a folder's `disk_bytes` for blocks."""
    return disk_bytes - session_bytes(disk_bytes)


def session_bytes_beside(blocks_bytes: int) -> int:
    """Size limit of sessions in a folder with that limit for blocks."""
    return min(MOST_SESSION_BYTES, blocks_bytes // (SESSION_SHARE - 1))
