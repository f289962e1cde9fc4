"""Tools: what goes to the model, and how calls are found in what it writes."""

import json

import pytest
from server.serving import (
    HERMES_TEMPLATE,
    MISTRAL_TEMPLATE,
    PLAIN_TEMPLATE,
    SPECIAL,
    ScriptedModel,
    byte_tokenizer,
    running,
    tiny_engine,
)

from kvire.engine.request import Output
from kvire.server.tool_formats import CALL_BEGIN, CALL_END, CALL_SEP, CALLS_BEGIN, CALLS_END, FORMATS
from kvire.server.tools import ToolText, tool_format

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
USER = [{"role": "user", "content": "Weather in Paris?"}]
ASK = {"model": "tiny", "messages": USER, "tools": [WEATHER, TIME], "temperature": 0, "max_tokens": 300}
PARIS = '{"name": "get_weather", "arguments": {"city": "Paris"}}'


def ask(served, **more):
    answer = served.post("/v1/chat/completions", ASK | more)
    assert answer.status == 200, answer.data
    return answer.json["choices"][0], answer.json


def joined(served, **more):
    """(content, calls, finish reason, all content pieces) of a stream, as clients put it together."""
    calls, finish, pieces = {}, None, []
    for event in served.post("/v1/chat/completions", ASK | more | {"stream": True}).events[:-1]:
        for choice in event["choices"]:
            pieces.append(choice["delta"].get("content") or "")
            for call in choice["delta"].get("tool_calls", []):
                calls.setdefault(call["index"], []).append(call)
            finish = choice["finish_reason"] or finish
    return "".join(pieces), calls, finish, pieces


def test_a_call_is_parsed_whole_and_streamed(scripted):
    text = f"Let me look.\n<tool_call>\n{PARIS}\n</tool_call>"
    scripted.say(text)
    choice, _ = ask(scripted.served)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me look."
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_") and "index" not in call
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    scripted.say(text)
    content, calls, finish, pieces = joined(scripted.served)
    assert (content, finish) == ("Let me look.", "tool_calls")
    assert len(pieces) > 10, "content is streamed as it comes"
    assert [call["function"] for call in calls[0]] == [{"name": "get_weather", "arguments": '{"city": "Paris"}'}]


def test_the_openai_client_understands_it(scripted):
    scripted.say(f"<tool_call>{PARIS}</tool_call><tool_call>" + '{"name": "get_time", "arguments": {}}</tool_call>')
    answer = scripted.served.openai().chat.completions.create(**ASK)
    assert answer.choices[0].message.content is None
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["get_weather", "get_time"]
    assert len({call.id for call in answer.choices[0].message.tool_calls}) == 2
    scripted.say(f"<tool_call>{PARIS}</tool_call><tool_call>" + '{"name": "get_time", "arguments": {}}</tool_call>')
    one = scripted.served.openai().chat.completions.create(parallel_tool_calls=False, **ASK)
    assert [call.function.name for call in one.choices[0].message.tool_calls] == ["get_weather"]


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_call_that_max_tokens_cuts_off_is_neither_shown_nor_made(scripted, cut):
    text = f"Hm. <tool_call>{PARIS}</tool_call>"
    scripted.say(text)
    content, calls, finish, _ = joined(scripted.served, max_tokens=cut)
    scripted.say(text)
    choice, whole = ask(scripted.served, max_tokens=cut)
    assert content == choice["message"]["content"] and finish == choice["finish_reason"] == "length"
    assert not calls and "tool_calls" not in choice["message"]
    if cut >= len("Hm. <tool_call>"):
        assert content == "Hm."
        assert whole["kvire"]["cut_off_tool_calls"]["0"].strip() == text[4:cut].strip()
    else:
        assert content == text[:cut], "may have been no call at all"


@pytest.mark.parametrize(
    "text",
    [
        "Use a < b and a <tool> here.",
        "<tool_call>not json</tool_call>",
        '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
        "  leading and trailing space  \n",
        "the end <tool_cal",
    ],
)
def test_what_is_no_call_stays_content_to_the_letter(scripted, text):
    scripted.say(text)
    choice, _ = ask(scripted.served)
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    scripted.say(text)
    assert joined(scripted.served)[:3] == (text, {}, "stop")


def test_a_call_without_its_closing_tag_counts_if_it_is_complete(scripted):
    scripted.say(f"<tool_call>{PARIS}")
    choice, _ = ask(scripted.served)
    assert (
        choice["finish_reason"] == "tool_calls"
        and choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    )


def test_without_tools_or_with_none_markup_is_text(scripted):
    text = f"<tool_call>{PARIS}</tool_call>"
    for more in ({"tools": []}, {"tool_choice": "none"}):
        scripted.say(text)
        choice, whole = ask(scripted.served, **more)
        assert choice["message"]["content"] == text and "tool_calls" not in choice["message"]
        bare = scripted.served.post("/v1/chat/completions", {"messages": USER, "max_tokens": 1}).json
        assert whole["usage"]["prompt_tokens"] == bare["usage"]["prompt_tokens"]


def test_tools_and_history_are_rendered_by_the_template(shared):
    history = [
        *USER,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    answer = shared.post("/v1/chat/completions", {"messages": history, "tools": [WEATHER], "max_tokens": 1}).json
    text = (
        f"<|im_start|>system\n{json.dumps(WEATHER)}\nCall them as <tool_call>{{...}}</tool_call><|im_end|>\n"
        "<|im_start|>user\nWeather in Paris?<|im_end|>\n"
        "<|im_start|>assistant\n<tool_call>get_weather:city=Paris;</tool_call><|im_end|>\n"
        "<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = byte_tokenizer()(text, add_special_tokens=False)["input_ids"]
    want = shared.direct(ids, temperature=0, max_tokens=8)[0]
    ask = {"messages": history, "tools": [WEATHER], "max_tokens": 8, "temperature": 0}
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert shared.post("/v1/chat/completions", ask).json["choices"][0]["message"]["content"].strip() == want.strip()


def test_an_answer_s_message_can_be_sent_back(scripted):
    """What the SDK gives out goes in again, nulls and all."""
    scripted.say(f"<tool_call>{PARIS}</tool_call>")
    client = scripted.served.openai()
    message = client.chat.completions.create(**ASK).choices[0].message
    messages = [*USER, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}]
    scripted.say("It is sunny.")
    answer = client.chat.completions.create(**(ASK | {"messages": messages}))
    assert answer.choices[0].message.content == "It is sunny." and answer.choices[0].finish_reason == "stop"


def test_mistral_s_special_token_is_found_although_text_leaves_it_out():
    model = ScriptedModel()
    marker = 256 + SPECIAL.index("[TOOL_CALLS]")
    with running(tiny_engine(model=model, template=MISTRAL_TEMPLATE)) as served:
        model.say([*b"Sure. ", marker, *f"[{PARIS}]".encode()])
        choice, _ = ask(served)
        assert choice["message"]["content"] == "Sure." and choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
        assert len(call["id"]) == 9 and call["id"].isalnum(), "what Mistral's template insists on"
        model.say([*b"Sure. ", marker, *f"[{PARIS}]".encode()])
        content, calls, finish, _ = joined(served)
        assert (content, len(calls), finish) == ("Sure.", 1, "tool_calls")
        model.say([*"Grüße ".encode(), *b"you"])
        assert joined(served)[0] == "Grüße you"


def test_a_template_without_tools_or_with_another_format_says_so():
    with running(tiny_engine(template=PLAIN_TEMPLATE)) as served:
        answer = served.post("/v1/chat/completions", ASK)
        assert answer.status == 400 and answer.error["param"] == "tools"
        assert "no place for tools" in answer.error["message"]
        assert served.post("/v1/chat/completions", ASK | {"tool_choice": "none", "max_tokens": 1}).status == 200
    unknown = HERMES_TEMPLATE.replace("{...}", "<function=name>")
    with running(tiny_engine(template=unknown)) as served:
        answer = served.post("/v1/chat/completions", ASK)
        assert answer.status == 400 and "cannot read" in answer.error["message"]


LLAMA = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
ARGUMENTS = '{"city": "Paris"}'
WRITTEN = {
    "mistral": f"[TOOL_CALLS][{PARIS}, {PARIS}]",
    "mistral-v11": f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}"
    f"[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{ARGUMENTS}",
    "llama": f"{LLAMA}; {LLAMA}",
    "llama-tag": f"<|python_tag|>{LLAMA}\n{LLAMA}",
    "deepseek-v3": CALLS_BEGIN
    + "\n".join(f"{CALL_BEGIN}function{CALL_SEP}get_weather\n```json\n{ARGUMENTS}\n```{CALL_END}" for _ in range(2))
    + CALLS_END,
    "deepseek-v31": CALLS_BEGIN + f"{CALL_BEGIN}get_weather{CALL_SEP}{ARGUMENTS}{CALL_END}" * 2 + CALLS_END,
    "hermes": f"<tool_call>\n{PARIS}\n</tool_call>\n<tool_call>\n{PARIS}\n</tool_call>",
    "hermes-text-arguments": f"<tool_call>{json.dumps({'name': 'get_weather', 'arguments': ARGUMENTS})}</tool_call>"
    * 2,
}


def split(name: str, text: str, step: int, finish: str = "stop"):
    form = next(form for form in FORMATS if form.name == name.partition("-")[0])
    splitter = ToolText(form, frozenset({"get_weather"}), None, ())
    pieces = [text[i : i + step] for i in range(0, len(text), step)]
    content = "".join(splitter.add(Output("r", 0, (), piece)) for piece in pieces)
    parsed = splitter.finish(truncated=finish == "length")
    return content, parsed


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("name", WRITTEN)
def test_formats(name, step):
    content, parsed = split(name, WRITTEN[name], step)
    assert content == "" and parsed.content == "" and parsed.withheld == ""
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == [
        ("get_weather", {"city": "Paris"})
    ] * 2


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("name", WRITTEN)
def test_formats_never_leak_markup_wherever_they_are_cut(name, step):
    text = WRITTEN[name]
    for cut in range(len(text)):
        content, parsed = split(name, text[:cut], step, "length")
        shown = content + parsed.content
        assert len(shown) < 60, shown
        assert not any(
            mark in shown for mark in ("<tool_call>", "[TOOL_CALLS]", "python_tag|>", CALL_BEGIN, CALLS_BEGIN)
        )


def test_llama_json_that_calls_no_offered_tool_is_content():
    for text in (
        '{"name": "Alice", "age": 3}',
        '{"x": 1}',
        "{",
        '{"name": "rm_rf", "parameters": {}}',
        'see {"name": 1}',
    ):
        for step in (1, 1000):
            content, parsed = split("llama", text, step)
            assert (content + parsed.content, parsed.calls) == (text, ())
    content, parsed = split("llama", LLAMA[:-5], 1, "length")
    assert content == parsed.content == "" and parsed.withheld


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("... <tool_call>{json}</tool_call>", "hermes"),
        ("... <tool_call><function=name>", None),
        ("... <tool_call>name<arg_key>", None),
        ("... [TOOL_CALLS] ...", "mistral"),
        ("... <|python_tag|> ... Environment: ipython", "llama"),
        (f"... {CALLS_BEGIN} ...", "deepseek"),
        ("{{ messages }}", None),
    ],
)
def test_the_format_is_chosen_by_the_template(template, name):
    form = tool_format(template)
    assert (form.name if form else None) == name


def nested(depth: int) -> dict:
    value: dict = {"type": "string"}
    for _ in range(depth):
        value = {"properties": value}
    return value


@pytest.mark.parametrize(
    "tools",
    [
        [WEATHER] * 129,
        [{"type": "retrieval"}],
        [{"type": "function"}],
        [{"type": "function", "function": {"name": "spaces are bad"}}],
        [{"type": "function", "function": {"name": ""}}],
        [{"type": "function", "function": {"name": "x" * 65}}],
        [{"type": "function", "function": {"name": "f", "parameters": "object"}}],
        [{"type": "function", "function": {"name": "f", "description": 1}}],
        [{"type": "function", "function": {"name": "f", "parameters": nested(32)}}],
        [{"type": "function", "function": {"name": "f", "description": "x" * 262_145}}],
        [None],
        {"type": "function"},
        "get_weather",
    ],
    ids=range(13),
)
def test_tools_are_bounded_and_checked(shared, tools):
    answer = shared.post("/v1/chat/completions", ASK | {"tools": tools})
    assert answer.status == 400 and answer.error["param"] == "tools"


def test_patterns_in_a_tool_s_schema_are_never_run(shared):
    schema = {"type": "object", "properties": {"x": {"type": "nonsense", "pattern": "(a+)+$("}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert shared.post("/v1/chat/completions", ASK | {"tools": [tool], "max_tokens": 1}).status == 200


@pytest.mark.parametrize("arguments", ["{", "[]", "7", '"text"', '{"a": ' * 40 + "1" + "}" * 40])
def test_arguments_in_the_history_must_be_objects(shared, arguments):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    answer = shared.post("/v1/chat/completions", {"messages": messages})
    assert answer.status == 400
    assert answer.error["param"] == "messages[1].tool_calls[0].function.arguments"
