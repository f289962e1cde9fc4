"""One OpenAI answer, whole or streamed: the same pieces make both, so that they cannot differ.

A stream consists of server-sent events: one chunk per output, then [DONE]; errors are events too.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvire.engine.request import Output
from kvire.engine.result import Result
from kvire.server.answers import Answers, provenance, until_client_gone, usage
from kvire.server.errors import api_error, log_failure
from kvire.server.json_text import JsonText, is_large, json_pieces, json_text, written
from kvire.server.service import Service, new_id

ReplyChoice = dict[str, Any]
MERGED_PIECES = 256  # an answer's tokens are held as one piece each until there are so many
# After an error the client may read no more; it gets this long to take the last event.
LAST_WORDS_S = 1.0


class Reply(ABC):
    """Turns outputs into choices.

    prefix: of the id.
    whole, chunk: names of the two shapes.
    """

    prefix: str
    whole: str
    chunk: str

    def __init__(self, service: Service) -> None:
        self.service = service
        self.id = new_id(self.prefix)
        self._created = int(time.time())

    @abstractmethod
    async def take(self, prompt: int, output: Output) -> list[ReplyChoice]:
        """Pieces of choices that an output adds, as in a chunk; the last has a finish_reason."""

    @abstractmethod
    def merge(self, pieces: list[ReplyChoice]) -> ReplyChoice:
        """One piece that says the same as these of one choice."""

    @abstractmethod
    def join(self, pieces: list[ReplyChoice]) -> ReplyChoice:
        """The whole choice of all its pieces."""

    def extra(self) -> dict[str, Any]:
        """More for the kvire object, once all outputs are in."""
        return {}

    def body(self, choices: list[ReplyChoice], results: Sequence[Result]) -> dict[str, Any]:
        """The answer in one piece."""
        return {**self._head(self.whole), "choices": choices, "usage": usage(results), "kvire": self._kvire(results)}

    def event(self, choices: list[ReplyChoice], *, with_usage: bool) -> dict[str, Any]:
        """A chunk of a stream.

        with_usage: null now, sent in the last chunk.
        """
        return {**self._head(self.chunk), "choices": choices, **({"usage": None} if with_usage else {})}

    def last_event(self, results: Sequence[Result], choices: list[ReplyChoice], *, with_usage: bool) -> dict[str, Any]:
        """The last chunk; it says where the KV came from."""
        counted = {"usage": usage(results)} if with_usage else {}
        return {**self._head(self.chunk), "choices": choices, **counted, "kvire": self._kvire(results)}

    def _head(self, shape: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": shape,
            "created": self._created,
            "model": self.service.model_name,
            "system_fingerprint": self.service.fingerprint,
        }

    def _kvire(self, results: Sequence[Result]) -> dict[str, Any]:
        return provenance(results) | self.extra()


async def whole_answer(answers: Answers, reply: Reply) -> Response:
    """Everything, once it is there."""
    pieces: dict[int, list[ReplyChoice]] = {}
    async with answers:
        async for prompt, output in answers.outputs():
            for piece in await reply.take(prompt, output):
                of_choice = pieces.setdefault(piece["index"], [])
                of_choice.append(await _packed(piece))
                if len(of_choice) == MERGED_PIECES:
                    of_choice[:] = [reply.merge(of_choice)]
    choices = [reply.join(pieces[index]) for index in sorted(pieces)]
    body = reply.body(choices, answers.results())

    def text() -> bytes:
        return "".join(json_pieces(body)).encode("ascii")

    return Response(await asyncio.to_thread(text) if is_large(body) else text(), media_type="application/json")


class EventStream(Response):
    """Streams a reply.

    Requests are submitted before the first byte, so that a refusal is a plain error.

    A client that leaves or stops reading frees its blocks.

    deadline: in the event loop's time.
    """

    def __init__(self, answers: Answers, reply: Reply, deadline: float, *, with_usage: bool) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._answers = answers
        self._reply = reply
        self._deadline = deadline
        self._with_usage = with_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Submit, then stream until the end or until the client leaves."""
        del scope
        async with self._answers:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await until_client_gone(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        try:
            async with asyncio.timeout_at(self._deadline):
                await self._send_events(send)
        except Exception as error:  # noqa: BLE001 - the client must hear of any error
            known = api_error(error)
            if known.status == 500:
                log_failure(error)
            if not await self._say_last(send, json_text(known.as_dict())):
                return  # it does not read: leaving the answer unfinished closes the connection
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, send: Send) -> None:
        held: list[ReplyChoice] = []  # the last choice to finish is part of the last chunk
        async for prompt, output in self._answers.outputs():
            for piece in await self._reply.take(prompt, output):
                for choice in [piece] if piece["finish_reason"] is None else held:
                    await _send(send, await written(self._reply.event([choice], with_usage=self._with_usage)))
                held = [piece] if piece["finish_reason"] is not None else held
        await self._send_last(send, held)

    async def _say_last(self, send: Send, data: str) -> bool:
        """Whether the client took it."""
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                await _send(send, data)
        except TimeoutError:
            return False
        return True

    async def _send_last(self, send: Send, choices: list[ReplyChoice]) -> None:
        results = self._answers.results()
        if self._with_usage:
            await _send(send, await written(self._reply.event(choices, with_usage=True)))
            choices = []
        await _send(send, await written(self._reply.last_event(results, choices, with_usage=self._with_usage)))
        await _send(send, "[DONE]")


def merged_logprobs(pieces: list[ReplyChoice]) -> dict[str, list[Any]] | None:
    """The logprobs objects of all pieces as one."""
    objects = [piece["logprobs"] for piece in pieces if piece["logprobs"] is not None]
    if not objects:
        return None
    return {name: [entry for each in objects for entry in each[name]] for name in objects[0]}


async def _packed(piece: ReplyChoice) -> ReplyChoice:
    """The piece with its log-probabilities as JSON text, which takes much less memory."""
    logprobs = piece["logprobs"]
    if logprobs is None:
        return piece

    def texts() -> dict[str, list[Any]]:
        return {
            name: [JsonText(json_text(entry)) if isinstance(entry, dict) else entry for entry in entries]
            for name, entries in logprobs.items()
        }

    return {**piece, "logprobs": await asyncio.to_thread(texts) if is_large(logprobs) else texts()}


async def _send(send: Send, data: str) -> None:
    await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode("ascii"), "more_body": True})
