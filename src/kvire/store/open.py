"""From a StoreConfig to an open TieredStore."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from urllib.parse import urlsplit

from kvire.codec.codec import codec_for
from kvire.codec.frame import Frames
from kvire.codec.seal import TenantKey
from kvire.core.config import StoreConfig
from kvire.core.memory import format_size
from kvire.store.disk.tier import DiskTier
from kvire.store.keyring import Keyring
from kvire.store.memory.tier import MemoryTier
from kvire.store.place import block_bytes, default_disk_bytes, network_file_system
from kvire.store.remote.open import open_remote
from kvire.store.remote.scheme import scheme_of
from kvire.store.tier import Tier
from kvire.store.tiered import TieredStore
from kvire.store.write_behind import DEFAULT_BUFFER_BYTES

log = logging.getLogger(__name__)


def open_store(
    config: StoreConfig, kv_dtype: str = "float32", *, buffer_bytes: int = DEFAULT_BUFFER_BYTES
) -> TieredStore:
    """Open every tier of `config`, fastest first.

    kv_dtype: of the blocks, for codecs that know about numbers.
    buffer_bytes: for blocks on their way into the tiers.

    Raises StoreError or ConfigError, and then leaves nothing open. A remote tier that does not
    answer now is no error: it is asked again later.
    """
    keyring = Keyring(config.key_file, encrypt=config.encrypt)
    sealed = Frames(keyring.lately)
    with ExitStack() as opened:
        tiers: list[tuple[Tier, Frames]] = []
        if config.ram_bytes:
            tiers.append((MemoryTier(config.ram_bytes), Frames(unsealed(keyring))))
        if config.path is not None:
            keyring.check_outside(config.path)
            disk = DiskTier(
                config.path,
                None if config.disk_bytes is None else block_bytes(config.disk_bytes),
                new_bytes=lambda path: block_bytes(default_disk_bytes(path)),
                writes_per_day_bytes=config.writes_per_day_bytes,
            )
            opened.callback(disk.close)
            disk.open()
            if (kind := network_file_system(config.path)) is not None:
                log.warning(
                    "the store in %s lies on %s: only one machine may use it. A local folder is faster, and --remote "
                    "is for sharing",
                    config.path,
                    kind,
                )
            tiers.append((disk, sealed))
        for url in config.remote:
            remote = open_remote(url, timeout_s=config.load_timeout_s, ttl_s=config.ttl_s)
            packed = codec_for(kv_dtype, scheme_of(urlsplit(url).scheme).bytes_per_s)
            tiers.append((remote, Frames(keyring.lately, packed)))
        for tier, _ in tiers:
            opened.callback(tier.close)
        store = TieredStore(tiers, keyring, config, buffer_bytes=buffer_bytes)
        store.open()
        opened.pop_all()
        return store


def described(config: StoreConfig, limit_bytes: int | None) -> str:
    """A line for people: where their KV is kept, how, and how to keep nothing.

    limit_bytes: of the disk tier.
    """
    places = [str(config.path)] if config.path is not None else []
    places += [
        urlsplit(url)._replace(netloc=urlsplit(url).netloc.rpartition("@")[2], query="").geturl()
        for url in config.remote
    ]
    places += ["memory"] if config.ram_bytes else []
    size = f", at most {format_size(limit_bytes)}" if limit_bytes else ""
    sealed = "sealed" if config.encrypt else "not sealed"
    return f"KV is kept in {' and '.join(places)}, {sealed}{size}; --no-store keeps nothing"


def unsealed(keyring: Keyring) -> Callable[[str], TenantKey]:
    """Keys for a tier inside this process.

    Blocks are separated by salt, and checked, but not sealed.
    """
    views: dict[str, tuple[TenantKey, TenantKey]] = {}

    def view(tenant: str) -> TenantKey:
        key = keyring.lately(tenant)
        known = views.get(tenant)
        if known is None or known[0] is not key:
            known = views[tenant] = (key, replace(key, secret=None))
        return known[1]

    return view
