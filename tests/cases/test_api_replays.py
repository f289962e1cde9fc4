"""The HTTP halves of replayed cases that need a broken build of their own; the rest is in tests/server."""

import json
from collections.abc import Callable

import pytest
from harness import mutants
from harness.broken_builds import Mutant
from harness.waiting import until
from server.serving import BLOCK, Served, running, slow_model, text_of, tiny_engine, words

from kvire.engine.client import EngineClient
from kvire.models import chat
from kvire.server import reply

SHAPES = [(path, stream) for path in ("/v1/chat/completions", "/v1/completions") for stream in (False, True)]


def s19_image_is_refused(served: Served) -> None:
    for kind in ("image_url", "input_audio", "file"):
        parts = [{"type": "text", "text": "what is this?"}, {"type": kind, kind: {"url": "data:image/png;base64,AA=="}}]
        answer = served.post("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]})
        assert answer.status == 400
        assert kind in answer.error["message"]


def s31_client_gone(served: Served) -> None:
    """Left alone, the requests take longer than anybody waits here."""
    body = json.dumps({"prompt": "p" * 40, "max_tokens": 1800, "ignore_eos": True}).encode()
    connections = []
    for _ in range(12):
        connection = served.connect()
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        connection.sendall(body)
        connections.append(connection)
    until(lambda: (len(served.engine.scheduler.running), len(served.engine.scheduler.waiting)) == (8, 4))
    for connection in connections:
        connection.close()
    served.wait_until_idle()


def s39_zero_is_a_number(served: Served) -> None:
    for i, (path, stream) in enumerate(SHAPES):
        text = text_of(words(39 + i, 100))
        body = {"max_tokens": 2, "stream": stream} | ({"stream_options": {"include_usage": True}} if stream else {})
        body |= {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
        for cold in (True, False):
            answer = served.post(path, body)
            usage = (answer.events[-2] if stream else answer.json)["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert type(cached) is int
            if cold:  # a second chat shares the first words of the template
                assert cached == 0 if i == 0 or path == "/v1/completions" else cached < BLOCK
            else:
                assert cached == usage["prompt_tokens"] - 1


def images_are_dropped(patch: pytest.MonkeyPatch) -> None:
    """A part that is no text is left out, and the rest answered."""
    patch.setattr(chat, "_text_of", lambda part, _: part.get("text", ""))


def abort_never_sent(patch: pytest.MonkeyPatch) -> None:
    """The connection is gone, and nobody tells the engine."""
    patch.setattr(EngineClient, "abort", lambda *_: None)


def zero_is_missing(patch: pytest.MonkeyPatch) -> None:
    """No hit is reported as nothing at all."""
    usage = reply.usage

    def broken(results):
        counted = usage(results)
        if not counted["prompt_tokens_details"]["cached_tokens"]:
            counted["prompt_tokens_details"] = None
        return counted

    patch.setattr(reply, "usage", broken)


CASES = [
    (s19_image_is_refused, images_are_dropped),
    (s31_client_gone, abort_never_sent),
    (s31_client_gone, mutants.abort_ignored),
    (s39_zero_is_a_number, zero_is_missing),
    (s39_zero_is_a_number, mutants.sequence_reports_nothing_reused),
]


def serve_and(replay: Callable[[Served], None]) -> None:
    model = slow_model() if replay is s31_client_gone else None
    with running(tiny_engine(model=model, max_num_seqs=8)) as served:
        replay(served)


@pytest.mark.parametrize("replay", list(dict.fromkeys(case for case, _ in CASES)), ids=lambda case: case.__name__)
def test_holds(replay: Callable[[Served], None]) -> None:
    serve_and(replay)


@pytest.mark.parametrize(("replay", "mutant"), CASES, ids=lambda part: part.__name__)
@pytest.mark.usefixtures("short_of_patience")
def test_notices_a_broken_build(replay: Callable, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, TypeError)):
        serve_and(replay)
