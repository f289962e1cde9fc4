"""S31: a client that leaves takes its blocks with it, within a second, wherever its request was."""

import json
import socket
import time
from urllib.parse import urlsplit

import pytest
from server.serving import ScriptedModel, running, tiny_engine

BODY = {"prompt": "p" * 40, "max_tokens": 1500, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def slow():
    model = ScriptedModel()
    model.say("z" * 3000)
    model.delay_s = 0.003
    with running(tiny_engine(model=model, max_num_seqs=16)) as served:
        yield served, model


def send(served, body: dict, path: str = "/v1/completions") -> socket.socket:
    address = urlsplit(served.url)
    connection = socket.create_connection((address.hostname, address.port), timeout=10)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    connection.sendall(head + data)
    return connection


def nothing_runs_on(served, model) -> None:
    steps = model.steps
    time.sleep(0.1)
    assert model.steps == steps, "no token is computed after that"
    served.engine.pool.check()


def until(condition, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_closed_while_waiting_for_the_whole_answer(slow, path):
    served, model = slow
    body = (
        BODY
        if path == "/v1/completions"
        else {
            **{name: value for name, value in BODY.items() if name != "prompt"},
            "messages": [{"role": "user", "content": "x"}],
        }
    )
    connections = [send(served, body, path) for _ in range(20)]
    time.sleep(0.3)
    assert len(served.engine.scheduler.running) == 16
    for connection in connections:
        connection.close()
    served.wait_until_idle(1.0)
    nothing_runs_on(served, model)


def test_closed_after_the_third_chunk_of_a_stream(slow):
    served, model = slow
    connections = [send(served, BODY | {"stream": True}) for _ in range(16)]
    for connection in connections:
        data = b""
        while data.count(b"data: ") < 3:
            data += connection.recv(65536)
    assert served.client.in_flight == 16
    for connection in connections:
        connection.close()
    served.wait_until_idle(1.0)
    nothing_runs_on(served, model)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_closed_while_queued(slow, stream):
    served, model = slow
    running_ones = [send(served, BODY) for _ in range(16)]
    until(lambda: len(served.engine.scheduler.running) == 16)
    queued = [send(served, BODY | {"stream": stream}) for _ in range(25)]
    until(lambda: len(served.engine.scheduler.waiting) == 25)
    for connection in queued:
        connection.close()
    until(lambda: not served.engine.scheduler.waiting, 1.0)
    assert len(served.engine.scheduler.running) == 16, "the others are not disturbed"
    for connection in running_ones:
        connection.close()
    served.wait_until_idle(1.0)
    nothing_runs_on(served, model)


def test_closed_with_many_samples_and_many_prompts(slow):
    served, model = slow
    connections = [
        send(served, BODY | {"n": 20}),
        send(served, BODY | {"prompt": ["a" * 20] * 10, "n": 2, "stream": True}),
    ]
    time.sleep(0.3)
    for connection in connections:
        connection.close()
    served.wait_until_idle(1.0)
    nothing_runs_on(served, model)


def test_reset_and_half_closed_connections_count_as_gone(slow):
    served, model = slow
    reset, half = send(served, BODY), send(served, BODY | {"stream": True})
    until(lambda: len(served.engine.scheduler.running) == 2)
    reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    reset.close()
    half.shutdown(socket.SHUT_RDWR)
    served.wait_until_idle(1.0)
    nothing_runs_on(served, model)
    half.close()


def test_gone_before_the_body_is_complete(slow):
    served, _ = slow
    address = urlsplit(served.url)
    connection = socket.create_connection((address.hostname, address.port))
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
    time.sleep(0.05)
    connection.close()
    until(lambda: b'route="/v1/completions",status="499"' in served.request("GET", "/metrics").data)
    assert served.client.in_flight == 0
