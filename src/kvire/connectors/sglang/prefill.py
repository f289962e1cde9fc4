"""How fast SGLang computes prompts, measured from missing pages and the times they are written.

SGLang reports no steps to a storage. The time from a miss to the page's writing includes a wait in
SGLang's queue, the computing, copies to the host, and the queue of writes. So a measurement is
never shorter than computing, and the quicker of many come close to it.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from time import monotonic

from kvire.plan.cost import LEAST_STEP_TOKENS, PrefillSpeed

KEPT, LEAST_KEPT = 32, 8  # measurements kept; least number for an estimate
QUICKER = 4  # one in so many is quicker than the estimate
MOST_MISSED = 4096  # pages that wait for their writing; older ones are dropped


class QuickPrefill(PrefillSpeed):
    """The lower quartile of the last measurements per token, which may include other waits."""

    def __init__(self) -> None:
        super().__init__()
        self._token_s: deque[float] = deque(maxlen=KEPT)

    def measured(self, start: int, count: int, seconds: float) -> None:
        """See PrefillSpeed; the tokens' position in a prompt is unknown here."""
        del start
        self._token_s.append(seconds / count)
        if len(self._token_s) >= LEAST_KEPT:
            self.samples += 1
            self.token_s = sorted(self._token_s)[len(self._token_s) // QUICKER]


class Misses:
    """Times the pages of KV that were missing. Thread-safe.

    page_tokens: in one page.
    """

    def __init__(self, prefill: PrefillSpeed, page_tokens: int, clock: Callable[[], float] = monotonic) -> None:
        self._prefill = prefill
        self._page_tokens = page_tokens
        self._clock = clock
        self._lock = threading.Lock()
        self._told_s: OrderedDict[str, float] = OrderedDict()  # by the first missing page: time of the miss

    def told(self, key: str) -> None:
        """SGLang was told that this page and all later ones are missing.

        The first time counts.
        """
        with self._lock:
            self._told_s.setdefault(key, self._clock())
            if len(self._told_s) > MOST_MISSED:
                self._told_s.popitem(last=False)

    def written(self, keys: Sequence[str]) -> None:
        """SGLang writes these pages: one after the other in a prompt, and computed together."""
        with self._lock:
            index = next((index for index, key in enumerate(keys) if key in self._told_s), None)
            if index is None:
                return
            seconds = self._clock() - self._told_s.pop(keys[index])
            count = (len(keys) - index) * self._page_tokens
            if count >= LEAST_STEP_TOKENS:
                self._prefill.measured(0, count, seconds)
