"""One OpenAI answer, whole or streamed: the same pieces make both, so that they cannot differ."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from kvire.engine.request import Output
from kvire.engine.result import Result
from kvire.server.answers import Answers, provenance, usage
from kvire.server.json_text import JsonText, is_large, json_pieces, json_text
from kvire.server.service import Service, new_id

ReplyChoice = dict[str, Any]
MERGED_PIECES = 256  # an answer's tokens are held as one piece each until there are so many


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
