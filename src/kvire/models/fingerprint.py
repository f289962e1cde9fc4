"""Digests of the inputs to KV besides tokens: the weight files and the config; and their namespace.

Hashing weights takes a second per half gigabyte, so digests of files are remembered in the cache
folder under (device, inode), and are valid only while size, mtime and ctime are unchanged. The
memory is a convenience: if it is damaged or cannot be written, files are simply hashed again.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from hashlib import sha256
from io import FileIO
from pathlib import Path
from typing import Any

from kvire.core.cache_folder import cache_folder, write_json
from kvire.core.keys import Namespace, field
from kvire.core.spec import KVGroup, group_text
from kvire.models.progress import Progress, silent

CHUNK_BYTES = 8 << 20

# A file written twice within one tick of the clock that stamps it keeps its stamps. Ticks are 1-10
# ms on local disks and up to a second elsewhere: a younger file is hashed, but not remembered.
SETTLED_NS = 1_000_000_000

# Fields that cannot change KV: origin and author of a config. Its dtype is the storage dtype of the
# weights, which their own digest covers; the dtype of computation is part of the numerics.
INERT_FIELDS = frozenset(
    {"_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "dtype", "torch_dtype"}
)


def weights_digest(files: Sequence[Path], progress: Progress = silent) -> str:
    """Hex SHA-256 over name, size and content of the weight files, in order of name."""
    total, done = sum(path.stat().st_size for path in files), 0
    digest = sha256(field("kvire", b"weights"))
    for path in sorted(files, key=lambda path: path.name):
        content = file_digest(path, _Within(progress, done, total))
        size = path.stat().st_size
        digest.update(field("name", path.name.encode()) + field("size", size.to_bytes(8, "little")))
        digest.update(field("content", bytes.fromhex(content)))
        done += size
    return digest.hexdigest()


def config_digest(config: Mapping[str, Any]) -> str:
    """Hex SHA-256 of a config's fields as canonical JSON, without INERT_FIELDS."""
    kept = {key: value for key, value in config.items() if key not in INERT_FIELDS}
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return sha256(field("kvire", b"config") + field("json", text.encode())).hexdigest()


def spec_text(groups: Sequence[KVGroup], layout: str = "tokens") -> str:
    """The shape of a block as text, the same in every process: part of the namespace.

    layout: of its numbers; the usual one is not named, so that keys of earlier versions hold.
    """
    order = "" if layout == "tokens" else f" layout={layout}"
    return ";".join(
        group_text(
            group.kind.value,
            ",".join(map(str, group.layers)),
            f"heads={group.kv_heads} k={group.key_width} v={group.value_width}{order}",
            group.window,
        )
        for group in groups
    )


def namespace(
    *,
    weights: str,
    config: str,
    groups: Sequence[KVGroup],
    numerics: str,
    kv_dtype: str,
    block_size: int,
    build: str,
    adapter: str = "",
    salt: str = "",
    shard: str = "",
    layout: str = "tokens",
) -> Namespace:
    """The namespace of a model's blocks.

    weights, config: digests from above;
    numerics, build: from the engine.
    """
    return Namespace(
        weights=weights,
        config=config,
        numerics=numerics,
        kv_dtype=kv_dtype,
        spec=spec_text(groups, layout),
        block_size=block_size,
        adapter=adapter,
        salt=salt,
        shard=shard,
        build=build,
    )


def file_digest(path: Path, progress: Progress = silent) -> str:
    """Hex SHA-256 of a file's content, remembered while the file is unchanged."""
    memory = cache_folder() / "digests.json"
    with path.open("rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        if (known := _remembered(_read_memory(memory), status)) is not None:
            return known
        hashed_at = time.time_ns()
        digest = _hash(file, status.st_size, progress)
        unchanged = _stamp(os.fstat(file.fileno())) == _stamp(status)
    if unchanged and hashed_at - max(status.st_mtime_ns, status.st_ctime_ns) > SETTLED_NS:
        _remember(memory, status, digest)
    return digest


class _Within:
    """Progress of one file as part of the progress of all."""

    def __init__(self, outer: Progress, start: int, total: int) -> None:
        self._outer, self._start, self._total = outer, start, total

    def __call__(self, stage: str, done: int, total: int) -> None:  # noqa: ARG002 - the protocol's signature
        self._outer(stage, self._start + done, self._total)


def _hash(file: FileIO, size: int, progress: Progress) -> str:
    digest, done = sha256(), 0
    buffer = bytearray(CHUNK_BYTES)
    view = memoryview(buffer)
    while count := file.readinto(buffer):
        digest.update(view[:count])
        done += count
        progress("reading the weights", done, max(size, done))
    return digest.hexdigest()


def _stamp(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _place(status: os.stat_result) -> str:
    return f"{status.st_dev}:{status.st_ino}"


def _remembered(memory: Mapping[str, Any], status: os.stat_result) -> str | None:
    """The remembered digest of this file; None: not known, or the file has changed."""
    match memory.get(_place(status)):
        case {"stamp": stamp, "sha256": str(digest)} if stamp == _stamp(status) and len(digest) == 64:
            return digest
    return None


def _remember(path: Path, status: os.stat_result, digest: str) -> None:
    memory = _read_memory(path)
    memory[_place(status)] = {"stamp": _stamp(status), "sha256": digest}
    try:
        write_json(path, memory)
    except OSError:  # a full or read-only cache folder costs a second at the next start, nothing else
        return


def _read_memory(path: Path) -> dict[str, Any]:
    try:
        memory = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return memory if isinstance(memory, dict) else {}
