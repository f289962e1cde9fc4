"""Where prompts of a GGUF begin and its answers end: BOS once, stops at the end of text and of a turn."""

from pathlib import Path
from typing import Any

import pytest

from kvire.core.errors import UnsupportedModelError
from kvire.llm import LLM
from kvire.models.chat import encode_chat
from kvire.models.gguf import config as gguf_config
from kvire.models.loader import LoadedModel, load_model
from kvire.models.resolve import resolve

from .tiny_gguf import TOKENS, make_gguf

END_OF_TEXT, IM_START, IM_END = (TOKENS.index(text) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _loaded(path: Path, pre: str = "", arch: str = "llama", **tokenizer: Any) -> LoadedModel:
    """tokenizer: fields below tokenizer.ggml, or the chat template."""
    fields = {name if name == "chat_template" else f"ggml.{name}": value for name, value in tokenizer.items()}
    return load_model(resolve(str(make_gguf(path / "tiny.gguf", arch, pre=pre, tokenizer=fields))))


ENDS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "end of text alone": ({"eos_token_id": END_OF_TEXT}, (END_OF_TEXT,)),
    "a field for the turn": ({"eos_token_id": END_OF_TEXT, "eot_token_id": IM_END}, (END_OF_TEXT, IM_END)),
    "a field for the message": ({"eos_token_id": END_OF_TEXT, "eom_token_id": IM_END}, (END_OF_TEXT, IM_END)),
    "both the same": ({"eos_token_id": IM_END, "eot_token_id": IM_END}, (IM_END,)),
    "only the template says": ({"eos_token_id": END_OF_TEXT, "chat_template": CHATML}, (END_OF_TEXT, IM_END)),
    "the template says it again": ({"eos_token_id": IM_END, "chat_template": CHATML}, (IM_END,)),
    "a template of plain words": ({"eos_token_id": END_OF_TEXT, "chat_template": "User: {{ m }}"}, (END_OF_TEXT,)),
}


@pytest.mark.parametrize("name", ENDS)
def test_every_end_counts(name: str, tmp_path: Path) -> None:
    fields, expected = ENDS[name]
    assert _loaded(tmp_path, **fields).eos_token_ids == expected


def test_generation_stops_at_both(tmp_path: Path) -> None:
    """Whichever of the two the model is made to say."""
    path = make_gguf(
        tmp_path / "tiny.gguf", tokenizer={"ggml.eos_token_id": END_OF_TEXT, "chat_template": CHATML}, head=True
    )
    with LLM(str(path), kv_memory="8MiB") as llm:
        for end in (END_OF_TEXT, IM_END):
            result = llm.generate([1, 2, 3], max_tokens=8, temperature=0, logit_bias={end: 100.0})
            assert (result.finish_reason, result.usage.completion_tokens) == ("stop", 1)
        other = llm.generate([1, 2, 3], max_tokens=8, temperature=0, logit_bias={IM_START: 100.0})
        assert (other.finish_reason, other.usage.completion_tokens) == ("length", 8)


def test_a_build_that_does_not_read_the_template_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_config, "TURN_ENDS", ())
    with pytest.raises(AssertionError):
        test_every_end_counts("only the template says", tmp_path)


# What the file says of BOS; whether a text begins with it. Llama 3's and SentencePiece's have it unless told otherwise.
BEGINNINGS = [
    ("smollm", None, False),
    ("smollm", True, True),
    ("smollm", False, False),
    ("llama-bpe", None, True),
    ("llama-bpe", False, False),
    ("pieces", None, True),
    ("pieces", True, True),
    ("pieces", False, False),
]


@pytest.mark.parametrize(("pre", "said", "there"), BEGINNINGS)
def test_a_text_begins_with_bos_once_or_not_at_all(pre: str, said: Any, there: Any, tmp_path: Path) -> None:
    fields = {} if said is None else {"add_bos_token": said}
    tokenizer = _loaded(tmp_path, pre, **fields).tokenizer
    ids = tokenizer("at").input_ids
    assert ids.count(tokenizer.bos_token_id) == (1 if there else 0)
    assert (ids[0] == tokenizer.bos_token_id) == there


@pytest.mark.parametrize("said", [True, False])
def test_a_template_that_writes_bos_does_not_get_another(said: Any, tmp_path: Path) -> None:
    """And one that writes none gets none, as in transformers."""
    for template, count in (("{{ bos_token }}" + CHATML, 1), (CHATML.replace("<|im_start|>", ""), 0)):
        (folder := tmp_path / str(count)).mkdir()
        loaded = _loaded(folder, add_bos_token=said, chat_template=template, bos_token_id=END_OF_TEXT)
        ids = encode_chat(loaded.tokenizer, [{"role": "user", "content": "at"}])
        assert ids.count(END_OF_TEXT) == count


@pytest.mark.parametrize("pre", ["smollm", "pieces"])
def test_a_prompt_does_not_end_where_it_goes_on(pre: str, tmp_path: Path) -> None:
    tokenizer = _loaded(tmp_path, pre, add_eos_token=True).tokenizer
    assert tokenizer.eos_token_id not in tokenizer("at").input_ids


@pytest.mark.parametrize(("said", "first"), [(None, "▁at"), (True, "▁at"), (False, "at")])
def test_a_space_before_a_text(said: Any, first: str, tmp_path: Path) -> None:
    fields = {} if said is None else {"add_space_prefix": said}
    tokenizer = _loaded(tmp_path, "pieces", **fields).tokenizer
    ids = tokenizer("at at", add_special_tokens=False).input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == [first, "▁at"]
    assert tokenizer.decode(ids) == "at at"


def test_gemma3_takes_texts_as_they_are(tmp_path: Path) -> None:
    tokenizer = _loaded(tmp_path, "pieces", "gemma3", add_space_prefix=False).tokenizer
    assert tokenizer.tokenize("at at") == ["at", "▁at"]
    (other := tmp_path / "other").mkdir()
    with pytest.raises(UnsupportedModelError, match="add_space_prefix"):
        _loaded(other, "pieces", "gemma3", add_space_prefix=True)
