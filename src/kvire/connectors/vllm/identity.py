"""The namespace of this vLLM's KV, and the options that no namespace can record."""

import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import vllm

from kvire.connectors.identity import connector_namespace
from kvire.connectors.vllm.groups import Group
from kvire.connectors.vllm.messages import Facts
from kvire.core.errors import ConfigError, UnsupportedModelError
from kvire.core.keys import Namespace
from kvire.core.spec import group_text
from kvire.models.precision import matmul_precision

# vLLM 0.30 loads a connector's blocks also for a request for log probabilities of its prompt, and
# answers with numbers that were never computed; later ones compute such prompts whole.
OLDEST = (0, 31)
# Formats that read the weights as stored in the model's folder.
LOAD_FORMATS = {"auto", "hf", "safetensors", "fastsafetensors", "pt", "npcache", "mistral", "gguf", "bitsandbytes"}
# Rotary embeddings that are the same for any length of context.
STEADY_ROPES = {None, "default", "linear", "llama3", "yarn", "proportional", "mrope"}


def check_options(vllm_config: Any) -> None:
    """Refuse options that this connector does not support.

    Raises ConfigError or UnsupportedModelError.
    """
    check_version(vllm.__version__)
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    if transfer.kv_role != "kv_both":
        raise ConfigError(f"Kvire loads and saves: set kv_role to kv_both, not {transfer.kv_role}")
    if transfer.kv_load_failure_policy != "recompute":
        raise ConfigError(
            "Kvire wants a block that cannot be loaded to be computed: add "
            '"kv_load_failure_policy":"recompute" to --kv-transfer-config'
        )
    if parallel.decode_context_parallel_size > 1 or getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise ConfigError("Kvire does not know how context parallelism divides a block: leave it out")
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in {"ngram", "suffix"}:
        raise ConfigError(
            f"Kvire keeps no KV of draft models, and speculative method {speculative.method} has one: use "
            "ngram, or leave it out"
        )
    load_format = str(vllm_config.load_config.load_format)
    if load_format not in LOAD_FORMATS:
        raise UnsupportedModelError(
            f"Kvire has to know which weights KV was computed with, and cannot tell with load_format {load_format}: "
            f"use one of {', '.join(sorted(LOAD_FORMATS))}"
        )


def check_version(version: str) -> None:
    """Refuse a release before OLDEST; a build from source may have any version.

    Raises ConfigError.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and "dev" not in version and tuple(map(int, numbers.groups())) < OLDEST:
        raise ConfigError(
            f"Kvire needs vLLM {OLDEST[0]}.{OLDEST[1]} or newer, and this is {version}: install a newer one"
        )


def facts_of(vllm_config: Any, groups: Sequence[Group], layers: Mapping[str, Any], row_bytes: Sequence[int]) -> Facts:
    """A worker's facts about its cache.

    layers: vLLM's cache tensors by name.
    row_bytes: of a block, by group.
    """
    context = vllm_config.compilation_config.static_forward_context
    kernels, dtypes, texts, devices = set(), set(), [], set()
    for group in groups:
        shapes = []
        for name in group.layers:
            tensor, layer = layers[name], context[name]
            # how a CPU kernel packs the inside of a page depends on the CPU's instructions
            kernels.add(f"{layer.get_attn_backend().get_name()}/{getattr(layer, 'isa', '')}".rstrip("/"))
            dtypes.add(f"{tensor.dtype}".removeprefix("torch."))
            devices.add(tensor.device.type)
            order = sorted(range(tensor.dim()), key=lambda axis: -tensor.stride(axis))
            shapes.append(f"{list(tensor.shape[1:])}{tensor.dtype} order={order}")
        names = sha256("\n".join(group.layers).encode()).hexdigest()[:16]
        runs = sorted(set(shapes))
        same = runs[0] if len(runs) == 1 else sha256("\n".join(shapes).encode()).hexdigest()[:16]
        texts.append(group_text(group.kind, str(len(group.layers)), f"names={names} {same}", group.window))
    numerics = [f"attention={','.join(sorted(kernels))}"]
    numerics += [f"matmul={precision}" for device in sorted(devices) if (precision := matmul_precision(device))]
    return Facts(
        numerics=" ".join(numerics),
        kv_dtype=",".join(sorted(dtypes)),
        spec=";".join(texts),
        block_bytes=tuple(row_bytes),
    )


def namespace_of(vllm_config: Any, facts: Sequence[Facts], block_size: int) -> Namespace:
    """Of a whole engine.

    facts: of its workers, in order.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    config = model.hf_config
    numerics = [
        f"device={vllm_config.device_config.device_type}",
        facts[0].numerics,
        f"compute={model.dtype}".replace("torch.", ""),
        f"quantization={model.quantization or 'none'}",
        f"cache_dtype={vllm_config.cache_config.cache_dtype}",
    ]
    if not ropes(config.to_dict()) <= STEADY_ROPES:
        numerics.append(f"max_model_len={model.max_model_len}")
    specs = [one.spec for one in facts]
    return connector_namespace(
        checkpoint(vllm_config),
        config.to_dict(),
        engine=_software(model),
        numerics=" ".join(numerics),
        kv_dtype=facts[0].kv_dtype,
        spec=specs[0] if len(set(specs)) == 1 else ";".join(specs),
        block_size=block_size,
        shard=f"tp={parallel.tensor_parallel_size} pp={parallel.pipeline_parallel_size}",
    )


def _software(model: Any) -> str:
    """Versions of all computing software; of some architectures vLLM runs transformers'
    own code.
    """
    text = f"vllm {vllm.__version__} torch {torch.__version__}"
    if model.using_transformers_backend():
        text += f" transformers {metadata.version('transformers')}"
    return text


def ropes(config: Mapping[str, Any]) -> set[str | None]:
    """Kinds of rotary embedding anywhere in a config."""
    found: set[str | None] = set()
    for name, value in config.items():
        if isinstance(value, Mapping):
            if name in {"rope_scaling", "rope_parameters"}:
                found.add(value.get("rope_type", value.get("type")))
            found |= ropes(value)
    return found


def checkpoint(vllm_config: Any) -> Path:
    """The folder (or GGUF file) that vLLM loaded the model from.

    Raises UnsupportedModelError if it is not local.
    """
    model = vllm_config.model_config
    path = Path(model.model)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - only for models named by a hub id

    try:
        return Path(
            snapshot_download(
                model.model,
                revision=model.revision,
                cache_dir=vllm_config.load_config.download_dir,
                local_files_only=True,
            )
        )
    except Exception as error:  # its errors vary with its version; each means that the files are missing here
        raise UnsupportedModelError(
            f"Kvire finds no weight files of {model.model} on this machine, so it cannot tell which model KV belongs "
            "to: download the model, and start vLLM with the folder's path"
        ) from error
