"""Single tokens as text and bytes, as log-probabilities report them."""

import re
from functools import lru_cache
from typing import Any

from kvire.engine.detokenizer import REPLACEMENT, Detokenizer
from kvire.engine.request import TokenLogprobs

# JSON has no infinity; vLLM writes impossible tokens like this too.
LOWEST_LOGPROB = -9999.0
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
SENTENCEPIECE_SPACE = "\u2581"


class TokenText:
    """The text of each single token of a tokenizer; cached, since it never changes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}

    def raw(self, token_id: int) -> bytes:
        """The token's bytes; perhaps only part of a character."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._find_bytes(token_id)
        return self._bytes[token_id]

    def text(self, token_id: int) -> str:
        """The token's text; a partial character is escaped with backslashes, as in the
        OpenAI API.
        """
        return self.raw(token_id).decode("utf-8", errors="backslashreplace")

    def completion_text(self, token_id: int) -> str:
        """The same in the older style: "bytes:" before tokens that are no text."""
        raw = self.raw(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _find_bytes(self, token_id: int) -> bytes:
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        piece = self._tokenizer.convert_ids_to_tokens(token_id) or ""
        if (byte := _BYTE_TOKEN.fullmatch(piece)) is not None:
            return bytes([int(byte[1], 16)])
        if REPLACEMENT in text and all(char in _byte_of_char() for char in piece):
            return bytes(_byte_of_char()[char] for char in piece)
        if piece.startswith(SENTENCEPIECE_SPACE) and not text.startswith(" "):
            text = " " + text  # decoding drops the space in front of a first word
        return text.encode("utf-8", errors="replace")


class CompletionLogprobs:
    """The logprobs object of one completion, in pieces; offsets count from the text's beginning."""

    def __init__(self, tokens: TokenText, tokenizer: Any) -> None:
        self._tokens = tokens
        self._detokenizer = Detokenizer(tokenizer)

    def add(self, entries: tuple[TokenLogprobs | None, ...], token_ids: tuple[int, ...]) -> dict[str, Any]:
        """Entries for `token_ids`; None stands for a token that nothing predicts."""
        offsets = []
        for token_id in token_ids:
            offsets.append(len(self._detokenizer.text))
            self._detokenizer.add(token_id)
        return {
            "tokens": [self._tokens.completion_text(token_id) for token_id in token_ids],
            "token_logprobs": [None if entry is None else finite(entry.logprob) for entry in entries],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """With the chosen token, likely or not, as the OpenAI API has it."""
        chosen = {entry.token_id: entry.logprob}
        return {self._tokens.completion_text(token): finite(p) for token, p in (entry.top | chosen).items()}


def chat_logprobs(tokens: TokenText, entries: tuple[TokenLogprobs, ...]) -> dict[str, Any]:
    """The logprobs object of a chat's choice."""
    return {"content": [_chat_entry(tokens, entry) for entry in entries]}


def _chat_entry(tokens: TokenText, entry: TokenLogprobs) -> dict[str, Any]:
    top = [_one(tokens, token, logprob) for token, logprob in entry.top.items()]
    return _one(tokens, entry.token_id, entry.logprob) | {"top_logprobs": top}


def _one(tokens: TokenText, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": tokens.text(token_id), "logprob": finite(logprob), "bytes": list(tokens.raw(token_id))}


def finite(logprob: float) -> float:
    """At least LOWEST_LOGPROB."""
    return max(logprob, LOWEST_LOGPROB)


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character (GPT-2's bytes_to_unicode)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
