"""From a model's name to a listening server."""

import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import uvicorn
from fastapi import FastAPI

from kvire.core.config import StoreConfig
from kvire.core.errors import ConfigError
from kvire.llm import LLM
from kvire.models.progress import Progress
from kvire.server.app import create_app
from kvire.server.auth import is_local_name
from kvire.server.options import ServerOptions
from kvire.server.protocol import MAX_HEADER_BYTES, bounded_protocol

API_KEY_VARIABLE = "KVIRE_API_KEY"
BACKLOG = 512


def serve(
    model: str,
    options: ServerOptions | None = None,
    *,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
    store: StoreConfig | None = None,
    **engine_options: Any,
) -> None:
    """Load a model and answer until Ctrl-C or SIGTERM.

    progress: receives the progress of loading.
    say: prints a line for people, by default to stderr.
    store: keeps blocks below the pool.
    engine_options: fields of EngineConfig.

    Without keys in the options, KVIRE_API_KEY may hold some, comma-separated.

    Raises ConfigError (also if the port is taken, before anything is loaded), ModelNotFoundError,
    UnsupportedModelError or StoreError.
    """
    options, say = with_environment(options or ServerOptions(), os.environ), say or _to_stderr
    with bind(options) as listener, LLM(model, progress=progress, store=store, **engine_options) as llm:
        app = create_app(llm.client, model, options, llm.sessions)
        server = make_server(app, options)
        for line in welcome(options, listener, app.state.service.model_name):
            say(line)
        if llm.store_line is not None:
            say(llm.store_line)
        with suppress(KeyboardInterrupt):  # uvicorn has finished the running requests and passes the signal on
            server.run(sockets=[listener])
        say("stopped")


def with_environment(options: ServerOptions, environment: Mapping[str, str]) -> ServerOptions:
    """The options with the keys of KVIRE_API_KEY, if they hold none."""
    if options.api_keys or API_KEY_VARIABLE not in environment:
        return options
    keys = tuple(key.strip() for key in environment[API_KEY_VARIABLE].split(","))
    if not all(keys):
        raise ConfigError(f"{API_KEY_VARIABLE} is set but holds an empty key; unset it, or set it to the key")
    return replace(options, api_keys=keys)


def bind(options: ServerOptions) -> socket.socket:
    """A bound socket, not yet listening. Raises ConfigError."""
    family, address = _resolve(options.host, options.port)
    if not options.api_keys and not is_local_name(address[0]):
        raise ConfigError(
            f"refusing to listen on {options.host} without an API key: anyone who reaches this machine could use the "
            f"model, and tell from its speed what others asked. Set {API_KEY_VARIABLE} (or an API key option), or "
            "listen on 127.0.0.1"
        )
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)  # so that a second server on this port fails now, not after loading
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {options.host} port {options.port}: {error.strerror or error}; choose another port "
            "(0 takes a free one) or stop what uses it"
        ) from error
    return listener


def make_server(app: FastAPI, options: ServerOptions) -> uvicorn.Server:
    """A uvicorn server with our bounds; run(sockets=[bind(options)]) starts it."""
    config = uvicorn.Config(
        app,
        http=bounded_protocol(options.header_timeout_s, options.send_timeout_s, options.max_connections),
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,  # its lines would hold query strings
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=options.keep_alive_s,
        timeout_graceful_shutdown=options.shutdown_s,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        backlog=BACKLOG,
    )
    return uvicorn.Server(config)


def url_of(listener: socket.socket) -> str:
    """Where a bound socket is reached from this machine."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def welcome(options: ServerOptions, listener: socket.socket, model_name: str) -> list[str]:
    """The address for people, and a command to try."""
    url = url_of(listener)
    key = ' -H "Authorization: Bearer $KVIRE_API_KEY"' if options.api_keys else ""
    body = f'{{"model": "{model_name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    lines = [f"{model_name} is served at {url}/v1 (Ctrl-C stops it)", "try:"]
    lines.append(f"  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'")
    if not is_local_name(listener.getsockname()[0]):
        lines.append("note: keys and prompts travel unencrypted; beyond a trusted network, put a TLS proxy in front")
    return lines


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot find the address {host!r} to listen on: {error}") from error
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, address


def _to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")
