"""Bounds on a client's input, checked before any work is done on it."""

import asyncio
import json
import math
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, ParamSpec, TypeVar

from starlette.requests import Request

from kvire.core.errors import QueueFullError
from kvire.server.errors import ApiError, ClientGoneError

P = ParamSpec("P")
T = TypeVar("T")


class TokeniserThreads:
    """A few threads, and a bounded number of calls that wait for one."""

    def __init__(self, threads: int, max_waiting: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="kvire-tokenise")
        self._max_calls = threads + max_waiting
        self._calls = 0

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The call's result. Raises QueueFullError. Cancelled while it waits, it never starts."""
        if self._calls >= self._max_calls:
            raise QueueFullError("too many requests are being read already; try again in a moment")
        self._calls += 1
        try:
            return await asyncio.wrap_future(self._executor.submit(call, *args, **kwargs))
        finally:
            self._calls -= 1

    def close(self) -> None:
        """Drop waiting calls; do not wait for running ones."""
        self._executor.shutdown(wait=False, cancel_futures=True)


R = TypeVar("R")

MIB = 1024 * 1024
MAX_BUFFERED_BYTES = 256 * MIB  # of all request bodies together
READ_IN_PLACE_BYTES = 16 * 1024  # reading the worst body of this size takes a few milliseconds
MAX_JSON_DEPTH = 64
MAX_JSON_CONTAINERS = 100_000  # an empty list takes 2 bytes of text and 56 of memory
MAX_JSON_VALUES = 1_000_000
MAX_JSON_QUOTES = 1_000_000  # two a string

# Possessive, so that it runs in linear time and without a stack; always matches from a quote on.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_SURROGATE = re.compile(r"\\u[dD][89abAB]|\\u[dD][c-fC-F]")


class BodyReader:
    """Reads request bodies.

    max_body_bytes: of one body.
    timeout_s: from its first byte to its last.
    """

    def __init__(self, max_body_bytes: int, timeout_s: float, workers: TokeniserThreads) -> None:
        self.max_body_bytes = max_body_bytes
        self.timeout_s = timeout_s
        self._workers = workers
        self._buffered_bytes = 0

    async def read(self, request: Request, checked: Callable[[dict[str, Any]], R]) -> R:
        """The body, a JSON object, as `checked` returns it; large ones are read off the event loop.

        Raises ApiError: 400, 408 too slow, 413 too large, 503 no room, and the errors of `checked`.
        """
        declared = request.headers.get("content-length", "0")
        if not declared.isdecimal() or int(declared) > self.max_body_bytes:
            raise self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._receive(request, body)
            if len(body) <= READ_IN_PLACE_BYTES:
                return checked(parse_json(bytes(body)))
            return await self._workers.run(lambda: checked(parse_json(bytes(body))))
        except TimeoutError as error:
            raise ApiError(408, f"the body did not arrive within {self.timeout_s:g} s", code="timeout") from error
        finally:
            self._buffered_bytes -= len(body)

    async def _receive(self, request: Request, body: bytearray) -> None:
        more = True
        while more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            chunk = message.get("body", b"")
            if len(body) + len(chunk) > self.max_body_bytes:
                raise self._too_large()
            if self._buffered_bytes + len(chunk) > MAX_BUFFERED_BYTES:
                raise _overloaded()
            body += chunk
            self._buffered_bytes += len(chunk)
            more = message.get("more_body", False)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self.max_body_bytes} bytes", code="body_too_large")


def parse_json(body: bytes) -> dict[str, Any]:
    """A JSON object, bounded in depth and size; no NaN, no infinity, valid Unicode.

    Raises ApiError 400.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad_json("is not UTF-8") from error
    check_structure([body])
    try:
        value = json.loads(text, parse_constant=_not_a_number, parse_float=_finite)
        if _SURROGATE.search(text):  # half a character: no tokenizer takes it
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise _bad_json("holds half a surrogate pair") from error
    except RecursionError as error:
        raise _bad_json("is nested too deeply") from error
    except ValueError as error:
        raise _bad_json("is not valid JSON") from error
    if not isinstance(value, dict):
        raise _bad_json("must be a JSON object")
    return value


def json_depth(value: Any) -> int:
    """Levels of lists and objects in a parsed value."""
    depth, level = 0, [value]
    while level := [v for v in level if isinstance(v, (list, dict))]:
        depth += 1
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v)]
    return depth


def check_structure(texts: Iterable[bytes]) -> None:
    """Check the number and depth of containers before parsing.

    Read off the bytes of all texts together, with strings cut out and brackets left.

    Raises ApiError 400.
    """
    quotes = containers = values = 0
    for text in texts:
        quotes += text.count(b'"')
        if quotes > MAX_JSON_QUOTES:
            raise _bad_json("holds too many values")
        bare = _STRING.sub(b"", text)
        brackets = bare.translate(None, _NOT_BRACKETS)
        containers += brackets.count(b"[") + brackets.count(b"{")
        values += bare.count(b",")
        if containers > MAX_JSON_CONTAINERS or values > MAX_JSON_VALUES:
            raise _bad_json("holds too many values")
        _check_depth(brackets)


def _check_depth(brackets: bytes) -> None:
    depth = 0
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_JSON_DEPTH:
            raise _bad_json(f"is nested deeper than {MAX_JSON_DEPTH} levels")


def _not_a_number(name: str) -> NoReturn:
    raise ValueError(name)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _overloaded() -> ApiError:
    message = "too much is being sent at the moment; try again shortly"
    return ApiError(503, message, kind="server_error", code="overloaded", headers={"Retry-After": "1"})


def _bad_json(why: str) -> ApiError:
    return ApiError(400, f"the body {why}", code="invalid_json")
