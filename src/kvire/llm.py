"""The Python API: a model that answers prompts and remembers what it read.

with LLM("smollm2", kv_dtype="float16", kv_memory="2GiB") as llm:
    r = llm.generate("The capital of France is", max_tokens=8, temperature=0)
    print(r.text, r.cache.reused_tokens)
"""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import fields
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, overload

from kvire.core.config import EngineConfig
from kvire.core.errors import KvireError, QueueFullError, RequestError
from kvire.engine.build import build_engine
from kvire.engine.client import EngineClient
from kvire.engine.request import Output, Request, SamplingParams
from kvire.engine.result import Collector, Result
from kvire.models.chat import encode_chat
from kvire.models.progress import Progress

Prompt = str | Sequence[int]
Message = dict[str, Any]

_ids = itertools.count()
_PARAMS = tuple(f.name for f in fields(SamplingParams))


class _Model:
    """What the synchronous and the asynchronous API share: a loaded model and its engine."""

    def __init__(self, model: str, *, progress: Progress | None = None, **options: Any) -> None:
        """model: directory, hub id, .gguf file or embedded name; options: fields of EngineConfig."""
        config = EngineConfig.from_options(options)
        engine, self.loaded = build_engine(model, config, progress)
        self.client = EngineClient(engine).start()

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
        """Token ids of a conversation, as the model's chat template writes it, up to where the answer begins."""
        return encode_chat(self.tokenizer, messages, tools)

    def params(self, **params: Any) -> SamplingParams:
        """Sampling parameters by name; raises RequestError for an unknown one or a wrong value."""
        unknown = sorted(set(params) - set(_PARAMS))
        if unknown:
            raise RequestError(f"unknown parameter {', '.join(unknown)}; the parameters are {', '.join(_PARAMS)}")
        if isinstance(params.get("logit_bias"), dict):
            params["logit_bias"] = dict(params["logit_bias"])  # the caller may go on changing theirs
        return SamplingParams(**params)

    def request(self, prompt: Prompt, params: SamplingParams) -> Request:
        """A record for the engine, with an id of its own."""
        return Request(f"req-{next(_ids)}", self.encode(prompt), params)

    def clear_cache(self) -> None:
        """Forget every remembered prefix: the next prompt is computed from its first token."""
        self.client.clear()

    def close(self) -> None:
        """Stop the engine and free its memory."""
        self.client.close()


class LLM(_Model):
    """A model that answers prompts, for programs that wait. Use as a context, or close() it."""

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
        """Answer a conversation: a list of {"role", "content"} messages, the last one to be answered."""
        return self._collect([self.request(self.encode_chat(messages, tools), self.params(**params))])[0]

    def stream(self, prompt: Prompt, **params: Any) -> Iterator[Output]:
        """Outputs as they come; leaving the loop early cancels the request."""
        return self.client.stream(self.request(prompt, self.params(**params)))

    def _collect(self, requests: list[Request]) -> list[Result]:
        """Run requests together, never more of them at once than the engine's queue takes."""
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


class AsyncLLM(_Model):
    """The same for asyncio: `async with AsyncLLM(...) as llm`. Cancelling a task cancels its request."""

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
        """Outputs as they come."""
        return self.client.stream_async(self.request(prompt, self.params(**params)))

    async def _collect_all(self, requests: list[Request]) -> list[Result]:
        """Never more of them at once than the engine's queue takes; if one fails, the others are cancelled."""
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
