"""One connection to a Redis or Valkey server: connect, log in, send, and read replies in time.

Written for a server that may be slow, dying or lying: every byte of connecting, handshake and reply
counts against the one deadline, a length is checked before anything is allocated, and large values
go from the socket straight into the caller's buffers. After any error in here the connection must
be closed: its next bytes are not known.
"""

import select
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvire.core.errors import FrameDamaged, TierUnavailable
from kvire.store.remote.backend import Value
from kvire.store.remote.deadline import Deadline
from kvire.store.remote.redis_address import Address
from kvire.store.tier import Buffer

RedisRequest: TypeAlias = tuple[bytes | Buffer, ...]  # sent one after the other
SMALL_READ_BYTES = 64  # enough for the line before a value; the first bytes of the value in it are copied once more
MAX_LINE_BYTES = 4096
MAX_SMALL_VALUE_BYTES = 64 << 10
MAX_ITEMS = 100_000


@dataclass(frozen=True, slots=True)
class ReplyError:
    """An error reply of the server; the connection stays usable.

    code: its first word.
    """

    text: str

    @property
    def code(self) -> str:
        """Such as WRONGTYPE or MOVED."""
        return self.text.partition(" ")[0]


RedisReply: TypeAlias = "int | str | bytes | ReplyError | list[RedisReply] | None"


@dataclass(frozen=True, slots=True)
class Login:
    """Credentials and options for a usable connection. The repr reveals no secret.

    tls: None for plain TCP.
    """

    username: str | None = None
    password: str | None = None
    db: int = 0
    tls: ssl.SSLContext | None = None

    def __repr__(self) -> str:
        return f"Login(db={self.db}, tls={self.tls is not None})"


def command(*parts: bytes | str | int) -> bytes:
    """One command in the server's format."""
    encoded = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    return b"*%d\r\n%b" % (len(encoded), b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in encoded))


def command_with_value(
    head: Sequence[bytes | str], value: Value, tail: Sequence[bytes | str | int] = ()
) -> RedisRequest:
    """One command with a large part that is sent without a copy."""
    before = command(*head).partition(b"\r\n")[2]
    after = command(*tail).partition(b"\r\n")[2]
    length = sum(len(part) for part in value)
    return b"*%d\r\n%b$%d\r\n" % (len(head) + 1 + len(tail), before, length), *value, b"\r\n" + after


class Wire:
    """A connection that is logged in. One thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._small = bytearray(MAX_LINE_BYTES)
        self._view = memoryview(self._small)
        self._incoming = select.poll()
        self._incoming.register(sock, select.POLLIN)
        self._start = self._end = 0  # of the received and unused bytes in _small

    @classmethod
    def connect(cls, address: Address, login: Login, deadline: Deadline) -> "Wire":
        """Connect and log in. Raises TierUnavailable."""
        try:
            sock = address.connect(deadline)
        except OSError as error:
            raise TierUnavailable(f"no connection to {address}: {error}") from error
        try:
            if login.tls is not None:
                sock.settimeout(deadline.left_s())  # for the handshake as a whole
                sock = login.tls.wrap_socket(sock, server_hostname=address.host)
            wire = cls(sock)
            wire._log_in(login, deadline)
        except OSError as error:
            sock.close()
            raise TierUnavailable(f"no connection to {address}: {error}") from error
        except BaseException:
            sock.close()
            raise
        return wire

    def is_idle(self) -> bool:
        """Whether nothing arrived unasked: neither bytes nor the end of the connection."""
        if self._start < self._end:
            return False
        return not self._incoming.poll(0)

    def close(self) -> None:
        """Idempotent."""
        self._sock.close()

    def send(self, parts: RedisRequest, deadline: Deadline) -> None:
        """Send everything. Raises TierUnavailable."""
        try:
            for part in parts:
                self._sock.settimeout(deadline.left_s())  # for the part as a whole
                self._sock.sendall(part)
        except OSError as error:
            raise _broken(error, deadline) from error

    def read_reply(self, deadline: Deadline, depth: int = 0) -> RedisReply:
        """Read any reply but a large value.

        Raises TierUnavailable, also for a malformed reply.
        """
        line = self._read_line(deadline)
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest.decode("utf-8", "replace")
        if kind == b"-":
            return ReplyError(rest.decode("utf-8", "replace"))
        if kind == b":":
            return _number(rest)
        if kind == b"$":
            length = _number(rest)
            if length == -1:
                return None
            if not 0 <= length <= MAX_SMALL_VALUE_BYTES:
                raise _no_redis(line)
            value = bytearray(length)
            self._read_value([memoryview(value)], length, deadline)
            return bytes(value)
        if kind == b"*":
            count = _number(rest)
            if not -1 <= count <= MAX_ITEMS or depth > 3:
                raise _no_redis(line)
            return None if count == -1 else [self.read_reply(deadline, depth + 1) for _ in range(count)]
        raise _no_redis(line)

    def read_value(self, buffers: Sequence[Buffer], deadline: Deadline) -> int | ReplyError | None:
        """Fill `buffers` in order with a value; returns its length, None without one, or an error
        reply.

        Raises FrameDamaged("length") before it reads a value that is longer than the buffers, or
        TierUnavailable.
        """
        line = self._read_line(deadline)
        if line.startswith(b"-"):
            return ReplyError(line[1:].decode("utf-8", "replace"))
        if not line.startswith(b"$"):
            raise _no_redis(line)
        length = _number(line[1:])
        if length == -1:
            return None
        if length < 0:
            raise _no_redis(line)
        if length > sum(len(buffer) for buffer in buffers):
            raise FrameDamaged("length")
        self._read_value(buffers, length, deadline)
        return length

    def _log_in(self, login: Login, deadline: Deadline) -> None:
        # reads that are not uses must not look like uses; older servers do not know that command
        requests = [command("CLIENT", "NO-TOUCH", "ON")]
        if login.db:
            requests.insert(0, command("SELECT", login.db))
        if login.password is not None:
            names = [login.username] if login.username else []
            requests.insert(0, command("AUTH", *names, login.password))
        self.send((b"".join(requests),), deadline)
        replies = [self.read_reply(deadline) for _ in requests]
        for reply in replies[:-1]:
            if isinstance(reply, ReplyError):
                raise TierUnavailable(f"the server refuses the login: {reply.text}")

    def _read_line(self, deadline: Deadline) -> bytes:
        while (at := self._small.find(b"\r\n", self._start, self._end)) < 0:
            if self._end - self._start > MAX_LINE_BYTES - SMALL_READ_BYTES:
                raise _no_redis(self._small[self._start : self._end])
            self._fill(deadline)
        line = bytes(self._small[self._start : at])
        self._start = at + 2
        return line

    def _read_value(self, buffers: Sequence[Buffer], length: int, deadline: Deadline) -> None:
        for buffer in buffers:
            part = buffer[:length]
            length -= len(part)
            taken = min(len(part), self._end - self._start)
            part[:taken] = self._small[self._start : self._start + taken]
            self._start += taken
            while taken < len(part):
                taken += self._receive(part[taken:], deadline)
        while self._end - self._start < 2:
            self._fill(deadline)
        if self._small[self._start : self._start + 2] != b"\r\n":
            raise _no_redis(self._small[self._start : self._end])
        self._start += 2

    def _fill(self, deadline: Deadline) -> None:
        """Receive a few more bytes after the present ones."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start:
            left = self._small[self._start : self._end]
            self._view[: len(left)] = left
            self._start, self._end = 0, len(left)
        self._end += self._receive(self._view[self._end : self._end + SMALL_READ_BYTES], deadline)

    def _receive(self, into: Buffer, deadline: Deadline) -> int:
        try:
            self._sock.settimeout(deadline.left_s())
            count = self._sock.recv_into(into)
        except OSError as error:
            raise _broken(error, deadline) from error
        if not count:
            raise TierUnavailable("the server closed the connection")
        return count


def _number(digits: bytes) -> int:
    # int() alone would take signs, spaces and underscores, and thousands of digits
    if not digits.lstrip(b"-").isdigit() or len(digits) > 20:
        raise _no_redis(digits)
    try:
        return int(digits)
    except ValueError:
        raise _no_redis(digits) from None


def _broken(error: OSError, deadline: Deadline) -> TierUnavailable:
    if isinstance(error, TimeoutError):
        return TierUnavailable(f"no answer within {deadline.timeout_s:g} s")
    return TierUnavailable(f"the connection broke: {error}")


def _no_redis(received: bytes | bytearray) -> TierUnavailable:
    return TierUnavailable(f"this is no answer of a Redis server: {bytes(received[:40])!r}")
