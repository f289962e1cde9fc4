"""The prompts of one HTTP request in the engine: submitted together, merged, cancelled
on leaving.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import replace
from time import monotonic
from types import TracebackType
from typing import Any, Self, TypeVar

from starlette.types import Receive

from kvire.core.errors import KvireError
from kvire.core.report import CacheReport
from kvire.engine.client import EngineClient, LoopRoute
from kvire.engine.request import Output, Request
from kvire.engine.result import Collector, Result
from kvire.server.errors import ClientGoneError
from kvire.server.metrics import Metrics

T = TypeVar("T")


class Answers:
    """A context: entering submits every request or none; leaving cancels the unfinished ones.

    Entering raises RequestError, QueueFullError or EngineClosedError.
    """

    def __init__(self, client: EngineClient, requests: Sequence[Request], metrics: Metrics) -> None:
        self.requests = list(requests)
        self._client = client
        self._metrics = metrics
        self._collectors: list[Collector] = []
        self._route: LoopRoute | None = None

    async def __aenter__(self) -> Self:
        self._route = LoopRoute(asyncio.get_running_loop())
        self._collectors = [Collector(request) for request in self.requests]
        self._started = monotonic()
        try:
            for request in self.requests:
                self._client.submit(request, self._route)
        except BaseException:
            self._abort()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._abort()

    async def outputs(self) -> AsyncIterator[tuple[int, Output]]:
        """(index of the prompt, output), as they come.

        Raises GenerationError, EngineClosedError.
        """
        assert self._route is not None, "enter first"
        index = {request.request_id: i for i, request in enumerate(self.requests)}
        unfinished = sum(request.params.n for request in self.requests)
        waiting = set(index)
        while unfinished:
            item = await self._route.queue.get()
            if isinstance(item, KvireError):
                raise item
            if item.request_id in waiting:
                waiting.discard(item.request_id)
                self._metrics.ttft_s.observe(monotonic() - self._started)
            unfinished -= item.finish_reason is not None
            self._collectors[index[item.request_id]].add(_without_logprobs(item))
            yield index[item.request_id], item

    def results(self) -> list[Result]:
        """One per prompt, once all outputs are in."""
        results = [collector.result() for collector in self._collectors]
        for result in results:
            if any(len(part.token_ids) > 1 for part in result.completions):
                self._metrics.tpot_s.observe(result.timing.tpot_s)
        return results

    def _abort(self) -> None:
        for request in self.requests:
            self._client.abort(request.request_id)


def _without_logprobs(output: Output) -> Output:
    """For the sums of a request; its log-probabilities are written at once, and may be many."""
    if output.logprobs is None and output.prompt_logprobs is None:
        return output
    return replace(output, logprobs=None, prompt_logprobs=None)


def usage(results: Sequence[Result]) -> dict[str, Any]:
    """The usage object.

    A prompt counts once, for any number of answers; cached_tokens is never null.
    """
    prompt = sum(result.usage.prompt_tokens for result in results)
    answer = sum(result.usage.completion_tokens for result in results)
    cached = sum(result.usage.cached_tokens for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def provenance(results: Sequence[Result]) -> dict[str, Any]:
    """The kvire object: where the prompt's KV came from, and how long things took.

    For a list of prompts, `cache` is the sum (without a miss reason) and `prompts` has one each.
    """
    reports = [result.cache for result in results]
    first = min((result.timing for result in results), key=lambda timing: timing.ttft_s)
    timing = {
        **{name: round(getattr(first, name), 6) for name in ("ttft_s", "queue_s", "load_s", "prefill_s")},
        "tpot_s": round(max(result.timing.tpot_s for result in results), 6),
        "total_s": round(max(result.timing.total_s for result in results), 6),
    }
    if len(reports) == 1:
        return {"cache": reports[0].as_dict(), "timing": timing}
    return {"cache": _sum(reports), "prompts": [report.as_dict() for report in reports], "timing": timing}


def _sum(reports: list[CacheReport]) -> dict[str, Any]:
    sums: Counter[str] = Counter()
    for report in reports:
        sums.update(report.counts())
    saved = [report.saved_s for report in reports if report.saved_s is not None]
    return {**sums, "miss": None, "miss_token": None, "miss_detail": None, "saved_s": sum(saved) if saved else None}


async def until_client_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; if the client closes its connection first, the work is cancelled.

    Call it once the body is read. Raises ClientGoneError.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
