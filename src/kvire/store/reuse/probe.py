"""Lookups in remote tiers beside an engine that cannot wait, and looks again later."""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from time import monotonic

from kvire.core.record import BlockId
from kvire.store.reuse.chain import Blocks
from kvire.store.reuse.look import Found, Word
from kvire.store.reuse.planner import Reuse

THREADS = 4
log = logging.getLogger(__name__)


class Probe:
    """Asks once for each prompt, and keeps the answer until it is forgotten.

    timeout_s: after it, the answer is no.

    Its methods belong to the engine's thread. The threads start with the first query, and end with
    close().
    """

    def __init__(self, reuse: Reuse, timeout_s: float) -> None:
        self._reuse = reuse
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(THREADS, "kvire probe")
        self._asked: dict[str, tuple[Future[Mapping[BlockId, str]], float]] = {}

    def ask(self, prompt: str, blocks: Blocks, found: Found) -> Found:
        """Blocks in local tiers and, once they have answered, remote ones: Word.ASKING until then.

        prompt: its name, under which the answer is kept.
        """
        if found.word is Word.SURE:
            return found
        future, deadline = self._asked.get(prompt) or self._begin(prompt, self._reuse.unknown(blocks, found))
        if future.done():
            return self._reuse.heard(blocks, found, future.result())
        if monotonic() >= deadline:
            return self._reuse.heard(blocks, found, {})
        return replace(found, word=Word.ASKING)

    def forget(self, prompt: str) -> None:
        """Drop the prompt's answer."""
        asked = self._asked.pop(prompt, None)
        if asked is not None:
            asked[0].cancel()

    def close(self) -> None:
        """End the threads without waiting for answers."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self, prompt: str, ids: Sequence[BlockId]) -> tuple[Future[Mapping[BlockId, str]], float]:
        asked = self._threads.submit(self._held, ids), monotonic() + self._timeout_s
        self._asked[prompt] = asked
        return asked

    def _held(self, ids: Sequence[BlockId]) -> Mapping[BlockId, str]:
        try:
            names = self._reuse.store.held_remotely(ids, self._timeout_s)
        except Exception:  # no error may come up in the engine's scheduler
            log.exception("asking remote tiers failed")
            return {}
        return {block_id: name for block_id, name in zip(ids, names, strict=True) if name is not None}
