"""The API of a request's body, and its prompts.

Bedrock Converse and Gemini are rewritten as bodies for render.py: the same text in the same order.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from kvire.doctor.prompt import LoggedPrompt
from kvire.doctor.reading import render
from kvire.doctor.reading.render import UnknownBodyError

Body = dict[str, Any]
OPENAI_ROLES = frozenset(("system", "developer", "tool", "function"))


def api_of(body: Body, levels: Sequence[Body]) -> str:
    """anthropic, converse, gemini, chat, responses or completions.

    levels: the line and everything it wraps, down to the body.
    """
    if isinstance(body.get("contents"), list):
        return "gemini"
    if not isinstance(body.get("messages"), list):
        return "completions" if isinstance(body.get("prompt"), (str, list)) else "responses"
    if _is_converse(body):
        return "converse"
    url = next((str(level["url"]) for level in levels if level.get("url")), "")
    if (
        "system" in body
        or "anthropic_version" in body
        or url.endswith("/messages")
        or any("input_schema" in tool for tool in body.get("tools") or ())
    ):
        return "anthropic"
    if any(message.get("role") in OPENAI_ROLES or "tool_calls" in message for message in body["messages"]):
        return "chat"  # also for a claude model: gateways take it so
    looks = str(body.get("model", "")).startswith("claude") or any(map(_has_anthropic_blocks, body["messages"][:8]))
    return "anthropic" if looks else "chat"


def _is_converse(body: dict[str, Any]) -> bool:
    """Bedrock's own fields, or blocks without a type: there the one field of a block is
    its kind.
    """
    if "toolConfig" in body or "inferenceConfig" in body:
        return True
    system = body.get("system")
    contents = [system, *(message.get("content") for message in body["messages"][:8])]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    return bool(blocks) and all(isinstance(block, dict) and len(block) == 1 for block in blocks)


def _has_anthropic_blocks(message: dict[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(
        isinstance(block, dict) and ("cache_control" in block or block.get("type") in {"tool_use", "tool_result"})
        for block in content
    )


def prompts_of_body(api: str, body: Body) -> list[LoggedPrompt]:
    """A body of completions may have several. Raises UnknownBodyError."""
    match api:
        case "anthropic":
            return [render.of_anthropic(body)]
        case "converse":
            return [render.of_anthropic(anthropic_of_converse(body))]
        case "gemini":
            return [render.of_chat(chat_of_gemini(body))]
        case "chat":
            return [render.of_chat(body)]
        case "responses":
            return [render.of_responses(body)]
    return render.of_completion(body)


def anthropic_of_converse(body: Body) -> Body:
    """Bedrock Converse as Anthropic messages: a cachePoint marks the block before it."""
    config = body.get("toolConfig") or {}
    tools = [one.get("toolSpec", one) if "cachePoint" not in one else one for one in _objects(config.get("tools"))]
    written: Body = {
        "tools": _marked(tools),
        "system": _marked([_block(one) for one in _objects(body.get("system"))]),
        "messages": [
            {"role": message.get("role"), "content": _marked([_block(one) for one in _objects(message.get("content"))])}
            for message in _objects(body.get("messages"))
        ],
    }
    if config.get("toolChoice") is not None:
        written["tool_choice"] = config["toolChoice"]
    return written


def _marked(blocks: list[Body]) -> list[Body]:
    """Without cachePoint: the block before each has a breakpoint; a point without one marks an
    empty block.
    """
    written: list[Body] = []
    for block in blocks:
        if (point := block.get("cachePoint")) is None:
            written.append(block)
            continue
        if not written:
            written.append({"type": "text", "text": ""})
        ttl = {"ttl": point["ttl"]} if isinstance(point, dict) and point.get("ttl") else {}
        written[-1] = written[-1] | {"cache_control": {"type": "ephemeral"} | ttl}
    return written


def _block(block: Body) -> Body:
    """A block is an object with one field, its kind."""
    match block:
        case {"text": text}:
            return {"type": "text", "text": text}
        case {"toolUse": dict(call)}:
            return {"type": "tool_use", "id": call.get("toolUseId"), "name": call.get("name"), "input": call["input"]}
        case {"toolResult": dict(result)}:
            content = [_result(one) for one in _objects(result.get("content"))]
            return {"type": "tool_result", "tool_use_id": result.get("toolUseId"), "content": content}
        case {"reasoningContent": dict(reasoning)}:
            written = reasoning.get("reasoningText") or {}
            return {"type": "thinking", "thinking": written.get("text") or reasoning.get("redactedContent") or ""}
        case {"image": dict(media)} | {"document": dict(media)} | {"video": dict(media)}:
            return {"type": next(iter(block)), **media}
    return block


def _result(block: Body) -> Body:
    return block if "json" in block else _block(block)


def chat_of_gemini(body: Body) -> Body:
    """Gemini's generateContent as chat: `systemInstruction`, `contents` of parts, `tools`."""
    config = body.get("generationConfig") or body.get("generation_config") or {}
    schema = _either(config, "responseSchema", "response_schema")
    messages: list[Body] = []
    if system := _either(body, "systemInstruction", "system_instruction"):
        messages.append({"role": "system", "content": _texts(_parts(system))})
    for content in _objects(body["contents"]):
        messages += _messages(content)
    tools = _objects(body.get("tools"))
    declared = [_either(tool, "functionDeclarations", "function_declarations") or [tool] for tool in tools]
    return {
        "tools": [function for tool in declared for function in _objects(tool)],
        "response_format": {"type": "schema", "schema": schema} if schema else None,
        "messages": messages,
    }


def _messages(content: Body) -> Iterable[Body]:
    """One message for each tool's result, and one for text and calls."""
    parts = _parts(content)
    for part in parts:
        if result := _either(part, "functionResponse", "function_response"):
            yield {"role": "tool", "content": [{"name": result.get("name"), "response": result.get("response")}]}
    said = [part for part in parts if not _either(part, "functionResponse", "function_response")]
    if not said:
        return
    calls = [call for part in said if (call := _call(part))]
    yield {
        "role": content.get("role") or "user",
        "reasoning_content": "".join(str(part.get("text", "")) for part in said if part.get("thought")),
        "content": _texts([part for part in said if not part.get("thought") and not _call(part)]),
        "tool_calls": [{"function": {"name": call.get("name"), "arguments": call.get("args")}} for call in calls],
    }


def _call(part: Body) -> Any:
    return _either(part, "functionCall", "function_call")


def _texts(parts: list[Body]) -> list[Body]:
    return [part if isinstance(part.get("text"), str) else {"type": "file", **part} for part in parts]


def _parts(content: Any) -> list[Body]:
    return [{"text": content}] if isinstance(content, str) else _objects(content.get("parts"))


def _either(holder: Body, camel: str, snake: str) -> Any:
    """The API's name of a field, or the Python client's."""
    return holder.get(camel) or holder.get(snake)


def _objects(values: Any) -> list[Body]:
    if values is None:
        return []
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise UnknownBodyError("blocks, parts or tools are not a list of objects")
    return values
