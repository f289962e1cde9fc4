"""redis://[user:password@]host[:port][/db], or a cluster by one or more of its nodes:
redis+cluster://host:port,host:port.
"""

import ssl
from collections.abc import Mapping
from urllib.parse import SplitResult, unquote, urlsplit

from kvire.core.errors import ConfigError
from kvire.store.remote.backend import Backend
from kvire.store.remote.redis import RedisBackend
from kvire.store.remote.redis_address import Address
from kvire.store.remote.redis_nodes import Nodes
from kvire.store.remote.redis_wire import Login

REDIS_PORT = 6379
REDIS_OPTIONS = ("db", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs")


class Redis:
    """One Redis or Valkey server, or a cluster; with TLS by rediss://, a Unix socket by
    unix:///path?db=0.
    """

    schemes = ("redis", "rediss", "redis+cluster", "rediss+cluster", "unix")
    example = "redis://host:6379"
    bytes_per_s = 2e9  # docs/adr/0014-remote-tiers.md, with the server on the same machine

    def make(self, url: SplitResult, name: str, options: Mapping[str, str]) -> Backend:
        """Connects at the first request."""
        return RedisBackend(_nodes(url, name, options))


SCHEME = Redis()


def _nodes(url: SplitResult, name: str, options: Mapping[str, str]) -> Nodes:
    if unknown := sorted(set(options) - set(REDIS_OPTIONS)):
        raise ConfigError(f"{name}: unknown option {', '.join(unknown)}; the options are {', '.join(REDIS_OPTIONS)}")
    cluster = url.scheme.endswith("+cluster")
    user, _, hosts = url.netloc.rpartition("@")
    username, _, password = user.partition(":")
    is_unix = url.scheme == "unix"
    db = options.get("db", "" if is_unix else url.path.strip("/")) or "0"
    if not db.isdecimal() or (cluster and db != "0"):
        raise ConfigError(f"{name}: the database is a number from 0, and always 0 in a cluster; got {db!r}")
    login = Login(
        username=unquote(username) or None,
        password=unquote(password) or None,
        db=int(db),
        tls=_tls(name, options) if url.scheme.startswith("rediss") else None,
    )
    if is_unix:
        return Nodes([Address(unquote(url.path), 0)], login, cluster=False)
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
