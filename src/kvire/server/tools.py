"""Tools of a chat: checked, put into the conversation, and found in the answer's text."""

import json
import re
from contextlib import suppress
from typing import Any

from kvire.engine.detokenizer import Detokenizer
from kvire.engine.request import Output
from kvire.server.errors import ApiError
from kvire.server.limits import check_structure, json_depth, parse_json
from kvire.server.tool_formats import FORMATS, Parsed, ToolFormat

MAX_TOOLS = 128
MAX_TOOL_DEPTH = 32
MAX_TOOLS_CHARS = 256 * 1024  # of all tools together, as JSON
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def checked_tools(value: Any) -> list[dict[str, Any]]:
    """The tools as they came, which is how templates print them. Raises ValueError."""
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise ValueError(f"must be a list of at most {MAX_TOOLS} tools")
    for tool in value:
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if function is None or type(function) is not dict:
            raise ValueError('each tool must be {"type": "function", "function": {...}}')
        if not isinstance(function.get("name"), str) or not _NAME.fullmatch(function["name"]):
            raise ValueError("a function's name is 1 to 64 letters, digits, dots, dashes or underscores")
        if not (function.get("description") is None or isinstance(function["description"], str)):
            raise ValueError("a function's description must be a text")
        if not (function.get("parameters") is None or isinstance(function["parameters"], dict)):
            raise ValueError("a function's parameters must be a JSON schema, an object")
    if len(json.dumps(value, ensure_ascii=False)) > MAX_TOOLS_CHARS:
        raise ValueError(f"the tools are longer than {MAX_TOOLS_CHARS} characters")
    if json_depth(value) - 1 > MAX_TOOL_DEPTH:
        raise ValueError(f"a tool is nested deeper than {MAX_TOOL_DEPTH} levels")
    return value


def checked_tool_choice(value: Any) -> Any:
    """Raises ValueError for choices that would have to force the model."""
    if value not in ("auto", "none"):
        raise ValueError('only "auto" and "none" are supported: the model cannot be made to call a tool')
    return value


def as_templates_expect(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with their calls' arguments, which are JSON in a text, as objects.

    Raises ApiError 400.

    Each text is bounded like a body, and so are all texts together.
    """
    calls = (call for message in messages for call in message.get("tool_calls") or ())
    check_structure(call["function"]["arguments"].encode() for call in calls)
    return [_with_parsed_arguments(message, i) for i, message in enumerate(messages)]


def _with_parsed_arguments(message: dict[str, Any], index: int) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = []
    for i, call in enumerate(message["tool_calls"]):
        param = f"messages[{index}].tool_calls[{i}].function.arguments"
        calls.append({**call, "function": {**call["function"], "arguments": _object(call, param)}})
    return {**message, "tool_calls": calls}


def _object(call: dict[str, Any], param: str) -> dict[str, Any]:
    with suppress(ApiError):
        arguments = parse_json((call["function"]["arguments"] or "{}").encode())
        if json_depth(arguments) <= MAX_TOOL_DEPTH:
            return arguments
    raise ApiError(400, f"{param}: must be a JSON object of at most {MAX_TOOL_DEPTH} levels", param=param)


def chat_template(tokenizer: Any) -> str:
    """The template that would render tools; empty if the model has none."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("tool_use", template.get("default"))
    return template or ""


def supports_tools(template: str) -> bool:
    """Whether the template looks at tools at all."""
    return re.search(r"\btools\b", template) is not None


def tool_format(template: str) -> ToolFormat | None:
    """How a model with this template writes its calls, if that is known."""
    return next((form for form in FORMATS if form.is_written_by(template)), None)


class ToolText:
    """Splits one answer, as it grows, into content and tool calls.

    Everything from the first piece of markup on is held back until the answer ends: no markup is
    ever shown in part.

    names: of the tools that were offered.
    """

    def __init__(self, form: ToolFormat, names: frozenset[str], tokenizer: Any, stop: tuple[str, ...]) -> None:
        self._form = form
        self._names = names
        self._pending = ""  # may become markup, or white space in front of it
        self._held = ""  # markup, from its beginning
        self._shown = False
        self._hidden = HiddenMarkup.of(form, tokenizer, stop)

    def add(self, output: Output) -> str:
        """Content that is certain to be content."""
        self._pending += self._hidden.text(output) if self._hidden else output.text
        if self._held:
            self._held, self._pending = self._held + self._pending, ""
            return ""
        begins, certain = self._form.split(self._pending, at_start=not self._shown)
        content = self._pending[:certain]
        if begins:
            self._held, self._pending = self._pending[certain:], ""
        else:
            self._pending = self._pending[certain:]
        self._shown = self._shown or bool(content.strip())
        return content

    def finish(self, *, truncated: bool) -> Parsed:
        """The answer is over: parse the held-back text."""
        if not self._held:
            return Parsed(content=self._pending)
        return self._form.parse(self._held, self._names, truncated=truncated)


class HiddenMarkup:
    """The answer's text with its special tokens, for tokenizers that treat markup as special."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...], special: set[int], markup: set[int]) -> None:
        self._detokenizer = Detokenizer(tokenizer, stop, skip_special_tokens=False)
        self._skipped = special - markup

    @classmethod
    def of(cls, form: ToolFormat, tokenizer: Any, stop: tuple[str, ...]) -> "HiddenMarkup | None":
        """None if nothing is left out."""
        added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
        special = {token: str(entry) for token, entry in added.items() if entry.special}
        markup = {token for token, text in special.items() if text in form.markup}
        return cls(tokenizer, stop, set(special), markup) if markup else None

    def text(self, output: Output) -> str:
        """In place of output.text."""
        shown = [token for token in output.token_ids if token not in self._skipped]
        text = "".join(self._detokenizer.add(token) for token in shown)
        return text if output.finish_reason is None else text + self._detokenizer.finish()
