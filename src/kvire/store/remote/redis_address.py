"""Address of a server, and connecting to it before a deadline."""

import contextlib
import socket
import threading
from typing import TypeAlias

from kvire.core.errors import TierUnavailable
from kvire.store.remote.deadline import Deadline

_SocketAddress: TypeAlias = tuple[str | int, ...] | tuple[int, bytes]  # as socket.getaddrinfo gives it


class Address:
    """Host and port, or the path of a Unix socket (port 0), and its last resolution."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._known: list[tuple[socket.AddressFamily, _SocketAddress]] = []
        self._resolving: threading.Thread | None = None
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" if self.port else self.host

    def connect(self, deadline: Deadline) -> socket.socket:
        """A connected socket. Raises OSError or TierUnavailable."""
        if not self.port:
            return _connected(socket.AF_UNIX, self.host, deadline.left_s())
        resolved = self._resolve(deadline)
        for place, (family, address) in enumerate(resolved):
            try:  # an address that does not answer leaves time for the others
                return _connected(family, address, deadline.left_s() / (len(resolved) - place))
            except OSError:
                if place == len(resolved) - 1:
                    raise
        raise TierUnavailable(f"the name {self.host} cannot be resolved")

    def _resolve(self, deadline: Deadline) -> list[tuple[socket.AddressFamily, _SocketAddress]]:
        """Addresses of the name.

        The system's resolver has no timeout, so a thread asks it; the old addresses serve
        meanwhile. There is one such thread at most, and it ends when the resolver gives up.
        """
        with self._lock:
            if self._resolving is None or not self._resolving.is_alive():
                self._resolving = threading.Thread(target=self._ask, name=f"resolve {self.host}", daemon=True)
                self._resolving.start()
            resolving = self._resolving
        resolving.join(deadline.left_s() / 2)
        return self._known

    def _ask(self) -> None:
        with contextlib.suppress(OSError):
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
            self._known = [(family, address) for family, _, _, _, address in found]


def _connected(family: socket.AddressFamily, address: _SocketAddress | str, timeout_s: float) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(address)
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        sock.close()
        raise
    return sock
