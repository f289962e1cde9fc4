"""Options of the server itself; those of the engine are kvire.core.config.EngineConfig."""

import math
from dataclasses import dataclass

from kvire.core.errors import ConfigError

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Address, access, and time limits.

    host, port: port 0 takes any free one.
    api_keys: each gives access; without any, only this machine is answered.
    served_name: the model's name in the API, by default the name it was loaded by.
    request_timeout_s: a request that takes longer ends with an error, and its blocks are free.
    header_timeout_s, body_timeout_s: for a request's head and its body.
    send_timeout_s: for 256 KiB of an answer, or all that is left; a client that reads more slowly
        is disconnected.
    keep_alive_s: how long a connection may idle between requests.
    shutdown_s: how long answers in flight may still take after Ctrl-C.
    max_body_bytes: of one request.
    max_connections: open at once.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    served_name: str | None = None
    request_timeout_s: float = 600.0
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    send_timeout_s: float = 60.0
    keep_alive_s: int = 15
    shutdown_s: int = 5
    max_body_bytes: int = 8 * MIB
    max_connections: int = 800

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must lie between 0 and 65535, got {self.port}")
        if not isinstance(self.api_keys, tuple):
            raise ConfigError(f"api_keys must be a tuple of keys, got a {type(self.api_keys).__name__}")
        if any(not key.strip() or key != key.strip() for key in self.api_keys):
            raise ConfigError("an API key must not be empty, nor begin or end with a space")
        if self.served_name is not None and not self.served_name:
            raise ConfigError("served_name must not be empty")
        timeouts = ("request_timeout_s", "header_timeout_s", "body_timeout_s", "send_timeout_s")
        for name in (*timeouts, "keep_alive_s", "shutdown_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be a positive number of seconds, got {value}")
        for name in ("max_body_bytes", "max_connections"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
