"""Authentication: by API key, or without keys for this machine only."""

import hmac
import ipaddress
from collections.abc import Iterable
from hashlib import sha256
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from kvire.server.errors import ApiError

TENANT = "kvire.tenant"  # in a request's scope: the owner of the KV that it may reuse
OPEN_PATHS = frozenset({"/health"})  # for load balancers and supervisors, which hold no keys


class ApiKeys:
    """The accepted keys.

    Only digests are kept and compared, in constant time, every one of them.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode("utf-8")) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def tenant(self, authorization: bytes) -> str | None:
        """The tenant of an Authorization header's value `Bearer <one of the keys>`, or None.

        Every key is a tenant of its own, by a name that does not reveal the key.
        """
        scheme, _, given = authorization.partition(b" ")
        digest = _digest(given.strip())
        known = [hmac.compare_digest(digest, key) for key in self._digests]
        return f"key-{digest.hex()[:24]}" if scheme.lower() == b"bearer" and any(known) else None


class Doorkeeper:
    """Refuses callers without access before anything of the request is read.

    With keys, every path but /health asks for one (/metrics too: it shows the load of others).
    Without keys the server listens on loopback only; then a web page in this machine's browser must
    not reach it either, so that Host and Origin have to name this machine (DNS rebinding,
    cross-site requests).
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self.app = app
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the app answer, or refuse."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            headers = dict(scope["headers"])
            refusal = self._refusal(headers)
            if refusal is not None:
                await refusal.response()(scope, receive, send)
                return
            if self.keys:
                scope[TENANT] = self.keys.tenant(headers[b"authorization"])
        await self.app(scope, receive, send)

    def _refusal(self, headers: dict[bytes, bytes]) -> ApiError | None:
        if self.keys:
            given = headers.get(b"authorization")
            return None if given is not None and self.keys.tenant(given) else _bad_key(missing=given is None)
        if is_local_name(_host_name(headers.get(b"host", b""))) and _is_local_origin(headers.get(b"origin")):
            return None
        message = (
            "without an API key this server answers this machine only, and the request's Host or Origin names "
            "another; start the server with an API key (KVIRE_API_KEY) to answer others"
        )
        return ApiError(403, message, code="foreign_host")


def is_local_name(name: str) -> bool:
    """Whether a host name or address means this machine, without asking anyone."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _bad_key(*, missing: bool) -> ApiError:
    needed = "an API key is needed: send the header `Authorization: Bearer <key>`"
    message = needed if missing else "this API key is not valid"
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()


def _host_name(host: bytes) -> str:
    """The name in a Host header: without port and brackets, lower case; if missing,
    this machine's.
    """
    return _name_of("//" + host.decode("latin-1")) if host else "localhost"


def _is_local_origin(origin: bytes | None) -> bool:
    return origin is None or is_local_name(_name_of(origin.decode("latin-1")))


def _name_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
