"""Errors that a user can meet. Each message names the problem and its remedy.

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


class StoreError(KvireError):
    """The store cannot be opened or changed as asked.

    For example: a wrong key file, a path that is not a store folder, an unknown tenant.
    """


class BlockMissing(KvireError):  # noqa: N818 - no error: an ordinary answer of a tier
    """A tier does not hold the requested block (any more)."""


class TierUnavailable(KvireError):  # noqa: N818 - as above
    """A tier cannot answer now, or not in time. Its content is unknown."""


class FrameDamaged(KvireError):  # noqa: N818 - as above
    """The bytes are no frame of ours, or differ from the bytes written.

    cause: one word for counters.
    """

    def __init__(self, cause: str) -> None:
        super().__init__(f"the frame is damaged: {cause}")
        self.cause = cause


class FrameForeign(KvireError):  # noqa: N818 - as above
    """An intact frame that does not answer the request.

    It belongs to another block or a newer version, or its key is not available. It counts as a miss
    and stays in the tier.

    cause: one word for counters.
    """

    def __init__(self, cause: str) -> None:
        super().__init__(f"the frame is not the one asked for: {cause}")
        self.cause = cause
