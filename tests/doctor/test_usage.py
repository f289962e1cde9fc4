"""What was counted of a prompt, as each API and gateway writes it; and records that count without a prompt."""

import json
from pathlib import Path
from typing import Any

import pytest
from doctor.examining import OFFERS, examine
from doctor.test_logs import MESSAGES, one
from typer.testing import CliRunner

from kvire.cli.main import cli
from kvire.doctor.diagnose import Doctor
from kvire.doctor.reading import usage as usage_module
from kvire.doctor.reading.logs import LoggedUsage, Malformed, read_log
from kvire.doctor.reading.usage import FORMS, TokenUsage, UsageForm, read_usage
from kvire.doctor.tokens import Estimate
from kvire.doctor.values import diagnosis_values

# One prompt of 10,000 tokens, of which 6,600 were read from a cache and 3,200 written.
OF_A_CLAUDE = {
    "LiteLLM": {
        "prompt_tokens": 10000,
        "prompt_tokens_details": {"cached_tokens": 6600},
        "cache_read_input_tokens": 6600,
        "cache_creation_input_tokens": 3200,
    },
    "LiteLLM, details empty": {
        "prompt_tokens": 10000,
        "prompt_tokens_details": {"cached_tokens": None},
        "cache_read_input_tokens": 6600,
        "cache_creation_input_tokens": 3200,
    },
    "LiteLLM, cached tokens beside": {
        "prompt_tokens": 10000,
        "cached_tokens": 6600,
        "cache_read_input_tokens": 6600,
        "cache_creation_input_tokens": 3200,
    },
    "pydantic-ai": {"input_tokens": 10000, "cache_read_tokens": 6600, "cache_write_tokens": 3200},
    "LangChain": {"input_tokens": 10000, "input_token_details": {"cache_read": 6600, "cache_creation": 3200}},
    "LangChain of Bedrock": {
        "input_tokens": 200,
        "output_tokens": 9,
        "total_tokens": 10009,
        "input_token_details": {"cache_read": 6600, "cache_creation": 3200},
    },
    "Anthropic": {"input_tokens": 200, "cache_read_input_tokens": 6600, "cache_creation_input_tokens": 3200},
    "Bedrock Converse": {"inputTokens": 200, "cacheReadInputTokens": 6600, "cacheWriteInputTokens": 3200},
    "Bedrock's log": {
        "inputTokenCount": 200, "cacheReadInputTokenCount": 6600, "cacheWriteInputTokenCount": 3200
    },
    "OpenRouter": {
        "prompt_tokens": 10000,
        "prompt_tokens_details": {"cached_tokens": 6600, "cache_write_tokens": 3200},
    },
    "AI SDK 6": {
        "inputTokens": 10000,
        "inputTokenDetails": {"noCacheTokens": 200, "cacheReadTokens": 6600, "cacheWriteTokens": 3200},
        "cachedInputTokens": 6600,
    },
    "AI SDK 6, a provider": {"inputTokens": {"total": 10000, "noCache": 200, "cacheRead": 6600, "cacheWrite": 3200}},
    "Langfuse": {"input": 200, "cache_read_input_tokens": 6600, "cache_creation_input_tokens": 3200, "output": 9},
    "Inspect": {"input_tokens": 200, "input_tokens_cache_read": 6600, "input_tokens_cache_write": 3200},
}  # fmt: skip
# The same where the API does not count what was written.
OF_OTHERS = {
    "OpenAI chat": {"prompt_tokens": 10000, "prompt_tokens_details": {"cached_tokens": 6600}},
    "OpenAI responses": {"input_tokens": 10000, "input_tokens_details": {"cached_tokens": 6600}},
    "OpenAI realtime": {"input_tokens": 10000, "input_token_details": {"cached_tokens": 6600}},
    "Gemini": {"promptTokenCount": 10000, "cachedContentTokenCount": 6600, "totalTokenCount": 10009},
    "Gemini's Python client": {"prompt_token_count": 10000, "cached_content_token_count": 6600},
    "DeepSeek": {"prompt_tokens": 10000, "prompt_cache_hit_tokens": 6600, "prompt_cache_miss_tokens": 3400},
    "Moonshot": {"prompt_tokens": 10000, "cached_tokens": 6600},
    "AI SDK 5": {"inputTokens": 10000, "outputTokens": 9, "totalTokens": 10009, "cachedInputTokens": 6600},
    "Codex": {"input_tokens": 10000, "cached_input_tokens": 6600, "output_tokens": 9, "total_tokens": 10009},
    "OpenRouter's generation": {"tokens_prompt": 9900, "native_tokens_prompt": 10000, "native_tokens_cached": 6600},
    "llama.cpp": {"prompt_n": 3400, "cache_n": 6600},
    "AI SDK 5, of a Claude": {"inputTokens": 3400, "cachedInputTokens": 6600},
}


@pytest.mark.parametrize("who", OF_A_CLAUDE)
def test_what_was_written_is_counted_once(who: str) -> None:
    assert read_usage(OF_A_CLAUDE[who]) == TokenUsage(10000, 6600, 3200)


@pytest.mark.parametrize("who", OF_OTHERS)
def test_what_was_read_is_counted_once(who: str) -> None:
    assert read_usage(OF_OTHERS[who]) == TokenUsage(10000, 6600, 0)


@pytest.mark.parametrize(
    ("record", "usage"),
    [
        ({"prompt_tokens": 9, "prompt_tokens_details": None}, TokenUsage(9, None)),
        ({"input_tokens": 9, "cache_read_input_tokens": None}, TokenUsage(9, None)),
        ({"input_tokens": 3, "cache_creation_input_tokens": 12304}, TokenUsage(12307, 0, 12304)),
        ({"prompt_tokens": True}, None),
        ({"prompt_tokens": -1}, None),
        ({"prompt_tokens": "9"}, None),
        ({}, None),
        ([], None),
    ],
)
def test_what_a_record_does_not_say_is_not_made_up(record: Any, usage: TokenUsage | None) -> None:
    assert read_usage(record) == usage


@pytest.mark.parametrize(
    "place",
    [
        lambda usage: {"usage": usage},
        lambda usage: {"usage_metadata": usage},
        lambda usage: {"usageMetadata": usage},
        lambda usage: {"usageDetails": usage},
        lambda usage: {"metadata": json.dumps({"usage_object": usage})},
        lambda usage: {"response": {"body": {"usage": usage}}},
        lambda usage: {"response": json.dumps({"usage": usage})},
        lambda usage: {"response": {"kwargs": {"usage_metadata": usage}}},
        lambda usage: {"response": {"llm_output": {"token_usage": usage}}},
        lambda usage: {"output": {"outputBodyJson": {"usage": usage}}},
        lambda usage: {"usage": {"prompt_tokens": 10000}, "response": {"usage": usage}},
        lambda usage: usage,
    ],
)
def test_usage_is_found_where_logs_put_it(place: Any) -> None:
    assert one({"messages": MESSAGES} | place(OF_A_CLAUDE["LiteLLM"])).usage == TokenUsage(10000, 6600, 3200)


def test_a_new_form_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_module, "FORMS", (*FORMS, UsageForm("toy_prompt", ("toy.hit",), apart=True)))
    assert read_usage({"toy_prompt": 1, "toy": {"hit": 2}}) == TokenUsage(3, 2)


@pytest.mark.parametrize("row", [i for i, form in enumerate(FORMS) if form.prompt == "input_tokens"][:-2])
def test_a_table_that_reads_gateways_as_anthropic_is_noticed(monkeypatch: pytest.MonkeyPatch, row: int) -> None:
    monkeypatch.setattr(usage_module, "FORMS", (*FORMS[:row], FORMS[row]._replace(apart=True), *FORMS[row + 1 :]))
    read = {who: read_usage(record) for who, record in (OF_A_CLAUDE | OF_OTHERS).items()}
    assert any(usage is None or usage.prompt_tokens != 10000 for usage in read.values())


def claude_code(answer: str, output_tokens: int, content: str) -> dict[str, Any]:
    usage = {
        "input_tokens": 2,
        "cache_read_input_tokens": 90000,
        "cache_creation_input_tokens": 1000,
        "output_tokens": output_tokens,
    }
    message = {"id": answer, "model": "claude-opus-5", "role": "assistant", "content": [{"type": content}]}
    return {
        "type": "assistant",
        "sessionId": "s",
        "requestId": f"r{answer}",
        "timestamp": "2026-09-10T08:00:00Z",
        "message": message | {"usage": usage},
    }


USER = {"type": "user", "sessionId": "s", "message": {"role": "user", "content": "Go on."}}
TRANSCRIPT = [
    {"type": "summary", "summary": "What was done", "leafUuid": "u"},
    USER,
    claude_code("m1", 1, "thinking"),
    claude_code("m1", 40, "text"),
    claude_code("m1", 90, "tool_use"),
    USER,
    claude_code("m2", 5, "text"),
]


def counts(input_tokens: int, cached: int) -> dict[str, int]:
    return {"input_tokens": input_tokens, "cached_input_tokens": cached, "output_tokens": 5}


def codex(session: str, *told: tuple[dict[str, int], dict[str, int]]) -> list[dict[str, Any]]:
    return [
        {"timestamp": "2026-09-10T08:00:00Z", "type": "session_meta", "payload": {"id": session}},
        {"timestamp": "2026-09-10T08:00:01Z", "type": "event_msg", "payload": {"type": "token_count", "info": None}},
        *(
            {"timestamp": "2026-09-10T08:00:02Z", "type": "event_msg", "payload": {
                "type": "token_count", "info": {"total_token_usage": total, "last_token_usage": last}}}
            for total, last in told
        ),
    ]  # fmt: skip


def as_json(values: list[dict[str, Any]]) -> list[bytes]:
    return [json.dumps(value).encode() for value in values]


def test_a_transcript_counts_each_answer_once() -> None:
    found = list(read_log(as_json(TRANSCRIPT)))
    assert [(one.line, one.answer) for one in found if isinstance(one, LoggedUsage)] == [
        (3, "m1"), (4, "m1"), (5, "m1"), (7, "m2")
    ]  # fmt: skip
    assert not any(isinstance(one, Malformed) for one in found)
    values = diagnosis_values(examine(as_json(TRANSCRIPT)), OFFERS)
    assert values["requests"] == values["malformed"]["lines"] == 0
    assert values["without_prompt"] == {
        "requests": 2,
        "prompt_tokens": 182_004,
        "cached_tokens": 180_000,
        "written_tokens": 2000,
        "share": 180_000 / 182_004,
    }


def test_an_answer_that_several_files_tell_counts_once() -> None:
    """A session that goes on from another begins with its lines."""
    doctor = Doctor([], Estimate())
    for name in ("first", "second"):
        doctor.examine(read_log(as_json(TRANSCRIPT)), name)
    assert doctor.diagnosis().totals.without_prompt.requests == 2


def test_codex_tells_its_counts_again_and_they_count_once() -> None:
    first, second = (counts(1000, 0), counts(1000, 0)), (counts(3000, 900), counts(2000, 900))
    lines = as_json(codex("a", first, first, second, second))
    totals = examine(lines).totals.without_prompt
    assert (totals.requests, totals.prompt_tokens, totals.cached_tokens) == (2, 3000, 900)
    # Another session with the same counts in its first answer is another request; what it replays is not.
    totals = examine([*lines, *as_json(codex("b", first, second))]).totals.without_prompt
    assert (totals.requests, totals.prompt_tokens) == (3, 4000)


def test_counting_lines_of_a_transcript_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken build: each line has a name of its own."""
    monkeypatch.setattr(
        "kvire.doctor.reading.logs.LoggedUsage", lambda line, _, usage: LoggedUsage(line, str(line), usage)
    )
    assert examine(as_json(TRANSCRIPT)).totals.without_prompt.prompt_tokens == 364_008


def test_a_transcript_says_what_to_log_instead(tmp_path: Path) -> None:
    log, page = tmp_path / "transcript.jsonl", tmp_path / "page.html"
    log.write_bytes(b"\n".join(as_json(TRANSCRIPT)))
    done = CliRunner().invoke(cli, ["doctor", str(log), "--html", str(page)], catch_exceptions=False)
    said = " ".join(done.stdout.split())
    assert "No prompt is in the log. Counted without their prompts: 2 requests of 182,004 tokens, 180,000" in said
    assert "log whole requests, at a proxy or in the gateway" in said
    assert "182,004" in page.read_text()


def test_rows_of_spending_without_prompts_are_counted() -> None:
    row = {
        "request_id": "r1",
        "call_type": "acompletion",
        "messages": "{}",
        "proxy_server_request": "{}",
        "prompt_tokens": 10000,
        "metadata": {"usage_object": OF_A_CLAUDE["LiteLLM"]},
    }
    (found,) = read_log(as_json([row]))
    assert found == LoggedUsage(1, "r1", TokenUsage(10000, 6600, 3200))
    (bare,) = read_log(as_json([row | {"metadata": {}}]))
    assert isinstance(bare, Malformed)  # without cached tokens there is nothing to tell
