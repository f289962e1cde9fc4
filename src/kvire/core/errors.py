"""Errors that a user can meet. Each message says what is wrong and what to do about it.

`assert` is for our own bugs; these exceptions are for mistakes and limits outside the code.
"""


class KvireError(Exception):
    """Base of every error that Kvire raises on purpose."""


class ConfigError(KvireError):
    """An option has a value that cannot work."""


class ModelNotFoundError(KvireError):
    """The model's name leads to no directory, file, package or hub entry."""


class UnsupportedModelError(KvireError):
    """The model exists, but its KV is not known to be cached right; it is refused by name."""


class RequestError(KvireError):
    """A request that cannot be served as it stands (the server answers 400)."""


class QueueFullError(KvireError):
    """Too many requests are waiting (the server answers 429)."""


class GenerationError(KvireError):
    """One request could not go on; others are not affected (the server answers 500)."""


class EngineClosedError(KvireError):
    """The engine was closed, or died, before the request finished."""
