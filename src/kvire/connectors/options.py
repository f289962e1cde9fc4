"""A store from an engine's configuration, with the option names of `kvire serve`.

It is opened once per process, also for several users.
"""

import threading
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvire.core.config import StoreConfig
from kvire.core.errors import ConfigError
from kvire.core.memory import parse_size
from kvire.store.open import open_store
from kvire.store.place import default_store
from kvire.store.tiered import TieredStore

STORE_OPTIONS: Mapping[str, tuple[type, ...]] = {
    "store": (str,),
    "disk_size": (str, int),
    "ram": (str, int),
    "remote": (str, list),
    "encrypt": (bool,),
    "key_file": (str,),
    "store_ttl": (int, float),
    "load_timeout": (int, float),
}
SECONDS = ("store_ttl", "load_timeout")


def store_config(
    given: Mapping[str, Any], where: str, *, also: Mapping[str, tuple[type, ...]] = MappingProxyType({})
) -> StoreConfig:
    """The store asked for; without `store`, `ram` and `remote` the folder that `kvire serve` uses.

    where: place of the options, for messages.
    also: other options allowed there, and their types.

    Raises ConfigError that names the unknown or wrong option.
    """
    kinds = {**STORE_OPTIONS, **also}
    for name, value in given.items():
        if name not in kinds:
            raise ConfigError(f"{where} has no option {name!r}; the options are {', '.join(kinds)}")
        if not isinstance(value, kinds[name]) or (isinstance(value, bool) and bool not in kinds[name]):
            wanted = " or ".join(kind.__name__ for kind in kinds[name])
            raise ConfigError(f"{name} in {where} is a {wanted}, got {value!r}")
        if name in SECONDS and isinstance(value, (int, float)) and not 0 < value < inf:
            raise ConfigError(f"{name} in {where} is a number of seconds above 0, got {value!r}")
    remote = given.get("remote", [])
    urls = [remote] if isinstance(remote, str) else remote
    if not all(isinstance(url, str) for url in urls):
        raise ConfigError(f"remote in {where} is a URL or a list of URLs, got {remote!r}")
    path = Path(given["store"]).expanduser() if "store" in given else None
    if path is None and not ("ram" in given or urls):
        path = default_store()
    if path is None and "disk_size" in given:
        raise ConfigError(f"disk_size in {where} limits a folder, and there is none: add store")
    return StoreConfig(
        path=path,
        disk_bytes=parse_size(given["disk_size"], "disk_size") if "disk_size" in given else None,
        ram_bytes=parse_size(given["ram"], "ram") if "ram" in given else 0,
        remote=tuple(urls),
        encrypt=given.get("encrypt", True),
        key_file=Path(given["key_file"]).expanduser() if "key_file" in given else None,
        ttl_s=given.get("store_ttl"),
        load_timeout_s=given.get("load_timeout", 0.5),
    )


_lock = threading.Lock()
_open: dict[StoreConfig, tuple[TieredStore, int]] = {}  # by config without disk_bytes; with the number of users


class SharedStore:
    """A use of an open store; the last one to close it ends it.

    moves_kv: whether this side reads and writes blocks.
    buffer_bytes: for blocks on their way into the tiers.

    A side that moves no KV takes the store of a side in the same process that does, or opens one
    without a memory tier, which would be empty in another process.
    """

    def __init__(self, config: StoreConfig, *, kv_dtype: str, buffer_bytes: int, moves_kv: bool) -> None:
        self._key = replace(config, disk_bytes=None)  # it is the folder's: the last user's value is set for all
        with _lock:
            if not moves_kv and self._key not in _open:
                config, self._key = replace(config, ram_bytes=0), replace(self._key, ram_bytes=0)
                if config.is_empty:
                    raise ConfigError(
                        "ram alone cannot be used here: vLLM's scheduler runs in another process and sees no memory "
                        "tier. Add store (a folder) to kv_connector_extra_config"
                    )
            known = _open.get(self._key)
            store = known[0] if known else open_store(config, kv_dtype, buffer_bytes=buffer_bytes)
            _open[self._key] = store, known[1] + 1 if known else 1
        self.store = store
        self._closed = False

    def close(self) -> None:
        """End this use. Idempotent."""
        with _lock:
            if self._closed:
                return
            self._closed = True
            store, users = _open.pop(self._key)
            if users > 1:
                _open[self._key] = store, users - 1
                return
        store.close()
