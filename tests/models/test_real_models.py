"""The two real models: tokens, stops and answers as they should be."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from kvire.core.spec import LayerKind
from kvire.models.embedded import EMBEDDED, find_embedded
from kvire.models.loader import LoadedModel, load_model

pytestmark = pytest.mark.model

TEXTS = ["Hello world", "naïve 日本語 🙂", "def f(x):\n\treturn x  # twice\r\n", "<|im_start|>user\nhi<|im_end|>\n", ""]


@pytest.fixture(scope="module")
def chat(smollm2: Path) -> LoadedModel:
    return load_model(smollm2)


@pytest.fixture(scope="module")
def base(gemma3: Path) -> LoadedModel:
    return load_model(gemma3)


def _greedy(loaded: LoadedModel, text: str, limit: int) -> list[int]:
    ids = torch.tensor([loaded.tokenizer(text, add_special_tokens=False).input_ids])
    out = loaded.model.generate(
        ids, max_new_tokens=limit, do_sample=False, eos_token_id=list(loaded.eos_token_ids), pad_token_id=0
    )
    return out[0, ids.shape[1] :].tolist()


def test_smollm2_tokens_as_transformers_reads_them(chat: LoadedModel) -> None:
    original = find_embedded(EMBEDDED["smollm2"]).files[0]
    theirs = AutoTokenizer.from_pretrained(original.parent, gguf_file=original.name)
    for text in TEXTS:
        assert chat.tokenizer(text).input_ids == theirs(text).input_ids
        assert chat.tokenizer.decode(chat.tokenizer(text).input_ids) == text


def test_smollm2_splits_digits_as_its_own_tokenizer_does(chat: LoadedModel) -> None:
    """tokenizer.ggml.pre = smollm: digits alone, so blanks before a digit stay together."""
    tokens = chat.tokenizer.tokenize("a  12")
    assert tokens == ["a", "ĠĠ", "1", "2"]


def test_smollm2_chat(chat: LoadedModel) -> None:
    text = chat.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>assistant\n")
    end = chat.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert chat.eos_token_ids == (end,)
    answer = _greedy(chat, text, 64)
    assert answer[-1] == end
    assert "Paris" in chat.tokenizer.decode(answer)


def test_smollm2_identity(chat: LoadedModel) -> None:
    assert chat.name == "smollm2"
    assert chat.max_positions == 8192
    assert chat.groups[0].elements_per_token == 11_520
    assert chat.weights_bytes == 134_515_008 * 4


def test_gemma_tokens(base: LoadedModel) -> None:
    assert base.tokenizer.chat_template is None
    ids = base.tokenizer("Hello world").input_ids
    assert ids == [2, 9259, 1902]
    assert base.eos_token_ids == (1,)


def test_gemma_groups(base: LoadedModel) -> None:
    full, sliding = base.groups
    assert (full.kind, full.layers) == (LayerKind.FULL, (5, 11, 17))
    assert (sliding.kind, sliding.window, len(sliding.layers)) == (LayerKind.SLIDING, 512, 15)
    assert base.max_positions == 32768


def test_gemma_continues(base: LoadedModel) -> None:
    ids = base.tokenizer("The quick brown fox jumps over the lazy").input_ids
    out = base.model.generate(torch.tensor([ids]), max_new_tokens=1, do_sample=False)
    assert base.tokenizer.decode(out[0]).endswith(" lazy dog")
