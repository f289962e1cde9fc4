"""HTTP connections: uvicorn's, with bounds and JSON errors.

Bounded are their number and how slowly a client may send heads and read answers.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvire.server.errors import ApiError
from kvire.server.json_text import json_text

MAX_HEADER_BYTES = 32 * 1024
# The least that a client must read of an answer in send_timeout_s, unless less is left: 4 KiB/s
# at the default.
MIN_TAKEN_BYTES = 256 * 1024


class BoundedProtocol(H11Protocol):
    """Closes slow connections.

    They are those without a complete request head within header_timeout_s, and those that read
    nearly nothing of their answer in send_timeout_s: between requests and when closing, too.
    """

    header_timeout_s = 10.0
    send_timeout_s = 60.0
    max_connections = 1000

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse connections beyond the limit, and begin to wait for a request."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.abort()
            return
        # pause_writing then comes for any unsent byte; by default a connection with less than 64
        # KiB of them would stay for ever when it is closed, since closing waits until all is sent.
        transport.set_write_buffer_limits(high=0)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._stop_waiting()
        self._stop_watching()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client has not taken everything yet; from now on it must keep reading."""
        super().pause_writing()
        self._watch_sending()

    def resume_writing(self) -> None:
        """Everything is sent."""
        self._stop_watching()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Any byte outside a request belongs to the next head, whose time then runs."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._deadline is None and not self.transport.is_closing():
            self._wait_for_head()

    def send_400_response(self, msg: str) -> None:
        """In the shape of every other error."""
        body = json_text(ApiError(400, msg, code="invalid_http").as_dict()).encode("ascii")
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        headers.append((b"content-length", str(len(body)).encode("ascii")))
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _wait_for_head(self) -> None:
        self._deadline = self.loop.call_later(self.header_timeout_s, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _watch_sending(self) -> None:
        self._stop_watching()
        unsent_bytes = self.transport.get_write_buffer_size()
        self._sending = self.loop.call_later(self.send_timeout_s, self._check_sending, unsent_bytes)

    def _check_sending(self, unsent_before_bytes: int) -> None:
        if unsent_before_bytes - self.transport.get_write_buffer_size() < MIN_TAKEN_BYTES:
            self.transport.abort()
        else:
            self._watch_sending()

    def _stop_watching(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None


def bounded_protocol(header_timeout_s: float, send_timeout_s: float, max_connections: int) -> type[BoundedProtocol]:
    """The protocol with these bounds; uvicorn makes the instances."""
    bounds = {
        "header_timeout_s": header_timeout_s,
        "send_timeout_s": send_timeout_s,
        "max_connections": max_connections,
    }
    return type("BoundedProtocol", (BoundedProtocol,), bounds)
