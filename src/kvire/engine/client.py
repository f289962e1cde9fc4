"""The engine on a thread of its own: an inbox for requests, a queue of outputs per request.

LLM and the server use this, from any thread.
"""

import asyncio
import atexit
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from queue import SimpleQueue
from types import TracebackType
from typing import Protocol, Self
from weakref import WeakSet

from kvire.core.errors import EngineClosedError, GenerationError, KvireError
from kvire.engine.engine import Engine
from kvire.engine.request import Failure, Output, Request

log = logging.getLogger(__name__)


class Route(Protocol):
    """Target of a request's outputs; called on the engine's thread, so it must not wait."""

    def put(self, item: Output | KvireError) -> None:
        """Take one output, or the error that ends the request."""


class EngineClient:
    """Owns the engine's thread. Use as a context, or start() and close()."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._routes: dict[str, tuple[Route, int]] = {}  # request id -> route, answers not finished yet
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._loop, name="kvire-engine", daemon=True)

    def start(self) -> Self:
        """Start the thread."""
        _started.add(self)
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop after the current step and free the pool. Idempotent.

        Requests in flight end with EngineClosedError.
        """
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._fail("the engine was closed")
        self.engine.close()
        _started.discard(self)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def in_flight(self) -> int:
        """Requests that have not finished."""
        return len(self._routes)

    @property
    def failure(self) -> EngineClosedError | None:
        """Why the engine stopped, if it did."""
        return None if self._failure is None else EngineClosedError(self._failure)

    def submit(self, request: Request, route: Route) -> None:
        """Queue a request.

        Raises RequestError, QueueFullError or EngineClosedError; then nothing was queued.
        """
        with self._lock:
            if self._failure is not None:
                raise EngineClosedError(self._failure)  # a new one each time: a raised one keeps its traceback
            assert request.request_id not in self._routes, "request ids are unique"
            self.engine.submit(request)
            self._routes[request.request_id] = (route, request.params.n)
        self._wake.set()

    def abort(self, request_id: str) -> None:
        """Cancel a request; its blocks are free within one step. Nothing more is delivered."""
        with self._lock:
            if self._routes.pop(request_id, None) is None:
                return
        self.engine.abort(request_id)
        self._wake.set()

    def clear(self) -> None:
        """Forget every remembered prefix before the next request runs; running answers go on."""
        self.engine.clear()
        self._wake.set()

    def stream(self, request: Request) -> Iterator[Output]:
        """Outputs as they arrive; leaving the loop early cancels the request."""
        queue: SimpleQueue[Output | KvireError] = SimpleQueue()
        self.submit(request, queue)
        unfinished = request.params.n
        try:
            while unfinished:
                item = queue.get()
                if isinstance(item, KvireError):
                    raise item
                unfinished -= item.finish_reason is not None
                yield item
        finally:
            self.abort(request.request_id)

    async def stream_async(self, request: Request) -> AsyncIterator[Output]:
        """The same for asyncio; cancelling the task cancels the request."""
        route = LoopRoute(asyncio.get_running_loop())
        self.submit(request, route)
        unfinished = request.params.n
        try:
            while unfinished:
                item = await route.queue.get()
                if isinstance(item, KvireError):
                    raise item
                unfinished -= item.finish_reason is not None
                yield item
        finally:
            self.abort(request.request_id)

    def _loop(self) -> None:
        try:
            while not self._stopping:
                self._wake.clear()
                if self.engine.has_work:
                    self._deliver(self.engine.step())
                else:
                    self._wake.wait()
        except Exception as error:  # any error must reach every waiting caller
            log.exception("the engine stopped")
            self._fail(f"the engine stopped: {type(error).__name__}: {error}")

    def _deliver(self, outputs: list[Output | Failure]) -> None:
        for output in outputs:
            failed = isinstance(output, Failure)
            with self._lock:
                entry = self._routes.get(output.request_id)
                if entry is None:
                    continue
                route, unfinished = entry
                unfinished -= not isinstance(output, Failure) and output.finish_reason is not None
                if unfinished and not failed:
                    self._routes[output.request_id] = (route, unfinished)
                else:
                    del self._routes[output.request_id]
            route.put(GenerationError(output.message) if isinstance(output, Failure) else output)

    def _fail(self, message: str) -> None:
        with self._lock:
            self._failure = self._failure or message
            routes, self._routes = list(self._routes.values()), {}
        for route, _ in routes:
            route.put(EngineClosedError(self._failure))


# Torch aborts the process if a thread is inside it while the interpreter shuts down.
_started: WeakSet[EngineClient] = WeakSet()


@atexit.register
def _close_all() -> None:
    for client in list(_started):
        client.close()


class LoopRoute:
    """Passes outputs from the engine's thread to an event loop, through its `queue`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.queue: asyncio.Queue[Output | KvireError] = asyncio.Queue()

    def put(self, item: Output | KvireError) -> None:
        """See Route."""
        try:
            self._loop.call_soon_threadsafe(self.queue.put_nowait, item)
        except RuntimeError:  # the loop is closed: no listener is left
            log.debug("output after the event loop closed")
