"""G17: the joined pieces equal the decoding of all ids, whatever the ids, the chunks and the stop strings."""

import os
import random

import pytest
from harness.engines import ByteTokenizer
from transformers import AutoTokenizer

from kvire.engine.detokenizer import CONTEXT_TOKENS, Detokenizer
from kvire.models.resolve import resolve

TEXTS = (
    "plain words, and more of them; 123 456",
    "안녕하세요 สวัสดี 漢字かな",
    "👨‍👩‍👧‍👦 👩🏽‍🚀 🇰🇷🇫🇷 e\u0301",
    "a real \ufffd, twice \ufffd\ufffd",
    "  leading and   inner  spaces\n\n\ttabs",
)
TRIPLES = int(os.environ.get("KVIRE_TEXT_TRIPLES", "1500"))


def pieces(tokenizer, ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], str | None]:
    detokenizer = Detokenizer(tokenizer, stop)
    shown = [detokenizer.add(token_id) for token_id in ids if detokenizer.stopped_by is None]
    shown.append(detokenizer.finish())
    assert "".join(shown) == detokenizer.text
    return shown, detokenizer.stopped_by


def random_ids(rng: random.Random, tokenizer, byte_ids: list[int]) -> list[int]:
    """Text, garbage, and text with single bytes thrown in."""
    ids = tokenizer(rng.choice(TEXTS), add_special_tokens=False)["input_ids"]
    kind = rng.random()
    if kind < 0.3:
        return [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(1, 40))]
    if kind < 0.6:
        for _ in range(rng.randrange(1, 12)):
            ids.insert(rng.randrange(len(ids) + 1), rng.choice(byte_ids))
    return ids


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_streams_equal_the_whole(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve(name))
    vocab = tokenizer.get_vocab()
    byte_ids = [i for token, i in vocab.items() if len(token) == 1 or (token.startswith("<0x") and len(token) == 6)]
    rng = random.Random(17)
    for _ in range(TRIPLES):
        ids = random_ids(rng, tokenizer, byte_ids)
        whole = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert "".join(pieces(tokenizer, ids)[0]) == whole
        if len(whole) > 3:
            at = rng.randrange(len(whole) - 1)
            stop = whole[at : at + rng.randrange(1, 9)]
            shown, stopped_by = pieces(tokenizer, ids, (stop,))
            assert stopped_by == stop
            assert stop not in "".join(shown)
            assert whole.startswith("".join(shown) + stop) or "\ufffd" in whole


def test_broken_text_is_shown_in_time_and_in_bounded_windows() -> None:
    """Bytes that never become characters: shown a few ids later, and not decoded again and again from the start."""
    longest = 0

    class Watching(ByteTokenizer):
        def decode(self, ids, **options) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return super().decode(ids, **options)

    detokenizer = Detokenizer(Watching())
    shown = [detokenizer.add(0xFF) for _ in range(2000)]
    assert longest < 100
    assert sum(map(len, shown)) >= 2000 - 100
    assert "".join([*shown, detokenizer.finish()]) == "\ufffd" * 2000
    assert CONTEXT_TOKENS < 100
