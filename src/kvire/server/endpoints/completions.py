"""/v1/completions: text or token ids, continued or scored."""

import asyncio
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kvire.engine.request import Output
from kvire.server.answers import until_client_gone
from kvire.server.reply import EventStream, Reply, ReplyChoice, merged_logprobs, whole_answer
from kvire.server.schemas import CompletionRequest, parse
from kvire.server.service import Service, Sharing, service_of
from kvire.server.token_text import CompletionLogprobs

router = APIRouter()


@router.post("/v1/completions", response_model=None)
async def completions(request: Request) -> Response:
    """Continue one prompt or several."""
    service = service_of(request)
    call = await service.bodies.read(request, partial(parse, CompletionRequest))
    service.check_model(call.model)
    params = call.sampling_params()
    deadline = service.deadline()
    async with asyncio.timeout_at(deadline):
        room = int(params.max_tokens > 0)
        prompts = [await service.encode_prompt(prompt, room) for prompt in call.prompt]
    reply = CompletionReply(service, call, prompts)
    answers = service.answers(reply.id, prompts, params, Sharing.of(request, call))
    if call.stream:
        with_usage = call.stream_options is not None and call.stream_options.include_usage
        return EventStream(answers, reply, deadline, with_usage=with_usage)
    async with asyncio.timeout_at(deadline):
        return await until_client_gone(request.receive, whole_answer(answers, reply))


class CompletionReply(Reply):
    """Choices with text: prompt by prompt, each with its n answers."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, service: Service, call: CompletionRequest, prompts: list[tuple[int, ...]]) -> None:
        super().__init__(service)
        self._call = call
        self._prompts = prompts
        self._logprobs: dict[int, CompletionLogprobs] = {}

    async def take(self, prompt: int, output: Output) -> list[ReplyChoice]:
        """See Reply."""
        index = prompt * self._call.n + output.index
        text, logprobs = output.text, None
        if index not in self._logprobs:
            self._logprobs[index] = CompletionLogprobs(self.service.tokens, self.service.tokenizer)
            if self._call.echo:
                echo, logprobs = await asyncio.to_thread(self._echo, prompt, index, output)
                text = echo + text
        if self._call.logprobs is not None and output.logprobs is not None:
            more = self._logprobs[index].add(output.logprobs, output.token_ids)
            logprobs = _joined(logprobs, more) if logprobs else more
        if not text and logprobs is None and output.finish_reason is None:
            return []
        return [{"index": index, "text": text, "logprobs": logprobs, "finish_reason": output.finish_reason}]

    def merge(self, pieces: list[ReplyChoice]) -> ReplyChoice:
        """See Reply."""
        return {
            "index": pieces[0]["index"],
            "text": "".join(piece["text"] for piece in pieces),
            "logprobs": merged_logprobs(pieces),
            "finish_reason": pieces[-1]["finish_reason"],
        }

    def join(self, pieces: list[ReplyChoice]) -> ReplyChoice:
        """See Reply."""
        return self.merge(pieces)

    def _echo(self, prompt: int, index: int, output: Output) -> tuple[str, dict[str, Any] | None]:
        """(the prompt's text, its logprobs if asked for)."""
        given, token_ids = self._call.prompt[prompt], self._prompts[prompt]
        text = given if isinstance(given, str) else self.service.tokenizer.decode(list(token_ids))
        if self._call.logprobs is None:
            return text, None
        assert output.prompt_logprobs is not None, "asked for"
        return text, self._logprobs[index].add(output.prompt_logprobs, token_ids)


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {name: first[name] + second[name] for name in first}
