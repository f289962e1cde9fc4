"""S31: a client that leaves takes its blocks with it, long before its request's own end, wherever that was."""

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.loads import PATIENT_S
from harness.stored import disk, say_what_prefill_costs, store_over
from harness.waiting import until
from server.serving import Served, running, slow_model, tiny_engine, words

from kvire.store.tiered import TieredStore

BODY = {"prompt": "p" * 40, "max_tokens": 1500, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def slow():
    model = slow_model()
    with running(tiny_engine(model=model, max_num_seqs=16)) as served:
        yield served, model


def send(served, body: dict, path: str = "/v1/completions") -> socket.socket:
    connection = served.connect()
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    connection.sendall(head + data)
    return connection


def queue_of(served) -> tuple[int, int]:
    """How many run, and how many wait."""
    return len(served.engine.scheduler.running), len(served.engine.scheduler.waiting)


def nothing_runs_on(served, model) -> None:
    """All of them have left."""
    served.wait_until_idle()
    steps = model.steps
    time.sleep(2 * model.delay_s)
    assert model.steps == steps, "no token is computed after that"
    served.engine.pool.check()


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
    until(lambda: queue_of(served) == (16, 4))
    for connection in connections:
        connection.close()
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
    nothing_runs_on(served, model)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_closed_while_queued(slow, stream):
    served, model = slow
    running_ones = [send(served, BODY) for _ in range(16)]
    until(lambda: queue_of(served) == (16, 0))
    queued = [send(served, BODY | {"stream": stream}) for _ in range(25)]
    until(lambda: queue_of(served) == (16, 25))
    for connection in queued:
        connection.close()
    until(lambda: queue_of(served)[1] == 0)
    assert queue_of(served) == (16, 0), "the others are not disturbed"
    for connection in running_ones:
        connection.close()
    nothing_runs_on(served, model)


def test_closed_with_many_samples_and_many_prompts(slow):
    served, model = slow
    connections = [
        send(served, BODY | {"n": 20}),
        send(served, BODY | {"prompt": ["a" * 20] * 10, "n": 2, "stream": True}),
    ]
    until(lambda: served.client.in_flight == 11 and queue_of(served)[0] == 16)
    for connection in connections:
        connection.close()
    nothing_runs_on(served, model)


def test_reset_and_half_closed_connections_count_as_gone(slow):
    served, model = slow
    reset, half = send(served, BODY), send(served, BODY | {"stream": True})
    until(lambda: queue_of(served) == (2, 0))
    reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    reset.close()
    half.shutdown(socket.SHUT_RDWR)
    nothing_runs_on(served, model)
    half.close()


def test_gone_before_the_body_is_complete(slow):
    served, _ = slow
    connection = served.connect()
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
    until(lambda: served.service.bodies._buffered_bytes == 1)
    connection.close()
    until(lambda: b'route="/v1/completions",status="499"' in served.request("GET", "/metrics").data)
    assert served.client.in_flight == 0


MOMENTS: dict[str, Callable[[Served, TieredStore], object]] = {
    "all have asked": lambda served, _: served.client.in_flight == 64,
    "some are seated": lambda served, _: queue_of(served)[0] == 4,
    "some lost their seat": lambda served, _: served.engine.scheduler.preemptions,
    "some are loaded": lambda _, store: store.stats().handles["disk"].counts.loaded_blocks,
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_n19_most_leave_before_they_had_a_seat(tmp_path: Path, moment: str):
    """64 prompts at once, of which the pool has room for four, over a store that has them: nothing stays of any."""
    prompts = [words(seed, 150) for seed in range(64)]
    with store_over(disk, tmp_path) as store, running(tiny_engine(store=store)) as served:
        answers = [served.direct(prompt, temperature=0, max_tokens=8, ignore_eos=True) for prompt in prompts]
    with store_over(disk, tmp_path) as store:
        engine = tiny_engine(blocks=44, max_num_seqs=4, store=store)
        say_what_prefill_costs(engine, PATIENT_S)
        with running(engine) as served:
            connections = [send(served, BODY | {"prompt": prompt, "max_tokens": 400}) for prompt in prompts]
            until(lambda: MOMENTS[moment](served, store))
            for connection in connections:
                connection.close()
            served.wait_until_idle()
            assert queue_of(served) == (0, 0)
            assert served.direct(prompts[-1], temperature=0, max_tokens=8, ignore_eos=True) == answers[-1]
            served.wait_until_idle()
            engine.pool.check()
