"""One streamed answer from any OpenAI-compatible server, and when each piece of it came.

Threads and the standard library: the client shares the machine with the server and must cost it
little.
"""

import http.client
import json
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from kvire.core.errors import ConfigError

ApiMessage = Mapping[str, str]
# Where servers put text of an answer; a chunk that has none of these (the role alone) is no token.
TEXT_FIELDS = ("content", "reasoning_content", "reasoning")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A model behind an OpenAI-compatible address.

    url: ends in /v1.
    model: its name in the API.
    extra: fields added to every request.
    """

    url: str
    model: str
    api_key: str | None = None
    timeout_s: float = 600.0
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StreamedAnswer:
    """What came back. Times are seconds since the request was sent.

    at_s, pieces: time and text of each piece.
    end_s: when the answer was complete, also without any text.
    usage: as the server counted.
    kvire: where a Kvire server says the KV came from, else empty.
    error: one word for what went wrong ("timeout", "http_429", ...), else None;
    detail: more of that.
    """

    at_s: tuple[float, ...]
    pieces: tuple[str, ...]
    end_s: float
    usage: Mapping[str, Any]
    kvire: Mapping[str, Any]
    error: str | None = None
    detail: str = ""

    @property
    def ttft_s(self) -> float:
        """First text received minus request sent; an answer without text is timed by its end."""
        return self.at_s[0] if self.at_s else self.end_s

    @property
    def e2e_s(self) -> float:
        """Last text received minus request sent."""
        return self.at_s[-1] if self.at_s else self.end_s

    @property
    def output_tokens(self) -> int:
        """By the server's count, else one for each piece."""
        return int(self.usage.get("completion_tokens") or len(self.pieces))

    @property
    def prompt_tokens(self) -> int | None:
        """By the server's count."""
        return self.usage.get("prompt_tokens")

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that were not computed; None where the server does not say."""
        cached: int | None = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        return cached

    @property
    def tpot_s(self) -> float | None:
        """(E2E - TTFT) / (tokens - 1); None for a single token, or several that came as
        one piece.
        """
        tokens = self.output_tokens
        return (self.e2e_s - self.ttft_s) / (tokens - 1) if tokens > 1 and len(self.pieces) > 1 else None

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Between pieces that follow each other."""
        return tuple(later - earlier for earlier, later in zip(self.at_s, self.at_s[1:], strict=False))


def ask_completion(
    endpoint: Endpoint, messages: Sequence[ApiMessage], max_tokens: int, extra: Mapping[str, Any] | None = None
) -> StreamedAnswer:
    """One answer at temperature 0, exactly `max_tokens` long where the server knows `ignore_eos`.

    Never raises.
    """
    body = {
        "model": endpoint.model,
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **endpoint.extra,
        **(extra or {}),
    }
    connection = connect(endpoint)
    reader = _Reader(perf_counter())  # connecting, also by TLS, is part of the wait; reading certificates is not
    try:
        connection.request("POST", _path(endpoint, "/chat/completions"), json.dumps(body), _headers(endpoint))
        response = connection.getresponse()
        if response.status != 200:
            detail = response.read(500).decode(errors="replace")
            return reader.answer(f"http_{response.status}", detail)
        for line in response:  # also comments, with which servers keep a connection open
            if line.startswith(b"data:"):
                reader.take(_event(line))
            if reader.elapsed_s > endpoint.timeout_s:
                return reader.answer("timeout", f"no end within {endpoint.timeout_s:g} s")
    except TimeoutError as error:
        return reader.answer("timeout", str(error))
    except (OSError, http.client.HTTPException) as error:
        return reader.answer("connection", f"{type(error).__name__}: {error}")
    except (
        ValueError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:  # no event of this form
        return reader.answer("malformed_stream", str(error))
    finally:
        connection.close()
    return reader.answer()


def get(endpoint: Endpoint, path: str) -> bytes:
    """Body of a GET; path begins at the server's root. Raises ConfigError where there is none."""
    connection = connect(endpoint)
    try:
        connection.request("GET", path, headers=_headers(endpoint))
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise ConfigError(f"{endpoint.url} does not answer: {error}; is the server running?") from error
    finally:
        connection.close()
    if response.status != 200:
        raise ConfigError(f"{endpoint.url} answered {response.status} to GET {path}")
    return body


def first_model(endpoint: Endpoint) -> str:
    """The name of the first model that the server lists. Raises ConfigError."""
    try:
        return str(json.loads(get(endpoint, _path(endpoint, "/models")))["data"][0]["id"])
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(f"{endpoint.url}/models lists no model; name one with --served-name") from error


def connect(endpoint: Endpoint) -> http.client.HTTPConnection:
    """Not yet connected. Raises ConfigError for an address that is none."""
    try:
        url = urlsplit(endpoint.url)
        port = url.port
    except ValueError as error:
        raise ConfigError(f"{endpoint.url} is no address: {error}") from error
    if url.scheme not in {"http", "https"} or not url.hostname:
        raise ConfigError(f"{endpoint.url} is no address: write http://host:port/v1")
    if url.scheme == "http":
        return http.client.HTTPConnection(url.hostname, port, timeout=endpoint.timeout_s)
    context = ssl.create_default_context()
    return http.client.HTTPSConnection(url.hostname, port, timeout=endpoint.timeout_s, context=context)


class _Reader:
    """Takes events as they come."""

    def __init__(self, sent: float) -> None:
        self._sent = sent
        self._at_s: list[float] = []
        self._pieces: list[str] = []
        self._usage: dict[str, Any] = {}
        self._kvire: dict[str, Any] = {}
        self._finished = False
        self._error: tuple[str, str] | None = None

    @property
    def elapsed_s(self) -> float:
        return perf_counter() - self._sent

    def take(self, event: Any) -> None:
        if event is None:  # [DONE]
            self._finished = True
            return
        if not isinstance(event, dict):
            raise ValueError("an event that is no object")  # noqa: TRY004 - not the caller's mistake
        if "error" in event:
            self._error = ("error_event", json.dumps(event["error"])[:500])
        self._usage = dict(event.get("usage") or self._usage)
        self._kvire = dict(event.get("kvire") or self._kvire)
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            texts = (delta[name] for name in TEXT_FIELDS if isinstance(delta.get(name), str))
            if piece := next(filter(None, texts), ""):
                self._at_s.append(self.elapsed_s)
                self._pieces.append(piece)
            self._finished = self._finished or choice.get("finish_reason") is not None

    def answer(self, error: str | None = None, detail: str = "") -> StreamedAnswer:
        if error is None and self._error is not None:
            error, detail = self._error
        if error is None and not self._finished:
            error, detail = "broken_stream", "the answer broke off"
        times, pieces = tuple(self._at_s), tuple(self._pieces)
        return StreamedAnswer(times, pieces, self.elapsed_s, self._usage, self._kvire, error, detail)


def _event(line: bytes) -> Any:
    """Payload of a server-sent event; None stands for [DONE]."""
    data = line[len(b"data:") :].strip()
    return None if data == b"[DONE]" else json.loads(data)


def _path(endpoint: Endpoint, path: str) -> str:
    return urlsplit(endpoint.url).path.rstrip("/") + path


def _headers(endpoint: Endpoint) -> dict[str, str]:
    key = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
    return {"Content-Type": "application/json", **key}
