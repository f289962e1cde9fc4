"""Open stores of this process, shared by the connectors in it: vLLM makes one per side, often in one process."""

import threading
from dataclasses import replace

from kvire.core.config import StoreConfig
from kvire.core.errors import ConfigError
from kvire.store.open import open_store
from kvire.store.tiered import TieredStore

_lock = threading.Lock()
_open: dict[StoreConfig, tuple[TieredStore, int]] = {}  # by config without disk_bytes; with the number of users


class SharedStore:
    """A use of an open store; the last one to close it ends it.

    moves_kv: whether this side reads and writes blocks. If not, it takes the store of a side in the same process that
    does, or opens one without a memory tier: in another process there would be nothing in it. buffer_bytes: for
    blocks on their way into the tiers.
    """

    def __init__(self, config: StoreConfig, *, kv_dtype: str, buffer_bytes: int, moves_kv: bool) -> None:
        self._key = replace(config, disk_bytes=None)  # it is the folder's: the last one that gives it sets it for all
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
        """This use is over. Idempotent."""
        with _lock:
            if self._closed:
                return
            self._closed = True
            store, users = _open.pop(self._key)
            if users > 1:
                _open[self._key] = store, users - 1
                return
        store.close()
