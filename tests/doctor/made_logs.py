"""Request logs with one planted cause each, and what a hand calculation says of them.

Tokens are bytes / 4, rounded down, of the prompt's bytes: two per message (or tool, or block) plus its text. Texts are
sized in multiples of four bytes so that the sums can be followed.
"""

import json
import random
from dataclasses import dataclass
from typing import Any

from kvire.doctor.findings import Cause

JSON = dict[str, Any]


@dataclass(frozen=True)
class Made:
    """requests: bodies. where, token: of the finding, counted from the prompt's start. tokens: what all prompts would
    share beyond what they do. requests_hit: how many lose something.
    """

    cause: Cause
    where: str
    token: int
    tokens: int
    requests_hit: int
    bodies: list[JSON]
    together_with: tuple[str, ...] = ()


def words(size_bytes: int, seed: int = 0) -> str:
    """Text of exactly so many bytes."""
    rng = random.Random(seed)
    text = " ".join("".join(rng.choices("abcdefghiklmnoprstuw", k=rng.randrange(3, 9))) for _ in range(size_bytes // 3))
    return text[:size_bytes]


RULES = "\n" + words(7999)
QUESTIONS = ("What now", "Really??", "Anything", "Go on...", "Begin it")


def chat(system: str, *messages: tuple[str, Any], model: str = "m", **more: Any) -> JSON:
    said = [{"role": role, "content": content} for role, content in messages]
    return {"model": model, "messages": [{"role": "system", "content": system}, *said], **more}


def in_front(pieces: list[str], before: str = "Info: ") -> list[JSON]:
    """Each piece between `before` and the same 8,000 bytes, then a question that no other one begins like."""
    return [
        chat(f"{before}{piece}{RULES}", ("user", question)) for piece, question in zip(pieces, QUESTIONS, strict=False)
    ]


def time_stamp() -> Made:
    # 2 + 6 bytes = token 2; then 20 bytes of time, 18 of them the same; then 8,000 bytes and 2 of the next message.
    # Shared now: 26 bytes = 6 tokens. Without the time: 2 + (7 + 2000 = 2007 - 7) = 2002. Gained: 1996, three times.
    stamps = [f"2026-11-30T10:00:0{i}Z" for i in range(4)]
    return Made(Cause.TIME, "system prompt", 2, 3 * 1996, 3, in_front(stamps))


def long_date() -> Made:
    # The weekday differs at once: 8 bytes shared, "Monday, 30 November 2026 at 10:15" has 33 bytes, 32 the others.
    # 2 + before(8 + 33 + 8000 + 2 = 8043) = 2010 - before(41) = 10 ... = 2002 - 2 = 2000 once.
    dates = ["Sunday, 29 November 2026 at 10:15", "Monday, 30 November 2026 at 10:15"]
    return Made(Cause.TIME, "system prompt", 2, 2000, 1, in_front(dates))


def chinese_date() -> Made:
    # 2 + 6 bytes, then "2026年11月" (4 + 3 + 2 + 3 bytes) is the same, to 20 = 5 tokens. The date has 16 bytes to
    # 24 = 6; then 8,002 bytes to 8026 = 2006: 2 + 2000 - 5.
    return Made(Cause.TIME, "system prompt", 2, 1997, 1, in_front(["2026年11月1日", "2026年11月2日"]))


def uuid() -> Made:
    ids = ["0b0e4bfa-93ac-4a2b-9d9e-7f8a5d2c1b11", "91c7de02-1f7c-4c3a-8a54-5fd1c2b7aa90"]
    # 36 bytes of id from byte 8 on: before(44) = 11, before(44 + 8002) = 2011: 2 + 2000 - 2 = 2000.
    return Made(Cause.RANDOM_ID, "system prompt", 2, 2000, 1, in_front(ids))


def time_and_id() -> Made:
    """Claude Code's header against local servers: a time, and five hexadecimal digits."""
    heads = [f"ts=2026-11-30T10:00:0{i}Z; id={one}; " for i, one in enumerate(("3fa9c", "b71e0", "5d2c4"))]
    # From byte 2 + 3 = 5 on (token 1): time to 25, "; id=" to 30, id to 35, then "; ", rules and 2: 8004 bytes to 8039.
    # 1 + (before(30) - before(25) = 1) + (before(8039) - before(35) = 2009 - 8 = 2001) = 2003; shared 23 bytes = 5.
    bodies = [chat(f"{head}{RULES}", ("user", q)) for head, q in zip(heads, QUESTIONS, strict=False)]
    return Made(Cause.TIME, "system prompt", 1, 2 * 1998, 2, bodies, ("random id",))


def counter() -> Made:
    # "Info: 7" and "Info: 8": byte 8, one digit; before(9) = 2, before(9 + 8002) = 2002: 2 + 2000 - 2.
    return Made(Cause.COUNTER, "system prompt", 2, 2 * 2000, 2, in_front(["7", "8", "9"]))


def user_name() -> Made:
    # 2 + 6 = 8 bytes "User: " then "Ada;" / "Eve;": the name is 3 bytes: before(11) = 2, before(11 + 8003) = 2003.
    bodies = in_front(["Ada;", "Eve;"], before="User: ")
    return Made(Cause.USER, "system prompt", 2, 2 + 2001 - 2, 1, bodies)


def _tool(name: str) -> JSON:
    return {"type": "function", "function": {"name": name, "description": words(400, ord(name[0]))}}


def tool_order() -> Made:
    a, b, c = _tool("alpha"), _tool("beta"), _tool("gamma")
    orders = [[a, b, c], [b, c, a]]
    bodies = [chat(RULES, ("user", q), tools=tools) for tools, q in zip(orders, QUESTIONS, strict=False)]
    # Nothing is shared but 2 + len('{"type":"function","function":{"name":"') = 41 bytes = 10 tokens. The tools take
    # 3 * (2 + 39 + 17 + 400 + 3) + 5 + 4 + 5 = 1397 bytes; then 2 + 8000 + 2 bytes to 9401 = 2350. In one order, the
    # tools are the same as well.
    return Made(Cause.TOOL_ORDER, "tools", 0, 2350 - 10, 1, bodies)


def tool_set() -> Made:
    a, b = _tool("alpha"), _tool("beta")
    bodies = [chat(RULES, ("user", q), tools=tools) for tools, q in zip([[a], [a, b]], QUESTIONS, strict=False)]
    # The first tool is 2 + 39 + 5 + 17 + 400 + 3 = 466 bytes and is shared, with one byte: 467 = 116. The second ends
    # at 931 = 232; then 8004 bytes to 8935 = 2233. before(466) = 116, 116 + 2001 - 116 = 2001.
    return Made(Cause.TOOL_SET, "tools", 116, 2001, 1, bodies)


def json_form() -> Made:
    call = {"city": "Oslo", "days": 3}
    history = []
    for arguments in (json.dumps(call), json.dumps(call, sort_keys=True, separators=(",", ":"))):
        said = {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "sky", "arguments": arguments}}]}
        first = {"role": "user", "content": words(398, 5)}
        history.append([first, said, {"role": "tool", "tool_call_id": "c1", "content": words(4000, 6)}])
    bodies = [{"model": "m", "messages": [*old, _user(q)]} for old, q in zip(history, QUESTIONS, strict=False)]
    # 400 bytes, then 2 + "c1 sky " = 409 is where the JSON begins (token 102): '{"city":' is the same, 417 = 104.
    # The second writes it in 24 bytes, to 433; then 2 + 4 + 4000 + 2 = 4008 to 4441 = 1110, all of it the same: - 104.
    return Made(Cause.JSON_FORM, "messages (tool call)", 102, 1110 - 104, 1, bodies)


def _user(text: str) -> JSON:
    return {"role": "user", "content": text}


def reasoning() -> Made:
    turn = {"role": "assistant", "content": words(3998, 8)}
    first = _user(words(398, 7))
    bodies = [
        {"model": "m", "messages": [first, {**turn, "reasoning_content": words(800, 9)}, _user("What now")]},
        {"model": "m", "messages": [first, turn, _user("Really??")]},
    ]
    # 400 bytes and one mark are shared: 100. Then 4000 bytes of the turn and 2: 100 + (1100 - 100) - 100 = 1000.
    return Made(Cause.REASONING, "messages (assistant)", 100, 1000, 1, bodies)


def think_tags() -> Made:
    said, first = words(3998, 8), _user(words(398, 7))
    turns = [f"<think>{words(500, 9)}</think>\n\n{said}", said]
    bodies = [
        {"model": "m", "messages": [first, {"role": "assistant", "content": turn}, _user(q)]}
        for turn, q in zip(turns, QUESTIONS, strict=False)
    ]
    # At byte 402 the reasoning is gone: 100, then 3998 + 2 bytes to 4402 = 1100: 100 + 1000 - 100.
    return Made(Cause.REASONING, "messages (assistant)", 100, 1000, 1, bodies)


def cut_history() -> Made:
    turns = [_user(words(998, i)) for i in range(12)]
    system = {"role": "system", "content": words(998, 99)}
    bodies = [{"model": "m", "messages": [system, *turns[i : i + 8]]} for i in range(4)]
    # 1000 bytes and "\x1eU" are shared: 250. Without the cut the seven turns that both have are shared too: 7 * 1000
    # bytes; then one prompt ends, so 250 + 1750 - 250 = 1750, three times.
    return Made(Cause.TRUNCATED, "messages (user)", 250, 3 * 1750, 3, bodies)


def inserted() -> Made:
    turns = [_user(words(998, i)) for i in range(5)]
    bodies = [
        {"model": "m", "messages": [_user("Found: " + words(591, 50 + i)), *turns, _user(q)]}
        for i, q in enumerate(QUESTIONS[:2])
    ]
    bodies[0]["messages"].pop(0)  # the first request found nothing to insert
    # One mark is shared. The insertion takes 600 bytes = 150; then 5 * 1000 and 2 to 5602 = 1400.
    return Made(Cause.INSERTED, "messages (user)", 0, 1400 - 150, 1, bodies)


def moved_passages() -> Made:
    passages = [words(998, 20 + i) for i in range(4)]
    orders = [(0, 1, 2, 3), (2, 0, 3, 1)]
    bodies = [
        chat("Answer", ("user", "\n\n".join([passages[i] for i in order] + [words(1000, 40), q])))
        for order, q in zip(orders, QUESTIONS, strict=False)
    ]
    # Passages begin at 2 + 6 + 2 = 10 (token 2) and end at 10 + 4 * 998 + 3 * 2 = 4008; then 2 + 1000 + 2 to 5012 =
    # 1253. In one order the passages are the same as well: 1253 - 2.
    return Made(Cause.MOVED_PASSAGES, "messages (user)", 2, 1251, 1, bodies)


def moved_documents() -> Made:
    documents = [words(998, 20 + i) for i in range(4)]
    bodies = [
        chat("Answer", ("user", "\n\n".join([documents[i] for i in order] + [q])))
        for order, q in zip([(0, 1, 2, 3), (2, 0, 3, 1)], QUESTIONS, strict=False)
    ]
    # As above, but nothing fixed follows: only the documents and the blank line, from byte 10 to 4010 = 1002: - 2.
    return Made(Cause.MOVED_PASSAGES, "messages (user)", 2, 1000, 1, bodies)


def white_space() -> Made:
    first = words(396, 3)
    said = {"role": "assistant", "content": words(3998, 4)}
    bodies = [
        {"model": "m", "messages": [_user(first + end), said, _user(q)]}
        for end, q in zip([" \n", ""], QUESTIONS, strict=False)
    ]
    # 398 bytes are shared = 99. The space is gone, then 2 + 3998 + 2 bytes to 4400 = 1100: 99 + 1001 - 99.
    return Made(Cause.WHITE_SPACE, "messages (user)", 99, 1001, 1, bodies)


def image() -> Made:
    def seen(data: str, q: str) -> JSON:
        picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        return chat(words(398, 1), ("user", [picture, {"type": "text", "text": words(4000, 2) + q}]))

    # 400 bytes, then 2 + "image_url " (10) of the image are shared: 412 = 103 at least; its digest has 16 digits and
    # ends at 428 = 107; 2 + 4000 bytes to 4430 = 1107: 100 + 1000 - 103.
    return Made(
        Cause.MEDIA, "messages (image or file)", 100, 100 + 1000 - 103, 1, [seen("AAAA", "?"), seen("BBBB", "!")]
    )


def settings() -> Made:
    bodies = [
        {
            "model": "claude-x",
            "max_tokens": 9,
            "system": words(398, 1),
            "tool_choice": {"type": choice},
            "messages": [_user(words(3998, 2)), {"role": "assistant", "content": "Yes"}, _user(q)],
        }
        for choice, q in zip(("auto", "any"), QUESTIONS, strict=False)
    ]
    # At 400 = token 100: 2 + len('{"tool_choice":{"type":"a') bytes are shared, to 427 = 106. With "any" the part ends
    # at 432 = 108; then 4000 + 5 + 2 bytes to 4439 = 1109: 100 + 1001 - 106.
    return Made(Cause.SETTINGS, "settings", 100, 995, 1, bodies)


def context() -> Made:
    bodies = [chat("Answer", ("user", words(1000, 30 + i) + RULES + q)) for i, q in enumerate(QUESTIONS[:2])]
    # From byte 10 on (token 2) 1000 other bytes to 1010 = 252, then 8000 to 9010 = 2252: 2 + 2000 - 2.
    return Made(Cause.CONTEXT, "messages (user)", 2, 2000, 1, bodies)


def system_text() -> Made:
    bodies = [chat(words(1000, 30 + i) + RULES, ("user", q)) for i, q in enumerate(QUESTIONS[:2])]
    # From byte 2 on 1000 other bytes to 1002 = 250, then 8002 to 9004 = 2251: 0 + 2001 - 0.
    return Made(Cause.SYSTEM, "system prompt", 0, 2001, 1, bodies)


def other_model() -> Made:
    bodies = [chat(RULES, ("user", "What now"), model=model) for model in ("one", "two")]
    # All 2 + 8000 + 2 + 8 = 8012 bytes are known, under the other name; the last token is computed.
    return Made(Cause.MODEL, "model", 0, 2002, 1, bodies)


ALL = (
    time_stamp, long_date, chinese_date, uuid, time_and_id, counter, user_name, tool_order, tool_set, json_form,
    reasoning, think_tags, cut_history, inserted, moved_passages, moved_documents, white_space, image, settings,
    context, system_text, other_model,
)  # fmt: skip


def claude(system: str, *messages: str, mark: tuple[int, ...] = (), system_ttl: str | None = None) -> JSON:
    """mark: messages with a breakpoint. system_ttl: of one behind the system prompt."""
    control = {"type": "ephemeral"}
    said = []
    for i, text in enumerate(messages):
        block = {"type": "text", "text": text} | ({"cache_control": control} if i in mark else {})
        said.append({"role": "assistant" if i % 2 else "user", "content": [block]})
    block = {"type": "text", "text": system} | ({"cache_control": control | {"ttl": system_ttl}} if system_ttl else {})
    return {"model": "claude-x", "system": [block], "messages": said}


def as_lines(bodies: list[JSON], spacing_s: float | None = 10.0) -> list[bytes]:
    """The log, a request every so many seconds."""
    if spacing_s is None:
        return [json.dumps(body).encode() for body in bodies]
    return [json.dumps({"timestamp": 1e9 + i * spacing_s, "body": body}).encode() for i, body in enumerate(bodies)]
