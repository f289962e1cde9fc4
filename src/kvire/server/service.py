"""The common part of all handlers: engine, tokenizer, and the limits that depend on them."""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from starlette.requests import Request as HttpRequest

from kvire.engine.client import EngineClient
from kvire.engine.request import Request, SamplingParams
from kvire.models.chat import ChatPrompt, continue_chat, encode_chat
from kvire.server.answers import Answers
from kvire.server.auth import TENANT
from kvire.server.errors import ApiError
from kvire.server.limits import BodyReader, TokeniserThreads
from kvire.server.metrics import Metrics
from kvire.server.options import ServerOptions
from kvire.server.schemas import SamplingFields
from kvire.server.token_text import TokenText
from kvire.server.tools import as_templates_expect, chat_template
from kvire.sessions.folder import Sessions

TOKENISING_THREADS = 2
MAX_LOGPROBS_TOGETHER = 524_288  # of one answer: about 40 MB of JSON
# Text of more characters than this per token of context cannot fit, unless it is mostly white
# space. Ordinary text has 3 to 5; tokenising the difference would be work for nothing.
MAX_CHARS_PER_TOKEN = 32


class Service:
    """One model behind one address.

    client: a started one.
    sessions: None for a server that keeps no chats.
    """

    def __init__(
        self, client: EngineClient, model_name: str, options: ServerOptions, sessions: Sessions | None = None
    ) -> None:
        self.client = client
        self.sessions = sessions
        self.sessions_in_use: set[tuple[str, str]] = set()  # tenant and name
        self.model_name = model_name
        self.options = options
        self.metrics = Metrics(client, model_name)
        self.workers = TokeniserThreads(TOKENISING_THREADS, client.engine.config.max_queue)
        self.bodies = BodyReader(options.max_body_bytes, options.body_timeout_s, self.workers)
        self.tokens = TokenText(self.tokenizer)
        self.template = chat_template(self.tokenizer)
        self.created = int(time.time())
        self.fingerprint = "kvire-" + client.engine.namespace.root.hex()[:16]
        # The first call settles the tokenizer's truncation and padding. Later, with threads
        # decoding beside it, changing them would fail in whichever thread came second.
        self.tokenizer("", add_special_tokens=False)

    @property
    def tokenizer(self) -> Any:
        """The model's."""
        return self.client.engine.tokenizer

    @property
    def max_model_len(self) -> int:
        """Longest prompt + answer, in tokens."""
        return self.client.engine.max_model_len

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 if another model is asked for."""
        if name is not None and name != self.model_name:
            message = f"this server serves {self.model_name!r} and no other model"
            raise ApiError(404, message, param="model", code="model_not_found")

    def deadline(self) -> float:
        """When a request that begins now must be over, in the event loop's time."""
        return asyncio.get_running_loop().time() + self.options.request_timeout_s

    async def encode_chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], options: dict[str, bool]
    ) -> tuple[int, ...]:
        """Token ids of a conversation. Raises ApiError, RequestError or QueueFullError."""

        def encode() -> tuple[int, ...]:
            self._check_chars(_chat_chars(messages, tools), "messages")
            return encode_chat(self.tokenizer, as_templates_expect(messages), tools or None, options)

        return await self._encode("messages", encode, room=1)

    async def continue_chat(
        self,
        messages: list[dict[str, Any]],
        known: Sequence[int],
        tools: list[dict[str, Any]],
        options: dict[str, bool],
    ) -> ChatPrompt:
        """The same for a session, whose last prompt and answer had the ids `known`."""

        def encode() -> ChatPrompt:
            self._check_chars(_chat_chars(messages, tools), "session")
            return continue_chat(self.tokenizer, as_templates_expect(messages), known, tools or None, options)

        prompt = await self.workers.run(encode)
        self._check_length(len(prompt.token_ids), "session", room=1)
        return prompt

    async def encode_prompt(self, prompt: str | tuple[int, ...], room: int) -> tuple[int, ...]:
        """Token ids of a prompt, with the special tokens that the tokenizer adds to text.

        room: tokens that must be left for the answer, 1 or, if there will be none, 0.
        """
        if not isinstance(prompt, str):
            self._check_length(len(prompt), "prompt", room)
            return prompt
        self._check_chars(len(prompt), "prompt")
        return await self._encode("prompt", lambda: tuple(self.tokenizer(prompt)["input_ids"]), room)

    def answers(
        self, reply_id: str, prompts: Sequence[tuple[int, ...]], params: SamplingParams, sharing: "Sharing"
    ) -> Answers:
        """The prompts, ready to be submitted."""
        if len(prompts) > self.client.engine.config.max_queue:
            message = f"this server takes at most {self.client.engine.config.max_queue} prompts in one request"
            raise ApiError(400, message, param="prompt")
        self._check_logprobs(prompts, params)
        requests = [
            Request(f"{reply_id}-{i}", ids, params, sharing.tenant, sharing.cache_salt, sharing.store)
            for i, ids in enumerate(prompts)
        ]
        return Answers(self.client, requests, self.metrics)

    def _check_logprobs(self, prompts: Sequence[tuple[int, ...]], params: SamplingParams) -> None:
        per_prompt_token = 0 if params.prompt_logprobs is None else 1 + params.prompt_logprobs
        per_token = 0 if params.logprobs is None else 1 + params.logprobs
        together = 0
        for prompt in prompts:
            longest = min(params.max_tokens, self.max_model_len - len(prompt))
            together += params.n * (len(prompt) * per_prompt_token + longest * per_token)
        if together > MAX_LOGPROBS_TOGETHER:
            message = (
                f"the answer could hold {together} log-probabilities: n x max_tokens x (1 + top_logprobs), and with "
                f"echo the prompt's. One answer may hold {MAX_LOGPROBS_TOGETHER}: ask for fewer, or for shorter answers"
            )
            raise ApiError(400, message, param="logprobs", code="too_many_logprobs")

    async def _encode(self, param: str, encode: Callable[[], tuple[int, ...]], room: int) -> tuple[int, ...]:
        token_ids = await self.workers.run(encode)
        self._check_length(len(token_ids), param, room)
        return token_ids

    def _check_chars(self, chars: int, param: str) -> None:
        if chars > self.max_model_len * MAX_CHARS_PER_TOKEN:
            raise _too_long(f"{param} has {chars} characters", self.max_model_len, param)

    def _check_length(self, length: int, param: str, room: int) -> None:
        if length > self.max_model_len - room:
            raise _too_long(f"{param} has {length} tokens", self.max_model_len, param)


@dataclass(frozen=True, slots=True)
class Sharing:
    """The owner of the KV that a request may reuse, and whether its own is kept.

    See engine.request.Request.
    """

    tenant: str = ""
    cache_salt: str = ""
    store: bool = True

    @classmethod
    def of(cls, request: HttpRequest, call: SamplingFields) -> Self:
        """The key decides the tenant; the body can only narrow the sharing."""
        salt = "" if call.cache_salt is None else call.cache_salt
        return cls(tenant_of(request), salt, call.store)


def new_id(prefix: str) -> str:
    """An id for an answer."""
    return f"{prefix}-{secrets.token_hex(12)}"


def tenant_of(request: HttpRequest) -> str:
    """The tenant: the key's holder, or without keys the only one."""
    tenant: str = request.scope.get(TENANT) or ""
    return tenant


def service_of(request: HttpRequest) -> Service:
    """The app's service."""
    service: Service = request.app.state.service
    return service


def _too_long(what: str, max_model_len: int, param: str) -> ApiError:
    message = f"{what}, but prompt and answer together may have {max_model_len} tokens here, one of them for the answer"
    return ApiError(400, message, param=param, code="context_length_exceeded")


def _chat_chars(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> int:
    return sum(map(_chars, messages)) + (len(str(tools)) if tools else 0)


def _chars(message: dict[str, Any]) -> int:
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        content = "".join(text for text in texts if isinstance(text, str))
    calls = message.get("tool_calls")
    return len(content or "") + (len(str(calls)) if calls else 0) + len(message.get("reasoning_content") or "")
