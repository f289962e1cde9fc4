"""Sessions through the API: the request brings what is new, the server knows the rest, and only its owner sees it."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from harness.waiting import PATIENCE_S, until
from models.tiny import make_tiny
from server.serving import (
    BLOCK,
    HERMES_TEMPLATE,
    MODEL,
    SLOW_STEP_S,
    Answer,
    ScriptedModel,
    Served,
    byte_tokenizer,
    listening,
    running,
    tiny_engine,
)

from kvire.core.config import StoreConfig
from kvire.llm import LLM
from kvire.server.app import create_app
from kvire.sessions.folder import Sessions
from kvire.sessions.session_file import Session, file_name
from kvire.store.keyring import Keyring

CHATS = "/v1/chat/completions"
USAGE = {"include_usage": True}
SLOW_ANSWER = "a slow answer " * 100
FORGETFUL = HERMES_TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'].split('</think>')[-1] }}")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def chat_ids(messages: list[dict], template: str = HERMES_TEMPLATE) -> list[int]:
    tokenizer = byte_tokenizer(template)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@dataclass
class Talk:
    """A server with sessions, whose model says what it is told."""

    served: Served
    model: ScriptedModel
    sessions: Sessions

    def turn(self, text: str, answer: str | list[int], *, stream: bool = False, **more: Any) -> Answer:
        """The next one, once the one before is over for the server, too."""
        until(lambda: not self.served.service.sessions_in_use)
        self.model.say(answer)
        body = {"messages": [user(text)], "session": "work", "temperature": 0, "stream": stream, **more}
        return self.served.post(CHATS, body)

    def stored(self, name: str = "work") -> list[dict]:
        session = self.sessions.load("", name)
        return [] if session is None else list(session.messages)


@pytest.fixture
def keep_sessions(monkeypatch: pytest.MonkeyPatch):
    """Servers made from here on keep sessions."""

    def keep(sessions: Sessions | None) -> None:
        def make(*args: Any) -> Any:
            app = create_app(*args)
            app.state.service.sessions = sessions
            return app

        monkeypatch.setattr("server.serving.create_app", make)

    return keep


@pytest.fixture
def new_talk(tmp_path: Path, keep_sessions):
    @contextmanager
    def new(template: str = HERMES_TEMPLATE, **options: Any):
        sessions = Sessions(tmp_path / "store", Keyring(tmp_path / "keys.json"), 1 << 20)
        keep_sessions(sessions)
        model = ScriptedModel()
        with running(tiny_engine(model=model, template=template), **options) as served:
            yield Talk(served, model, sessions)

    return new


@pytest.fixture
def talk(new_talk):
    with new_talk() as made:
        yield made


def last(answer: Answer, *, stream: bool) -> dict[str, Any]:
    """The body, or a stream's last chunk."""
    assert answer.status == 200, answer.data
    return answer.events[-2] if stream else answer.json


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_history_comes_before_what_is_new_and_the_answer_joins_it(talk, stream):
    first = last(talk.turn("hello", "hi there", stream=stream), stream=stream)
    assert first["kvire"]["session"] == {"name": "work", "messages": 2, "tokens_lost": 0}
    assert talk.stored() == [user("hello"), assistant("hi there")]
    second = talk.turn("who are you?", "a script", stream=stream, stream_options=USAGE if stream else None)
    second = last(second, stream=stream)
    asked = chat_ids([user("hello"), assistant("hi there"), user("who are you?")])
    assert second["usage"]["prompt_tokens"] == len(asked)
    assert second["kvire"]["session"] == {"name": "work", "messages": 4, "tokens_lost": 0}
    assert talk.stored() == [user("hello"), assistant("hi there"), user("who are you?"), assistant("a script")]
    kept = talk.sessions.load("", "work").token_ids
    assert kept[: len(asked)] == tuple(asked)
    assert bytes(kept[len(asked) : -1]) == b"a script"


def test_a_request_without_session_says_and_keeps_nothing_of_it(talk):
    answer = talk.turn("hello", "hi", session=None)
    assert "session" not in answer.json["kvire"]
    assert talk.sessions.names("") == []


def test_an_answer_that_reached_its_length_is_kept_and_continued_from_its_last_token(talk):
    talk.turn("hello", "hi there", max_tokens=4)
    assert talk.stored()[-1] == assistant("hi t")
    again = talk.turn("go on", "here", max_tokens=4)
    assert again.json["kvire"]["session"]["tokens_lost"] == 0


def test_bytes_that_are_no_text_stay_what_the_model_wrote(talk):
    """Told again, they would be three other tokens each."""
    talk.turn("hello", [200, 201, 72])
    assert talk.stored()[-1] == assistant("\ufffd\ufffdH")
    again = talk.turn("go on", "yes")
    assert again.json["kvire"]["session"]["tokens_lost"] == 0
    asked = chat_ids([user("hello"), assistant("???"), user("go on")])
    assert again.json["usage"]["prompt_tokens"] == len(asked)


def test_s25_a_template_that_drops_reasoning_reuses_to_the_last_common_token_on_every_turn(new_talk):
    with new_talk(FORGETFUL) as talk:
        messages, before = [], []
        for number in range(5):
            question, answer = f"question {number}, which is long enough for blocks", f"<think>hm {number}</think>yes"
            messages.append(user(question))
            asked = chat_ids(messages, FORGETFUL)
            told = talk.turn(question, answer).json
            common = next((i for i, (a, b) in enumerate(zip(before, asked, strict=False)) if a != b), len(before))
            assert told["usage"]["prompt_tokens"] == len(asked)
            assert told["kvire"]["session"]["tokens_lost"] == len(before) - common
            assert (common > 0) == (number > 0)
            assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == common
            messages.append(assistant(answer))
            before = list(talk.sessions.load("", "work").token_ids)


def test_tool_calls_and_their_results_are_history_too(talk):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    first = talk.turn("1 + 1?", call, tools=tools)
    assert first.json["choices"][0]["finish_reason"] == "tool_calls"
    kept = talk.stored()[-1]
    assert kept["tool_calls"] == first.json["choices"][0]["message"]["tool_calls"]
    result = {"role": "tool", "tool_call_id": kept["tool_calls"][0]["id"], "content": "2"}
    second = talk.turn("", "two", messages=[result], tools=tools)
    assert second.status == 200, second.data
    assert talk.stored()[-2:] == [result, assistant("two")]


def test_an_answer_whose_client_left_is_not_kept_and_the_session_is_free_again(talk):
    talk.turn("hello", "hi")
    before = talk.sessions.load("", "work")
    talk.model.delay_s = SLOW_STEP_S
    talk.model.say("x" * 1500)
    body = {"messages": [user("long")], "session": "work", "temperature": 0, "stream": True}
    with talk.served.begun("POST", CHATS, body) as response:
        response.read(64)
    talk.served.wait_until_idle()
    talk.model.delay_s = 0
    assert talk.sessions.load("", "work") == before
    assert talk.turn("short", "ok").json["kvire"]["session"]["messages"] == 4


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_answer_that_broke_off_is_not_kept(talk, stream):
    talk.turn("hello", "hi")
    before = talk.sessions.load("", "work")
    talk.model.fails = True
    answer = talk.turn("again", "never said", stream=stream)
    error = answer.events[-1]["error"] if stream else answer.error
    assert error["code"] in {"engine_stopped", "generation_failed"}
    assert talk.sessions.load("", "work") == before


@pytest.fixture
def slow(talk):
    """The same while a request holds the session, until the test lets it finish."""
    talk.turn("hello", "hi")
    talk.model.delay_s = SLOW_STEP_S
    talk.model.say(SLOW_ANSWER)
    body = {"messages": [user("take your time")], "session": "work", "temperature": 0}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(talk.served.post, CHATS, body)
        until(lambda: talk.served.client.in_flight)

        def finish() -> Answer:
            talk.model.delay_s = 0
            return answer.result(PATIENCE_S)

        yield talk, finish
        talk.model.delay_s = 0


def test_a_session_is_continued_by_one_request_at_a_time(slow):
    talk, finish = slow
    for refused in (
        talk.served.post(CHATS, {"messages": [user("me too")], "session": "work"}),
        talk.served.post(CHATS, {"messages": [user("me too")], "session": "work", "stream": True}),
        talk.served.request("DELETE", "/v1/sessions/work"),
    ):
        assert refused.status == 409
        assert refused.error["code"] == "session_in_use"
    other = talk.served.post(CHATS, {"messages": [user("hi")], "session": "other", "max_tokens": 1})
    assert other.status == 200, "another session is free"
    assert finish().status == 200
    assert [m["content"] for m in talk.stored()] == ["hello", "hi", "take your time", SLOW_ANSWER]
    assert talk.turn("now", "yes").status == 200


def test_what_another_process_did_meanwhile_is_not_overwritten(slow):
    talk, finish = slow
    theirs = talk.sessions.save("", replace(talk.sessions.load("", "work"), token_ids=(1,)))
    refused = finish()
    assert refused.status == 409
    assert refused.error["code"] == "session_conflict"
    assert talk.sessions.load("", "work") == theirs


def test_in_a_stream_a_turn_that_is_not_kept_ends_with_an_error(talk, monkeypatch):
    monkeypatch.setattr(talk.sessions, "limit_bytes", 0)
    refused = talk.turn("hello", "hi", stream=True)
    assert refused.events[-1]["error"]["code"] == "session_unusable"
    assert "no room" in refused.events[-1]["error"]["message"]
    assert not any(
        event == "[DONE]" or (event.get("choices") and event["choices"][0]["finish_reason"]) for event in refused.events
    )
    refused = talk.turn("hello", "hi")
    assert refused.status == 422 and "no room" in refused.error["message"]


def test_a_key_s_sessions_are_its_own(new_talk):
    mine, theirs = {"Authorization": "Bearer mine"}, {"Authorization": "Bearer theirs"}
    with new_talk(api_keys=("mine", "theirs")) as talk:
        talk.model.say("first")
        body = {"messages": [user("my secret")], "session": "work", "temperature": 0}
        assert talk.served.post(CHATS, body, headers=mine).status == 200
        assert names(talk.served, headers=theirs) == []
        assert talk.served.request("DELETE", "/v1/sessions/work", headers=theirs).status == 404
        talk.model.say("second")
        answer = talk.served.post(CHATS, {**body, "messages": [user("who?")]}, headers=theirs)
        assert answer.json["kvire"]["session"]["messages"] == 2
        assert answer.json["usage"]["prompt_tokens"] == len(chat_ids([user("who?")]))
        assert names(talk.served, headers=mine) == names(talk.served, headers=theirs) == ["work"]
        assert talk.served.request("DELETE", "/v1/sessions/work", headers=theirs).status == 200
        assert names(talk.served, headers=mine) == ["work"]
        assert talk.served.request("GET", "/v1/sessions").status == 401


def names(served: Served, **more: Any) -> list[str]:
    answer = served.request("GET", "/v1/sessions", **more)
    assert answer.json["object"] == "list"
    assert all(set(entry) == {"id", "object"} for entry in answer.json["data"])
    return [entry["id"] for entry in answer.json["data"]]


def test_sessions_are_listed_and_removed(talk):
    for name in ("b", "a"):
        talk.turn("hello", "hi", session=name)
    assert names(talk.served) == ["a", "b"]
    gone = talk.served.request("DELETE", "/v1/sessions/a")
    assert gone.json == {"id": "a", "object": "session", "deleted": True}
    assert names(talk.served) == ["b"]
    missing = talk.served.request("DELETE", "/v1/sessions/a")
    assert missing.status == 404 and missing.error["code"] == "session_not_found"
    assert talk.turn("hello", "hi", session="a").json["kvire"]["session"]["messages"] == 2
    metrics = talk.served.request("GET", "/metrics").data.decode()
    assert 'route="/v1/sessions/{name}"' in metrics and "/v1/sessions/a" not in metrics


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"session": "a/b"}, "session", "1 to 64 of the characters"),
        ({"session": "x" * 65}, "session", "1 to 64 of the characters"),
        ({"session": 7}, "session", "string"),
        ({"session": "work", "n": 2}, "n", "one answer"),
        ({"session": "work", "store": False}, "store", "contradicts"),
        ({"session": "work", "messages": [user("x" * 2100)]}, "session", "2048 tokens"),
        ({"session": "work", "messages": [user("x" * 100_000)]}, "session", "2048 tokens"),
    ],
    ids=["slash", "long", "number", "n", "store", "context", "characters"],
)
def test_what_contradicts_a_session_is_a_400(talk, body, param, says):
    refused = talk.served.post(CHATS, {"messages": [user("hi")], **body})
    assert refused.status == 400
    assert refused.error["param"] == param
    assert says in refused.error["message"]
    assert talk.sessions.names("") == []


def test_completions_have_no_sessions(talk):
    refused = talk.served.post("/v1/completions", {"prompt": "hi", "session": "work"})
    assert refused.status == 400 and refused.error["param"] == "session"


def test_a_server_without_a_store_says_so(keep_sessions):
    keep_sessions(None)
    with running(tiny_engine(model=ScriptedModel())) as served:
        for refused in (
            served.post(CHATS, {"messages": [user("hi")], "session": "work"}),
            served.request("GET", "/v1/sessions"),
            served.request("DELETE", "/v1/sessions/work"),
        ):
            assert refused.status == 400
            assert refused.error["code"] == "no_store"


def test_s43_a_damaged_session_is_an_error_of_its_own_and_can_be_removed(talk, tmp_path):
    talk.turn("hello", "hi")
    talk.turn("hello", "hi", session="other")
    (file,) = talk.sessions.store.rglob(file_name(Keyring(tmp_path / "keys.json").tenant(""), "work"))
    file.write_bytes(b"")
    refused = talk.turn("again", "no")
    assert refused.status == 422
    assert refused.error["code"] == "session_unusable"
    assert "damaged" in refused.error["message"]
    assert str(talk.sessions.store) not in refused.error["message"]
    assert talk.turn("again", "yes", session="other").json["kvire"]["session"]["messages"] == 4
    assert talk.served.request("DELETE", "/v1/sessions/work").status == 200
    assert talk.turn("again", "yes").json["kvire"]["session"]["messages"] == 2


def test_broken_keys_are_told_without_their_place(talk, tmp_path):
    talk.turn("hello", "hi")
    (tmp_path / "keys.json").write_text("{")
    refused = talk.served.request("GET", "/v1/sessions")
    assert refused.status == 500
    assert str(tmp_path) not in refused.error["message"]


@pytest.mark.usefixtures("loading_pays")
def test_after_a_restart_a_turn_computes_the_last_partial_block_and_what_is_new(tmp_path, keep_sessions):
    model = str(make_tiny("llama", tmp_path / "tiny"))
    config = StoreConfig(path=tmp_path / "store", disk_bytes=64 << 20, key_file=tmp_path / "keys.json")
    bytes_only = {str(token): -100 for token in range(256, 320)}
    body = {"session": "work", "temperature": 0, "max_tokens": 24, "ignore_eos": True, "logit_bias": bytes_only}
    known: Session | None = None
    for text in ("a first message, long enough to fill a few blocks", "a second one"):
        with LLM(model, store=config) as llm:
            keep_sessions(llm.sessions)
            with listening(llm.client, MODEL) as served:
                told = served.post(CHATS, body | {"messages": [user(text)]}).json
                if known is not None:
                    assert told["kvire"]["session"]["tokens_lost"] == 0
                    cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
                    assert cached >= (len(known.token_ids) - 1) // BLOCK * BLOCK
                    assert told["kvire"]["cache"]["disk_tokens"] > 0
                known = llm.sessions.load("", "work")
                assert len(known.messages) == told["kvire"]["session"]["messages"]
