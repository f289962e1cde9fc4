"""Fields of requests: types and counts, checked strictly before any work.

Ranges are checked by SamplingParams.

A field that is null counts as not given. One that OpenAI knows and Kvire cannot honour is refused
by name, since ignoring it would answer another question; so is an unknown one.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from kvire.core.errors import RequestError
from kvire.engine.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_SAMPLES, MAX_STOP_CHARS, MAX_STOPS, SamplingParams
from kvire.server.errors import ApiError
from kvire.server.tools import MAX_TOOLS, checked_tool_choice, checked_tools
from kvire.sessions.session_file import SessionError, check_name

MAX_MESSAGES = 4096
MAX_PAST_CALLS = 4096  # tool calls of all messages
MAX_STOP_TOKENS = 1024
MAX_PROMPTS = MAX_SAMPLES  # prompts times n, too
MAX_NAME_CHARS = 256
MAX_ECHO_CHARS = 8 * 1024 * 1024  # of all prompts, each n times
CHARS_PER_ECHOED_ID = 16  # at most, of nearly all tokens
DEFAULT_COMPLETION_TOKENS = 16  # as the OpenAI API has it; a chat has no such limit

# Accepted, and without effect on the answer.
METADATA = frozenset(
    {
        "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention",
    }
)  # fmt: skip
# Known to the OpenAI API but not to Kvire -> values that ask for nothing special.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "functions": ([],),
    "function_call": ("none",),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "suffix": ("",),
    "best_of": (1,),
    "chat_template": (),
}
# Fields that SamplingParams has by the same name and in the same form.
PASSED_ON = (
    "n", "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "logit_bias", "ignore_eos",
)  # fmt: skip


def _integer_keys(value: Any) -> Any:
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"must be an object of at most {MAX_LOGIT_BIAS} token ids")
    if not all(key.isascii() and key.isdecimal() and len(key) <= 10 for key in value):
        raise ValueError("keys must be token ids")
    return {int(key): bias for key, bias in value.items()}


def _stop_strings(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise ValueError(f"must be a text or a list of at most {MAX_STOPS} texts")
    if not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"takes texts of 1 to {MAX_STOP_CHARS} characters")
    return stops


def _prompts(value: Any) -> list[str | tuple[int, ...]]:
    """One prompt or many, each text or token ids."""
    if isinstance(value, str) or _is_ids(value):
        value = [value]
    if not isinstance(value, list) or not 0 < len(value) <= MAX_PROMPTS:
        raise ValueError(f"must be a text, a list of token ids, or a list of 1 to {MAX_PROMPTS} of either")
    if not all(isinstance(prompt, str) or _is_ids(prompt) for prompt in value):
        raise ValueError("each prompt must be a text or a list of whole numbers, not empty")
    return [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in value]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _content(value: Any) -> Any:
    """Text or parts; the chat template decides about the parts (models/chat.py)."""
    if not (value is None or isinstance(value, (str, list))):
        raise ValueError("must be a text or a list of parts")
    return value


def _messages(value: Any) -> Any:
    """Counts, before each message is looked at: that takes half a second for 40,000 tool calls."""
    if not isinstance(value, list) or not 0 < len(value) <= MAX_MESSAGES:
        raise ValueError(f"must be a list of 1 to {MAX_MESSAGES} messages")
    calls = [message.get("tool_calls") for message in value if isinstance(message, dict)]
    if sum(len(each) for each in calls if isinstance(each, list)) > MAX_PAST_CALLS:
        raise ValueError(f"must not hold more than {MAX_PAST_CALLS} tool calls")
    return value


def _template_options(value: Any) -> dict[str, bool]:
    if not isinstance(value, dict) or any(k != "enable_thinking" or type(v) is not bool for k, v in value.items()):
        raise ValueError("takes enable_thinking (true or false) and nothing else")
    return value


def _session_name(name: str) -> str:
    try:
        check_name(name)
    except SessionError as error:
        raise ValueError(str(error)) from None
    return name


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


class FunctionCall(_Record):
    """One call of a function.

    arguments: JSON, as the model wrote it.
    """

    name: Annotated[str, Field(max_length=MAX_NAME_CHARS)]
    arguments: str


class PastToolCall(_Record):
    """A call that the assistant made earlier in the conversation."""

    id: Annotated[str, Field(max_length=MAX_NAME_CHARS)]
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(_Record):
    """One message of a conversation. Other fields that clients send back are dropped.

    function_call, audio: parts of the conversation that Kvire cannot pass on; they must be null.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | list[Any] | None, BeforeValidator(_content)] = None
    name: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None
    tool_calls: Annotated[list[PastToolCall], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_call_id: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None
    reasoning_content: str | None = None
    function_call: None = None
    audio: None = None


class StreamOptions(_Record):
    """Options of a streamed answer.

    include_usage: one more chunk at the end, with the tokens counted.
    """

    include_usage: bool = False


class SamplingFields(_Record):
    """Fields that chats and completions share.

    cache_salt: share KV only with requests of the same salt.
    store: whether new KV may be kept outside the engine; KV already kept is used in any case.
    """

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(_integer_keys)] = {}
    stop: Annotated[list[str], BeforeValidator(_stop_strings)] = []
    stop_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=MAX_STOP_TOKENS)] = []
    ignore_eos: bool = False
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)] | None = None
    store: bool = True

    def check(self) -> None:
        """Raise ApiError where fields contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")

    def _params(self, **more: Any) -> SamplingParams:
        fields = {name: getattr(self, name) for name in PASSED_ON}
        fields["stop"], fields["stop_token_ids"] = tuple(self.stop), tuple(self.stop_token_ids)
        fields["top_k"] = 0 if self.top_k == -1 else self.top_k  # vLLM's clients say -1 for all tokens
        try:
            return SamplingParams(**fields, **more)
        except RequestError as error:
            named = next((name for name in type(self).model_fields if str(error).startswith(name)), None)
            raise ApiError(400, str(error), param=named) from error


class ChatRequest(SamplingFields):
    """Body of /v1/chat/completions.

    session: name of a chat that the server keeps; messages are then only the new ones
        (endpoints/sessions.py).
    """

    messages: Annotated[list[ChatMessage], Field(fail_fast=True), BeforeValidator(_messages)]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    tools: Annotated[list[dict[str, Any]], BeforeValidator(checked_tools)] = []
    tool_choice: Annotated[Any, BeforeValidator(checked_tool_choice)] = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: Annotated[dict[str, bool], BeforeValidator(_template_options)] = {}
    session: Annotated[str, AfterValidator(_session_name)] | None = None

    def check(self) -> None:
        """Raise ApiError where fields contradict each other."""
        super().check()
        if self.session is not None and self.n != 1:
            raise ApiError(400, "a session goes on with one answer: leave out n", param="n")
        if self.session is not None and not self.store:
            message = "a session is stored, so store: false contradicts it; leave out one of the two"
            raise ApiError(400, message, param="store")
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")

    def sampling_params(self, max_model_len: int) -> SamplingParams:
        """Raises ApiError 400. Without a limit, the answer may fill the context."""
        asked = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        if asked == 0:
            raise ApiError(400, "max_tokens must be at least 1", param="max_tokens")
        limit = max_model_len if asked is None else asked
        return self._params(max_tokens=limit, logprobs=self.top_logprobs if self.logprobs else None)


class CompletionRequest(SamplingFields):
    """Body of /v1/completions."""

    prompt: Annotated[list[str | tuple[int, ...]], BeforeValidator(_prompts)]
    echo: bool = False
    logprobs: int | None = None

    def check(self) -> None:
        """Raise ApiError where fields contradict each other."""
        super().check()
        if len(self.prompt) * self.n > MAX_PROMPTS:
            raise ApiError(400, f"the number of prompts times n must be at most {MAX_PROMPTS}", param="n")
        if self.echo and self._echoed_chars() > MAX_ECHO_CHARS:
            message = f"with echo, the prompts times n must be at most {MAX_ECHO_CHARS} characters; send fewer"
            raise ApiError(400, message, param="echo")
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens may be 0 only with echo", param="max_tokens")

    def _echoed_chars(self) -> int:
        each = (len(prompt) * (1 if isinstance(prompt, str) else CHARS_PER_ECHOED_ID) for prompt in self.prompt)
        return self.n * sum(each)

    def sampling_params(self) -> SamplingParams:
        """Raises ApiError 400."""
        limit = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        scored = self.logprobs if self.echo else None
        if limit == 0 and scored is None:
            scored = 0  # nothing to generate nor to report; the engine still has to see the prompt
        return self._params(max_tokens=limit, logprobs=self.logprobs, prompt_logprobs=scored)


R = TypeVar("R", bound=SamplingFields)


def parse(schema: type[R], body: dict[str, Any]) -> R:
    """The checked request.

    Raises ApiError 400, which names the field and never repeats its value.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name in list(given):
        if name not in schema.model_fields:
            _check_foreign(name, given.pop(name))
    try:
        request = schema.model_validate(given)
    except ValidationError as error:
        raise _first_error(error) from None
    request.check()
    return request


def _check_foreign(name: str, value: Any) -> None:
    if name in METADATA or value in UNSUPPORTED.get(name, ()):
        return
    if name in UNSUPPORTED:
        raise ApiError(400, f"{name} is not supported by this server", param=name, code="unsupported_parameter")
    raise ApiError(400, f"unknown field: {name[:64]}", param=name[:64], code="unknown_parameter")


def _first_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in first["loc"]).lstrip(".")
    reason = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{path}: {reason[:1].lower() + reason[1:]}", param=path)
