"""The namespace of this server's pages, from SGLang's own settings."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

from kvire.connectors.identity import connector_namespace
from kvire.core.errors import ConfigError, UnsupportedModelError
from kvire.core.keys import Namespace
from kvire.models.checkpoint import read_config
from kvire.models.hub import find_in_hub, is_hub_id
from kvire.models.refusal import IMAGE_FIELDS

# Server arguments that can change KV, found by words in their names, so that new ones count at
# once. A model's path and name do not matter: its files are hashed.
TELLING = re.compile(
    "dtype|quant|attention|backend|moe|rope|speculative|torchao|override|context_length|load_format|model_impl|"
    "deterministic|compile|precision|sparse|indexer"
)
INERT = re.compile("hicache|^served_|^disagg|^grammar|^sampling|lora|storage|cuda_graph|preferred")


@dataclass(frozen=True, slots=True)
class SglangServer:
    """What SGLang computes with.

    model: folder of the checkpoint.
    numerics: text of everything else that decides bits.
    shard: of this process.
    """

    model: Path
    config: Mapping[str, Any]
    numerics: str
    shard: Mapping[str, str]  # of pools with the same content on every tensor-parallel rank, and of the others

    @classmethod
    def of(cls, storage_config: Any) -> Self:
        """Raises ConfigError or UnsupportedModelError for settings that pages cannot record."""
        if storage_config.dcp_size > 1:
            raise ConfigError("decode context parallelism is not supported: SGLang divides pages in a way of its own")
        arguments = _arguments()
        if arguments.get("enable_lora") or arguments.get("lora_paths"):
            raise UnsupportedModelError(
                "adapters are not supported: SGLang's page hashes hold an adapter's name and path, not its weights, so "
                "a retrained one would get the old one's KV. Leave --hicache-storage-backend out, or merge the adapter."
            )
        model = _folder(arguments)
        config = read_config(model)
        if any(config.get(name) is not None for name in IMAGE_FIELDS):
            raise UnsupportedModelError(
                f"{model} takes images or sound, of which SGLang's page hashes hold short digests only: its KV is not "
                "stored. Leave --hicache-storage-backend out for this model."
            )
        telling = {
            name: str(value)
            for name, value in sorted(arguments.items())
            if value not in (None, False, "", [], {}) and TELLING.search(name) and not INERT.search(name)
        }
        numerics = " ".join(f"{name}={value}" for name, value in telling.items())
        pipeline = f"pp={storage_config.pp_rank}/{storage_config.pp_size}"
        if storage_config.attn_cp_size > 1:
            pipeline += f" cp={storage_config.attn_cp_rank}/{storage_config.attn_cp_size}"
        ranked = f"tp={storage_config.tp_rank}/{storage_config.tp_size} {pipeline}"
        replicated = f"tp=any {pipeline}" if storage_config.is_mla_model else ranked
        return cls(model, config, numerics, {"replicated": replicated, "ranked": ranked})

    def namespace(self, pool: Any, name: str) -> Namespace:
        """Of one host pool's pages; without a salt."""
        layers = f"{getattr(pool, 'start_layer', 0)}-{getattr(pool, 'end_layer', 0)}"
        tag = getattr(pool, "storage_format_tag", None)
        spec = (
            f"sglang page of {name}: {type(pool).__name__} {pool.layout} layers={layers} "
            f"token_bytes={pool.size_per_token}{f' format={tag}' if tag else ''}"
        )
        return connector_namespace(
            self.model,
            self.config,
            engine=f"sglang {_version()}",
            numerics=self.numerics,
            kv_dtype=str(getattr(pool, "dtype", "bytes")).removeprefix("torch."),
            spec=spec,
            block_size=pool.page_size,
            shard=self.shard["ranked" if name == "mamba" else "replicated"],  # running states are each rank's own
        )


def _arguments() -> dict[str, Any]:
    """The server's, by name."""
    try:
        arguments = import_module("sglang.srt.runtime_context").get_server_args()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"this version of SGLang does not say how it was started ({error}), so its pages cannot be told from "
            "those of another one: use SGLang 0.5.23 or later"
        ) from error
    return {name: value for name, value in vars(arguments).items() if not name.startswith("_")}


def _folder(arguments: Mapping[str, Any]) -> Path:
    """Of the checkpoint that is served."""
    model = str(arguments["model_path"])
    if (folder := Path(model).expanduser()).is_dir():
        return folder
    if is_hub_id(model) and not arguments.get("revision"):
        return find_in_hub(model)
    raise ConfigError(
        f"{model} is no local folder, so its weights cannot be told from others: pass --model-path the folder of the "
        "checkpoint"
    )


def _version() -> str:
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "unknown"
