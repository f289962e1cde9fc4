"""s3://bucket[/prefix] and compatible stores; gs:// and az:// as obstore takes them."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import SplitResult

from kvire.core.errors import ConfigError
from kvire.store.remote.backend import Backend


class Objects:
    """Object stores. The options are obstore's, such as endpoint and region."""

    schemes = ("s3", "gs", "az")
    example = "s3://bucket/prefix"
    bytes_per_s = 100e6  # slow enough for byte planes to pay (docs/adr/0012-frames-and-seal.md)

    def make(self, url: SplitResult, name: str, options: Mapping[str, str]) -> Backend:
        """Connects at the first request."""
        try:
            from obstore.store import from_url  # noqa: PLC0415 - optional

            from kvire.store.remote.objects import ObjectBackend  # noqa: PLC0415 - needs it
        except ImportError:
            raise ConfigError(f"{name} needs the package obstore: pip install 'kvire[s3]'") from None
        open_store: Any = from_url  # its types have a form for each kind of store; which one this is only the URL says
        try:
            store = open_store(
                f"{url.scheme}://{url.netloc}{url.path}",
                config=dict(options),
                client_options=_client_options(options),
                retry_config={"max_retries": 0},
            )
        except Exception as error:
            raise ConfigError(f"{name}: {str(error).partition(chr(10))[0]}") from error
        return ObjectBackend(store)


def _client_options(options: Mapping[str, str]) -> dict[str, Any]:
    """Every failure comes back at once: whether to try again is the circuit breaker's business."""
    is_plain = options.get("endpoint", "").startswith("http:")
    return {"connect_timeout": "10s", "timeout": "60s", "allow_http": is_plain}


SCHEME = Objects()
