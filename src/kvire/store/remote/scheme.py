"""The protocol of a kind of remote tier, and the known kinds: one per file of folder schemes."""

from collections.abc import Mapping
from functools import cache
from typing import Protocol
from urllib.parse import SplitResult

from kvire.core.discovery import parts
from kvire.core.errors import ConfigError
from kvire.store.remote.backend import Backend

FOLDER = "kvire.store.remote.schemes"


class Scheme(Protocol):
    """Turns URLs into backends. A file of the folder has one, called SCHEME.

    schemes: URL schemes, without "://".
    example: a short URL, for help texts.
    bytes_per_s: approximate bandwidth for one machine, by which its codec is chosen.
    """

    schemes: tuple[str, ...]
    example: str
    bytes_per_s: float

    def make(self, url: SplitResult, name: str, options: Mapping[str, str]) -> Backend:
        """The backend of a URL; sends no request.

        Optional packages are imported here.

        url: begins with one of `schemes`.
        name: the URL without secrets, for messages.
        options: the query part of the URL.

        Raises ConfigError.
        """


@cache
def schemes() -> tuple[Scheme, ...]:
    """All schemes, fastest first. Two for the same URLs are a bug of ours."""
    found: list[Scheme] = parts(FOLDER, "SCHEME")
    taken = [scheme for each in found for scheme in each.schemes]
    assert len(set(taken)) == len(taken), "a URL is one kind's"
    return tuple(sorted(found, key=lambda each: each.bytes_per_s, reverse=True))


def examples() -> str:
    """A URL of each kind, for help texts."""
    *others, last = (each.example for each in schemes())
    return f"{', '.join(others)} or {last}"


def scheme_of(asked: str) -> Scheme:
    """The kind of remote tier for URLs of that scheme. Raises ConfigError, which lists all."""
    for each in schemes():
        if asked in each.schemes:
            return each
    known = ", ".join(f"{scheme}://" for each in schemes() for scheme in each.schemes)
    raise ConfigError(f"the URL of a remote tier begins with one of {known}; this one with {asked!r}")
