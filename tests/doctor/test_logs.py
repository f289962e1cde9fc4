"""Every kind of log line is known by its content; what is none is counted, named by number, and skipped."""

import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvire.core.errors import ConfigError
from kvire.doctor.reading.lines import lines_of
from kvire.doctor.reading.logs import LoggedRequest, Malformed, read_log

MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hej"}]
CLAUDE = {
    "model": "claude-x",
    "tools": [{"name": "t", "input_schema": {}, "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
    "system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": "Hej"}],
}
CHAT_TEXT = b"\x1eSBe kind.\x1eUHej"


def one(value: Any) -> LoggedRequest:
    (found,) = read_log([value if isinstance(value, bytes) else json.dumps(value).encode()])
    assert isinstance(found, LoggedRequest), found
    return found


@pytest.mark.parametrize(
    ("line", "api", "text"),
    [
        ({"model": "m", "messages": MESSAGES}, "chat", CHAT_TEXT),
        ({"request": {"messages": MESSAGES}, "response": {}}, "chat", CHAT_TEXT),
        ({"request": {"body": json.dumps({"messages": MESSAGES})}}, "chat", CHAT_TEXT),
        ({"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": MESSAGES}}, "chat",
         CHAT_TEXT),
        ({"custom_id": "1", "params": CLAUDE}, "anthropic",
         b'\x1eT{"name":"t","input_schema":{}}\x1eSBe kind.\x1eUHej'),
        ({"url": "/v1/messages", "body": {"messages": MESSAGES[1:]}}, "anthropic", b"\x1eUHej"),
        ({"model": "m", "instructions": "Be kind.", "input": "Hej"}, "responses", CHAT_TEXT),
        (
            {"input": {"model": "m", "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hej"}]}]}},
            "responses",
            b"\x1eUHej",
        ),
        ({"prompt": "Hej"}, "completions", b"Hej"),
        ({"prompt": [1, 64]}, "completions", b"\x1eN00010010"),
        (MESSAGES, "chat", CHAT_TEXT),
        (b'"Hej"', "prompt", b"Hej"),
        (b"Hej, {du}", "prompt", b"Hej, {du}"),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [
                {"id": "c", "function": {"name": "f", "arguments": '{"b": 1}'}}]}]},
            "chat",
            b'\x1eCc f {"b": 1}',
        ),
        (
            {"messages": [{"role": "assistant", "reasoning_content": "Hm.", "content": "Ja"}], "functions": [{"n": 1}]},
            "chat",
            b'\x1eT{"n":1}\x1eRHm.\x1eAJa',
        ),
        (
            {"model": "claude-x", "thinking": {"type": "on"}, "messages": [{"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Ja"},
                {"type": "tool_use", "id": "u", "name": "f", "input": {"b": 1}}]}]},
            "anthropic",
            b'\x1eP{"thinking":{"type":"on"}}\x1eRHm.\x1eAJa\x1ecu f {"b":1}',
        ),
    ],
)  # fmt: skip
def test_a_line_is_known_by_its_content(line: Any, api: str, text: bytes) -> None:
    found = one(line)
    assert (found.api, found.prompt.text) == (api, text)


CALLS = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "f"}}]}
MARKED = [{"type": "text", "text": "Hej", "cache_control": {"type": "ephemeral"}}]


def test_a_claude_model_behind_an_openai_gateway_is_chat() -> None:
    found = one({"model": "claude-x", "messages": [MESSAGES[1], CALLS, {"role": "tool", "content": "1"}]})
    assert (found.api, found.prompt.text) == ("chat", b"\x1eUHej\x1eCc f \x1eO1")
    assert found.prompt.breakpoints is None
    marked = one({"messages": [{"role": "user", "content": MARKED}, CALLS]})
    assert (marked.api, marked.prompt.breakpoints) == ("chat", ((5, 300),))


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA" * 1000}}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "u", "content": [{"type": "text", "text": "Seen: "}, IMAGE]}]}]},
        {"input": [{"type": "function_call_output", "call_id": "u", "output": [
            {"type": "input_text", "text": "Seen: "}, {"type": "input_image", "image_url": "data:" + "A" * 4000}]}]},
        {"input": [{"type": "computer_call_output", "call_id": "u", "output": {
            "type": "computer_screenshot", "image_url": "data:" + "A" * 4000}}]},
    ],
)  # fmt: skip
def test_images_that_tools_give_are_digests(body: dict[str, Any]) -> None:
    prompt = one({"model": "m", **body}).prompt
    assert prompt.text.startswith(b"\x1eOu: ")
    assert len(prompt.text) < 60
    assert prompt.media == 1


def test_documents_and_search_results_that_are_text_count_as_text() -> None:
    document = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "Ja."}}
    search = {"type": "search_result", "source": "https://x", "content": [{"type": "text", "text": "Nej."}]}
    prompt = one({"system": "S", "messages": [{"role": "user", "content": [document, search]}]}).prompt
    assert prompt.text.startswith(b"\x1eSS\x1eUT  Ja.\x1eu{")
    assert b"Nej." in prompt.text
    assert prompt.media == 0


def test_what_the_provider_keeps_is_known_by_the_api() -> None:
    assert one({"input": "Hej", "previous_response_id": "r"}).incomplete
    assert one({"input": "Hej", "prompt": {"id": "p"}}).incomplete
    assert one({"messages": MESSAGES, "session": "s"}).incomplete
    assert not one({"messages": MESSAGES, "conversation": "c"}).incomplete


def test_breakpoints_lie_behind_what_they_mark() -> None:
    text = one(CLAUDE).prompt.text
    assert one(CLAUDE).prompt.breakpoints == ((text.index(b"\x1eS"), 3600), (text.index(b"\x1eU"), 300))
    assert one(CLAUDE | {"cache_control": {"type": "ephemeral"}}).prompt.breakpoints[-1] == (len(text), 300)
    assert one({"messages": MESSAGES}).prompt.breakpoints is None


def test_digits_are_no_iso_date() -> None:
    assert one({"timestamp": "1712123012345", "body": {"messages": MESSAGES}}).sent_s == pytest.approx(1712123012.345)


@pytest.mark.parametrize("sent", [1700000000.5, 1700000000500, "2023-11-14T22:13:20.500Z", "1700000000.5"])
def test_times_are_seconds_milliseconds_or_iso(sent: Any) -> None:
    assert one({"timestamp": sent, "body": {"messages": MESSAGES}}).sent_s == pytest.approx(1700000000.5)


@pytest.mark.parametrize("sent", [float("nan"), float("inf"), 10**400, "\u00b2", "1" * 500, True, [], ""])
def test_what_is_no_time_is_none(sent: Any) -> None:
    assert one({"messages": MESSAGES, "created": sent}).sent_s is None


def test_several_prompts_in_a_body_are_several_requests() -> None:
    found = list(read_log([json.dumps({"prompt": ["a", "b"], "usage": {"prompt_tokens": 9}}).encode()]))
    assert [(one.line, one.prompt.text, one.usage) for one in found] == [(1, b"a", None), (1, b"b", None)]


def test_malformed_lines_are_named_and_skipped() -> None:
    good = json.dumps({"messages": MESSAGES}).encode()
    no_call = b'{"messages": [{"role": "assistant", "tool_calls": [7]}]}'
    no_messages = [b'{"messages": 7}', b'{"messages": ["x"]}', b'{"other": 1}', b"null", no_call]
    bad = [b"{broken", *no_messages, b"[" * 5000, b'{"prompt": [-1]}', b"plain text"]
    found = list(read_log([good, *bad, b"", good]))
    assert [one.line for one in found] == [*range(1, 11), 12]
    assert [type(one) for one in found] == [LoggedRequest, *[Malformed] * 9, LoggedRequest]
    assert not any("plain" in one.reason for one in found if isinstance(one, Malformed))


def test_marks_inside_texts_are_no_parts() -> None:
    assert one({"messages": [{"role": "user", "content": "a\x1eSb"}]}).prompt.text == b"\x1eUa\x1aSb"
    assert one({"prompt": "\x1eSb"}).prompt.text == b" Sb"


def test_lone_surrogates_are_read() -> None:
    assert one(b'{"messages": [{"role": "user", "content": "\\ud800!"}]}').prompt.text.endswith(b"!")


def test_gzip_is_known_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "log.any"
    path.write_bytes(gzip.compress(b"a\r\nb\n\nc"))
    told: list[int] = []
    assert list(lines_of(str(path), told.append)) == [b"a", b"b", b"", b"c"]
    assert told[-1] == path.stat().st_size


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(gzip.compress(b"a\nb")))))
    assert list(lines_of("-")) == [b"a", b"b"]


def test_a_line_of_any_length_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvire.doctor.reading.lines.LONGEST_LINE_BYTES", 10)
    path = tmp_path / "log"
    path.write_bytes(b'{"a": 1}\n' + b"x" * 35 + b"\n" + b"123456789\nend")
    found = list(lines_of(str(path)))
    assert [found[0], *found[2:]] == [b'{"a": 1}', b"123456789", b"end"]
    assert len(found[1]) < 35


PACKED = gzip.compress(bytes(range(256)) * 20)


@pytest.mark.parametrize(
    "content", [PACKED[:-9], PACKED[:30] + b"\xff" * 99 + PACKED[40:], PACKED[:-6] + b"123456", None]
)
def test_what_cannot_be_read_is_said(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "log.gz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot read"):
        list(lines_of(str(path)))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"\xff\xd8\xff\xe0JFIF", "neither JSON nor UTF-8 text"),
        (b"PK\x03\x04\x00\x00", "neither JSON nor text: it has zero bytes"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_file_that_is_no_text_is_no_prompt(line: bytes, reason: str) -> None:
    assert list(read_log([line])) == [Malformed(1, reason)]


def test_deep_json_inside_a_string_is_named() -> None:
    line = json.dumps({"request_body": "[" * 100_000}).encode()
    [found] = read_log([line])
    assert isinstance(found, Malformed)
