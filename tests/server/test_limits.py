"""Bounds on what a client may send, and how slowly."""

import asyncio
import contextlib
import http.client
import json
import resource
import socket
import threading
import time
import tracemalloc

import pytest
from harness.waiting import AT_ONCE_S, PATIENCE_S, until
from server.serving import running, tiny_engine

from kvire.core.errors import QueueFullError
from kvire.server.errors import ApiError
from kvire.server.limits import MAX_JSON_CONTAINERS, MAX_JSON_DEPTH, TokeniserThreads, json_depth, parse_json

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def impatient():
    """Its clock is put forward; what it allows takes much longer than a test does."""
    options = {"header_timeout_s": 1000, "body_timeout_s": 1000, "keep_alive_s": 10_000}
    with running(tiny_engine(), max_connections=30, **options) as served:
        yield served


def skip(served, seconds: float) -> None:
    """Put the clock forward; the server has done then what was due."""
    served.loop.skip(seconds)
    assert served.request("GET", "/health").status == 200


def read_to_end(connection: socket.socket) -> bytes:
    data = b""
    try:
        while chunk := connection.recv(65536):
            data += chunk
    except ConnectionResetError:
        pass
    return data


def chunks(total: int):
    """A body without Content-Length."""
    for _ in range(total // MIB):
        yield b" " * MIB


def test_a_body_over_8_mib_is_413_declared_or_not(shared):
    for body in (b" " * (8 * MIB + 1), chunks(10 * MIB)):
        answer = shared.post("/v1/completions", body)
        assert answer.status == 413 and answer.error["code"] == "body_too_large"


def test_a_body_just_below_8_mib_is_read(shared):
    padding = b'{"prompt": "x", "max_tokens": 1, "user": "' + b"u" * (8 * MIB - 60) + b'"}'
    assert shared.post("/v1/completions", padding).status == 200


def test_a_lying_length_is_refused_before_anything_arrives(shared):
    with shared.connect() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n")
        assert b"413" in connection.recv(4096).split(b"\r\n")[0]


def test_a_slow_body_is_408_and_a_slow_head_is_cut(impatient):
    with impatient.connect() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n")
        for received in range(1, 4):
            connection.sendall(b" ")
            until(lambda received=received: impatient.service.bodies._buffered_bytes == received)
            skip(impatient, 300)
        assert impatient.service.bodies._buffered_bytes == 3, "it has its time, from the first byte to the last"
        impatient.loop.skip(100)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == 408 and json.load(answer)["error"]["code"] == "timeout"
    for start in (b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: "):
        until(lambda: not impatient.protocols)
        with impatient.connect() as connection:
            connection.sendall(start)
            until(lambda: impatient.protocols)
            (protocol,) = impatient.protocols
            skip(impatient, 900)
            assert not protocol.transport.is_closing(), "it has its time"
            impatient.loop.skip(100)
            assert read_to_end(connection) == b""


def test_dribbling_after_an_answer_does_not_keep_the_connection(impatient):
    with impatient.connect() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 413")
        for seconds in (0, 300, 300, 300, 300):
            connection.sendall(b"x")
            skip(impatient, seconds)
        with pytest.raises(OSError, match=r"."):
            until(lambda: connection.sendall(b"x"))


def test_a_second_request_on_a_connection_has_its_own_time(impatient):
    with impatient.connect() as connection:
        for _ in range(3):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            data = b""
            while not data.endswith(b"}}"):
                data += connection.recv(4096)
            assert data.startswith(b"HTTP/1.1 200")
            impatient.loop.skip(800)


def test_idle_connections_are_bounded_and_do_not_block_others(impatient):
    until(lambda: not impatient.protocols)
    idle = [impatient.connect() for _ in range(29)]
    try:
        assert impatient.request("GET", "/health").status == 200
        until(lambda: len(impatient.protocols) == 29)
        with impatient.connect():
            until(lambda: len(impatient.protocols) == 30)
            with impatient.connect() as refused:
                assert read_to_end(refused) == b"", "one too many is closed at once"
        impatient.loop.skip(1000)
        assert all(read_to_end(connection) == b"" for connection in idle), "and idle ones are closed in time"
        assert impatient.request("GET", "/health").status == 200
    finally:
        for connection in idle:
            connection.close()


def test_500_half_open_requests_do_not_block_a_client(shared):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2048)), hard))  # both ends are in this process
    slow = [shared.connect() for _ in range(500)]
    try:
        for connection in slow:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        answer = shared.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
        assert answer.status == 200 and answer.seconds < AT_ONCE_S
    finally:
        for connection in slow:
            connection.close()


def test_huge_headers_are_refused(shared):
    with shared.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Big: " + b"x" * 100_000)
        assert not read_to_end(connection).startswith(b"HTTP/1.1 200")


def test_what_is_no_http_is_answered_in_json(shared):
    with shared.connect() as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00 not http\r\n\r\n")
        head, _, body = read_to_end(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and json.loads(body)["error"]["code"] == "invalid_http"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"{",
        b'{"a": }',
        b'{"a": 1} x',
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": "\xff"}',
        b'{"a": "\xed\xa0\x80"}',
        b'{"a": "\\ud800"}',
        b'{"a": "\\udfff\\ud800"}',
        b"\xef\xbb\xbf{}",
        '{"a": 1}'.encode("utf-16"),
        b'{"a": ' + b"[" * (MAX_JSON_DEPTH + 1) + b"]" * (MAX_JSON_DEPTH + 1) + b"}",
        b"[" * 1_000_000,
        b'{"a":' * 1_000_000,
        b'{"a": [' + b"[]," * (MAX_JSON_CONTAINERS + 1) + b"1]}",
        b'{"a": [' + b"1," * 1_000_001 + b"1]}",
        b'{"a": "' + b"\\" * 999_999,
        b'{"a": "' + b'\\"' * 500_000,
    ],
    ids=range(25),
)
def test_json_that_is_refused(body):
    started = time.monotonic()
    with pytest.raises(ApiError) as caught:
        parse_json(body)
    assert caught.value.status == 400 and caught.value.code == "invalid_json"
    assert time.monotonic() - started < AT_ONCE_S
    assert len(str(caught.value)) < 100, "the body is not repeated"


def test_json_that_is_taken():
    deep = b'{"a": ' + b"[" * (MAX_JSON_DEPTH - 1) + b"]" * (MAX_JSON_DEPTH - 1) + b"}"
    assert json_depth(parse_json(deep)) == MAX_JSON_DEPTH
    assert parse_json('{"a": "[[[{{{ \\" ] \\ud83d\\ude00 한"}'.encode()) == {"a": '[[[{{{ " ] 😀 한'}
    brackets = json.dumps({"a": "[{" * 300_000 + ",,," * 400_000}).encode()
    assert len(parse_json(brackets)["a"]) == 1_800_000, "what is inside a string does not count"
    ids = json.dumps({"prompt": list(range(200_000))}).encode()
    assert len(parse_json(ids)["prompt"]) == 200_000


def test_the_worst_bodies_take_bounded_memory():
    for unit in (b"[],", b"{},", b"1.5,", b'"ab",', b"123456,"):
        body = b'{"a": [' + unit * (8 * MIB // len(unit) - 4) + b"0]}"
        tracemalloc.start()
        with contextlib.suppress(ApiError):
            parse_json(body)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 100 * MIB, (unit, peak)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 129),
        ("n", 0),
        ("stop", ["x"] * 17),
        ("stop", "x" * 257),
        ("stop", ""),
        ("stop", [""]),
        ("stop", [1]),
        ("stop", 5),
        ("stop_token_ids", list(range(1025))),
        ("stop_token_ids", ["a"]),
        ("logit_bias", {str(i): 1 for i in range(1025)}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1": "x"}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", [1]),
        ("top_logprobs", 21),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("presence_penalty", 1e9),
        ("frequency_penalty", []),
        ("seed", 2**64),
        ("seed", "1"),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2**40),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("stream", "yes"),
        ("stream", 1),
        ("model", 3),
        ("logprobs", 1),
        ("messages", []),
        ("messages", {}),
        ("messages", "hi"),
        ("messages", [{"role": "user", "content": "x"}] * 4097),
        ("messages", [{"role": "robot", "content": "x"}]),
        ("messages", [{"content": "x"}]),
        ("messages", [{"role": "user", "content": {"text": "x"}}]),
        ("messages", [7]),
    ],
    ids=lambda x: x if isinstance(x, str) and len(x) < 30 else "",
)
def test_fields_out_of_bounds_are_named(shared, field, value):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "logprobs": True}
    answer = shared.post("/v1/chat/completions", body | {field: value})
    assert answer.status == 400
    assert (answer.error["param"] or "").split("[")[0].split(".")[0] == field
    assert answer.seconds < AT_ONCE_S


def test_a_token_outside_the_vocabulary_is_refused(shared):
    answer = shared.post("/v1/completions", {"prompt": "x", "logit_bias": {"100000": 5}})
    assert answer.status == 400 and "logit_bias" in answer.error["message"]


def test_a_text_that_cannot_fit_is_not_even_tokenised(shared, monkeypatch):
    monkeypatch.setattr(shared.engine, "tokenizer", None)  # touching it would fail
    long = "x" * (2048 * 32 + 1)
    parts = [{"type": "text", "text": long}]
    for path, body in (
        ("/v1/completions", {"prompt": long}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]}),
    ):
        answer = shared.post(path, body)
        assert answer.status == 400 and answer.error["code"] == "context_length_exceeded"


def test_bodies_in_the_air_are_bounded_together(shared, monkeypatch):
    monkeypatch.setattr("kvire.server.limits.MAX_BUFFERED_BYTES", MIB)
    small = {"prompt": "x", "max_tokens": 1}
    with shared.connect() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000000\r\n\r\n")
        connection.sendall(b" " * (MIB - 100))
        until(lambda: shared.service.bodies._buffered_bytes == MIB - 100)
        answer = shared.post("/v1/completions", small | {"user": "u" * 1000})
        assert answer.status == 503 and answer.error["code"] == "overloaded" and answer.headers["retry-after"]
        connection.sendall(b" " * 1000)
        assert connection.recv(4096).startswith(b"HTTP/1.1 503"), "the big one is over the bound too, now"
        assert shared.post("/v1/completions", small).status == 200, "and has given its room back"


def test_calls_that_wait_for_a_thread_are_bounded():
    async def crowd() -> list[object]:
        workers, hang = TokeniserThreads(threads=1, max_waiting=2), threading.Event()
        calls = [asyncio.ensure_future(workers.run(hang.wait, PATIENCE_S)) for _ in range(5)]
        await asyncio.wait(calls[3:])
        calls[1].cancel()
        hang.set()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert await workers.run(len, "abc") == 3, "room again"
        workers.close()
        return results

    results = asyncio.run(crowd())
    assert [type(result) for result in results] == [bool, asyncio.CancelledError, bool, QueueFullError, QueueFullError]
