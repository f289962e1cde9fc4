"""What one request may cost: bounded before work begins, and nothing long on the event loop."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from types import ModuleType

import pytest
from harness.broken_builds import Cases, Claim, Mutant, each_broken_build, each_claim, must_notice
from harness.waiting import PATIENCE_S, until
from hypothesis import given
from hypothesis import strategies as st
from server.serving import running, tiny_engine

from kvire.server import json_text, limits, reply, schemas, service, tools
from kvire.server.endpoints.completions import CompletionReply
from kvire.server.errors import ApiError
from kvire.server.json_text import JsonText, json_pieces
from kvire.server.limits import MAX_JSON_CONTAINERS, READ_IN_PLACE_BYTES
from kvire.server.reply import MERGED_PIECES
from kvire.server.schemas import MAX_PAST_CALLS, CompletionRequest
from kvire.server.service import Service

CHAT = "/v1/chat/completions"
HI = {"role": "user", "content": "hi"}


def call(arguments: str = "{}") -> dict:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


def assistant(*calls: dict) -> dict:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def refused(body: dict) -> dict:
    """The error of a chat that is a 400."""
    with running(tiny_engine()) as served:
        answer = served.post(CHAT, {"max_tokens": 1} | body)
        assert answer.status == 400
        return answer.error


def large_bodies_are_read_beside_the_event_loop() -> None:
    """With every thread for that held up, such a body waits, and others are answered."""
    large = {"messages": [HI], "user": "u" * READ_IN_PLACE_BYTES, "temperature": "hot"}
    with running(tiny_engine()) as served, ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        hang = threading.Event()
        stack.callback(hang.set)
        for _ in range(2):
            served.service.workers._executor.submit(hang.wait, PATIENCE_S)
        answer = pool.submit(served.post, CHAT, large)
        until(lambda: served.service.bodies._buffered_bytes > READ_IN_PLACE_BYTES)
        small = served.post(CHAT, large | {"user": "u"})
        assert (small.status, small.error["param"]) == (400, "temperature")
        assert not answer.done()
        hang.set()
        assert answer.result().error["param"] == "temperature"


def past_calls_are_counted_before_they_are_read() -> None:
    """All of them wrong, so that whoever reads them finds something else to say."""
    wrong = assistant(*[{"id": 1}] * 100)
    error = refused({"messages": [HI, *[wrong] * (MAX_PAST_CALLS // 100 + 1)]})
    assert error["param"] == "messages" and f"more than {MAX_PAST_CALLS} tool calls" in error["message"]


def arguments_are_bounded_together_as_a_body_is() -> None:
    """They are JSON inside of JSON, which the bounds of the body do not see."""
    nested = '{"a": [' + "[]," * (MAX_JSON_CONTAINERS // 3) + "1]}"
    with pytest.raises(ApiError, match="too many values"):
        tools.as_templates_expect([assistant(call(nested))] * 3)


def half_a_character_in_arguments_is_refused() -> None:
    """No tokenizer takes it."""
    error = refused({"messages": [HI, assistant(call('{"a": "\\ud800"}'))]})
    assert error["param"] == "messages[1].tool_calls[0].function.arguments"


def threads_that_write(module: ModuleType, body: dict) -> set[str]:
    """Names of the threads in which a module writes large JSON while it answers."""
    names, write = set(), module.json_pieces

    def noting(value: object) -> Iterator[str]:
        names.add(threading.current_thread().name.partition("_")[0])
        return write(value)

    with running(tiny_engine()) as served, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "json_pieces", noting)
        assert served.post("/v1/completions", {"ignore_eos": True} | body).status == 200
    return names


def large_answers_are_written_beside_the_event_loop() -> None:
    assert threads_that_write(reply, {"prompt": "x", "max_tokens": 400, "logprobs": 20}) == {"asyncio"}


def large_events_are_written_beside_the_event_loop() -> None:
    """The first event of an echo has the whole prompt's."""
    body = {"prompt": "x" * 100, "echo": True, "max_tokens": 1, "logprobs": 20, "stream": True}
    assert threads_that_write(json_text, body) == {"asyncio"}


def log_probabilities_are_held_as_text() -> None:
    """While an answer grows."""
    held, join = [], CompletionReply.join

    def noting(self: CompletionReply, pieces: list[dict]) -> dict:
        held.extend(entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["top_logprobs"])
        return join(self, pieces)

    with running(tiny_engine()) as served, pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompletionReply, "join", noting)
        body = {"prompt": "x", "max_tokens": 2 * MERGED_PIECES + 3, "logprobs": 1, "ignore_eos": True}
        logprobs = served.post("/v1/completions", body).json["choices"][0]["logprobs"]
    assert len(held) == body["max_tokens"] and {type(entry) for entry in held} == {JsonText}
    assert [json.loads(entry) for entry in held] == logprobs["top_logprobs"]


def log_probabilities_of_an_answer_are_bounded() -> None:
    """Where each of n, max_tokens and top_logprobs is within its own bound; what the context leaves is what counts."""
    with running(tiny_engine(max_model_len=128)) as served, pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "MAX_LOGPROBS_TOGETHER", 400)
        chat = {"messages": [HI], "logprobs": True, "ignore_eos": True}
        scored = {"prompt": "x" * 99, "max_tokens": 1, "echo": True, "logprobs": 1}
        for path, within, over in (
            (CHAT, chat | {"top_logprobs": 3, "max_tokens": 10, "n": 10}, {"n": 11}),
            (CHAT, chat | {"top_logprobs": 9, "max_tokens": 10, "n": 4}, {"max_tokens": 11}),
            (CHAT, chat | {"top_logprobs": 0}, {"top_logprobs": 4}),
            ("/v1/completions", scored | {"n": 2}, {"n": 3}),
        ):
            assert served.post(path, within).status == 200
            refused = served.post(path, within | over)
            assert refused.status == 400
            assert refused.error["code"] == "too_many_logprobs" and "400" in refused.error["message"]


def echoes_are_bounded() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schemas, "MAX_ECHO_CHARS", 1600)
        for prompt in ("x" * 400, ["x" * 200] * 2, [1] * 25):
            body = {"prompt": prompt, "echo": True, "n": 4}
            schemas.parse(CompletionRequest, body)
            schemas.parse(CompletionRequest, body | {"n": 5, "echo": False})
            with pytest.raises(ApiError, match="with echo"):
                schemas.parse(CompletionRequest, body | {"n": 5})


def everything_is_read_on_the_event_loop(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(limits, "READ_IN_PLACE_BYTES", 1 << 30)


def calls_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(schemas, "MAX_PAST_CALLS", 1 << 30)


def arguments_are_trusted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tools, "check_structure", lambda _: None)


def arguments_are_counted_one_by_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tools, "check_structure", lambda texts: [limits.check_structure([text]) for text in texts])


def arguments_are_read_with_plain_json(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tools, "parse_json", tools.json.loads)


def everything_is_written_on_the_event_loop(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reply, "is_large", lambda _: False)
    patch.setattr(json_text, "is_large", lambda _: False)


def log_probabilities_are_held_as_they_are(patch: pytest.MonkeyPatch) -> None:
    async def unchanged(piece: dict) -> dict:
        return piece

    patch.setattr(reply, "_packed", unchanged)


def products_are_not_bounded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Service, "_check_logprobs", lambda *_: None)


def n_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    check = Service._check_logprobs
    patch.setattr(Service, "_check_logprobs", lambda self, prompts, params: check(self, prompts, replace(params, n=1)))


CASES: Cases = [
    (large_bodies_are_read_beside_the_event_loop, [everything_is_read_on_the_event_loop]),
    (past_calls_are_counted_before_they_are_read, [calls_are_not_counted]),
    (arguments_are_bounded_together_as_a_body_is, [arguments_are_trusted, arguments_are_counted_one_by_one]),
    (large_answers_are_written_beside_the_event_loop, [everything_is_written_on_the_event_loop]),
    (large_events_are_written_beside_the_event_loop, [everything_is_written_on_the_event_loop]),
    (log_probabilities_are_held_as_text, [log_probabilities_are_held_as_they_are]),
    (log_probabilities_of_an_answer_are_bounded, [products_are_not_bounded, n_is_not_counted]),
    (echoes_are_bounded, []),
    (half_a_character_in_arguments_is_refused, [arguments_are_read_with_plain_json]),
]  # fmt: skip


@each_claim(CASES)
def test_work_is_bounded(claim: Claim) -> None:
    claim()


@each_broken_build(CASES)
def test_notices_a_broken_build(claim: Claim, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    must_notice(claim, mutant, monkeypatch)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers() | st.booleans() | st.none(), inner),
)


@given(VALUES)
def test_pieces_of_json_are_the_whole(value: object) -> None:
    assert "".join(json_pieces(value)) == json_text.json_text(value)
