"""The server over SmolLM2: a real tokenizer, a real template, sensible text."""

import pytest
from server.serving import listening

from kvire.llm import LLM

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture(scope="module")
def smollm2():
    options = {"kv_memory": "256MiB", "max_model_len": 2048}
    with LLM("smollm2", **options) as llm, listening(llm.client, "smollm2") as served:
        yield served, llm


CHAT = {"model": "smollm2", "temperature": 0, "max_tokens": 10}
FRANCE = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]


def test_a_chat_equals_the_python_api_streamed_or_not_and_hits_the_second_time(smollm2):
    served, llm = smollm2
    want = llm.chat(FRANCE, temperature=0, max_tokens=10)
    assert "Paris" in want.text
    client = served.openai()
    first = client.chat.completions.create(messages=FRANCE, **CHAT)
    assert first.choices[0].message.content == want.text
    assert first.usage.prompt_tokens == want.usage.prompt_tokens
    assert 0 < first.usage.prompt_tokens_details.cached_tokens < first.usage.prompt_tokens
    chunks = client.chat.completions.create(messages=FRANCE, stream=True, **CHAT)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == want.text


def test_text_and_its_token_ids_are_the_same_prompt(smollm2):
    served, llm = smollm2
    client = served.openai()
    ids = list(llm.encode("The first ten prime numbers are"))
    answers = [
        client.completions.create(prompt=p, **CHAT).choices[0].text for p in ("The first ten prime numbers are", ids)
    ]
    assert answers[0] == answers[1] != ""


def test_s41_the_alphabet_stops_before_the_stop_string(smollm2):
    served, _ = smollm2
    prompt = "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z\nA B C D E F"
    text = "".join(
        chunk.choices[0].text
        for chunk in served.openai().completions.create(prompt=prompt, stop="J K", stream=True, **CHAT)
    )
    assert text.strip() == "G H I"


def test_tools_are_refused_since_its_template_has_none(smollm2):
    served, _ = smollm2
    tools = [{"type": "function", "function": {"name": "f"}}]
    answer = served.post("/v1/chat/completions", {"messages": FRANCE, "tools": tools})
    assert answer.status == 400 and "no place for tools" in answer.error["message"]


def test_logprobs_join_to_the_text(smollm2):
    served, _ = smollm2
    answer = (
        served.openai()
        .completions.create(
            prompt="Once upon a time", echo=True, logprobs=1, model="smollm2", temperature=0, max_tokens=6
        )
        .choices[0]
    )
    assert "".join(answer.logprobs.tokens) == answer.text
    offsets = answer.logprobs.text_offset
    for token, start, end in zip(answer.logprobs.tokens, offsets, [*offsets[1:], len(answer.text)], strict=True):
        assert answer.text[start:end] == token
