"""--hicache-storage-backend-extra-config: the store's options, named as in `kvire serve`."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Self

from kvire.connectors.options import store_config
from kvire.core.config import StoreConfig
from kvire.core.errors import ConfigError

WHERE = "--hicache-storage-backend-extra-config"
TENANT = "sglang"
PREFILL = "prefill_tokens_per_s"

# Options that SGLang itself reads there and leaves in for the backend.
SGLANGS = frozenset({"backend_name", "module_path", "class_name", "interface_v1"})


@dataclass(frozen=True, slots=True)
class Options:
    """The parsed options.

    config: of the store.
    tenant: owner of the pages; clearing SGLang's storage forgets this tenant.
    prefill_tokens_per_s: how fast SGLang computes prompts; None: to be measured.
    """

    config: StoreConfig
    tenant: str
    prefill_tokens_per_s: float | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Raises ConfigError that names the unknown or wrong option."""
        asked = {name: value for name, value in given.items() if name not in SGLANGS}
        config = store_config(asked, WHERE, also={"tenant": (str,), PREFILL: (int, float)})
        speed = asked.get(PREFILL)
        if speed is not None and not 0 < speed < inf:
            raise ConfigError(f"{PREFILL} in {WHERE} is a number of tokens a second above 0, got {speed!r}")
        if not given.get("interface_v1"):
            raise ConfigError(f'add "interface_v1": 1 to {WHERE}: without it SGLang allocates memory for every page')
        return cls(config, asked.get("tenant") or TENANT, speed)
