"""Server-sent events: form, stop strings, split characters, preemption."""

import random
from functools import partial

import pytest
from server.serving import SLOW_STEP_S, running, tiny_engine, words


def streamed(served, path="/v1/completions", **body):
    """(text, finish reason, pieces) of one streamed choice."""
    answer = served.post(path, {"temperature": 0, "stream": True} | body)
    assert answer.status == 200, answer.data
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done = answer.events
    assert done == "[DONE]"
    choices = [choice for event in events for choice in event["choices"]]
    pieces = [choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices]
    finish = [choice["finish_reason"] for choice in choices]
    assert set(finish[:-1]) <= {None} and finish[-1] is not None, "one finish reason, at the end"
    return "".join(pieces), finish[-1], pieces


def whole(served, **body):
    choice = served.post("/v1/completions", {"temperature": 0} | body).json["choices"][0]
    return choice["text"], choice["finish_reason"]


def test_every_chunk_of_a_stream_has_the_same_id_and_shape(shared):
    events = shared.post("/v1/completions", {"prompt": "abc", "stream": True, "n": 3, "ignore_eos": True}).events
    assert len({event["id"] for event in events[:-1]}) == 1
    assert {event["object"] for event in events[:-1]} == {"text_completion"}
    assert {len(event["choices"]) for event in events[:-1]} == {1}


def test_tokens_arrive_while_the_rest_is_computed(scripted):
    """The first event does not wait for the last token."""
    scripted.say("x" * 1500)
    scripted.model.delay_s = SLOW_STEP_S
    try:
        chunks = scripted.served.openai().completions.create(
            model="tiny", prompt="a", max_tokens=1500, temperature=0, stream=True
        )
        next(iter(chunks))
        assert len(scripted.served.engine.scheduler.running) == 1
        chunks.close()
        scripted.served.wait_until_idle()
    finally:
        scripted.model.delay_s = 0.0


def test_s41_no_character_of_a_stop_string_is_ever_shown(scripted):
    text = "DEFGHIJKLMNOPQRSTUVWXYZ"
    scripted.say(text)
    assert streamed(scripted.served, prompt="ABC", stop="DEFGHIJ", max_tokens=30)[:2] == ("", "stop")
    for length in range(1, 13):
        for at in (0, 3, 13 - length, len(text) - length):
            stop = text[at : at + length]
            for stops in (stop, ["never", stop, "XYZ!"]):
                scripted.say(text)
                assert whole(scripted.served, prompt="ABC", stop=stops, max_tokens=30) == (text[:at], "stop")
                scripted.say(text)
                shown, finish, pieces = streamed(scripted.served, prompt="ABC", stop=stops, max_tokens=30)
                assert (shown, finish) == (text[:at], "stop")
                assert len(pieces) >= at - 2, "streamed token by token, as far as certain"


def test_s41_a_stop_string_that_only_begins_is_shown_in_the_end(scripted):
    scripted.say("abcdefSTO")
    assert streamed(scripted.served, prompt="x", stop="STOP", max_tokens=30)[:2] == ("abcdefSTO", "stop")
    scripted.say("abcdefSTO")
    assert streamed(scripted.served, prompt="x", stop="STOP", max_tokens=9)[:2] == ("abcdefSTO", "length")


def test_s41_stops_after_a_cached_prefix(scripted):
    prompt = "p" * 64
    for _ in range(2):
        scripted.say("one two three")
        assert streamed(scripted.served, prompt=prompt, stop=[" t"], max_tokens=30)[:2] == ("one", "stop")


SCRIPTS = {
    "korean": "안녕하세요, 세계! 다람쥐 헌 쳇바퀴에 타고파",
    "thai": "สวัสดีชาวโลก ก็ผู้ใหญ่น้ำ",
    "family": "👨‍👩‍👧‍👦 and 👩🏽‍🚀 at 🏳️‍🌈",
    "flags": "🇰🇷🇹🇭🇪🇺🏴󠁧󠁢󠁳󠁣󠁴󠁿",
    "combining": "e\u0301a\u0308o\u0302 Z̷̢̛a̸l̵g̶o̴",
    "separators": "line\nline\r\nline\u2028line\u0085end\0end",
}


@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS)
def test_s42_characters_split_over_tokens_arrive_whole(scripted, text):
    size = len(text.encode())
    for path, prompt in (
        ("/v1/completions", {"prompt": "say it"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "say it"}]}),
    ):
        scripted.say(text)
        shown, finish, pieces = streamed(scripted.served, path, max_tokens=size + 1, **prompt)
        assert (shown, finish) == (text, "stop")
        assert len(pieces) > len(text) / 2, "not saved up"


@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS)
def test_s42_cut_at_every_byte_the_stream_equals_decoding_all_ids(scripted, text):
    data = text.encode()
    for cut in random.Random(1).sample(range(1, len(data)), min(10, len(data) - 1)):
        scripted.say(text)
        shown, finish, _ = streamed(scripted.served, prompt="x", max_tokens=cut)
        assert (shown, finish) == (scripted.served.engine.tokenizer.decode(list(data[:cut])), "length")
        scripted.say(text)
        assert whole(scripted.served, prompt="x", max_tokens=cut) == (shown, finish)


def test_s42_leaving_in_the_middle_of_a_character_hurts_nobody(scripted):
    scripted.say("한국어" * 200)
    scripted.model.delay_s = SLOW_STEP_S
    try:
        chunks = scripted.served.openai().completions.create(
            model="tiny", prompt="x", max_tokens=1800, temperature=0, stream=True
        )
        assert next(iter(chunks)).choices[0].text == "한"
        chunks.close()
        scripted.served.wait_until_idle()
    finally:
        scripted.model.delay_s = 0.0
    scripted.say("어")
    assert streamed(scripted.served, prompt="x", max_tokens=100)[0] == "어"


PREEMPTED = [
    {"prompt": words(1, 40), "max_tokens": 100, "seed": 3, "temperature": 1.0},
    {"prompt": words(2, 40), "max_tokens": 100, "seed": 4, "temperature": 0.8, "presence_penalty": 1.0},
    {"prompt": words(3, 30), "max_tokens": 90, "temperature": 0, "frequency_penalty": 0.7, "stop": ["\x00\x01\x02"]},
]


@pytest.mark.parametrize("pair", [(0, 1), (1, 2), (0, 2)])
def test_s30_preempted_answers_are_complete_streamed_or_not(pair):
    """10 blocks for two answers that need 9 each: the younger gives way, and nothing is lost or sent twice."""
    bodies = [PREEMPTED[i] | {"ignore_eos": True} for i in pair]
    with running(tiny_engine(prefix_cache=False)) as alone:
        want = [whole(alone, **body)[0] for body in bodies]
    with running(tiny_engine(blocks=10, max_batch_tokens=32)) as tiny:
        results = tiny.together(*(partial(whole, tiny, **body) for body in bodies))
        assert tiny.engine.scheduler.preemptions > 0
        assert [text for text, _ in results] == want
        before = tiny.engine.scheduler.preemptions
        results = tiny.together(*(partial(streamed, tiny, **body) for body in bodies))
        assert tiny.engine.scheduler.preemptions > before
        assert [text for text, _, _ in results] == want
        tiny.wait_until_idle()
        tiny.engine.pool.check()
