"""Result of one prompt's reuse: its load, the sources of its KV, and why reuse ended."""

from collections import Counter
from collections.abc import Callable
from time import monotonic

from kvire.core.report import CacheReport, MissReason
from kvire.core.tier_kind import TierKind
from kvire.store.explain import MissAnswer
from kvire.store.reuse.load import Load, Miss, explained
from kvire.store.reuse.look import Found

FRESH_S = 0.25  # how long a look is believed: a prompt that waits for a seat is looked at in every step


class Reused:
    """Reuse of one prompt; belongs to its engine's thread.

    load: blocks on their way from the store; None if there are none.
    may_load: whether it may load once more.
    device_tokens: reused from the device's own blocks.
    loaded_tokens: by kind of tier.
    spans: (start, stop) of loaded prompt tokens.
    waited_s: for loads.
    saved_s: time that computing the reused tokens would have taken, less waited_s; None before the
        first measurement.
    miss: why reuse ended, as far as the device knows.
    load_miss: why reuse of stored tokens ended; None if the store had nothing to do with it.
    answer: the store's answer about the prompt from token `asked_token` on; None if it was not
        asked.
    """

    def __init__(self) -> None:
        self.load: Load | None = None
        self.may_load = True
        self.device_tokens = 0
        self.loaded_tokens: Counter[str] = Counter()
        self.spans: list[tuple[int, int]] = []
        self.waited_s = 0.0
        self.saved_s: float | None = None
        self.miss = Miss(MissReason.NEVER_STORED)
        self.load_miss: Miss | None = None
        self.answer: MissAnswer | None = None
        self.asked_token = 0
        self._seen: tuple[int, float, Found] | None = None

    def seen(self, first: int, look: Callable[[], Found]) -> Found:
        """Result of `look` beyond the device's `first` blocks, recent or new."""
        now = monotonic()
        if self._seen is None or self._seen[0] != first or now - self._seen[1] > FRESH_S:
            self._seen = first, now, look()
        return self._seen[2]

    def forget_look(self) -> None:
        """Drop the recent lookup."""
        self._seen = None

    def take(self, kind: TierKind, tokens: int) -> None:
        """Count tokens from a tier."""
        self.loaded_tokens[kind.name] += tokens

    def missed(self, token: int, reason: MissReason) -> None:
        """The token was computed although it was, or could have been, loaded.

        Only the first one counts.
        """
        if self.load_miss is None:
            self.load_miss = Miss(reason, token)

    def end_load(self) -> Load:
        """Detach the load in progress."""
        load, self.load = self.load, None
        assert load is not None
        self.waited_s += load.waited_s
        return load

    def why(self) -> Miss:
        """The first computed token, and the reason."""
        if self.load_miss is not None:
            return self.load_miss
        return explained(self.miss, self.answer.poll() if self.answer is not None else None, self.asked_token)

    def share(self) -> "Reused":
        """For another answer to the same prompt, whose KV is present now."""
        twin = Reused()
        twin.device_tokens, twin.loaded_tokens = self.device_tokens, self.loaded_tokens.copy()
        twin.miss, twin.load_miss, twin.saved_s = self.miss, self.load_miss, self.saved_s
        twin.answer, twin.asked_token = self.answer, self.asked_token
        return twin

    def report(self, prompt_tokens: int, *, recomputed_tokens: int = 0, preemptions: int = 0) -> CacheReport:
        """Sources of the prompt's KV."""
        miss = self.why()
        return CacheReport(
            device_tokens=self.device_tokens,
            loaded_tokens=dict(self.loaded_tokens),
            computed_tokens=prompt_tokens - self.device_tokens - self.loaded_tokens.total(),
            miss=miss.reason,
            miss_token=miss.token,
            miss_detail=miss.detail,
            saved_s=self.saved_s,
            recomputed_tokens=recomputed_tokens,
            preemptions=preemptions,
        )
