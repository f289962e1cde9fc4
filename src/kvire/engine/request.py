"""Plain records for requests and outputs of the engine, without references to its state."""

from dataclasses import dataclass, field

from kvire.core.errors import RequestError
from kvire.core.report import CacheReport

MAX_LOGPROBS = 20
MAX_SAMPLES = 128
MAX_STOPS, MAX_STOP_CHARS = 16, 256
MAX_LOGIT_BIAS = 1024
# Smaller values underflow in float32 and mean nothing else than these.
MIN_TOP_P, MIN_REPETITION_PENALTY = 1e-6, 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen, and where its answer ends.

    max_tokens: longest answer.
    temperature: 0 is greedy.
    top_k, top_p: keep the likeliest; 0 and 1 keep everything.
    min_p: keep tokens at least that share of the likeliest.
    repetition_penalty: divides (multiplies) positive (negative) logits of tokens in prompt and
        answer.
    presence_penalty, frequency_penalty: subtracted from tokens of the answer, once or per
        occurrence.
    logit_bias: added by token id.
    seed: with it, the random numbers are the same whatever else runs (only the last bits of logits
        may still differ, docs/architecture.md).
    stop: strings that end the answer and are no part of it.
    stop_token_ids: end the answer and are its last id.
    ignore_eos: go on past the model's end tokens.
    logprobs: how many likeliest tokens to list beside each chosen one (None: no logprobs), of the
        raw model before penalties and temperature.
    prompt_logprobs: the same for the prompt.
    n: answers to the same prompt.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_stops()
        self._check_logit_bias()
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise RequestError("max_tokens must be at least 1 (0 only to score a prompt: echo with logprobs)")

    def _check_numbers(self) -> None:
        _within("max_tokens", self.max_tokens, 0, 2**31)
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_k", self.top_k, 0, 2**31)
        _within("top_p", self.top_p, MIN_TOP_P, 1.0)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 100.0)
        _within("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _within("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        _within("n", self.n, 1, MAX_SAMPLES)
        if self.seed is not None:
            _within("seed", self.seed, -(2**63), 2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _within(name, getattr(self, name), 0, MAX_LOGPROBS)

    def _check_stops(self) -> None:
        if len(self.stop_strings) > MAX_STOPS or any(not 0 < len(s) <= MAX_STOP_CHARS for s in self.stop_strings):
            raise RequestError(f"stop takes at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters")
        if not isinstance(self.stop_token_ids, list | tuple):
            raise RequestError(f"stop_token_ids must be a list of token ids, got {self.stop_token_ids!r}")
        for token_id in self.stop_token_ids:
            _token_id("stop_token_ids", token_id)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be true or false, got {self.ignore_eos!r}")

    def _check_logit_bias(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(f"logit_bias takes at most {MAX_LOGIT_BIAS} tokens, got {len(self.logit_bias)}")
        for token_id, bias in self.logit_bias.items():
            _token_id("logit_bias", token_id)
            _within("logit_bias", bias, -100.0, 100.0)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, however it was written."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to answer.

    request_id: unique among the requests in flight.
    tenant: owner of the KV that it reuses and leaves behind.
    cache_salt: shares KV only with requests of the same salt, within the tenant.
    store: whether its KV may be kept outside the engine; stored KV is reused all the same.
    """

    request_id: str
    token_ids: tuple[int, ...]
    params: SamplingParams
    tenant: str = ""
    cache_salt: str = ""
    store: bool = True


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One position: the chosen token, its log-probability, and the likeliest tokens (id ->
    logprob).
    """

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass(frozen=True, slots=True)
class Output:
    """New part of one answer of a request, added by one step.

    index: which of the n answers.
    token_ids: new tokens.
    text: new text that is safe to show.
    logprobs: one entry per new token if asked for.
    finish_reason: "stop", "length" or "abort" on the last output, else None.
    stop_reason: the stop string or token id that ended it, if one did.
    cache: the prompt's CacheReport, on the first and last output.
    prompt_logprobs: on the first output of each answer, if asked for; None stands for the first
        token, which nothing predicts.
    load_s, prefill_s: on the first output, seconds since the prompt got memory: waiting for the
        store, and the rest.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cache: CacheReport | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    load_s: float = 0.0
    prefill_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that failed; none of its answers gets another output."""

    request_id: str
    message: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Cancel all answers of a request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Clear:
    """Forget every remembered prefix; running answers go on."""


def _token_id(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{name} names tokens by their ids, whole numbers, got {value!r}")


def _within(name: str, value: float, low: float, high: float) -> None:
    """Also refuses NaN, booleans and text, which compare in surprising ways."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name} must be a number, got {value!r}")
    if not low <= value <= high:
        raise RequestError(f"{name} must be at least {low} and at most {high}, got {value}")
    if isinstance(low, int) and not isinstance(value, int):
        raise RequestError(f"{name} must be a whole number, got {value}")
