"""Asking remote tiers what they have, beside the scheduler: a request is asked about again until they answer."""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic

from kvire.core.record import BlockId
from kvire.store.tiered import TieredStore

THREADS = 4
log = logging.getLogger(__name__)


class RemoteProbe:
    """Each request is asked for once, and its answer kept until it is forgotten. timeout_s: then the answer is no."""

    def __init__(self, store: TieredStore, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(THREADS, "kvire probe")
        self._asked: dict[str, tuple[Future[Mapping[BlockId, str]], float]] = {}

    def ask(self, request_id: str, ids: Sequence[BlockId]) -> Mapping[BlockId, str] | None:
        """Which of the blocks some remote tier has, and its name; None while nobody knows."""
        asked = self._asked.get(request_id)
        if asked is None:
            if not ids:
                return {}
            future = self._threads.submit(self._held, tuple(ids))
            asked = self._asked[request_id] = future, monotonic() + self._timeout_s
        future, deadline = asked
        if future.done():
            return future.result()
        return {} if monotonic() >= deadline else None

    def forget(self, request_id: str) -> None:
        """The request is over."""
        asked = self._asked.pop(request_id, None)
        if asked is not None:
            asked[0].cancel()

    def close(self) -> None:
        """Wait for nobody."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _held(self, ids: Sequence[BlockId]) -> Mapping[BlockId, str]:
        try:
            names = self._store.held_remotely(ids, self._timeout_s)
        except Exception:  # whatever it is: it must not come up in vLLM's scheduler, which would end the engine
            log.exception("asking remote tiers failed")
            return {}
        return {block_id: name for block_id, name in zip(ids, names, strict=True) if name is not None}
