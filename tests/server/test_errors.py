"""What goes wrong, and how the client hears of it."""

import json
import logging
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from harness.engines import held
from harness.waiting import AT_ONCE_S, PATIENCE_S, until
from server.serving import Answer, ScriptedModel, running, slow_model, tiny_engine, words

from kvire.server import service
from kvire.server.reply import LAST_WORDS_S

CANARY = "xylophone-canary-4711"
SLOW = {"prompt": "x", "max_tokens": 2000, "temperature": 0, "ignore_eos": True}


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
        assert all(answer.error["code"] == "context_length_exceeded" for answer in long)
        assert short.status == 200 and all(answer.seconds < AT_ONCE_S for answer in (short, *long))
        grown = served.post("/v1/completions", {"prompt": words(7, 700), "max_tokens": 500, "ignore_eos": True}).json
        assert grown["choices"][0]["finish_reason"] == "length" and grown["usage"]["total_tokens"] == 784


def test_a_full_queue_is_429_with_retry_after():
    body = SLOW | {"max_tokens": 3}
    with running(tiny_engine(model=ScriptedModel(), max_queue=2, max_num_seqs=1)) as served:
        with ThreadPoolExecutor(8) as pool, held(served.engine):
            answers = [pool.submit(served.post, "/v1/completions", body) for _ in range(8)]
            until(lambda: sum(answer.done() for answer in answers) >= 5)  # while nobody else is answered
        answers = [answer.result() for answer in answers]
        full = [answer for answer in answers if answer.status == 429]
        assert 5 <= len(full) <= 6, "one may run already when the queue is full"
        assert all(answer.status in (200, 429) for answer in answers)
        assert all(
            answer.error["type"] == "rate_limit_error" and int(answer.headers["retry-after"]) >= 1 for answer in full
        )
        with ThreadPoolExecutor(3) as pool, held(served.engine) as stands:
            answers = [pool.submit(served.post, "/v1/completions", body)]
            assert stands.wait(PATIENCE_S)
            answers += [pool.submit(served.post, "/v1/completions", body) for _ in range(2)]
            until(lambda: served.client.in_flight == 3)
            with pytest.raises(openai.RateLimitError):
                served.openai().completions.create(model="tiny", prompt="x", stream=True)
        assert [answer.result().status for answer in answers] == [200] * 3
        assert served.post("/v1/completions", body).status == 200
        many = served.post("/v1/completions", {"prompt": ["x"] * 3, "max_tokens": 1})
        assert many.status == 400 and "at most 2 prompts" in many.error["message"]


def test_several_prompts_are_taken_together_or_not_at_all():
    body = SLOW | {"max_tokens": 3}
    with running(tiny_engine(model=ScriptedModel(), max_queue=3, max_num_seqs=1)) as served:
        with ThreadPoolExecutor(2) as pool, held(served.engine) as stands:
            answers = [pool.submit(served.post, "/v1/completions", body)]
            assert stands.wait(PATIENCE_S)
            answers.append(pool.submit(served.post, "/v1/completions", body))
            until(lambda: served.client.in_flight == 2)
            assert served.post("/v1/completions", {"prompt": ["x", "y", "z"], "max_tokens": 1}).status == 429
            assert served.client.in_flight == 2, "nothing of the refused request is left behind"
        assert [answer.result().status for answer in answers] == [200] * 2
        served.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_request_that_takes_too_long_ends_and_frees_its_blocks(stream):
    with running(tiny_engine(model=slow_model()), request_timeout_s=1000) as served, ThreadPoolExecutor(1) as pool:
        if stream:
            with served.begun("POST", "/v1/completions", SLOW | {"stream": True}) as response:
                data = b"".join(response.readline() for _ in range(12))  # six chunks; an empty line follows each
                served.loop.skip(900)
                assert served.request("GET", "/health").status == 200
                assert served.client.in_flight == 1, "it has its time"
                served.loop.skip(100)
                *chunks, last = Answer(response.status, {}, data + response.read(), 0.0).events
            assert response.status == 200
            assert len(chunks) > 5 and last["error"]["code"] == "timeout"
            again = served.openai().completions.create(model="tiny", prompt="x", max_tokens=2000, stream=True)
            next(again)
            served.loop.skip(1000)
            with pytest.raises(openai.APIError, match="took longer"):
                list(again)
        else:
            answer = pool.submit(served.post, "/v1/completions", SLOW)
            until(lambda: served.client.in_flight)
            served.loop.skip(900)
            assert served.request("GET", "/health").status == 200
            assert served.client.in_flight == 1, "it has its time"
            served.loop.skip(100)
            answer = answer.result()
            assert answer.status == 504 and answer.error["code"] == "timeout"
        served.wait_until_idle()


def test_a_client_that_stops_reading_is_cut_off():
    """It takes no more, so that the stream stalls; its time up, it is dropped without a word that looks like an end."""
    model = ScriptedModel()
    model.say("y" * 2000)
    times = {"request_timeout_s": 1000, "send_timeout_s": 100_000}
    with running(tiny_engine(model=model), **times, send_buffer_bytes=4096) as served:
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(PATIENCE_S)
            connection.connect(("127.0.0.1", int(served.url.rpartition(":")[2])))
            body = json.dumps(SLOW | {"max_tokens": 600, "stream": True, "logprobs": 20}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            connection.sendall(head + body)
            until(lambda: [protocol.flow.write_paused for protocol in served.protocols] == [True])
            (protocol,) = served.protocols
            served.loop.skip(900)
            assert served.request("GET", "/health").status == 200
            assert not protocol.transport.is_closing(), "it has its time"
            served.loop.skip(100)
            until(lambda: served.loop.skip(LAST_WORDS_S) or protocol.transport.is_closing())
            served.wait_until_idle()
            data = b""
            while chunk := connection.recv(1 << 20):  # raises if the server still holds the connection
                data += chunk
        assert data.startswith(b"HTTP/1.1 200")
        assert b"[DONE]" not in data and not data.endswith(b"0\r\n\r\n")
        assert len(data) < 500_000, "it stalled long before the end"


def test_a_dead_engine_is_503_everywhere_and_tells_nothing():
    model = slow_model()
    with running(tiny_engine(model=model)) as served, ThreadPoolExecutor(2) as pool:
        whole = pool.submit(served.post, "/v1/completions", SLOW)
        stream = pool.submit(served.post, "/v1/completions", SLOW | {"stream": True})
        until(lambda: len(served.engine.scheduler.running) == 2)
        model.fails = True
        assert whole.result().status == 503 and whole.result().error["code"] == "engine_stopped"
        assert stream.result().events[-1]["error"]["code"] == "engine_stopped"
        later = served.post("/v1/completions", SLOW)
        assert later.status == 503 and later.seconds < AT_ONCE_S
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
    hanging, go = [], threading.Event()
    real = service.encode_chat

    def hang(*args):
        hanging.append(args)
        go.wait()
        return real(*args)

    monkeypatch.setattr(service, "encode_chat", hang)
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    with ThreadPoolExecutor(2) as pool:
        try:
            stuck = [pool.submit(shared.post, "/v1/chat/completions", chat) for _ in range(2)]
            until(lambda: len(hanging) == 2)
            assert shared.post("/v1/completions", {"prompt": words(1, 20), "max_tokens": 5}).status == 200
        finally:
            go.set()
        assert [one.result().status for one in stuck] == [200, 200]
