"""Token ids to text, incrementally: never half a character, never part of a stop string.

The joined pieces equal the decoding of all ids, cut before the stop string if one was found.
"""

import re
from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"  # decoded from bytes that are no complete character (yet)
# Context kept in front of new ids, so that spaces and joins come out as in the whole text.
CONTEXT_TOKENS = 6
# A character has at most 4 bytes: ids that are no text after this many never will be.
LONG_WINDOW_TOKENS = 64
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


class Detokenizer:
    """Text of one answer.

    tokenizer: anything with transformers' `decode`, or None for ids only.
    stopped_by: the stop string that was found, if any; nothing is shown from its first character
        on.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = (), *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._window = 0  # decoding starts here: decoding everything each time would be quadratic
        self._in_text = 0  # characters of the window's decoding that are in _text
        self._text = ""  # complete characters so far
        self._shown = 0  # characters of _text handed out
        self.stopped_by: str | None = None

    @property
    def text(self) -> str:
        """Everything handed out so far."""
        return self._text[: self._shown]

    def add(self, token_id: int) -> str:
        """Add one id; returns the new text that is safe to show."""
        self._ids.append(token_id)
        if self._tokenizer is None or self.stopped_by is not None:
            return ""
        if self._is_byte(token_id):
            return ""  # a run of byte tokens is decoded as a whole: one wrong byte changes all of its text
        decoded = self._decode(self._ids[self._window :])
        complete = self._complete(decoded)
        if complete > self._in_text:
            self._text += decoded[self._in_text : complete]
            self._in_text = complete
        if len(self._ids) - self._window > 2 * CONTEXT_TOKENS:
            self._slide(decoded, complete)
        return self._show(final=False)

    def finish(self) -> str:
        """No more ids follow: returns the text that was held back."""
        if self._tokenizer is None or self.stopped_by is not None:
            return ""
        whole = self._decode(self._ids)
        if whole.startswith(self._text):
            self._text = whole
        return self._show(final=True)

    def _complete(self, decoded: str) -> int:
        """How many characters of `decoded` are final, whatever ids follow."""
        complete = len(decoded.rstrip(REPLACEMENT))
        if complete < len(decoded) and len(self._ids) - self._window > LONG_WINDOW_TOKENS:
            # Not the beginning of a character but text that is broken for good: only its end may
            # still change.
            head = self._decode(self._ids[self._window : -CONTEXT_TOKENS])
            if decoded.startswith(head):
                return max(complete, len(head))
        return complete

    def _slide(self, decoded: str, complete: int) -> None:
        """Move the window forward, unless it would begin inside a character."""
        start = len(self._ids) - CONTEXT_TOKENS
        tail = self._decode(self._ids[start:])
        broken = len(self._ids) - self._window > LONG_WINDOW_TOKENS
        before = len(decoded) - len(tail)
        if decoded.endswith(tail) and complete >= before and (broken or not tail.startswith(REPLACEMENT)):
            self._window, self._in_text = start, complete - before

    def _is_byte(self, token_id: int) -> bool:
        """Whether a tokenizer with byte fallback writes this id as one byte."""
        convert = getattr(self._tokenizer, "convert_ids_to_tokens", None)
        return convert is not None and BYTE_TOKEN.fullmatch(convert(token_id) or "") is not None

    def _show(self, *, final: bool) -> str:
        """Hold back text that may become a stop string: none may begin in shown text."""
        found = [(at, stop) for stop in self._stop if (at := self._text.find(stop, self._shown)) >= 0]
        if found:
            at, self.stopped_by = min(found)
            self._text = self._text[:at]
        held = 0 if found or final else max((_overlap(self._text, stop) for stop in self._stop), default=0)
        start, self._shown = self._shown, max(self._shown, len(self._text) - held)
        return self._text[start : self._shown]

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that ends `text`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
