"""From the URL of `--remote` to a tier.

Opens nothing: the first call does. The URLs that there are: schemes/.
"""

from urllib.parse import SplitResult, parse_qsl, urlsplit

from kvire.core.errors import ConfigError
from kvire.store.health import PROBE_AFTER_S
from kvire.store.remote.scheme import scheme_of
from kvire.store.remote.tier import DEFAULT_TIMEOUT_S, RemoteTier


def open_remote(
    url: str,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    ttl_s: float | None = None,
    probe_after_s: float = PROBE_AFTER_S,
) -> RemoteTier:
    """The tier of a URL; its name is the URL without user, password and options.

    timeout_s: default of its calls.
    ttl_s: how long a block lives after a use; in an object store, after its write.
    probe_after_s: time until a failing tier is asked again.

    Raises ConfigError.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigError("the URL of a remote tier cannot be read; it looks like redis://host:6379/0") from None
    name = url_without_secrets(parts)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    backend = scheme_of(parts.scheme).make(parts, name, options)
    return RemoteTier(name, backend, timeout_s=timeout_s, ttl_s=ttl_s, probe_after_s=probe_after_s)


def url_without_secrets(parts: SplitResult) -> str:
    """The URL without secrets: for names, messages and metrics."""
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
