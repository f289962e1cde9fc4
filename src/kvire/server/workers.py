"""Threads for what would hold up the event loop: templates, tokenising, reading large bodies."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from kvire.core.errors import QueueFullError

P = ParamSpec("P")
T = TypeVar("T")


class TokeniserThreads:
    """A few threads, and a bounded number of calls that wait for one."""

    def __init__(self, threads: int, max_waiting: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="kvire-tokenise")
        self._max_calls = threads + max_waiting
        self._calls = 0

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The call's result. Raises QueueFullError. Cancelled while it waits, it never starts."""
        if self._calls >= self._max_calls:
            raise QueueFullError("too many requests are being read already; try again in a moment")
        self._calls += 1
        try:
            return await asyncio.wrap_future(self._executor.submit(call, *args, **kwargs))
        finally:
            self._calls -= 1

    def close(self) -> None:
        """Drop what waits; do not wait for what runs."""
        self._executor.shutdown(wait=False, cancel_futures=True)
