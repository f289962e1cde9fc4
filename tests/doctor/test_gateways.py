"""Bodies as gateways and clouds log them, and files that are not one request a line."""

import json
from typing import Any

import pytest
from doctor.examining import examine
from doctor.made_logs import words
from doctor.test_logs import CHAT_TEXT, MESSAGES, one

from kvire.doctor.reading import lines as lines_module
from kvire.doctor.reading.lines import TOO_LONG, json_values
from kvire.doctor.reading.logs import LoggedRequest, Malformed, read_log
from kvire.doctor.reading.usage import TokenUsage
from kvire.doctor.rules import CacheRules

MARKED = CacheRules(min_tokens=1024, step_tokens=1, ttl_s=300, explicit=True)
POINT = {"cachePoint": {"type": "default"}}
SYSTEM = words(40_000)


def converse(question: str, read: int, written: int) -> dict[str, Any]:
    return {
        "modelId": "anthropic.claude-x",
        "system": [{"text": SYSTEM}, POINT],
        "messages": [{"role": "user", "content": [{"text": question}]}],
        "usage": {
            "inputTokens": 3,
            "cacheReadInputTokens": read,
            "cacheWriteInputTokens": written,
            "outputTokens": 9,
        },
    }


def test_converse_has_its_breakpoint_behind_the_system_prompt() -> None:
    found = one(converse("hi", 0, 12304))
    assert (found.api, found.model) == ("converse", "anthropic.claude-x")
    assert found.usage == TokenUsage(12307, 0, 12304)
    assert found.prompt.text == b"\x1eS" + SYSTEM.encode() + b"\x1eUhi"
    assert found.prompt.breakpoints == ((40_002, 300),)


def test_converse_is_reckoned_as_what_it_was() -> None:
    bodies = converse("hi", 0, 12304), converse("ho", 12304, 0)
    diagnosis = examine([json.dumps(body).encode() for body in bodies], [MARKED])
    assert diagnosis.totals.without_breakpoint == 0
    assert (diagnosis.totals.measured.prompt_tokens, diagnosis.totals.measured.cached_tokens) == (2 * 12307, 12304)
    # The system prompt is 40,002 of 40,006 bytes, so 12,305 of 12,307 tokens.
    assert diagnosis.by_rules[0].cached == 12305


def test_every_block_of_converse() -> None:
    tool = {"toolSpec": {"name": "f", "inputSchema": {"json": {}}}}
    call = {"toolUse": {"toolUseId": "u", "name": "f", "input": {"b": 1}}}
    result = {"toolResult": {"toolUseId": "u", "content": [{"text": "Ja"}, {"json": {"a": 1}}]}}
    thought = {"reasoningContent": {"reasoningText": {"text": "Hm."}}}
    image = {"image": {"format": "png", "source": {"bytes": "AAAA" * 1000}}}
    prompt = one({
        "toolConfig": {"tools": [tool, {"cachePoint": {"type": "default", "ttl": "1h"}}], "toolChoice": {"auto": {}}},
        "messages": [
            {"role": "user", "content": [{"text": "Hej"}, image]},
            {"role": "assistant", "content": [thought, call]},
            {"role": "user", "content": [result, POINT]},
        ],
    }).prompt  # fmt: skip
    assert prompt.media == 1
    assert prompt.text.startswith(
        b'\x1eT{"name":"f","inputSchema":{"json":{}}}\x1eP{"tool_choice":{"auto":{}}}\x1eUHej\x1eiimage '
    )
    assert prompt.text.endswith(b'\x1eRHm.\x1eCu f {"b":1}\x1eOu: Ja{"json":{"a":1}}')
    assert prompt.breakpoints == ((prompt.text.index(b"\x1eP"), 3600), (len(prompt.text), 300))


def test_the_log_that_bedrock_writes() -> None:
    body = converse("hi", 0, 0) | {"usage": None}
    record = {
        "schemaType": "ModelInvocationLog",
        "timestamp": "2026-09-10T08:00:00Z",
        "modelId": "anthropic.claude-x",
        "input": {"inputBodyJson": body, "inputTokenCount": 3, "cacheWriteInputTokenCount": 12304},
        "output": {"outputBodyJson": {"usage": {"inputTokens": 3, "cacheWriteInputTokens": 12304}}},
    }
    found = one(record)
    assert (found.api, found.model, found.usage) == ("converse", "anthropic.claude-x", TokenUsage(12307, 0, 12304))


def test_gemini() -> None:
    body = {
        "systemInstruction": {"parts": [{"text": "Be kind."}]},
        "tools": [{"functionDeclarations": [{"name": "f"}]}],
        "contents": [
            {"role": "user", "parts": [{"text": "Hej"}, {"inlineData": {"mimeType": "image/png", "data": "AAAA"}}]},
            {"role": "model", "parts": [{"text": "Hm.", "thought": True}, {"functionCall": {"name": "f", "args": {}}}]},
            {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"a": 1}}}]},
        ],
    }
    url = "https://generativelanguage.googleapis.com/v1beta/models/gemini-2.5-pro:generateContent"
    answer = {"usageMetadata": {"promptTokenCount": 100, "cachedContentTokenCount": 60}}
    found = one({"url": url, "request": body, "response": answer})
    assert (found.api, found.model, found.usage) == ("gemini", "gemini-2.5-pro", TokenUsage(100, 60))
    assert found.prompt.text.startswith(b'\x1eT{"name":"f"}\x1eSBe kind.\x1eUHej\x1eifile ')
    assert found.prompt.text.endswith(b'\x1eRHm.\x1eC f {}\x1eO{"name":"f","response":{"a":1}}')
    assert found.prompt.media == 1
    snake = {"system_instruction": {"parts": [{"text": "Be kind."}]}, "contents": [{"parts": [{"text": "Hej"}]}]}
    assert one(snake).prompt.text == CHAT_TEXT
    assert one(body | {"cachedContent": "cachedContents/c"}).incomplete


def test_rows_of_spending_hold_messages_as_text() -> None:
    row = {
        "request_id": "r1",
        "call_type": "acompletion",
        "model": "m",
        "startTime": "2026-09-10T08:00:00Z",
        "messages": json.dumps(MESSAGES),
        "response": json.dumps({"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}}),
    }
    found = one(row)
    assert (found.api, found.prompt.text, found.usage) == ("chat", CHAT_TEXT, TokenUsage(9, 4))
    assert found.sent_s == 1789027200
    body = json.dumps({"model": "m", "messages": MESSAGES})
    assert one(row | {"messages": "{}", "proxy_server_request": body}).prompt.text == CHAT_TEXT
    (broken,) = read_log([json.dumps(row | {"messages": "[{"}).encode()])
    assert isinstance(broken, Malformed) and broken.reason == "messages is no JSON"


def test_tools_that_a_callback_keeps_apart_belong_to_the_prompt() -> None:
    row = {"messages": MESSAGES, "model_parameters": {"tools": [{"name": "t"}], "temperature": 0}}
    assert one(row).prompt.text == b'\x1eT{"name":"t"}' + CHAT_TEXT


REQUESTS = [{"model": "m", "messages": MESSAGES}, {"prompt": 'a "quoted" [ bracket \\'}, {"body": {"prompt": "c"}}]
SPREAD = {
    "one line": json.dumps(REQUESTS),
    "indented": json.dumps(REQUESTS, indent=2),
    "a request a line": "[\n" + ",\n".join(map(json.dumps, REQUESTS)) + "\n]\n",
    "begun on the first line": "[" + ",\n".join(map(json.dumps, REQUESTS)) + "]",
    "objects one after another": "\n".join(json.dumps(request, indent=2) for request in REQUESTS),
}


@pytest.mark.parametrize("form", SPREAD)
def test_a_file_may_be_one_array_of_requests(form: str) -> None:
    found = list(read_log(SPREAD[form].encode().split(b"\n")))
    assert all(isinstance(one, LoggedRequest) for one in found), found
    assert [(one.line, one.prompt.text) for one in found if isinstance(one, LoggedRequest)] == [
        (1, CHAT_TEXT), (2, b'a "quoted" [ bracket \\'), (3, b"c")
    ]  # fmt: skip


def test_a_list_of_messages_is_one_prompt_and_text_in_brackets_is_text() -> None:
    assert one(MESSAGES).prompt.text == CHAT_TEXT
    assert one(b"[INST] {Hej} [/INST]").prompt.text == b"[INST] {Hej} [/INST]"
    each = [json.dumps([request]).encode() for request in REQUESTS]
    assert [found.line for found in read_log(each)] == [1, 2, 3]


def test_an_array_that_breaks_off_gives_what_is_whole() -> None:
    cut = json.dumps(REQUESTS, indent=2)[:-40].encode().split(b"\n")
    found = list(read_log(cut))
    assert [type(one) for one in found] == [LoggedRequest, LoggedRequest, Malformed]
    assert "never ends" in found[-1].reason


def test_a_value_that_never_ends_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "LONGEST_LINE_BYTES", 1000)
    read = []

    def endless() -> Any:
        yield b"["
        for number in range(10_000):
            read.append(number)
            yield b'{"a": ['

    assert list(json_values(endless(), in_array=True)) == [TOO_LONG]
    assert len(read) < 200
