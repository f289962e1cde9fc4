"""/v1/chat/completions."""

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kvire.engine.request import Output
from kvire.server.answers import until_client_gone
from kvire.server.endpoints.sessions import SessionResponse, Turn
from kvire.server.errors import ApiError
from kvire.server.reply import EventStream, Reply, ReplyChoice, merged_logprobs, whole_answer
from kvire.server.schemas import ChatRequest, parse
from kvire.server.service import Service, Sharing, service_of, tenant_of
from kvire.server.token_text import chat_logprobs
from kvire.server.tool_formats import Parsed, ToolFormat
from kvire.server.tools import ToolText, supports_tools, tool_format

router = APIRouter()


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    service = service_of(request)
    call, messages = await service.bodies.read(request, _call_and_messages)
    service.check_model(call.model)
    if call.session is None:
        return await _answer(request, service, call, messages)
    return SessionResponse(service, tenant_of(request), call.session, lambda: _answer(request, service, call, messages))


async def _answer(request: Request, service: Service, call: ChatRequest, messages: list[dict[str, Any]]) -> Response:
    params = call.sampling_params(service.max_model_len)
    deadline = service.deadline()
    async with asyncio.timeout_at(deadline):
        turn = None
        if call.session is not None:
            turn = await Turn.begin(service, tenant_of(request), call.session, messages)
        reply = ChatReply(service, call, turn)
        if turn is None:
            prompt = await service.encode_chat(messages, reply.tools, call.chat_template_kwargs)
        else:
            prompt = await turn.encode(reply.tools, call.chat_template_kwargs)
    answers = service.answers(reply.id, [prompt], params, Sharing.of(request, call))
    if call.stream:
        with_usage = call.stream_options is not None and call.stream_options.include_usage
        return EventStream(answers, reply, deadline, with_usage=with_usage)
    async with asyncio.timeout_at(deadline):
        return await until_client_gone(request.receive, whole_answer(answers, reply))


def _call_and_messages(body: dict[str, Any]) -> tuple[ChatRequest, list[dict[str, Any]]]:
    call = parse(ChatRequest, body)
    return call, [message.model_dump(exclude_none=True) for message in call.messages]


class ChatReply(Reply):
    """Choices with messages.

    tools: offered to the model.
    turn: of the session, if the request names one.
    """

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, call: ChatRequest, turn: Turn | None = None) -> None:
        super().__init__(service)
        self._turn = turn
        self._pieces: list[ReplyChoice] = []  # of the one answer that the turn keeps
        self._token_ids: list[int] = []
        self.tools = call.tools if call.tool_choice == "auto" else []
        self._call = call
        self._format = _format_of(service) if self.tools else None
        self._answers: dict[int, ChatAnswer] = {}

    async def take(self, prompt: int, output: Output) -> list[ReplyChoice]:
        """See Reply."""
        del prompt  # a chat has one
        if output.index not in self._answers:
            self._answers[output.index] = self._new_answer()
        delta, finish_reason = self._answers[output.index].take(output)
        logprobs = chat_logprobs(self.service.tokens, output.logprobs) if output.logprobs is not None else None
        choice = {"index": output.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        if self._turn is not None:
            await self._keep(self._turn, choice, output)
        if not delta and logprobs is None and finish_reason is None:
            return []
        return [choice]

    def merge(self, pieces: list[ReplyChoice]) -> ReplyChoice:
        """See Reply."""
        deltas = [piece["delta"] for piece in pieces]
        delta: dict[str, Any] = {"content": "".join(delta.get("content", "") for delta in deltas)}
        if calls := [call for delta in deltas for call in delta.get("tool_calls", [])]:
            delta["tool_calls"] = calls
        return {
            "index": pieces[0]["index"],
            "delta": delta,
            "logprobs": merged_logprobs(pieces),
            "finish_reason": pieces[-1]["finish_reason"],
        }

    def join(self, pieces: list[ReplyChoice]) -> ReplyChoice:
        """See Reply."""
        merged = self.merge(pieces)
        content, calls = merged["delta"]["content"], merged["delta"].get("tool_calls")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": [_without_index(call) for call in calls]}
        logprobs = merged["logprobs"] or {"content": []} if self._call.logprobs else None
        return {
            "index": merged["index"],
            "message": message,
            "logprobs": logprobs,
            "finish_reason": merged["finish_reason"],
        }

    def extra(self) -> dict[str, Any]:
        """The session, and tool calls that max_tokens cut off: neither content nor calls, but not
        lost.
        """
        withheld = {i: answer.withheld for i, answer in sorted(self._answers.items()) if answer.withheld}
        session = {"session": self._turn.report()} if self._turn is not None else {}
        return session | ({"cut_off_tool_calls": withheld} if withheld else {})

    async def _keep(self, turn: Turn, choice: ReplyChoice, output: Output) -> None:
        """Put the answer into the session once it is whole, before its end is sent."""
        self._pieces.append(choice | {"logprobs": None})
        self._token_ids += output.token_ids
        if output.finish_reason in {"stop", "length"}:
            message = self.join(self._pieces)["message"]
            await turn.keep({name: value for name, value in message.items() if value is not None}, self._token_ids)

    def _new_answer(self) -> "ChatAnswer":
        if self._format is None:
            return ChatAnswer(None, None, parallel=True)
        names = frozenset(tool["function"]["name"] for tool in self.tools)
        text = ToolText(self._format, names, self.service.tokenizer, tuple(self._call.stop))
        return ChatAnswer(self._format, text, parallel=self._call.parallel_tool_calls)


class ChatAnswer:
    """One choice in the making.

    parallel: whether more than one tool call is allowed.
    """

    def __init__(self, form: ToolFormat | None, text: ToolText | None, *, parallel: bool) -> None:
        self.withheld = ""
        self._format = form
        self._text = text
        self._parallel = parallel
        self._begun = False

    def take(self, output: Output) -> tuple[dict[str, Any], str | None]:
        """(delta, finish reason) of the next output."""
        delta: dict[str, Any] = {}
        if not self._begun:
            self._begun, delta["role"] = True, "assistant"
        content, finish_reason = output.text, output.finish_reason
        if self._text is not None:
            content = self._text.add(output)
            if finish_reason is not None:
                end = self._text.finish(truncated=finish_reason == "length")
                content, finish_reason = content + end.content, self._end(end, delta, finish_reason)
        if content or "role" in delta:
            delta["content"] = content
        return delta, finish_reason

    def _end(self, end: Parsed, delta: dict[str, Any], finish_reason: str) -> str:
        """Put the calls into the delta; the finish reason that follows."""
        assert self._format is not None
        self.withheld = end.withheld
        calls = end.calls if self._parallel else end.calls[:1]
        if not calls:
            return finish_reason
        delta["tool_calls"] = [
            {
                "index": i,
                "id": self._format.new_id(),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for i, call in enumerate(calls)
        ]
        return "tool_calls" if finish_reason == "stop" else finish_reason


def _format_of(service: Service) -> ToolFormat:
    if not supports_tools(service.template):
        raise ApiError(
            400, "this model's chat template has no place for tools: the model was not made for them", param="tools"
        )
    form = tool_format(service.template)
    if form is None:
        message = (
            "this model writes tool calls in a way that Kvire cannot read; leave out tools or set tool_choice to none"
        )
        raise ApiError(400, message, param="tools")
    return form


def _without_index(call: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in call.items() if name != "index"}
