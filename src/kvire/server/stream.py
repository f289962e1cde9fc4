"""Server-sent events: one chunk per output, then [DONE]; errors are events too."""

import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvire.server.answers import Answers, until_client_gone
from kvire.server.errors import api_error, log_failure
from kvire.server.json_text import json_text, written
from kvire.server.reply import Reply, ReplyChoice

# After an error the client may read no more; it gets this long to take the last event.
LAST_WORDS_S = 1.0


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


async def _send(send: Send, data: str) -> None:
    await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode("ascii"), "more_body": True})
