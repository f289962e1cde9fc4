"""Conversations to token ids, through the model's own chat template.

transformers renders templates in an immutable Jinja sandbox; they come from the model's directory
only, never from a request, and have RENDER_TIMEOUT_S for each conversation.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jinja2 import TemplateError

from kvire.core.errors import RequestError

T = TypeVar("T")


class _Expired(BaseException):
    """Not an Exception, so that no handler on the way takes it for an error of its own."""


def within(seconds: float, call: Callable[[], T]) -> T:
    """The call's result.

    Raises TimeoutError if it takes longer: its Python code is stopped wherever it is then.

    Loops and recursion end in time. One long operation of an extension module, or of Python's own,
    is waited for.
    """
    thread, lock, running = ctypes.c_ulong(threading.get_ident()), threading.Lock(), True

    def expire() -> None:
        with lock:
            if running:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_Expired))

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    try:
        try:
            timer.start()  # may be over before this returns
            return call()
        finally:
            with lock:
                running = False
            timer.cancel()  # Python code: an exception raised before the lock was taken arrives here at the latest
    except _Expired:
        raise TimeoutError(f"not within {seconds:g} s") from None


RENDER_TIMEOUT_S = 10.0  # 4,096 messages take a tenth of a second
ROLES = ("system", "developer", "user", "assistant", "tool")


def encode_chat(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    options: dict[str, bool] | None = None,
) -> tuple[int, ...]:
    """Token ids of a conversation, up to the start of the answer.

    options: switches that some templates know, such as enable_thinking.

    Raises RequestError if the model or a message does not allow it.
    """
    return _encode(tokenizer, _rendered(tokenizer, messages, tools, options))


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, up to the start of the answer.

    tokens_lost: how many of the known ids it does not begin with.
    """

    token_ids: tuple[int, ...]
    tokens_lost: int


def continue_chat(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    known: Sequence[int],
    tools: list[dict[str, Any]] | None = None,
    options: dict[str, bool] | None = None,
) -> ChatPrompt:
    """As encode_chat, beginning with `known`, the ids of an earlier prompt and answer, if
    equivalent.

    A model may write a text in other tokens than the tokenizer would; to continue from its own
    tokens, those have to stay. If the template changes the history (drops earlier reasoning, trims
    white space), the template wins.
    """
    text = _rendered(tokenizer, messages, tools, options)
    ids, before = _encode(tokenizer, text), tuple(known)
    if ids[: len(before)] == before:
        return ChatPrompt(ids, 0)
    # The token that ended the answer may be another one in the history, or none: its KV was never
    # computed anyway.
    for kept in (before, before[:-1]):
        said = _decode(tokenizer, kept)
        if text.startswith(said):
            continued = kept + _encode(tokenizer, text[len(said) :])
            if _decode(tokenizer, continued) == text:  # not so where a tokenizer adds or drops spaces between parts
                return ChatPrompt(continued, len(before) - _common_prefix(before, continued))
    return ChatPrompt(ids, len(before) - _common_prefix(before, ids))


def _rendered(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    options: dict[str, bool] | None,
) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise RequestError(
            "this model has no chat template: it continues text but was not made to chat; use completions (generate)"
        )
    plain = [_plain_message(message, i) for i, message in enumerate(messages)]
    if not plain:
        raise RequestError("messages is empty: it must hold at least one message")

    def render() -> str:
        text: str = tokenizer.apply_chat_template(
            plain, tools=tools, tokenize=False, add_generation_prompt=True, **(options or {})
        )
        return text

    try:
        return within(RENDER_TIMEOUT_S, render)
    except TimeoutError as error:
        raise RequestError(
            f"the model's chat template did not finish within {RENDER_TIMEOUT_S:g} s: send a shorter conversation, or "
            "use another model"
        ) from error
    except TemplateError as error:
        raise RequestError(f"the model's chat template refuses these messages: {error}") from error
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        # Templates are programs too; their errors come from the messages.
        raise RequestError("the model's chat template cannot render these messages or tools") from error


def _encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _plain_message(message: dict[str, Any], index: int) -> dict[str, Any]:
    """The message with its content as one text."""
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"messages[{index}].role must be one of {', '.join(ROLES)}, got {role!r}")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_text_of(part, index) for part in content)
    if content is None:
        content = ""
    if not isinstance(content, str):
        raise RequestError(f"messages[{index}].content must be text or a list of text parts")
    return {**message, "content": content}


def _text_of(part: Any, index: int) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(part.get("text"), str):
        raise RequestError(
            f"messages[{index}].content holds a part of type {kind!r}: only text is supported; images, audio and "
            "files are refused, since their KV depends on more than tokens"
        )
    text: str = part["text"]
    return text
