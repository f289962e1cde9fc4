"""How much memory there is, and human-readable sizes."""

import os
import re
from pathlib import Path

from kvire.core.errors import ConfigError

UNITS = {
    "": 1,
    "b": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def parse_size(text: str | int, name: str = "size") -> int:
    """Bytes of "2GiB", "500 MB", "1.5g" or a plain number; KiB, MiB, GiB are powers of 1024.

    name: the option, for the message of ConfigError.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text <= 0:
            raise ConfigError(f"{name} must be a positive size, got {text}")
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", str(text).lower())
    if match is None or match[2] not in UNITS:
        raise ConfigError(f"{name} is no size: {text!r}; write it as 2GiB, 500MB or a number of bytes")
    size = int(float(match[1]) * UNITS[match[2]])
    if size <= 0:
        raise ConfigError(f"{name} must be a positive size, got {text!r}")
    return size


def format_size(size_bytes: float) -> str:
    """3 significant digits with a binary unit: 1.41 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" or abs(size_bytes) >= 999.5 else f"{size_bytes:.3g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.3g} TiB"


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still take: free memory, or a cgroup's limit (v1, v2) if
    lower.
    """
    free = _meminfo_available(proc)
    limits = [limit for limit in (_cgroup2_free(proc, cgroup), _cgroup1_free(cgroup)) if limit is not None]
    return max(0, min([free, *limits]))


def _meminfo_available(proc: Path) -> int:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return _sysconf_available()
    fields = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    kib = fields.get("MemAvailable") or fields.get("MemFree")
    return int(kib[0]) * 1024 if kib else _sysconf_available()


def _sysconf_available() -> int:
    """Without /proc: half of physical memory, since the free part is not known."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _cgroup2_free(proc: Path, cgroup: Path) -> int | None:
    """The tightest limit between this process's cgroup and the root."""
    try:
        own = next(x[3:] for x in (proc / "self/cgroup").read_text().splitlines() if x.startswith("0::"))
    except (OSError, StopIteration):
        own = "/"
    here, free = cgroup / own.lstrip("/"), None
    while True:
        found = _limit_minus_usage(here, "memory.max", "memory.current", "inactive_file")
        if found is not None:
            free = found if free is None else min(free, found)
        if here == cgroup or cgroup not in here.parents:
            return free
        here = here.parent


def _cgroup1_free(cgroup: Path) -> int | None:
    return _limit_minus_usage(
        cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    )


def _limit_minus_usage(folder: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    try:
        text = (folder / limit).read_text().strip()
        if text == "max":
            return None
        used = int((folder / usage).read_text())
    except (OSError, ValueError):
        return None
    return int(text) - used + _stat_value(folder / "memory.stat", reclaimable)


def _stat_value(path: Path, name: str) -> int:
    """Page cache that the kernel would drop counts as free; it is inside the cgroup's usage."""
    try:
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0
