"""The Python API: a model that answers prompts and remembers what it read.

with LLM("smollm2", kv_dtype="float16", kv_memory="2GiB") as llm:
    r = llm.generate("The capital of France is", max_tokens=8, temperature=0)
    print(r.text, r.cache.reused_tokens)
"""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, overload

from kvire.core.config import EngineConfig, StoreConfig
from kvire.core.errors import ConfigError, KvireError, QueueFullError, RequestError
from kvire.engine.build import build_engine
from kvire.engine.client import EngineClient
from kvire.engine.request import Output, Request, SamplingParams
from kvire.engine.result import Collector, Result
from kvire.models.chat import ChatPrompt, continue_chat, encode_chat
from kvire.models.progress import Progress
from kvire.sessions.folder import Sessions, open_sessions
from kvire.sessions.session_file import Session
from kvire.store.open import described
from kvire.store.tiered import TieredStore

Prompt = str | Sequence[int]
Message = dict[str, Any]

_ids = itertools.count()
_PARAMS = tuple(f.name for f in fields(SamplingParams))


class _Model:
    """Common part of the synchronous and the asynchronous API: a loaded model and its engine."""

    def __init__(
        self,
        model: str,
        *,
        progress: Progress | None = None,
        store: str | Path | StoreConfig | TieredStore | None = None,
        **options: Any,
    ) -> None:
        """model: directory, hub id, .gguf file or embedded name; options: fields of EngineConfig.

        store: a folder that keeps blocks for the next start, more of StoreConfig, or an open store;
            nothing is kept without.
        """
        config = EngineConfig.from_options(options)
        if isinstance(store, (str, Path)):
            store = StoreConfig(path=Path(store).expanduser())
        engine, self.loaded = build_engine(model, config, progress, store)
        self.client = EngineClient(engine).start()
        self.sessions: Sessions | None = None
        self.store_line: str | None = None  # for people: where KV is kept
        if isinstance(store, StoreConfig) and engine.reuse.keeps:
            disk = engine.reuse.stats().handles.get("disk")
            limit_bytes = disk.tier.limit_bytes if disk else None
            self.sessions, self.store_line = open_sessions(store, limit_bytes), described(store, limit_bytes)

    @property
    def engine(self) -> Any:
        """The engine, for its stats and limits; its state belongs to its own thread."""
        return self.client.engine

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.loaded.tokenizer

    @property
    def max_model_len(self) -> int:
        """Longest prompt + answer, in tokens."""
        return self.client.engine.max_model_len

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt, with the special tokens that the model's tokenizer adds."""
        if isinstance(prompt, str):
            if not prompt.isascii() and any("\ud800" <= char <= "\udfff" for char in prompt):
                raise RequestError("the prompt holds bytes that are no text in UTF-8")
            return tuple(self.tokenizer(prompt)["input_ids"])
        if not isinstance(prompt, list | tuple) or not all(type(token) is int for token in prompt):
            raise RequestError("a prompt is text or a list of token ids")
        return tuple(prompt)

    def encode_chat(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> tuple[int, ...]:
        """Token ids of a conversation in the model's chat template, up to the start of the
        answer.
        """
        return encode_chat(self.tokenizer, messages, tools)

    def continue_chat(self, messages: list[Message], known: Sequence[int]) -> ChatPrompt:
        """As encode_chat, beginning with the ids of the last prompt and answer.

        Only as far as the history still agrees with them.
        """
        return continue_chat(self.tokenizer, messages, known)

    def params(self, **params: Any) -> SamplingParams:
        """Sampling parameters by name; raises RequestError for an unknown one or a wrong value."""
        unknown = sorted(set(params) - set(_PARAMS))
        if unknown:
            raise RequestError(f"unknown parameter {', '.join(unknown)}; the parameters are {', '.join(_PARAMS)}")
        if isinstance(params.get("logit_bias"), dict):
            params["logit_bias"] = dict(params["logit_bias"])  # the caller may go on changing theirs
        return SamplingParams(**params)

    def request(self, prompt: Prompt, params: SamplingParams, **more: Any) -> Request:
        """A record for the engine, with an id of its own.

        more: tenant, cache_salt, store (see Request).
        """
        return Request(f"req-{next(_ids)}", self.encode(prompt), params, **more)

    def clear_cache(self) -> None:
        """Forget every prefix that the pool remembers.

        Blocks in a store remain, and are found: its own clear() removes them.
        """
        self.client.clear()

    def close(self) -> None:
        """Stop the engine and free its memory."""
        self.client.close()


class LLM(_Model):
    """A model that answers prompts, for synchronous programs. Use as a context, or close() it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @overload
    def generate(self, prompt: str | Sequence[int], **params: Any) -> Result: ...
    @overload
    def generate(self, prompt: list[str] | list[list[int]], **params: Any) -> list[Result]: ...
    def generate(self, prompt: Any, **params: Any) -> Result | list[Result]:
        """Answer a prompt, or a list of prompts together; params are fields of SamplingParams."""
        sampling = self.params(**params)
        if _is_many(prompt):
            return self._collect([self.request(one, sampling) for one in prompt])
        return self._collect([self.request(prompt, sampling)])[0]

    def chat(self, messages: list[Message], *, tools: list[dict[str, Any]] | None = None, **params: Any) -> Result:
        """Answer a conversation: a list of {"role", "content"} messages, ending with the open
        one.
        """
        return self._collect([self.request(self.encode_chat(messages, tools), self.params(**params))])[0]

    def stream(self, prompt: Prompt, **params: Any) -> Iterator[Output]:
        """Outputs as they arrive; leaving the loop early cancels the request."""
        return self.client.stream(self.request(prompt, self.params(**params)))

    def session(self, name: str) -> "ChatSession":
        """A chat that can be resumed after a restart.

        Needs a store with a folder; raises StoreError if it cannot be read.
        """
        if self.sessions is None:
            raise ConfigError("a session is kept in a store on this machine's disk: give LLM a folder, store=DIR")
        return ChatSession(self, self.sessions, name)

    def _collect(self, requests: list[Request]) -> list[Result]:
        """Run requests together, at most as many at once as the engine's queue takes."""
        for request in requests:
            self.engine.validate(request)
        outputs: SimpleQueue[Output | KvireError] = SimpleQueue()
        collectors = {request.request_id: Collector(request) for request in requests}
        waiting, unfinished = deque(requests), 0
        try:
            while waiting or unfinished:
                while waiting and unfinished < self.engine.config.max_queue:
                    try:
                        self.client.submit(waiting[0], outputs)
                    except QueueFullError:
                        if not unfinished:
                            raise
                        break  # others wait as well; when one of ours has finished there is room
                    unfinished += waiting.popleft().params.n
                item = outputs.get()
                if isinstance(item, KvireError):
                    raise item
                unfinished -= item.finish_reason is not None
                collectors[item.request_id].add(item)
        finally:
            for request in requests:
                self.client.abort(request.request_id)
        return [collector.result() for collector in collectors.values()]


class ChatSession:
    """A chat with its history in the store, sealed, until it is deleted or its tenant forgotten.

    sessions: the store's sessions.
    tokens_lost: of the last prompt, how many tokens of the session it does not begin with
        (models/chat.py).
    """

    def __init__(self, llm: LLM, sessions: Sessions, name: str) -> None:
        self.sessions = sessions
        self.tokens_lost = 0
        self._llm = llm
        self._session = sessions.load("", name) or Session(name)

    @property
    def name(self) -> str:
        """Name under which it is resumed."""
        return self._session.name

    @property
    def messages(self) -> list[Message]:
        """Messages so far, oldest first."""
        return list(self._session.messages)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of the model's last prompt and answer; empty if that was another model."""
        return self._session.known_ids(self._llm.engine.namespace.weights)

    def say(self, text: str, **params: Any) -> Result:
        """Answer the next message and keep both; params are fields of SamplingParams.

        Raises StoreError if the answer cannot be kept: another process continued the session, or
        there is no room.
        """
        if params.get("n", 1) != 1:
            raise RequestError("a session goes on with one answer: leave out n")
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self._llm.continue_chat(messages, self.token_ids)
        result = self._llm.generate(prompt.token_ids, **params)
        self.tokens_lost = prompt.tokens_lost
        answer = {"role": "assistant", "content": result.text}
        self.keep([*messages, answer], [*prompt.token_ids, *result.token_ids])
        return result

    def keep(self, messages: Sequence[Message], token_ids: Sequence[int]) -> None:
        """Replace the stored session: the whole history, and the ids of the last prompt and answer.

        Raises StoreError.
        """
        model = self._llm.engine.namespace.weights
        changed = replace(self._session, messages=tuple(messages), token_ids=tuple(token_ids), model=model)
        self._session = self.sessions.save("", changed)

    def delete(self) -> None:
        """Remove it from the store; the next message begins a new one of the same name.

        Raises StoreError.
        """
        self.sessions.delete("", self.name)
        self._session = Session(self.name)


class AsyncLLM(_Model):
    """The same for asyncio: `async with AsyncLLM(...) as llm`.

    Cancelling a task cancels its request.
    """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    async def generate(self, prompt: Any, **params: Any) -> Result | list[Result]:
        """Answer a prompt, or a list of prompts together."""
        sampling = self.params(**params)
        if _is_many(prompt):
            return await self._collect_all([self.request(one, sampling) for one in prompt])
        return await self._collect(self.request(prompt, sampling))

    async def chat(
        self, messages: list[Message], *, tools: list[dict[str, Any]] | None = None, **params: Any
    ) -> Result:
        """Answer a conversation."""
        return await self._collect(self.request(self.encode_chat(messages, tools), self.params(**params)))

    def stream(self, prompt: Prompt, **params: Any) -> AsyncIterator[Output]:
        """Outputs as they arrive."""
        return self.client.stream_async(self.request(prompt, self.params(**params)))

    async def _collect_all(self, requests: list[Request]) -> list[Result]:
        """Run requests, at most as many at once as the engine's queue takes.

        If one fails, the others are cancelled.
        """
        room = asyncio.Semaphore(self.engine.config.max_queue)

        async def one(request: Request) -> Result:
            async with room:
                return await self._collect(request)

        tasks = [asyncio.create_task(one(request)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _collect(self, request: Request) -> Result:
        collector = Collector(request)
        async for output in self.client.stream_async(request):
            collector.add(output)
        return collector.result()


def _is_many(prompt: Any) -> bool:
    """A list of prompts (perhaps empty), not a list of token ids."""
    return isinstance(prompt, (list, tuple)) and not (prompt and isinstance(prompt[0], int))
