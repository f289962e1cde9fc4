"""What is asked: for each workload, the prompts of one repeat at one context length.

Assistant turns are made up beforehand, so that every server and every state sees the same prompts.
Tools are described in the system message as text: any server can be asked, whatever its chat
template knows.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvire.bench.client import ApiMessage
from kvire.bench.work.prompts import BenchPrompt, Script, Writer, message
from kvire.core.errors import ConfigError

QUESTION_TOKENS = 24
TURNS = 5  # of a conversation; the last one is the probe's
STEPS = 6  # of an agent
SHORT, SHORT_TOKENS = "shortchat", 60  # whatever --context says


@dataclass(frozen=True, slots=True)
class WorkSize:
    """How much a workload sends.

    context_tokens: of the longest prompts, about.
    scripts: documents, conversations or agents.
    at_once: how many of them run together.
    output_tokens: of every answer.
    """

    context_tokens: int
    scripts: int
    at_once: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class BenchWork:
    """The prompts of one workload.

    fill: sent first, to an empty cache.
    probe: sent in every other state; its prompts begin like the fill's. Empty for a workload
        without reuse: then only E and Z can be measured, both with the fill.
    """

    fill: tuple[Script, ...]
    probe: tuple[Script, ...] = ()

    @property
    def baseline(self) -> tuple[Script, ...]:
        """What is sent without reuse, to compare with."""
        return self.probe or self.fill


Maker = Callable[[Writer, WorkSize, str], BenchWork]


def docqa(write: Writer, size: WorkSize, name: str) -> BenchWork:
    """One document after another, each asked one question by the fill, and another by the probe."""
    room = size.context_tokens - QUESTION_TOKENS
    documents = [write.document(room, name, i) for i in range(size.scripts)]

    def ask(part: str) -> tuple[Script, ...]:
        questions = [write.text(QUESTION_TOKENS, name, part, i) for i in range(size.scripts)]
        return tuple(
            _script(size, [message("user", f"{document}\n\n{question}")])
            for document, question in zip(documents, questions, strict=True)
        )

    return BenchWork(ask("fill"), ask("probe"))


def multiturn(write: Writer, size: WorkSize, name: str) -> BenchWork:
    """Conversations that grow to the context length: the fill sends all turns but the last, the
    probe the last one.
    """
    part = size.context_tokens / (2 * TURNS - 1)
    histories: list[list[ApiMessage]] = []
    for i in range(size.scripts):
        turns: list[ApiMessage] = [message("user", write.document(part, name, i))]
        for turn in range(1, TURNS):
            turns.append(message("assistant", write.text(part, name, i, turn, "answer")))
            turns.append(message("user", write.text(part, name, i, turn, "question")))
        histories.append(turns)
    return _growing(size, histories)


def shared_prompt(write: Writer, size: WorkSize, name: str) -> BenchWork:
    """One system prompt: the fill is its first user, the probe as many others as are allowed at
    once.
    """
    system = message("system", write.document(size.context_tokens - QUESTION_TOKENS, name))

    def ask(i: int) -> Script:
        return _script(size, [system, message("user", write.text(QUESTION_TOKENS, name, i))])

    return BenchWork((ask(0),), tuple(ask(i + 1) for i in range(max(size.scripts, size.at_once))))


def agent(write: Writer, size: WorkSize, name: str) -> BenchWork:
    """Agents that call tools: a long list of tools, then call and result, step by step; the probe
    is the last step.
    """
    step = size.context_tokens / (2 * STEPS)
    tools = [_tool(write.text(step / 4, name, "tool", i)) for i in range(4)]
    histories: list[list[ApiMessage]] = []
    for i in range(size.scripts):
        system = f"{write.document(step, name, i)} Answer with a call of one of these tools: {json.dumps(tools)}"
        turns: list[ApiMessage] = [message("system", system), message("user", write.text(step, name, i))]
        for n in range(1, STEPS):
            call = {"name": tools[n % len(tools)]["name"], "arguments": {"query": write.text(step / 3, name, i, n)}}
            turns.append(message("assistant", json.dumps(call)))
            turns.append(message("user", f"Tool result: {write.text(step, name, i, n, 'result')}"))
        histories.append(turns)
    return _growing(size, histories)


def fork(write: Writer, size: WorkSize, name: str) -> BenchWork:
    """Agents that fork one context: the fill reads it once, the probe are all of them going on,
    each its own way.
    """
    context = [
        message("system", write.document(size.context_tokens * 0.8, name)),
        message("user", write.text(size.context_tokens * 0.1, name, "task")),
        message("assistant", write.text(size.context_tokens * 0.1 - QUESTION_TOKENS, name, "plan")),
    ]

    def ask(i: int) -> Script:
        return _script(size, [*context, message("user", write.text(QUESTION_TOKENS, name, i))])

    return BenchWork((ask(0),), tuple(ask(i + 1) for i in range(max(size.scripts, size.at_once, 2))))


def shortchat(write: Writer, size: WorkSize, name: str) -> BenchWork:
    """Short chats and their second turn, where little can be gained."""
    histories: list[list[ApiMessage]] = []
    for i in range(size.scripts):
        first, second = (write.text(SHORT_TOKENS / 3, name, i, turn) for turn in range(2))
        opening = message("user", write.document(SHORT_TOKENS / 3, name, i))
        histories.append([opening, message("assistant", first), message("user", second)])
    return _growing(size, histories)


def unlike(write: Writer, size: WorkSize, name: str) -> BenchWork:
    """Prompts that have nothing in common: what a cache costs where it cannot help."""
    texts = [write.document(size.context_tokens, name, i) for i in range(size.scripts)]
    return BenchWork(tuple(_script(size, [message("user", text)]) for text in texts))


WORKLOADS: Mapping[str, Maker] = {
    "docqa": docqa,
    "multiturn": multiturn,
    "shared": shared_prompt,
    "agent": agent,
    "fork": fork,
    SHORT: shortchat,
    "random": unlike,
}


def maker(name: str) -> Maker:
    """Raises ConfigError for an unknown one."""
    if name not in WORKLOADS:
        raise ConfigError(f"there is no workload {name!r}; choose from {', '.join(WORKLOADS)}, or --trace FILE")
    return WORKLOADS[name]


def _growing(size: WorkSize, histories: list[list[ApiMessage]]) -> BenchWork:
    """Conversations whose prompts end before each assistant turn, and at the end, which is the
    probe.
    """
    fill, probe = [], []
    for turns in histories:
        ends = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
        fill.append(_script(size, *[turns[:end] for end in ends]))
        probe.append(_script(size, turns))
    return BenchWork(tuple(fill), tuple(probe))


def _script(size: WorkSize, *conversations: list[ApiMessage]) -> Script:
    return Script(tuple(BenchPrompt(tuple(messages), size.output_tokens) for messages in conversations))


def _tool(about: str) -> dict[str, object]:
    """A function as tool lists describe it."""
    return {
        "name": "_".join(about.replace(".", "").split()[:2]) or "tool",
        "description": about,
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    }
