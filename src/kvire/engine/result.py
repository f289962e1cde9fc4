"""A finished request seen from outside: answers, usage, times, and the prompt's sources."""

from dataclasses import dataclass, field, replace
from time import monotonic

from kvire.core.report import CacheReport
from kvire.engine.request import Output, Request, TokenLogprobs


@dataclass(slots=True)
class Completion:
    """One answer.

    token_ids: new tokens only, with the one that ended it.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens for counting and billing; the prompt counts once, however many answers it got."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt and answers."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds, seen from outside the engine.

    ttft_s: to the first token.
    tpot_s: per token after it.
    queue_s, load_s, prefill_s: the parts of ttft_s: until the prompt got memory (plus the answer's
        delivery), waiting for the store since then, and the rest.
    """

    ttft_s: float
    total_s: float
    tpot_s: float
    queue_s: float
    load_s: float
    prefill_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """Return value of `generate` and `chat`: the answers, and the sources of the prompt's KV."""

    completions: tuple[Completion, ...]
    usage: Usage
    cache: CacheReport
    timing: Timing
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        """New token ids of the first answer."""
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        """Why the first answer ended: "stop" or "length"."""
        return self.completions[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """One entry per new token of the first answer, if requested."""
        return self.completions[0].logprobs


class Collector:
    """Joins the outputs of one request, in order of arrival."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.completions = [Completion() for _ in range(request.params.n)]
        self._caches: dict[int, CacheReport] = {}  # by answer; the last one of each is complete
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self._started = monotonic()
        self._first: float | None = None
        self._first_output: Output | None = None
        self._last = self._started

    def add(self, output: Output) -> None:
        """Add the next output."""
        self._last = monotonic()
        if self._first is None:
            self._first, self._first_output = self._last, output
        part = self.completions[output.index]
        part.text += output.text
        part.token_ids += output.token_ids
        part.logprobs += output.logprobs or ()
        part.finish_reason, part.stop_reason = output.finish_reason, output.stop_reason
        if output.cache is not None:
            self._caches[output.index] = output.cache
        self._prompt_logprobs = output.prompt_logprobs or self._prompt_logprobs

    @property
    def started(self) -> bool:
        """Whether there is anything to show yet."""
        return 0 in self._caches

    def result(self) -> Result:
        """All outputs so far; an answer cut short has no finish_reason."""
        assert self.started and self._first is not None and self._first_output is not None
        cache = replace(
            self._caches[0],
            recomputed_tokens=sum(report.recomputed_tokens for report in self._caches.values()),
            preemptions=sum(report.preemptions for report in self._caches.values()),
        )
        tokens = sum(len(part.token_ids) for part in self.completions)
        longest = max(len(part.token_ids) for part in self.completions)
        usage = Usage(len(self.request.token_ids), tokens, cache.reused_tokens)
        ttft = self._first - self._started
        load_s, prefill_s = self._first_output.load_s, self._first_output.prefill_s
        timing = Timing(
            ttft_s=ttft,
            total_s=self._last - self._started,
            tpot_s=(self._last - self._first) / max(1, longest - 1),
            queue_s=max(0.0, ttft - load_s - prefill_s),
            load_s=load_s,
            prefill_s=prefill_s,
        )
        return Result(tuple(self.completions), usage, cache, timing, self._prompt_logprobs)
