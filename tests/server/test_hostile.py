"""A hundred hostile requests, twenty at a time, beside a client that must not notice."""

import json
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from harness.waiting import AT_ONCE_S, PATIENCE_S
from server.serving import running, tiny_engine, words

MIB = 1024 * 1024
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


class Hostile(NamedTuple):
    kind: str
    path: str
    body: object
    method: str = "POST"


def with_field(kind: str, field: str, *values: object) -> list[Hostile]:
    return [Hostile(kind, CHAT, {"messages": HI, "max_tokens": 1, field: value}) for value in values]


def nested(depth: int, opening: str, closing: str) -> bytes:
    return b'{"messages": ' + opening.encode() * depth + b"1" + closing.encode() * depth + b"}"


def function(**fields: object) -> list[dict]:
    return [{"type": "function", "function": {"name": "f"} | fields}]


def deep_schema(depth: int) -> dict:
    schema: dict = {}
    for _ in range(depth):
        schema = {"a": schema}
    return schema


HOSTILE = [
    # wrong types
    *with_field("type", "temperature", "1", [], {}, True),
    *with_field("type", "max_tokens", "9", 1.5, [1], True),
    *with_field("type", "stop", 1, {"a": 1}, [None], [["x"]]),
    *with_field("type", "logit_bias", [1], {"x": "y"}, "none"),
    *with_field("type", "messages", None, 1, "hi", [[]], [{"role": 1, "content": "x"}]),
    *with_field("type", "messages", [{"role": "user", "content": 5}]),
    Hostile("type", TEXT, {"prompt": {"a": 1}}),
    Hostile("type", TEXT, {"prompt": [["a"]]}),
    Hostile("type", TEXT, {"prompt": [1, "a"]}),
    # numbers that underflow
    *with_field("tiny", "top_p", 1e-46, 5e-324),
    *with_field("tiny", "repetition_penalty", 1e-39, 5e-324),
    # numbers out of any range
    *with_field("huge", "n", 129, 10**6, 10**100),
    *with_field("huge", "max_tokens", 2**31 + 1, 10**18, 10**4000),
    *with_field("huge", "temperature", 1e300, 101, 10**400),
    *with_field("huge", "seed", 2**64, -(2**70)),
    *with_field("huge", "top_logprobs", 10**9),
    *with_field("huge", "top_k", 2**40, 10**4000),
    *with_field("negative", "n", -1, 0),
    *with_field("negative", "max_tokens", -1, 0),
    *with_field("negative", "temperature", -1),
    *with_field("negative", "top_k", -5),
    *with_field("negative", "top_p", -0.5, 0),
    *with_field("negative", "repetition_penalty", -1, 0),
    # not numbers
    *(
        Hostile("nan", CHAT, b'{"messages": [{"role": "user", "content": "x"}], "temperature": ' + value + b"}")
        for value in (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"0x10", b"1_000")
    ),
    # too long, too many
    *with_field("long", "stop", ["x"] * 1000, "s" * 10_000),
    *with_field("long", "logit_bias", {str(i): 1 for i in range(5000)}),
    *with_field("long", "messages", HI * 100_000),
    *with_field("long", "tools", function() * 1000, function(description="d" * MIB)),
    *with_field("long", "user_defined_field_" + "x" * 5000, 1),
    Hostile("long", TEXT, {"prompt": "word " * 300_000}),
    Hostile("long", TEXT, {"prompt": " " * 4_000_000}),
    Hostile("long", TEXT, {"prompt": list(range(200)) * 1000}),
    Hostile("long", TEXT, {"prompt": ["x"] * 10_000}),
    Hostile("long", TEXT, {"prompt": ["x"] * 128, "n": 128}),
    Hostile("long", "/v1/models/" + "m" * 8000, None, "GET"),
    # nesting
    Hostile("deep", CHAT, nested(100, "[", "]")),
    Hostile("deep", CHAT, nested(1_000_000, "[", "]")),
    Hostile("deep", CHAT, nested(500_000, '{"a":', "}")),
    Hostile("deep", CHAT, b"[" * 3_000_000),
    *with_field("deep", "tools", function(parameters=deep_schema(40))),
    # bodies
    Hostile("body", TEXT, b"x" * (9 * MIB)),
    Hostile("body", TEXT, b'{"prompt": "' + b"y" * (9 * MIB) + b'"}'),
    Hostile("body", TEXT, b'{"a": [' + b"[]," * 2_000_000 + b"1]}"),
    Hostile("body", TEXT, b'{"prompt": "' + b'\\"' * 3_000_000),
    Hostile("body", TEXT, b""),
    Hostile("body", TEXT, b"not json"),
    Hostile("body", TEXT, b"\x80\x04\x95K\x00pickle."),
    Hostile("body", TEXT, b'{"prompt": "x", "prompt": 1}'),
    # characters
    Hostile("utf-8", TEXT, b'{"prompt": "\xff\xfe"}'),
    Hostile("utf-8", TEXT, b'{"prompt": "\xc0\xaf"}'),
    Hostile("utf-8", TEXT, b'{"prompt": "\\ud83d"}'),
    Hostile("utf-8", CHAT, b'{"messages": [{"role": "user", "content": "\\udc00\\ud800"}]}'),
    Hostile("utf-8", TEXT, json.dumps({"prompt": "x"}).encode("utf-16")),
    # methods and paths
    Hostile("method", CHAT, None, "GET"),
    Hostile("method", TEXT, b"{}", "PATCH"),
    Hostile("method", "/v1/models", b"{}", "DELETE"),
    Hostile("path", "/v1/../../etc/passwd", None, "GET"),
    Hostile("path", "/%00%ff%2e%2e/", None, "GET"),
    Hostile("path", TEXT + "/", b"{}"),
    # tokens that are none
    *(Hostile("tokens", TEXT, {"prompt": [token]}) for token in (260, 10**6, -1, 2**31, 2**63, -(2**65))),
    *with_field("tokens", "logit_bias", {"99999": 1}, {"-1": 1}, {"999999999999999999": 1}),
    # what the model must not be given
    *with_field("content", "messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]),
    *with_field("content", "chat_template", "{% for i in range(10**9) %}x{% endfor %}"),
    *with_field("content", "chat_template_kwargs", {"tokenize": True}, {"chat_template": "x"}),
]  # fmt: skip


def resident_mib() -> float:
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("needs /proc")
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def test_a_hundred_hostile_requests_beside_a_canary():
    assert len(HOSTILE) >= 100 and len(Counter(one.kind for one in HOSTILE)) >= 10
    with running(tiny_engine()) as served:
        ask = {"prompt": words(1, 100), "max_tokens": 30, "temperature": 0, "ignore_eos": True}
        want = served.post(TEXT, ask).json["choices"][0]["text"]
        served.post(CHAT, {"messages": HI, "max_tokens": 1})
        before_mib, begun, over = resident_mib(), threading.Event(), threading.Event()
        slowest, canaries = 0.0, 0

        def canary() -> None:
            nonlocal slowest, canaries
            begun.set()
            while not (canaries and over.is_set()):
                answer = served.post(TEXT, ask)
                assert answer.status == 200 and answer.json["choices"][0]["text"] == want
                events = served.post(TEXT, ask | {"stream": True}).events
                text = "".join(choice["text"] for event in events[:-1] for choice in event["choices"])
                assert text == want
                slowest, canaries = max(slowest, answer.seconds), canaries + 1

        with ThreadPoolExecutor(21) as pool:
            watching = pool.submit(canary)
            assert begun.wait(PATIENCE_S)
            started = time.monotonic()
            answers = list(pool.map(lambda one: served.request(one.method, one.path, one.body), HOSTILE))
            took = time.monotonic() - started
            over.set()
            watching.result()
        wrong = {}
        for one, answer in zip(HOSTILE, answers, strict=True):
            where = f"{one.kind} {one.method} {one.path[:40]} {str(one.body)[:80]}"
            if not 400 <= answer.status < 500 or answer.seconds >= AT_ONCE_S:
                wrong[where] = (answer.status, round(answer.seconds, 2))
            else:
                assert len(answer.error["message"]) < 500
        assert not wrong
        assert slowest < AT_ONCE_S, f"{canaries} canaries in {took:.1f} s"
        assert resident_mib() - before_mib < 200
        served.wait_until_idle()
        served.engine.pool.check()
        assert served.post(TEXT, ask).json["choices"][0]["text"] == want
