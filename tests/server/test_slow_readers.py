"""Clients that take their answers slowly or not at all: none keeps a connection, a request or its blocks for ever."""

import contextlib
import json
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from harness.broken_builds import Cases, Claim, Mutant, each_broken_build, each_claim, must_notice
from harness.waiting import PATIENCE_S, until
from server.serving import Served, running, slow_model, tiny_engine

from kvire.server.protocol import MIN_TAKEN_BYTES, BoundedProtocol

KEY = "k" * 20
SEND_TIMEOUT_S, KEEP_ALIVE_S = 1000, 300
# Control characters are six bytes of JSON each: 1.5 MB, more than the kernel takes for somebody who does not read.
BIG_ANSWER = {"prompt": "\x01" * 2000, "n": 128, "echo": True, "max_tokens": 1}
STREAM = {"prompt": "p" * 40, "max_tokens": 1500, "stream": True, "ignore_eos": True}
ASYNCIO_FULL_BYTES = 64 * 1024  # by default, a connection with less to send does not count as paused


@contextlib.contextmanager
def with_one_place(**options) -> Iterator[Served]:
    """Room for one connection beside the test's own question; its clock is put forward."""
    limits = {"send_timeout_s": SEND_TIMEOUT_S, "keep_alive_s": KEEP_ALIVE_S, "header_timeout_s": 100_000}
    with running(tiny_engine(), max_connections=2, send_buffer_bytes=4096, **limits, **options) as served:
        yield served


def asking(served: Served, body: dict, key: str | None = None) -> socket.socket:
    """A connection with one question, which nobody reads the answer of."""
    data = json.dumps(body).encode()
    access = f"Authorization: Bearer {key}\r\n" if key else ""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{access}Content-Length: {len(data)}\r\n\r\n"
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(PATIENCE_S)
    address = urlsplit(served.url)
    connection.connect((address.hostname, address.port))
    connection.sendall(head.encode() + data)
    return connection


def unsent(served: Served) -> BoundedProtocol | None:
    """The connection that has an answer to send and cannot."""
    return next((each for each in list(served.protocols) if each.flow.write_paused), None)


def stuck(served: Served) -> BoundedProtocol:
    """The same, once there is one."""
    until(lambda: unsent(served) is not None)
    protocol = unsent(served)
    assert protocol is not None
    return protocol


def passes(served: Served, seconds: float) -> None:
    """Put the clock forward; the server has done then what was due."""
    served.loop.skip(seconds)
    assert served.request("GET", "/health").status == 200


def assert_cut(served: Served, protocol: BoundedProtocol) -> None:
    """In time; the kernel may still have taken something when it seemed full, and the time then runs from there."""
    until(lambda: served.loop.skip(SEND_TIMEOUT_S) or protocol not in served.protocols)


def pipelined_questions_are_cut() -> None:
    """Without a key: many small answers in one connection."""
    with with_one_place(api_keys=(KEY,)) as served, served.connect() as connection:
        ask = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 400
        connection.settimeout(0.2)
        with contextlib.suppress(TimeoutError):  # the server reads no further, since its answers stay unread
            while unsent(served) is None:
                connection.sendall(ask)
        protocol = stuck(served)
        passes(served, SEND_TIMEOUT_S / 2)
        assert protocol in served.protocols, "it has its time"
        assert_cut(served, protocol)


def one_big_answer_is_cut() -> None:
    """With a key: one question is enough. Keep-alive ends before, and closing waits for what is unsent."""
    with with_one_place(api_keys=(KEY,)) as served, asking(served, BIG_ANSWER, KEY):
        protocol = stuck(served)
        until(lambda: protocol.cycle.response_complete)
        passes(served, KEEP_ALIVE_S)
        assert protocol.transport.is_closing() and protocol in served.protocols
        assert_cut(served, protocol)


def small_rests_are_cut_too() -> None:
    """Less than what asyncio calls a full buffer, of a connection that is closing."""
    with with_one_place() as served, asking(served, BIG_ANSWER | {"n": 4}):
        until(lambda: served.protocols)
        (protocol,) = served.protocols
        until(lambda: 0 < protocol.transport.get_write_buffer_size() < ASYNCIO_FULL_BYTES)
        passes(served, KEEP_ALIVE_S)
        assert_cut(served, protocol)


def who_goes_on_reading_gets_everything() -> None:
    """However often the time has passed meanwhile, also after the end of keep-alive."""
    with with_one_place() as served, asking(served, BIG_ANSWER) as connection:
        protocol, data = stuck(served), b""
        while unsent(served) is not None:
            left = protocol.transport.get_write_buffer_size()
            while left - protocol.transport.get_write_buffer_size() < min(MIN_TAKEN_BYTES, left):
                data += connection.recv(65536)
            passes(served, SEND_TIMEOUT_S)
        while chunk := connection.recv(65536):
            data += chunk
        head, _, body = data.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert f"content-length: {len(body)}".encode() in head, "nothing is missing"


def an_unread_stream_gives_its_blocks_back() -> None:
    """Long before the request's own time is over."""
    model = slow_model()
    model.delay_s = 0.0
    model.say("\x01" * 3000)
    with running(tiny_engine(model=model), send_timeout_s=SEND_TIMEOUT_S, send_buffer_bytes=4096) as served:
        connections = [asking(served, STREAM) for _ in range(4)]
        until(lambda: sum(each.flow.write_paused for each in list(served.protocols)) == len(connections))
        until(lambda: served.loop.skip(SEND_TIMEOUT_S) or not served.protocols)
        for connection in connections:
            connection.close()
        served.wait_until_idle()


def progress_is_not_asked_for(patch: pytest.MonkeyPatch) -> None:
    """Somebody who takes nothing may wait for ever."""
    patch.setattr(BoundedProtocol, "_check_sending", lambda self, _: self._watch_sending())


def progress_does_not_count(patch: pytest.MonkeyPatch) -> None:
    """The whole answer must be taken in one period."""
    patch.setattr(BoundedProtocol, "_check_sending", lambda self, _: self.transport.abort())


def small_rests_are_not_watched(patch: pytest.MonkeyPatch) -> None:
    """asyncio's own bounds: nobody hears of less than 64 KiB that cannot be sent."""
    made = BoundedProtocol.connection_made

    def broken(self, transport):
        made(self, transport)
        transport.set_write_buffer_limits()

    patch.setattr(BoundedProtocol, "connection_made", broken)


CASES: Cases = [
    (pipelined_questions_are_cut, [progress_is_not_asked_for]),
    (one_big_answer_is_cut, [progress_is_not_asked_for]),
    (small_rests_are_cut_too, [small_rests_are_not_watched]),
    (who_goes_on_reading_gets_everything, [progress_does_not_count]),
    (an_unread_stream_gives_its_blocks_back, []),
]


@each_claim(CASES)
def test_a_slow_reader(claim: Claim) -> None:
    claim()


@each_broken_build(CASES)
def test_notices_a_broken_build(claim: Claim, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    must_notice(claim, mutant, monkeypatch)
