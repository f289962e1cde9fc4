"""Chats through the real OpenAI client: what is answered, counted and refused."""

import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from server.serving import BLOCK, SPECIAL, byte_tokenizer, running, text_of, tiny_engine, words

GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def chat_ids(messages, tools=None) -> list[int]:
    tokenizer = byte_tokenizer()
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_answer_is_the_engines_and_is_counted_in_openai_s_words(shared):
    messages = user("What is in a block? " + text_of(words(1, 60)))
    want, ids = shared.direct(chat_ids(messages), temperature=0, max_tokens=12, ignore_eos=True)
    answer = shared.openai().chat.completions.create(messages=messages, **GREEDY)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == "tiny"
    assert answer.choices[0].message.content == want
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == len(ids) == 12
    assert answer.usage.prompt_tokens == len(chat_ids(messages))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_system_prompt_and_parts_of_text_reach_the_model(shared):
    parts = [{"role": "system", "content": "Be brief."}]
    parts.append({"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]})
    joined = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one two"}]
    client = shared.openai()
    answers = [client.chat.completions.create(messages=m, **GREEDY).choices[0].message.content for m in (parts, joined)]
    assert answers[0] == answers[1]
    without = client.chat.completions.create(messages=joined[1:], **GREEDY).choices[0].message.content
    assert without != answers[0]


def test_stream_equals_the_whole_answer(shared):
    messages = user(text_of(words(2, 50)))
    client = shared.openai()
    whole = client.chat.completions.create(messages=messages, n=2, seed=1, **(GREEDY | {"temperature": 1}))
    texts, finish, roles = ["", ""], [None, None], [[], []]
    for chunk in client.chat.completions.create(
        messages=messages, n=2, seed=1, stream=True, **(GREEDY | {"temperature": 1})
    ):
        assert chunk.object == "chat.completion.chunk"
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index].append(choice.delta.role)
            finish[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert texts[0] != texts[1], "two samples differ"
    assert finish == ["length", "length"]
    assert all(role[0] == "assistant" and set(role[1:]) <= {None} for role in roles)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_s39_cached_tokens_is_the_integer_0_on_a_miss_and_never_the_whole_prompt(fresh, endpoint, stream):
    text = text_of(words(3, 100))
    body = {"max_tokens": 2, "ignore_eos": True, "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    body |= {"messages": user(text)} if endpoint == "chat" else {"prompt": text}
    path = "/v1/chat/completions" if endpoint == "chat" else "/v1/completions"
    cached = []
    for _ in range(3):
        answer = fresh.post(path, body)
        final = answer.events[-2] if stream else answer.json
        details = final["usage"]["prompt_tokens_details"]
        assert type(details["cached_tokens"]) is int
        cached.append(details["cached_tokens"])
        prompt_tokens = final["usage"]["prompt_tokens"]
        assert cached[-1] <= prompt_tokens - 1
        report = final["kvire"]["cache"]
        assert report["device_tokens"] + report["computed_tokens"] == report["prompt_tokens"] == prompt_tokens
        assert report["reused_tokens"] == cached[-1]
    assert cached == [0, prompt_tokens - 1, prompt_tokens - 1]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("length", [5, 5 * BLOCK])
def test_s38_the_prompt_counts_once_however_many_answers(fresh, length, stream):
    for i, n in enumerate((1, 2, 4, 8)):
        prompt = [i, *words(100 + i, length - 1)]  # a cold prompt for each n
        seen = []
        for _ in range(2):
            body = {"prompt": prompt, "n": n, "max_tokens": 3, "temperature": 1, "seed": 5, "ignore_eos": True}
            body |= {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            answer = fresh.post("/v1/completions", body)
            final = answer.events[-2] if stream else answer.json
            usage = final["usage"]
            seen.append(usage["prompt_tokens_details"]["cached_tokens"])
            assert usage["prompt_tokens"] == length
            assert usage["completion_tokens"] == 3 * n
        assert seen == [0, length - 1]


def test_samples_differ_and_each_is_reproducible_by_seed(shared):
    client = shared.openai()
    ask = lambda seed: [
        choice.message.content
        for choice in client.chat.completions.create(
            messages=user("Roll the dice."), n=4, seed=seed, **(GREEDY | {"temperature": 1.0})
        ).choices
    ]
    first, again, other = ask(7), ask(7), ask(8)
    assert first == again
    assert len(set(first)) == 4
    assert first != other


def test_kvire_object_says_where_the_answer_came_from(fresh):
    messages = user(text_of(words(4, 200)))
    first, second = (fresh.openai().chat.completions.create(messages=messages, **GREEDY) for _ in range(2))
    assert first.kvire["cache"]["miss"] == "never_stored" and first.kvire["cache"]["reused_tokens"] == 0
    assert second.kvire["cache"]["reused_tokens"] == second.usage.prompt_tokens_details.cached_tokens > 150
    timing = second.kvire["timing"]
    parts = timing["queue_s"] + timing["load_s"] + timing["prefill_s"]
    assert timing["prefill_s"] > 0 and timing["ttft_s"] == pytest.approx(parts, abs=1e-5)
    assert second.choices[0].message.content == first.choices[0].message.content


def test_kvire_object_is_in_the_final_chunk_only(shared):
    for options, choices in (({}, 1), ({"stream_options": {"include_usage": True}}, 0)):
        body = {"messages": user("hi"), "max_tokens": 4, "ignore_eos": True, "stream": True, **options}
        *chunks, last, done = shared.post("/v1/chat/completions", body).events
        assert done == "[DONE]"
        assert all("kvire" not in chunk for chunk in chunks)
        assert last["kvire"]["cache"]["prompt_tokens"] > 0
        assert len(last["choices"]) == choices
        if options:
            assert all(chunk["usage"] is None for chunk in chunks) and last["usage"]["completion_tokens"] == 4
        else:
            assert all("usage" not in chunk for chunk in [*chunks, last])


def test_logprobs_agree_with_the_engine(shared):
    messages = user("Score me.")
    answer = shared.openai().chat.completions.create(messages=messages, logprobs=True, top_logprobs=3, **GREEDY)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens == 12
    shown = b"".join(bytes(entry.bytes) for entry in entries if entry.token not in SPECIAL)
    assert shown.decode(errors="replace") == answer.choices[0].message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob, "greedy takes the likeliest"
        assert all(top.logprob <= 0 for top in entry.top_logprobs)
    streamed = []
    for chunk in shared.openai().chat.completions.create(
        messages=messages, logprobs=True, top_logprobs=3, stream=True, **GREEDY
    ):
        streamed += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    assert [e.bytes for e in streamed] == [e.bytes for e in entries]
    assert [e.logprob for e in streamed] == pytest.approx([e.logprob for e in entries], abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 2.5, "seed": 1},
        {"temperature": 2.5, "seed": 1, "top_p": 0.05},
        {"temperature": 2.5, "seed": 1, "top_k": 1},
        {"temperature": 2.5, "seed": 1, "min_p": 0.9},
        {"repetition_penalty": 3.0},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"logit_bias": {"65": 100}},
        {"stop_token_ids": list(range(256))},
        {"stop": ["\x00", "a", "e", "i", "o", "u", "\x11", "K", "O"]},
        {"max_completion_tokens": 3, "max_tokens": None},
    ],
    ids="+".join,
)
def test_each_sampling_field_reaches_the_engine(shared, options):
    """The answer is the one that the engine gives with the same parameters, and without the field it differs."""
    messages = user("Sampling " + text_of(words(5, 30)))
    base = {"messages": messages, "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    answer = shared.post("/v1/chat/completions", base | options).json["choices"][0]["message"]["content"]
    direct = {"temperature": 0, "max_tokens": 40, "ignore_eos": True} | options
    direct["max_tokens"] = direct.pop("max_completion_tokens", None) or direct["max_tokens"]
    if "logit_bias" in direct:
        direct["logit_bias"] = {65: 100.0}
    assert answer == shared.direct(chat_ids(messages), **direct)[0]
    last = list(options)[-1]
    if last != "max_tokens":
        fewer = {name: value for name, value in options.items() if name != last} or {}
        assert answer != shared.post("/v1/chat/completions", base | fewer).json["choices"][0]["message"]["content"]


def test_ignore_eos(scripted):
    scripted.say("ab")
    ask = {"messages": user("x"), "max_tokens": 5, "temperature": 0}
    answer = scripted.served.post("/v1/chat/completions", ask).json
    assert answer["choices"][0] | {"logprobs": None} == {
        "index": 0,
        "message": {"role": "assistant", "content": "ab", "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
    }
    scripted.say("ab")
    answer = scripted.served.post("/v1/chat/completions", ask | {"ignore_eos": True}).json
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 5


def test_without_max_tokens_a_chat_may_fill_the_context(scripted):
    scripted.say("x" * 3000)
    answer = scripted.served.post("/v1/chat/completions", {"messages": user("x"), "temperature": 0}).json
    assert answer["usage"]["total_tokens"] == 2048
    assert answer["choices"][0]["finish_reason"] == "length"


METADATA = {
    "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": True,
    "safety_identifier": "s", "prompt_cache_key": "k", "prompt_cache_retention": "24h",
    "response_format": {"type": "text"}, "modalities": ["text"], "functions": [], "best_of": 1,
}  # fmt: skip


def test_harmless_and_null_fields_change_nothing(shared):
    body = {"messages": user("hi"), "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    plain = shared.post("/v1/chat/completions", body).json["choices"]
    nulls = dict.fromkeys(("stop", "seed", "logit_bias", "tools", "audio", "made_up_field", "top_logprobs", "n"))
    assert shared.post("/v1/chat/completions", body | METADATA | nulls).json["choices"] == plain


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}),
        ("response_format", {"type": "json_object"}),
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("modalities", ["text", "audio"]),
        ("prediction", {"type": "content", "content": "x"}),
        ("functions", [{"name": "f"}]),
        ("web_search_options", {}),
        ("reasoning_effort", "high"),
        ("chat_template", "{{ messages }}"),
        ("best_of", 2),
        ("prompt_embeds", "AAAA"),
        ("temprature", 1),
        ("chat_template_kwargs", {"x": 1}),
        ("chat_template_kwargs", {"enable_thinking": "yes"}),
        ("top_logprobs", 3),
        ("stream_options", {"include_usage": True}),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_cannot_be_honoured_is_refused_by_name(shared, field, value):
    answer = shared.post("/v1/chat/completions", {"messages": user("hi"), "max_tokens": 1, field: value})
    assert answer.status == 400
    assert answer.error["param"] == field and field in answer.error["message"]


def test_parts_of_the_history_that_would_be_lost_are_refused(shared):
    for field, value in (("function_call", {"name": "f", "arguments": "{}"}), ("audio", {"id": "a"})):
        messages = [*user("hi"), {"role": "assistant", "content": "x", field: value}, *user("and?")]
        answer = shared.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
        assert answer.status == 400 and answer.error["param"] == f"messages[1].{field}"


def test_enable_thinking_is_passed_to_the_template(shared):
    body = {"messages": user("hi"), "max_tokens": 1}
    tokens = lambda more: shared.post("/v1/chat/completions", body | more).json["usage"]["prompt_tokens"]
    assert tokens({"chat_template_kwargs": {"enable_thinking": False}}) == tokens({}) + len("(no thinking)")


def test_s19_images_audio_and_embeddings_are_refused(shared):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(openai.BadRequestError) as caught:
        shared.openai().chat.completions.create(
            messages=[{"role": "user", "content": [{"type": "text", "text": "What is it?"}, image]}], **GREEDY
        )
    assert "only text is supported" in caught.value.message
    for part in ({"type": "input_audio", "input_audio": {}}, {"type": "file", "file": {}}, "text", 7, {"type": "text"}):
        assert shared.post("/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]}).status == 400


def test_a_model_without_chat_template_says_so():
    with running(tiny_engine(template=None)) as served:
        answer = served.post("/v1/chat/completions", {"messages": user("hi")})
        assert answer.status == 400 and "no chat template" in answer.error["message"]
        assert served.post("/v1/completions", {"prompt": "hi", "max_tokens": 1}).status == 200


def test_models(shared):
    client = shared.openai()
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 2048
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(messages=user("hi"), **(GREEDY | {"model": "gpt-4"}))
    assert caught.value.code == "model_not_found" and caught.value.param == "model"


def test_s10_a_burst_on_a_cold_prefix_computes_it_once_and_answers_right():
    prefix = words(6, 128)
    prompts = [[*prefix, i, *words(200 + i, 8 + i)] for i in range(32)]
    with running(tiny_engine(prefix_cache=False)) as oracle:
        want = [oracle.direct(prompt, temperature=0, max_tokens=8, ignore_eos=True)[0] for prompt in prompts]
    with running(tiny_engine(max_batch_tokens=48)) as served, ThreadPoolExecutor(32) as pool:
        body = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
        answers = list(pool.map(lambda prompt: served.post("/v1/completions", body | {"prompt": prompt}).json, prompts))
    assert [answer["choices"][0]["text"] for answer in answers] == want
    reused = sorted(answer["kvire"]["cache"]["reused_tokens"] for answer in answers)
    assert reused == [0] + [128] * 31


def test_s16_a_long_agent_history_with_tools_is_answered_both_times(fresh):
    tools = [
        {"type": "function", "function": {"name": f"tool_{i}", "description": "d", "parameters": {"type": "object"}}}
        for i in range(15)
    ]
    messages = [{"role": "system", "content": "You use tools."}]
    i = 0
    while len(chat_ids(messages, tools)) < 0.9 * 2048 - 60:
        messages.append({"role": ("user", "assistant")[i % 2], "content": text_of(words(i, 30))})
        i += 1
    messages.append({"role": "user", "content": "go on"})
    ids = chat_ids(messages, tools)
    with running(tiny_engine(prefix_cache=False)) as oracle:
        want = oracle.direct(ids, temperature=0, max_tokens=150, ignore_eos=True)[0]
    for reused in (0, len(ids) - 1):
        body = {"messages": messages, "tools": tools, "temperature": 0, "max_tokens": 150, "ignore_eos": True}
        answer = fresh.post("/v1/chat/completions", body).json
        assert answer["choices"][0]["message"]["content"].strip() == want.strip() != ""
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == reused


def test_bodies_are_plain_ascii_json(scripted):
    scripted.say("\u2028 naïve 한국어")
    answer = scripted.served.post("/v1/chat/completions", {"messages": user("x"), "temperature": 0})
    assert answer.data.isascii()
    assert json.loads(answer.data)["choices"][0]["message"]["content"] == "\u2028 naïve 한국어"
