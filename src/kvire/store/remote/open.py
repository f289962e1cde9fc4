"""From the URL of `--remote` to a tier. Opens nothing: the first call does.

redis://[user:password@]host[:port][/db]     one Redis or Valkey server; rediss:// with TLS, unix:///path?db=0
redis+cluster://[user:password@]host[:port]  a cluster, by one or more of its nodes (host:port,host:port); rediss+cluster://
s3://bucket[/prefix]                         S3 or what speaks like it; gs:// and az:// as obstore takes them
file:///folder                               a folder that several machines share; memory:// for trials
"""

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from kvire.core.errors import ConfigError
from kvire.store.health import PROBE_AFTER_S
from kvire.store.remote.backend import Backend
from kvire.store.remote.redis import RedisBackend
from kvire.store.remote.redis_address import Address
from kvire.store.remote.redis_nodes import Nodes
from kvire.store.remote.redis_wire import Login
from kvire.store.remote.tier import DEFAULT_TIMEOUT_S, RemoteTier

REDIS_PORT = 6379
REDIS_SCHEMES = ("redis", "rediss", "redis+cluster", "rediss+cluster", "unix")
OBJECT_SCHEMES = ("s3", "gs", "az", "file", "memory")
REDIS_OPTIONS = ("db", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs")


def open_remote(
    url: str,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    ttl_s: float | None = None,
    probe_after_s: float = PROBE_AFTER_S,
) -> RemoteTier:
    """The tier of a URL; its name is the URL without user, password and options. Raises ConfigError.

    timeout_s: for each call that does not bring its own. ttl_s: how long a block lives on after a use; not in an object
    store, where it lives as long as it was written for. probe_after_s: how soon a failing tier is asked again.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigError("the URL of a remote tier cannot be read; it looks like redis://host:6379/0") from None
    name = shown(parts)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if parts.scheme in REDIS_SCHEMES:
        backend: Backend = RedisBackend(_redis(parts, name, options))
    elif parts.scheme in OBJECT_SCHEMES:
        backend = _objects(parts, name, options)
    else:
        known = ", ".join(f"{scheme}://" for scheme in (*REDIS_SCHEMES, *OBJECT_SCHEMES))
        raise ConfigError(f"the URL of a remote tier begins with one of {known}; this one with {parts.scheme!r}")
    return RemoteTier(name, backend, timeout_s=timeout_s, ttl_s=ttl_s, probe_after_s=probe_after_s)


def shown(parts: SplitResult) -> str:
    """The URL without what is secret in it: for names, messages and metrics."""
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _redis(parts: SplitResult, name: str, options: Mapping[str, str]) -> Nodes:
    if unknown := sorted(set(options) - set(REDIS_OPTIONS)):
        raise ConfigError(f"{name}: unknown option {', '.join(unknown)}; the options are {', '.join(REDIS_OPTIONS)}")
    cluster = parts.scheme.endswith("+cluster")
    user, _, hosts = parts.netloc.rpartition("@")
    username, _, password = user.partition(":")
    is_unix = parts.scheme == "unix"
    db = options.get("db", "" if is_unix else parts.path.strip("/")) or "0"
    if not db.isdecimal() or (cluster and db != "0"):
        raise ConfigError(f"{name}: the database is a number from 0, and always 0 in a cluster; got {db!r}")
    login = Login(
        username=unquote(username) or None,
        password=unquote(password) or None,
        db=int(db),
        tls=_tls(name, options) if parts.scheme.startswith("rediss") else None,
    )
    if is_unix:
        return Nodes([Address(unquote(parts.path), 0)], login, cluster=False)
    addresses = [_address(host, name) for host in hosts.split(",")]
    if len(addresses) > 1 and not cluster:
        raise ConfigError(f"{name}: several hosts are the nodes of a cluster; write redis+cluster://")
    return Nodes(addresses, login, cluster=cluster)


def _address(host: str, name: str) -> Address:
    try:
        parts = urlsplit(f"//{host}")
        port = REDIS_PORT if parts.port is None else parts.port
    except ValueError:
        port = 0
    if not port:
        raise ConfigError(f"{name}: the port is a number from 1 to 65535")
    return Address(parts.hostname or "localhost", port)


def _tls(name: str, options: Mapping[str, str]) -> ssl.SSLContext:
    needs = options.get("ssl_cert_reqs", "required")
    if needs not in {"required", "none"}:
        raise ConfigError(f"{name}: ssl_cert_reqs is required or none, got {needs!r}")
    try:
        context = ssl.create_default_context(cafile=options.get("ssl_ca_certs"))
        if "ssl_certfile" in options:
            context.load_cert_chain(options["ssl_certfile"], options.get("ssl_keyfile"))
    except OSError as error:
        raise ConfigError(f"{name}: a certificate cannot be read: {error}") from error
    if needs == "none":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _objects(parts: SplitResult, name: str, options: dict[str, str]) -> Backend:
    try:
        from obstore.store import MemoryStore, from_url  # noqa: PLC0415 - optional

        from kvire.store.remote.objects import FolderBackend, ObjectBackend  # noqa: PLC0415 - needs it
    except ImportError:
        raise ConfigError(f"{name} needs the package obstore: pip install 'kvire[s3]'") from None
    if parts.scheme in {"file", "memory"} and (options or parts.netloc):
        raise ConfigError(f"{name}: write file:///folder or memory://, without host and options")
    if parts.scheme == "memory":
        return ObjectBackend(MemoryStore())
    if parts.scheme == "file":
        try:
            return FolderBackend(Path(unquote(parts.path)))
        except OSError as error:
            raise ConfigError(f"{name}: this is no folder that can be used: {error}") from error
    open_store: Any = from_url  # its types have a form for each kind of store; which one this is only the URL says
    # every failure comes back at once: whether to try again is the circuit breaker's business
    client = {"connect_timeout": "10s", "timeout": "60s", "allow_http": options.get("endpoint", "").startswith("http:")}
    try:
        store = open_store(
            f"{parts.scheme}://{parts.netloc}{parts.path}",
            config=options,
            client_options=client,
            retry_config={"max_retries": 0},
        )
    except Exception as error:
        raise ConfigError(f"{name}: {str(error).partition(chr(10))[0]}") from error
    return ObjectBackend(store)
