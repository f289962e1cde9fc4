"""What counts as the first token, what is counted as an error, and what the request asks for."""

import socket
from time import sleep

import pytest
from bench_command.streams import DONE, END, piece, scripted, usage

from kvire.bench import client
from kvire.bench.client import Endpoint, ask_completion, first_model
from kvire.core.errors import ConfigError

PAUSE_S = 0.2


def answered(script, status=200, **more):
    with scripted(script, status) as (url, bodies):
        return ask_completion(Endpoint(url, "m", **more), [{"role": "user", "content": "x"}], 4), bodies[0]


def test_a_chunk_with_the_role_alone_is_no_token():
    script = [piece("", role="assistant"), PAUSE_S, piece("a"), PAUSE_S, piece("b"), END, usage(10, 2, 7), DONE]
    answer, body = answered(script)
    assert answer.error is None and answer.pieces == ("a", "b")
    assert answer.ttft_s >= PAUSE_S and answer.e2e_s >= 2 * PAUSE_S
    assert answer.tpot_s == pytest.approx(answer.gaps_s[0]) and answer.gaps_s[0] >= 0.9 * PAUSE_S
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (10, 2, 7)
    assert body["temperature"] == 0 and body["stream_options"] == {"include_usage": True} and body["ignore_eos"]


def test_reasoning_is_text_and_a_token_without_text_is_counted_by_usage():
    answer, _ = answered([piece(reasoning_content="hm"), PAUSE_S, piece("a"), END, usage(5, 4), DONE])
    assert answer.pieces == ("hm", "a") and answer.output_tokens == 4
    assert answer.tpot_s == pytest.approx((answer.e2e_s - answer.ttft_s) / 3)
    assert answer.cached_tokens is None
    at_once, _ = answered([piece("a b c"), END, usage(5, 3), DONE])
    assert at_once.output_tokens == 3 and at_once.tpot_s is None, "how long the others took is not known"


def test_an_answer_without_text_is_timed_by_its_end():
    answer, _ = answered([piece("", role="assistant"), PAUSE_S, END, usage(5, 1), DONE])
    assert answer.error is None and answer.ttft_s == answer.e2e_s >= PAUSE_S
    assert answer.tpot_s is None and answer.gaps_s == ()


@pytest.mark.parametrize(
    ("script", "status", "error"),
    [
        (["no"], 429, "http_429"),
        (["no"], 500, "http_500"),
        ([piece("a")], 200, "broken_stream"),
        ([piece("a"), {"error": {"message": "no more memory"}}], 200, "error_event"),
        (["data: {"], 200, "malformed_stream"),
        (["data: 3"], 200, "malformed_stream"),
        ([{"choices": [3]}], 200, "malformed_stream"),
        ([piece("a"), {"usage": [3]}], 200, "malformed_stream"),
        ([piece("a"), 1.5, piece("b"), END], 200, "timeout"),
    ],
)
def test_errors_have_kinds(script, status, error):
    assert answered(script, status, timeout_s=1.0)[0].error == error


def test_drops_that_never_fall_silent_still_end():
    for drop in (piece("a"), ": still here"):
        answer, _ = answered([part for _ in range(12) for part in (drop, 0.1)], timeout_s=0.5)
        assert answer.error == "timeout" and len(answer.pieces) < 12
        assert answer.end_s < 1.0


def test_the_clock_starts_when_the_address_has_been_read(monkeypatch):
    """With https, certificates are read then."""
    connect = client.connect
    monkeypatch.setattr(client, "connect", lambda endpoint: (sleep(PAUSE_S), connect(endpoint))[1])
    answer, _ = answered([piece("a"), END, DONE])
    assert answer.error is None and answer.ttft_s < PAUSE_S


def test_nobody_there():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nowhere = Endpoint(f"http://127.0.0.1:{probe.getsockname()[1]}/v1", "m")
        assert ask_completion(nowhere, [], 1).error == "connection"
        with pytest.raises(ConfigError, match="is the server running"):
            first_model(nowhere)
    with scripted([]) as (url, _), pytest.raises(ConfigError, match="name one with --served-name"):
        first_model(Endpoint(url, "m"))
    for url in ("127.0.0.1:8000", "ftp://host/v1", "http://host:port/v1"):
        with pytest.raises(ConfigError, match="is no address"):
            first_model(Endpoint(url, "m"))
