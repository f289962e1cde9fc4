"""Completions: prompts of every kind, echo, logprobs, and what the cache reports."""

import math

import pytest
from server.serving import BLOCK, running, text_of, tiny_engine, words

GREEDY = {"temperature": 0, "ignore_eos": True}


def complete(served, **body):
    answer = served.post("/v1/completions", GREEDY | body)
    assert answer.status == 200, answer.data
    return answer.json


def test_prompts_of_every_kind(shared):
    one, two = words(1, 20), words(2, 33)
    want = [shared.direct(ids, temperature=0, max_tokens=6, ignore_eos=True)[0] for ids in (one, two)]
    for prompt in (text_of(one), one, [text_of(one)], [one]):
        answer = complete(shared, prompt=prompt, max_tokens=6)
        assert answer["object"] == "text_completion"
        assert [choice["text"] for choice in answer["choices"]] == want[:1]
    for prompt in ([text_of(one), text_of(two)], [one, two], [one, text_of(two)]):
        answer = complete(shared, prompt=prompt, max_tokens=6)
        assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == list(enumerate(want))
        assert answer["usage"]["prompt_tokens"] == 53 and answer["usage"]["completion_tokens"] == 12
        assert len(answer["kvire"]["prompts"]) == 2
        assert answer["kvire"]["cache"]["prompt_tokens"] == 53


def test_choices_are_numbered_prompt_by_prompt(shared):
    prompts = [words(3, 20), words(4, 20)]
    sampled = {"temperature": 1, "seed": 3, "max_tokens": 8, "n": 3}
    together = complete(shared, prompt=prompts, **sampled)["choices"]
    alone = [complete(shared, prompt=prompt, **sampled)["choices"] for prompt in prompts]
    assert [choice["index"] for choice in together] == list(range(6))
    assert [choice["text"] for choice in together] == [choice["text"] for choices in alone for choice in choices]
    assert len({choice["text"] for choice in together}) == 6


def test_max_tokens_is_16_by_default_as_in_the_openai_api(shared):
    assert complete(shared, prompt="abc")["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_echo(shared, stream):
    plain = complete(shared, prompt="Grüße, world", max_tokens=4)["choices"][0]["text"]
    body = GREEDY | {"prompt": "Grüße, world", "max_tokens": 4, "echo": True, "stream": stream}
    answer = shared.post("/v1/completions", body)
    if stream:
        text = "".join(choice["text"] for event in answer.events[:-1] for choice in event["choices"])
    else:
        text = answer.json["choices"][0]["text"]
    assert text == "Grüße, world" + plain
    ids = list("Grüße, world".encode())
    assert complete(shared, prompt=ids, max_tokens=4, echo=True)["choices"][0]["text"] == text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_every_sample_echoes_the_scored_prompt(shared, stream):
    body = GREEDY | {"prompt": ["one prompt", "and another"], "max_tokens": 4, "echo": True, "logprobs": 2}
    alone = shared.post("/v1/completions", body).json["choices"]
    answer = shared.post("/v1/completions", body | {"n": 3, "stream": stream})
    assert answer.status == 200
    told = [choice for event in (answer.events[:-1] if stream else [answer.json]) for choice in event["choices"]]
    for i in range(6):
        pieces = [choice["logprobs"] for choice in told if choice["index"] == i and choice["logprobs"]]
        tokens = [token for piece in pieces for token in piece["tokens"]]
        assert tokens == alone[i // 3]["logprobs"]["tokens"]


def test_echo_without_new_tokens_scores_or_warms_a_prompt(fresh):
    prompt = words(5, 50)
    answer = complete(fresh, prompt=prompt, max_tokens=0, echo=True)
    assert answer["choices"][0]["text"] == text_of(prompt)
    assert answer["choices"][0]["finish_reason"] == "length" and answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 0
    again = complete(fresh, prompt=prompt, max_tokens=1)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 49
    refused = fresh.post("/v1/completions", {"prompt": "x", "max_tokens": 0})
    assert refused.status == 400 and refused.error["param"] == "max_tokens"


@pytest.mark.parametrize("length", [10, BLOCK, 7 * BLOCK + 5, 2000])
def test_s37_prompt_logprobs_are_right_on_a_cached_prompt(fresh, length):
    prompt = words(60 + length, length)
    complete(fresh, prompt=prompt, max_tokens=1)  # now it is cached
    for max_tokens in (0, 5):
        first, second = (
            complete(fresh, prompt=prompt, max_tokens=max_tokens, echo=True, logprobs=1)["choices"][0]["logprobs"]
            for _ in range(2)
        )
        assert len(first["tokens"]) == len(first["top_logprobs"]) == len(first["text_offset"]) == length + max_tokens
        assert first["token_logprobs"][0] is None and second["token_logprobs"][0] is None
        assert second["token_logprobs"][1:] == pytest.approx(first["token_logprobs"][1:], abs=1e-4)
        assert first["tokens"][:length] == [chr(token) for token in prompt]
        assert first["text_offset"][:length] == list(range(length))
    with running(tiny_engine(prefix_cache=False)) as cold:
        body = {"prompt": prompt, "max_tokens": 5, "echo": True, "logprobs": 1}
        want = complete(cold, **body)["choices"][0]["logprobs"]["token_logprobs"]
    assert second["token_logprobs"][1:] == pytest.approx(want[1:], abs=1e-4)


def test_logprobs_of_the_answer(shared):
    prompt = words(7, 40)
    answer = complete(shared, prompt=prompt, max_tokens=6, logprobs=3)
    logprobs = answer["choices"][0]["logprobs"]
    assert {len(values) for values in logprobs.values()} == {6}
    for chosen, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert len(top) == 3, "greedy: the chosen one is among the likeliest"
        assert chosen == max(top.values())
        assert sum(math.exp(p) for p in top.values()) <= 1.0001
    echoed = complete(shared, prompt=prompt, max_tokens=6, logprobs=3, echo=True)["choices"][0]["logprobs"]
    assert echoed["tokens"][40:] == logprobs["tokens"]
    assert echoed["token_logprobs"][40:] == pytest.approx(logprobs["token_logprobs"], abs=1e-4)
    events = shared.post("/v1/completions", GREEDY | {"prompt": prompt, "max_tokens": 6, "logprobs": 3, "stream": True})
    pieces = [choice["logprobs"] for event in events.events[:-1] for choice in event["choices"] if choice["logprobs"]]
    assert [token for piece in pieces for token in piece["tokens"]] == logprobs["tokens"]
    assert [offset for piece in pieces for offset in piece["text_offset"]] == logprobs["text_offset"]


def test_logprobs_zero_reports_the_chosen_token_only(shared):
    logprobs = complete(shared, prompt="abc", max_tokens=3, logprobs=0)["choices"][0]["logprobs"]
    assert [list(top) for top in logprobs["top_logprobs"]] == [[token] for token in logprobs["tokens"]]


def test_tokens_that_are_part_of_a_character_are_shown_as_bytes(scripted):
    scripted.say("é한")
    answer = complete(scripted.served, prompt="x", max_tokens=5, logprobs=0)["choices"][0]
    assert answer["text"] == "é한"
    assert answer["logprobs"]["tokens"] == [f"bytes:\\x{byte:02x}" for byte in "é한".encode()]
    assert answer["logprobs"]["text_offset"] == [0, 0, 1, 1, 1]
    scripted.say("é한")
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "logprobs": True, "temperature": 0}
    content = scripted.served.post("/v1/chat/completions", chat).json["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "é한"


def test_s02_a_wholly_cached_prompt_of_any_length():
    """Lengths around block borders, three times each, then continued: right answers, all but the last token reused."""
    lengths = [1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1]
    with running(tiny_engine()) as served, running(tiny_engine(prefix_cache=False)) as oracle:
        for length in lengths:
            prompt = words(300 + length, length)
            longer = prompt + words(400 + length, 3 * BLOCK)
            want = oracle.direct(prompt, temperature=0, max_tokens=5, ignore_eos=True)[0]
            answers = [complete(served, prompt=prompt, max_tokens=5) for _ in range(3)]
            assert [answer["choices"][0]["text"] for answer in answers] == [want] * 3
            cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
            most = length - 1
            assert cached == [0, most, most], length
            extended = complete(served, prompt=longer, max_tokens=5)
            assert (
                extended["choices"][0]["text"] == oracle.direct(longer, temperature=0, max_tokens=5, ignore_eos=True)[0]
            )
            assert extended["usage"]["prompt_tokens_details"]["cached_tokens"] == length


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, None),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"prompt": ["x"] * 129}, "prompt"),
        ({"prompt": ["x"] * 64, "n": 3}, "n"),
        ({"prompt": [300]}, None),
        ({"prompt": [-1]}, None),
        ({"prompt": [2**70]}, None),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "logprobs": -1}, "logprobs"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "messages": []}, "messages"),
        ({}, "prompt"),
    ],
)
def test_refused(shared, body, param):
    answer = shared.post("/v1/completions", body)
    assert answer.status == 400
    assert answer.error["param"] == param
