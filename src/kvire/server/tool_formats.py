r"""How families of models write a tool call, and how to read it back.

hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>     Hermes, Qwen 2.5 and 3
mistral   [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
          or [TOOL_CALLS]name[ARGS]{...}
deepseek  <begin>function<sep>name\n```json\n{...}\n```<end>          V3
          <begin>name<sep>{...}<end>                                   V3.1
llama     {"name": ..., "parameters": {...}}                           the whole answer, Llama 3
"""

import json
import re
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

ALPHANUMERIC = string.ascii_letters + string.digits
# DeepSeek's, with its full-width bar and low block.
CALLS_BEGIN, CALL_BEGIN, CALL_SEP, CALL_END, CALLS_END = (
    f"<\uff5ctool\u2581{word}\uff5c>"
    for word in ("calls\u2581begin", "call\u2581begin", "sep", "call\u2581end", "calls\u2581end")
)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call read from an answer.

    arguments: a JSON object as text.
    """

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """The parsed end of an answer.

    withheld: a call that was cut off; neither shown nor made.
    """

    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    withheld: str = ""


Reader = Callable[[str, frozenset[str]], tuple[list[ToolCall], str]]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way of writing calls.

    openings: texts that begin one.
    starts: texts that do so only as the first thing of an answer.
    markup: all texts that belong to the format.
    read: (calls, rest that it could not read).
    signs, no_signs: texts of which one must, or none may, be in the chat template.
    """

    name: str
    openings: tuple[str, ...]
    markup: tuple[str, ...]
    read: Reader = field(repr=False)
    signs: tuple[str, ...]
    no_signs: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    id_alphabet: str = string.hexdigits[:16]
    id_length: int = 24
    id_prefix: str = "call_"

    def is_written_by(self, template: str) -> bool:
        """Whether a model with this chat template writes this format."""
        return any(s in template for s in self.signs) and not any(s in template for s in self.no_signs)

    def split(self, text: str, *, at_start: bool) -> tuple[bool, int]:
        """(whether a call begins in `text`, number of characters before it that are content)."""
        blank = len(text) - len(text.lstrip())
        if at_start and text[blank:].startswith(self.starts or ("\0",)):
            return True, 0
        found = [at for opening in self.openings if (at := text.find(opening)) >= 0]
        if found:
            return True, len(text[: min(found)].rstrip())
        partial = max(_overlap(text, opening) for opening in self.openings)
        return False, len(text[: len(text) - partial].rstrip())

    def parse(self, held: str, names: frozenset[str], *, truncated: bool) -> Parsed:
        """Parse the end of an answer, from the possible beginning of a call.

        Everything else is content.
        """
        calls, rest = self.read(held, names)
        if rest.strip() and truncated and self._begins_call(rest, names):
            return Parsed(calls=tuple(calls), withheld=rest)
        return Parsed(rest if rest.strip() or not calls else "", tuple(calls))

    def new_id(self) -> str:
        """An id for a call; Mistral's template takes 9 alphanumeric characters and nothing else."""
        return self.id_prefix + "".join(secrets.choice(self.id_alphabet) for _ in range(self.id_length))

    def _begins_call(self, rest: str, names: frozenset[str]) -> bool:
        if any(opening in rest for opening in self.openings):
            return True
        named = re.match(r'\s*\{\s*"(?:name|type)"\s*:\s*"([^"]*)"', rest)
        return named is not None and named[1] in names | {"function"}


def _read_hermes(held: str, _: frozenset[str]) -> tuple[list[ToolCall], str]:
    calls, rest = [], ""
    before, *blocks = held.split("<tool_call>")
    rest += before
    for block in blocks:
        inside, closed, after = block.partition("</tool_call>")
        call = _call(_load(inside))
        if call is None:
            rest += "<tool_call>" + block
        else:
            calls.append(call)
            rest += after if closed and after.strip() else ""
    return calls, rest


def _read_mistral(held: str, _: frozenset[str]) -> tuple[list[ToolCall], str]:
    calls, rest = [], ""
    before, *blocks = held.split("[TOOL_CALLS]")
    rest += before
    for block in blocks:
        name, args, arguments = block.partition("[ARGS]")
        listed = [{"name": name.split("[CALL_ID]")[0].strip(), "arguments": _load(arguments)}] if args else _load(block)
        found = [_call(entry) for entry in listed] if isinstance(listed, list) else []
        good = [call for call in found if call is not None]
        if not good or len(good) < len(found):
            rest += "[TOOL_CALLS]" + block
        else:
            calls += good
    return calls, rest


_DEEPSEEK_ENDS = re.compile(f"{CALLS_BEGIN}|{CALL_END}|{CALLS_END}")


def _read_deepseek(held: str, _: frozenset[str]) -> tuple[list[ToolCall], str]:
    calls, rest = [], ""
    before, *blocks = held.split(CALL_BEGIN)
    rest += _DEEPSEEK_ENDS.sub("", before) if blocks else before
    for block in blocks:
        head, _sep, tail = _DEEPSEEK_ENDS.split(block)[0].partition(CALL_SEP)
        name, fence, body = tail.partition("\n```json\n")  # V3; V3.1 writes name<sep>{...}
        if not fence:
            name, body = head, tail
        call = _call({"name": name.strip(), "arguments": _load(body.strip().removesuffix("```"))})
        if call is None:
            rest += CALL_BEGIN + block
        else:
            calls.append(call)
    return calls, rest


def _read_llama(held: str, names: frozenset[str]) -> tuple[list[ToolCall], str]:
    text = held.strip().removeprefix("<|python_tag|>").strip()
    calls, decoder = [], json.JSONDecoder(parse_constant=_refuse)
    while text:
        try:
            value, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            return [], held
        call = _call(value, "parameters")
        if call is None or call.name not in names:
            return [], held
        calls.append(call)
        text = text[end:].lstrip(" ;\n")
    return calls, ""


def _load(text: str) -> Any:
    """A JSON value, or None."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _call(value: Any, arguments_name: str = "arguments") -> ToolCall | None:
    """The call of {"name": ..., "arguments": ...}, or "parameters" instead of "arguments"."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get(arguments_name, value.get("arguments", value.get("parameters", {})))
    if isinstance(arguments, str):
        arguments = _load(arguments)
    if not isinstance(arguments, dict):
        return None
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)


def _overlap(text: str, opening: str) -> int:
    """Length of the longest end of `text` that begins `opening`."""
    return next((n for n in range(min(len(opening) - 1, len(text)), 0, -1) if text.endswith(opening[:n])), 0)


_DEEPSEEK_MARKUP = (CALLS_BEGIN, CALL_BEGIN, CALL_SEP, CALL_END, CALLS_END)
FORMATS = (
    ToolFormat("deepseek", _DEEPSEEK_MARKUP[:2], _DEEPSEEK_MARKUP, _read_deepseek, signs=(CALLS_BEGIN,)),
    ToolFormat(
        "hermes",
        ("<tool_call>",),
        ("<tool_call>", "</tool_call>"),
        _read_hermes,
        signs=("<tool_call>",),
        no_signs=("<function=", "<arg_key>"),  # other languages in the same brackets
    ),
    ToolFormat(
        "mistral",
        ("[TOOL_CALLS]",),
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        _read_mistral,
        signs=("[TOOL_CALLS]",),
        id_alphabet=ALPHANUMERIC,
        id_length=9,
        id_prefix="",
    ),
    ToolFormat(
        "llama",
        ("<|python_tag|>",),
        ("<|python_tag|>",),
        _read_llama,
        signs=("<|python_tag|>", "Environment: ipython"),
        starts=("{",),
    ),
)
