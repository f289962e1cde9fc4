"""serve(): from a model's name to a listening server and back to the prompt."""

import json
import os
import signal
import socket
import threading
import time
import urllib.request
from contextlib import contextmanager

import pytest
from harness.waiting import PATIENCE_S, until
from server.serving import slow_model, tiny_engine

from kvire.core.errors import ConfigError
from kvire.engine.client import EngineClient
from kvire.server import run
from kvire.server.options import ServerOptions


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def tiny_llm(model, *, progress=None, store=None, **engine_options):
    """In place of kvire.LLM. What is long takes longer than the test."""
    assert model == "some/model" and store is None
    progress("loading", 1, 1)
    with EngineClient(tiny_engine(model=slow_model(), **engine_options)) as client:
        client.engine.closed_properly = False
        yield type("Loaded", (), {"client": client, "sessions": None, "store_line": None})()
        client.engine.closed_properly = True


@pytest.mark.parametrize("in_flight", [False, True], ids=["idle", "busy"])
def test_serve_prints_how_to_try_it_answers_and_stops_on_ctrl_c(monkeypatch, in_flight):
    said, stages, answers, open_ = [], [], [], []
    monkeypatch.setattr(run, "LLM", tiny_llm)
    port = free_port()
    url = f"http://127.0.0.1:{port}"

    def visit() -> None:
        try:
            until(lambda: said)
            body = {"prompt": "x", "max_tokens": 3, "ignore_eos": True}
            request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode())
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                answers.append(json.load(answer)["usage"]["completion_tokens"])
            if in_flight:
                long = json.dumps(body | {"max_tokens": 2000, "stream": True}).encode()
                request = urllib.request.Request(url + "/v1/completions", long)
                open_.append(urllib.request.urlopen(request, timeout=PATIENCE_S))
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    visitor = threading.Thread(target=visit)
    visitor.start()
    started = time.monotonic()
    run.serve(
        "some/model",
        ServerOptions(port=port, served_name="mine", shutdown_s=1),
        progress=lambda stage, done, total: stages.append((stage, done, total)),
        say=said.append,
        max_num_seqs=4,
    )
    visitor.join()
    assert time.monotonic() - started < 2 * PATIENCE_S, "nobody waits for the end of what is long"
    assert len(open_) == in_flight
    assert answers == [3] and stages == [("loading", 1, 1)]
    assert said[0].startswith(f"mine is served at {url}/v1")
    curl = next(line for line in said if "curl" in line)
    assert f"{url}/v1/chat/completions" in curl and '"model": "mine"' in curl
    assert said[-1] == "stopped"
    with pytest.raises(OSError, match=r"."):
        socket.create_connection(("127.0.0.1", port), timeout=1)


def test_a_taken_port_is_noticed_before_the_model_is_loaded(monkeypatch):
    monkeypatch.setattr(run, "LLM", lambda *_, **__: pytest.fail("loaded"))
    with run.bind(ServerOptions(port=0)) as listener, pytest.raises(ConfigError, match="cannot listen"):
        run.serve("some/model", ServerOptions(port=listener.getsockname()[1]))
    with pytest.raises(ConfigError, match="without an API key"):
        run.serve("some/model", ServerOptions(host="0.0.0.0", port=0))


def test_with_a_key_the_example_sends_it(monkeypatch):
    with run.bind(ServerOptions(port=0)) as listener:
        lines = run.welcome(ServerOptions(api_keys=("secret",)), listener, "m")
    assert any("Bearer $KVIRE_API_KEY" in line for line in lines)
    assert not any("secret" in line for line in lines)
