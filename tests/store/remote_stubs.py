"""Servers that do what no server should: they answer late, in drops, wrongly, or with lengths that are lies.

And counting what is left afterwards.
"""

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

from harness import waiting

RESET = "reset"  # instead of bytes: end the connection with RST
Answer = bytes | float | str  # what to send, how many seconds to wait, or RESET


class Stub:
    """A TCP server for as long as it is entered. It gives each request that `read_request` finds to `answer`, and does
    what that says; `answer` can be replaced at any time. requests: how many came.
    """

    def __init__(
        self, read_request: Callable[[socket.socket], list[bytes]], answer: Callable[[list[bytes]], Iterator[Answer]]
    ) -> None:
        self._read_request = read_request
        self.answer = answer
        self.requests = 0
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._peers: list[socket.socket] = []

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for sock in (self._listener, *self._peers):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(5)

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                peer, _ = self._listener.accept()
                self._peers.append(peer)
                self._start(self._serve, peer)

    def _serve(self, peer: socket.socket) -> None:
        with suppress(OSError, EOFError), peer:
            while True:
                request = self._read_request(peer)
                self.requests += 1
                for piece in self.answer(request):
                    if piece == RESET:
                        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        return
                    if isinstance(piece, float):
                        if self._stopping.wait(piece):
                            return
                    else:
                        assert isinstance(piece, bytes)
                        peer.sendall(piece)


def redis_request(peer: socket.socket) -> list[bytes]:
    """The words of one command."""
    count = int(_line(peer)[1:])
    return [_exactly(peer, int(_line(peer)[1:]) + 2)[:-2] for _ in range(count)]


def http_request(peer: socket.socket) -> list[bytes]:
    """Method, path and body of one request."""
    method, path, _ = _line(peer).split(b" ", 2)
    length = 0
    while header := _line(peer):
        name, _, value = header.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    return [method, path, _exactly(peer, length)]


def in_drops(data: bytes, every_s: float = 1.0) -> Iterator[Answer]:
    """A byte, a pause, a byte, ..."""
    for byte in data:
        yield bytes([byte])
        yield every_s


def cut_off(data: bytes, share: float) -> Iterator[Answer]:
    """The first part of it, and a reset."""
    yield data[: int(len(data) * share)]
    yield 0.02  # let it arrive: a reset overtakes what is on its way
    yield RESET


def redis_value(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


def http_reply(body: bytes, *, length: int | None = None, status: bytes = b"200 OK") -> bytes:
    """What an S3 server says to a GET. length: what it claims."""
    length = len(body) if length is None else length
    head = b'HTTP/1.1 %b\r\nContent-Length: %d\r\nLast-Modified: Sun, 29 Nov 2026 10:00:00 GMT\r\nETag: "x"\r\n\r\n'
    return head % (status, length) + body


def sockets() -> int:
    count = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one that lists
            count += str(descriptor.readlink()).startswith("socket:")
    return count


def settled(count: Callable[[], int], most: int) -> bool:
    """Whether the count is back where it was (or below: an earlier test may have left something) soon."""
    end = time.monotonic() + waiting.PATIENCE_S
    while count() > most:
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def _line(peer: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\r\n"):
        line += _exactly(peer, 1)
    return line[:-2]


def _exactly(peer: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (more := peer.recv(count - len(data))):
            raise EOFError
        data += more
    return data
