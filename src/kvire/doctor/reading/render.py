"""Bodies of requests as prompts: the order of their text in the provider's prompt.

Tools come first, then the answer's format, then the system prompt, then the messages. Anthropic
gives this order for its cache (tools, system, messages); OpenAI's guide puts tools and schemas
before the system message, too. The real templates add a few tokens per message; they are not known
and not counted.
"""

import json
from collections.abc import Iterable
from typing import Any

import xxhash

from kvire.doctor import prompt as p

TTL_S = {"5m": 300, "1h": 3600}
ROLES = {
    "system": p.SYSTEM,
    "developer": p.SYSTEM,
    "user": p.USER,
    "assistant": p.ASSISTANT,
    "model": p.ASSISTANT,
    "tool": p.RESULT,
    "function": p.RESULT,
}
THINKING_TYPES = ("thinking", "redacted_thinking")
MEDIA_TYPES = ("image", "file", "audio", "video")
TOKEN_ID_BYTES = 4
_DIGITS = [chr(0x30 + i) for i in range(64)]


class UnknownBodyError(ValueError):
    """No prompt is found in the body; the message names the missing part."""


def of_text(text: str) -> p.LoggedPrompt:
    """A prompt without any structure."""
    return p.LoggedPrompt(text.replace(p.PART.decode(), " ").encode("utf-8", "surrogatepass"))


def of_token_ids(ids: list[int]) -> p.LoggedPrompt:
    """A prompt of token ids."""
    if not all(0 <= i < 1 << 24 for i in ids):
        raise UnknownBodyError("a token id is not in 0 ... 16,777,215")
    out = p.PromptWriter()
    out.add(p.TOKENS, "".join(_DIGITS[(i >> shift) & 63] for i in ids for shift in (18, 12, 6, 0)))
    return out.prompt()


def of_completion(body: dict[str, Any]) -> list[p.LoggedPrompt]:
    """OpenAI completions: text, token ids, or a list of either."""
    prompt = body["prompt"]
    if isinstance(prompt, str):
        return [of_text(prompt)]
    if isinstance(prompt, list) and prompt:
        if all(type(one) is int for one in prompt):
            return [of_token_ids(prompt)]
        return [made for one in prompt for made in of_completion({"prompt": one})]
    raise UnknownBodyError("prompt is neither text nor token ids")


def of_chat(body: dict[str, Any]) -> p.LoggedPrompt:
    """OpenAI chat completions and the like; with cache_control if a gateway passes it on."""
    out = p.PromptWriter()
    _tools(out, body.get("tools") or body.get("functions"))
    _format(out, body.get("response_format"))
    for message in _dicts(body["messages"], "messages"):
        kind = ROLES.get(str(message.get("role")), p.OTHER)
        if reasoning := message.get("reasoning_content") or message.get("reasoning"):
            out.add(p.REASONING, _as_text(reasoning))
        name = message.get("name") or message.get("tool_call_id")
        first = _content(out, kind, message.get("content"), name=f"{name}: " if name else "")
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            _add_call(out, function.get("name"), call.get("id"), function.get("arguments"), first=first)
            first = False
        if first:
            out.add(kind, "")
        _mark(out, message)
    _mark(out, body)
    return out.prompt()


def of_responses(body: dict[str, Any]) -> p.LoggedPrompt:
    """OpenAI responses: `instructions` and `input`."""
    out = p.PromptWriter()
    _tools(out, body.get("tools"))
    _format(out, (body.get("text") or {}).get("format"))
    if isinstance(body.get("instructions"), str):
        out.add(p.SYSTEM, body["instructions"])
    given = body["input"]
    if isinstance(given, str):
        out.add(p.USER, given)
        return out.prompt()
    for item in _dicts(given, "input"):
        kind = item.get("type", "message")
        if kind == "message":
            if _content(out, ROLES.get(str(item.get("role")), p.OTHER), item.get("content")):
                out.add(p.OTHER, "")
        elif kind == "function_call":
            _add_call(out, item.get("name"), item.get("call_id"), item.get("arguments"), first=True)
        elif kind == "function_call_output":
            out.add(p.RESULT, f"{item.get('call_id')}: {_result(out, item.get('output'))}")
        elif kind == "reasoning":
            out.add(p.REASONING, _as_text(item.get("encrypted_content") or item.get("summary") or ""))
        elif kind == "computer_call_output":
            out.add(p.RESULT, f"{item.get('call_id')}: {_digest(out, item.get('output'))}")
        else:
            out.add(p.OTHER, _as_text(item))
    return out.prompt()


def of_anthropic(body: dict[str, Any]) -> p.LoggedPrompt:
    """Anthropic messages, with their cache breakpoints.

    Settings that void the cached messages but not tools and system (tool_choice, thinking) stand
    between them.
    """
    out = p.PromptWriter()
    for tool in _dicts(body.get("tools") or [], "tools"):
        out.add(p.TOOL, _json(_unmarked(tool)))
        _mark(out, tool)
    system = body.get("system") or []
    _blocks(out, p.SYSTEM, [{"type": "text", "text": system}] if isinstance(system, str) else system)
    settings = {name: body[name] for name in ("tool_choice", "thinking") if body.get(name) is not None}
    if settings:
        out.add(p.SETTINGS, _json(settings))
    for message in _dicts(body["messages"], "messages"):
        kind = ROLES.get(str(message.get("role")), p.OTHER)
        content = message.get("content")
        _blocks(out, kind, [{"type": "text", "text": content}] if isinstance(content, str) else content)
    _mark(out, body)
    return out.prompt(has_breakpoints=True)


def _blocks(out: p.PromptWriter, kind: str, blocks: Any) -> None:
    first = True
    for block in _dicts(blocks, "content"):
        match block.get("type", "text" if "text" in block else ""):
            case "text":
                out.add(kind, _as_text(block.get("text")), first=first)
            case "document" if isinstance(written := _written(block.get("source")), str):
                out.add(kind, f"{block.get('title') or ''} {block.get('context') or ''} {written}", first=first)
            case kind_of_block if kind_of_block in THINKING_TYPES:
                out.add(p.REASONING, _as_text(block.get("thinking") or block.get("data") or ""))
                _mark(out, block)
                continue
            case "tool_use" | "server_tool_use":
                _add_call(out, block.get("name"), block.get("id"), _json(block.get("input")), first=first)
            case "tool_result":
                out.add(p.RESULT, f"{block.get('tool_use_id')}: {_result(out, block.get('content'))}", first=first)
            case _ if _is_media(block):
                _media(out, block, first=first)
            case _:
                out.add(kind, _json(_unmarked(block)), first=first)
        _mark(out, block)
        first = False


def _mark(out: p.PromptWriter, block: dict[str, Any]) -> None:
    """Add the block's breakpoint, if any; notes a reason of the API for refusing it (its prompt
    caching guide).
    """
    control = block.get("cache_control")
    if not isinstance(control, dict):
        return
    ttl_s = TTL_S.get(control.get("ttl") or "5m")
    if control.get("type") != "ephemeral" or ttl_s is None:
        out.refuse("cache_control has an unknown type or ttl")
    elif block.get("type") in THINKING_TYPES:
        out.refuse("a block of thinking has a breakpoint")
    elif block.get("type") == "text" and not block.get("text"):
        out.refuse("an empty text block has a breakpoint")
    out.mark(ttl_s or TTL_S["5m"])


def _content(out: p.PromptWriter, kind: str, content: Any, *, name: str = "") -> bool:
    """Add a message's content. True if it had no part: the message's first one is still to come."""
    if isinstance(content, str):
        out.add(kind, name + content)
        return False
    first = True
    for block in _dicts(content or [], "content"):
        if isinstance(block.get("text"), str):
            out.add(kind, name + block["text"], first=first)
        elif block.get("type") == "refusal":
            out.add(kind, _as_text(block.get("refusal")), first=first)
        elif _is_media(block):
            _media(out, block, first=first)
        else:
            out.add(kind, _json(_unmarked(block)), first=first)
        _mark(out, block)
        first, name = False, ""
    return first


def _tools(out: p.PromptWriter, tools: Any) -> None:
    for tool in _dicts(tools or [], "tools"):
        out.add(p.TOOL, _json(_unmarked(tool)))
        _mark(out, tool)


def _format(out: p.PromptWriter, wanted: Any) -> None:
    if isinstance(wanted, dict) and wanted.get("type") not in (None, "text"):
        out.add(p.FORMAT, _json(wanted))


def _add_call(out: p.PromptWriter, name: Any, call_id: Any, arguments: Any, *, first: bool) -> None:
    out.add(p.CALL, f"{call_id or ''} {name or ''} {_as_text(arguments)}", first=first)


def _media(out: p.PromptWriter, block: dict[str, Any], *, first: bool) -> None:
    out.add(p.MEDIA, _digest(out, _unmarked(block)), first=first)


def _is_media(block: dict[str, Any]) -> bool:
    return isinstance(block.get("source"), dict) or any(one in str(block.get("type")) for one in MEDIA_TYPES)


def _unmarked(block: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in block.items() if name != "cache_control"}


def _digest(out: p.PromptWriter, block: Any) -> str:
    """Base64 says nothing about tokens: a digest stands for it."""
    out.media += 1
    kind = block.get("type") if isinstance(block, dict) else ""
    return f"{kind} {xxhash.xxh3_64_hexdigest(_json(block).encode('utf-8', 'surrogatepass'))}"


def _result(out: p.PromptWriter, content: Any) -> str:
    """A tool's result (text, or blocks of text, images and files) as one block."""
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        return _as_text(content)
    return "".join(_result_block(out, block) for block in content)


def _result_block(out: p.PromptWriter, block: dict[str, Any]) -> str:
    text = block.get("text")
    if isinstance(text, str):
        return text
    return _digest(out, block) if _is_media(block) else _json(block)


def _written(source: Any) -> Any:
    """The text of a plain-text document."""
    return source.get("data") if isinstance(source, dict) and source.get("type") == "text" else None


def _dicts(values: Any, name: str) -> Iterable[dict[str, Any]]:
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise UnknownBodyError(f"{name} is not a list of objects")
    return values


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(one, dict) and isinstance(one.get("text"), str) for one in value):
        return "".join(one["text"] for one in value)
    return "" if value is None else _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
