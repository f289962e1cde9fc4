"""From a command's store options to a StoreConfig, with a folder and sizes that fit the disk."""

from typing import Any

from kvire.core.config import StoreConfig
from kvire.core.errors import ConfigError
from kvire.core.memory import format_size, parse_size
from kvire.store.place import DISK_BYTES, default_store

SMALLEST_DISK_BYTES = 5 << 20  # with its part for sessions, the least for a disk tier
DAYS_OF_WEAR = 10  # times DISK_BYTES that a folder may be written in a day


def store_config(given: dict[str, Any], engine: dict[str, Any], *, default: bool) -> StoreConfig | None:
    """The store asked for; None for none.

    default: use the cache folder if no store is given.

    Raises ConfigError where options contradict each other.
    """
    asked = [name for name in ("store", "disk_size", "ram", "remote") if given[name]]
    reuses = engine["prefix_cache"] and engine["kv_cache"] == "paged"
    if given["no_store"]:
        if asked:
            raise ConfigError(f"--no-store and {_flag(asked[0])} contradict each other; leave out one of them")
        return None
    if asked and not reuses:
        raise ConfigError(
            f"{_flag(asked[0])} needs the prefix cache: leave out --no-prefix-cache, and --kv-cache other than paged"
        )
    if given["store_ttl"] is not None and not given["store_ttl"] > 0:
        raise ConfigError(f"--store-ttl is a number of seconds above 0, got {given['store_ttl']:g}")
    if not reuses or (not asked and not default):
        needless = next((name for name in ("store_ttl", "key_file") if given[name] is not None), None)
        if needless is not None:
            raise ConfigError(f"{_flag(needless)} says how a store works, and there is none here: add --store DIR")
        return None
    if given["disk_size"] and parse_size(given["disk_size"], "--disk-size") < SMALLEST_DISK_BYTES:
        raise ConfigError(f"--disk-size must be at least {format_size(SMALLEST_DISK_BYTES)}, got {given['disk_size']}")
    path = given["store"]
    if path is None and (default or given["disk_size"]) and not (given["ram"] or given["remote"]):
        path = default_store()
    return StoreConfig(
        path=path,
        disk_bytes=parse_size(given["disk_size"], "--disk-size") if given["disk_size"] else None,
        ram_bytes=parse_size(given["ram"], "--ram") if given["ram"] else 0,
        remote=tuple(given["remote"] or ()),
        encrypt=given["encrypt"],
        key_file=given["key_file"],
        ttl_s=given["store_ttl"],
        writes_per_day_bytes=DAYS_OF_WEAR * DISK_BYTES if path else None,
        required=bool(asked),
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
