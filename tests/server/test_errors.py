"""What goes wrong, and how the client hears of it."""

import json
import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import openai
import pytest
from server.serving import ScriptedModel, running, tiny_engine, words

from kvire.server import service
from kvire.server.stream import LAST_WORDS_S

CANARY = "xylophone-canary-4711"
SLOW = {"prompt": "x", "max_tokens": 2000, "temperature": 0, "ignore_eos": True}


def slow_model(delay_s: float) -> ScriptedModel:
    model = ScriptedModel()
    model.say("y" * 3000)
    model.delay_s = delay_s
    return model


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("GET", "/v1/chat/completions/", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/docs", 404),
        ("GET", "/openapi.json", 404),
        ("GET", "/v1/chat/completions", 405),
        ("PUT", "/v1/completions", 405),
        ("DELETE", "/v1/models/tiny", 405),
        ("POST", "/health", 405),
        ("OPTIONS", "/v1/chat/completions", 405),
        ("BREW", "/v1/completions", 405),
        ("GET", "/v1/models/other/model", 404),
        ("POST", "/v1/completions", 400),
    ],
)
def test_every_error_has_openai_s_shape(shared, method, path, status):
    answer = shared.request(method, path)
    assert answer.status == status
    assert answer.error["type"] == "invalid_request_error"
    assert answer.headers["content-type"] == "application/json"
    if status == 405:
        assert answer.headers["allow"]


def test_s33_a_full_context_ends_one_chat_and_not_the_next(fresh):
    limit = fresh.engine.max_model_len
    client = fresh.openai()
    messages, finish = [], None
    for turn in range(100):
        messages.append({"role": "user", "content": f"turn {turn} " + "and " * 50})
        try:
            answer = client.chat.completions.create(
                model="tiny", messages=messages, max_tokens=100, temperature=0, extra_body={"ignore_eos": True}
            )
        except openai.BadRequestError as error:
            finish = error.code
            break
        content = answer.choices[0].message.content
        assert content
        assert answer.usage.completion_tokens == 100 or answer.choices[0].finish_reason == "length"
        messages.append({"role": "assistant", "content": "".join(c if c.isascii() else "?" for c in content)})
    assert finish == "context_length_exceeded"
    new = client.completions.create(model="tiny", prompt=words(1, 20), max_tokens=5, extra_body={"ignore_eos": True})
    assert new.usage.completion_tokens == 5
    for length in (limit - 1, limit, limit + 1, 3 * limit):
        for max_tokens in (1, 100):
            answer = fresh.post(
                "/v1/completions", {"prompt": words(2, length), "max_tokens": max_tokens, "ignore_eos": True}
            )
            if length < limit:
                assert answer.json["choices"][0]["finish_reason"] == "length"
                assert answer.json["usage"]["completion_tokens"] == 1
            else:
                assert answer.status == 400 and answer.error["code"] == "context_length_exceeded"
                assert str(limit) in answer.error["message"] and str(length) in answer.error["message"]


def test_s32_what_can_never_fit_is_refused_at_once_and_blocks_nobody():
    """49 blocks of 16 hold 784 tokens, although the model's context is longer."""
    with running(tiny_engine(blocks=49)) as served, ThreadPoolExecutor(6) as pool:
        prompts = [words(i, 1000) for i in range(5)] + [words(9, 20)]
        body = {"max_tokens": 4, "ignore_eos": True}
        *long, short = pool.map(lambda prompt: served.post("/v1/completions", body | {"prompt": prompt}), prompts)
        assert all(answer.status == 400 and "784" in answer.error["message"] for answer in long)
        assert all(answer.error["code"] == "context_length_exceeded" and answer.seconds < 1 for answer in long)
        assert short.status == 200 and short.seconds < 1
        grown = served.post("/v1/completions", {"prompt": words(7, 700), "max_tokens": 500, "ignore_eos": True}).json
        assert grown["choices"][0]["finish_reason"] == "length" and grown["usage"]["total_tokens"] == 784


def test_a_full_queue_is_429_with_retry_after():
    with running(tiny_engine(model=slow_model(0.01), max_queue=2, max_num_seqs=1)) as served:
        with ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(served.post, "/v1/completions", SLOW | {"max_tokens": 30}) for _ in range(8)]
            answers = [answer.result() for answer in answers]
        full = [answer for answer in answers if answer.status == 429]
        assert 1 <= len(full) <= 6
        assert all(answer.status in (200, 429) for answer in answers)
        assert all(
            answer.error["type"] == "rate_limit_error" and int(answer.headers["retry-after"]) >= 1 for answer in full
        )
        assert all(answer.seconds < 1 for answer in full)
        streamed = [
            threading.Thread(target=served.post, args=("/v1/completions", SLOW | {"max_tokens": 30})) for _ in range(4)
        ]
        for thread in streamed:
            thread.start()
        time.sleep(0.2)
        with pytest.raises(openai.RateLimitError):
            served.openai().completions.create(model="tiny", prompt="x", stream=True)
        for thread in streamed:
            thread.join()
        assert served.post("/v1/completions", SLOW | {"max_tokens": 2}).status == 200
        many = served.post("/v1/completions", {"prompt": ["x"] * 3, "max_tokens": 1})
        assert many.status == 400 and "at most 2 prompts" in many.error["message"]


def test_several_prompts_are_taken_together_or_not_at_all():
    with running(tiny_engine(model=slow_model(0.01), max_queue=3, max_num_seqs=1)) as served:
        first = threading.Thread(target=served.post, args=("/v1/completions", SLOW | {"max_tokens": 50}))
        second = threading.Thread(target=served.post, args=("/v1/completions", SLOW | {"max_tokens": 1}))
        first.start()
        time.sleep(0.1)
        second.start()
        time.sleep(0.1)
        assert served.post("/v1/completions", {"prompt": ["x", "y", "z"], "max_tokens": 1}).status == 429
        time.sleep(0.1)
        assert served.client.in_flight == 2, "nothing of the refused request is left behind"
        first.join()
        second.join()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_request_that_takes_too_long_ends_and_frees_its_blocks(stream):
    with running(tiny_engine(model=slow_model(0.01)), request_timeout_s=0.5) as served:
        answer = served.post("/v1/completions", SLOW | {"stream": stream})
        assert 0.4 < answer.seconds < 2
        if stream:
            assert answer.status == 200
            *chunks, last = answer.events
            assert len(chunks) > 5 and last["error"]["code"] == "timeout"
            with pytest.raises(openai.APIError, match="took longer"):
                list(served.openai().completions.create(model="tiny", prompt="x", max_tokens=2000, stream=True))
        else:
            assert answer.status == 504 and answer.error["code"] == "timeout"
        served.wait_until_idle(1)


def test_a_client_that_stops_reading_is_cut_off():
    """It takes no more, so that the stream stalls; its time up, it is dropped without a word that looks like an end."""
    model = ScriptedModel()
    model.say("y" * 2000)
    with running(tiny_engine(model=model), request_timeout_s=0.7, send_buffer_bytes=4096) as served:
        address = urlsplit(served.url)
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(2)
            connection.connect((address.hostname, address.port))
            body = json.dumps(SLOW | {"max_tokens": 600, "stream": True, "logprobs": 20}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            connection.sendall(head + body)
            served.wait_until_idle(5)
            time.sleep(0.7 + LAST_WORDS_S + 0.3)
            data = b""
            while chunk := connection.recv(1 << 20):  # raises if the server still holds the connection
                data += chunk
        assert data.startswith(b"HTTP/1.1 200")
        assert b"[DONE]" not in data and not data.endswith(b"0\r\n\r\n")
        assert len(data) < 500_000, "it stalled long before the end"


def test_a_dead_engine_is_503_everywhere_and_tells_nothing():
    model = slow_model(0.005)
    with running(tiny_engine(model=model)) as served, ThreadPoolExecutor(2) as pool:
        whole = pool.submit(served.post, "/v1/completions", SLOW)
        stream = pool.submit(served.post, "/v1/completions", SLOW | {"stream": True})
        time.sleep(0.3)
        model.fails = True
        assert whole.result().status == 503 and whole.result().error["code"] == "engine_stopped"
        assert stream.result().events[-1]["error"]["code"] == "engine_stopped"
        later = served.post("/v1/completions", SLOW)
        assert later.status == 503 and later.seconds < 1
        assert served.request("GET", "/health").status == 503
        assert served.request("GET", "/health").json["status"] == "failed"
        assert served.request("GET", "/metrics").status == 200
        assert b"SECRET" not in whole.result().data + stream.result().data + later.data


def test_no_prompt_text_in_logs_metrics_and_errors(caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)
    with running(tiny_engine()) as served:
        served.post("/v1/completions", {"prompt": CANARY, "max_tokens": 3})
        served.post("/v1/completions?q=" + CANARY, {"prompt": CANARY, "max_tokens": 3, "stream": True})
        served.request("GET", "/" + CANARY)
        errors = [
            served.post("/v1/completions", {"prompt": CANARY, "temperature": CANARY}),
            served.post("/v1/completions", {"prompt": {CANARY: CANARY}}),
            served.post("/v1/completions", {"prompt": CANARY * 10000}),
            served.post("/v1/chat/completions", {"messages": [{"role": CANARY, "content": CANARY}]}),
            served.post(
                "/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image", "x": CANARY}]}]}
            ),
            served.post(
                "/v1/chat/completions", {"messages": [{"role": "user", "content": CANARY}], "tools": [{"x": CANARY}]}
            ),
            served.post("/v1/completions", b'{"prompt": "' + CANARY.encode()),
        ]
        assert [answer.status for answer in errors] == [400] * 7
        monkeypatch.setattr("kvire.server.service.encode_chat", lambda *_: (_ for _ in ()).throw(RuntimeError(CANARY)))
        broken = served.post("/v1/chat/completions", {"messages": [{"role": "user", "content": CANARY}]})
        assert broken.status == 500 and broken.error["code"] == "internal_error"
        metrics = served.request("GET", "/metrics").data
    assert all(CANARY.encode() not in answer.data for answer in [*errors, broken])
    assert CANARY.encode() not in metrics
    assert "RuntimeError inside the server" in caplog.text, "but it is logged that something happened, and where"
    ours = [record for record in caplog.records if not record.name.startswith(("openai", "httpx", "httpcore"))]
    assert all(CANARY not in record.getMessage() and CANARY not in (record.exc_text or "") for record in ours)


def test_tokenising_does_not_hold_up_others(shared, monkeypatch):
    """Two templates that hang occupy the threads; streams go on, and what waits is bounded."""
    hang = threading.Event()
    real = service.encode_chat
    monkeypatch.setattr(service, "encode_chat", lambda *args: hang.wait(10) and real(*args))
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    with ThreadPoolExecutor(2) as pool:
        stuck = [pool.submit(shared.post, "/v1/chat/completions", chat) for _ in range(2)]
        time.sleep(0.2)
        answer = shared.post("/v1/completions", {"prompt": words(1, 20), "max_tokens": 5})
        assert answer.status == 200 and answer.seconds < 2
        hang.set()
        assert [one.result().status for one in stuck] == [200, 200]
