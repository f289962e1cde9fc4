"""What one request may cost: bounded before work begins, and nothing long on the event loop."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from harness.broken_builds import Cases, Claim, Mutant, each_broken_build, each_claim, must_notice
from harness.waiting import PATIENCE_S, until
from server.serving import running, tiny_engine

from kvire.server import limits, schemas, tools
from kvire.server.errors import ApiError
from kvire.server.limits import MAX_JSON_CONTAINERS, READ_IN_PLACE_BYTES
from kvire.server.schemas import MAX_PAST_CALLS

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


CASES: Cases = [
    (large_bodies_are_read_beside_the_event_loop, [everything_is_read_on_the_event_loop]),
    (past_calls_are_counted_before_they_are_read, [calls_are_not_counted]),
    (arguments_are_bounded_together_as_a_body_is, [arguments_are_trusted, arguments_are_counted_one_by_one]),
    (half_a_character_in_arguments_is_refused, [arguments_are_read_with_plain_json]),
]  # fmt: skip


@each_claim(CASES)
def test_work_is_bounded(claim: Claim) -> None:
    claim()


@each_broken_build(CASES)
def test_notices_a_broken_build(claim: Claim, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    must_notice(claim, mutant, monkeypatch)
