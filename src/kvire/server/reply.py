"""One OpenAI answer, whole or streamed: the same pieces make both, so that they cannot differ."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from kvire.engine.request import Output
from kvire.engine.result import Result
from kvire.server.answers import Answers, provenance, usage
from kvire.server.json_text import json_response
from kvire.server.service import Service, new_id

Choice = dict[str, Any]


class Reply(ABC):
    """Turns outputs into choices. prefix: of the id. whole, chunk: names of the two shapes."""

    prefix: str
    whole: str
    chunk: str

    def __init__(self, service: Service) -> None:
        self.service = service
        self.id = new_id(self.prefix)
        self._created = int(time.time())

    @abstractmethod
    async def take(self, prompt: int, output: Output) -> list[Choice]:
        """Pieces of choices that an output adds, as a chunk shows them; the last has a finish_reason."""

    @abstractmethod
    def join(self, pieces: list[Choice]) -> Choice:
        """The whole choice of all its pieces."""

    def extra(self) -> dict[str, Any]:
        """More for the kvire object, once all outputs are in."""
        return {}

    def body(self, choices: list[Choice], results: Sequence[Result]) -> dict[str, Any]:
        """The answer in one piece."""
        return {**self._head(self.whole), "choices": choices, "usage": usage(results), "kvire": self._kvire(results)}

    def event(self, choices: list[Choice], *, with_usage: bool) -> dict[str, Any]:
        """A chunk of a stream. with_usage: null now, to be told in the last one."""
        return {**self._head(self.chunk), "choices": choices, **({"usage": None} if with_usage else {})}

    def last_event(self, results: Sequence[Result], choices: list[Choice], *, with_usage: bool) -> dict[str, Any]:
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
    pieces: dict[int, list[Choice]] = {}
    async with answers:
        async for prompt, output in answers.outputs():
            for piece in await reply.take(prompt, output):
                pieces.setdefault(piece["index"], []).append(piece)
    choices = [reply.join(pieces[index]) for index in sorted(pieces)]
    return json_response(reply.body(choices, answers.results()))
