"""How narrow a checkpoint keeps its weights: from its dtype, or its quantization_config."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvire.core.errors import ConfigError

_DTYPES = {"torch.bfloat16": "bfloat16", "torch.float16": "float16", "torch.float32": "float32", "auto": "bfloat16"}
# What a method keeps where its settings have no bits: (dense weights, experts). Embeddings, norms
# and scales of groups are wider; that share is small.
_METHODS = {"fp8": ("fp8", "fp8"), "fbgemm_fp8": ("fp8", "fp8"), "mxfp4": ("bfloat16", "mxfp4")}
_BITS = {4: "int4", 8: "int8"}
_BIT_FIELDS = ("bits", "w_bit", "num_bits", "weight_bits")
_ALGORITHMS = {"FP8": "fp8", "NVFP4": "int4"}  # NVFP4: one 8-bit scale per 16, as many bits as int4's


def checkpoint_weights(config: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """What the checkpoint keeps its weights in, by part ("dense", "experts"); what a reader must
    know about it.

    Raises ConfigError for a dtype whose size is not known.
    """
    settings = config.get("quantization_config") or config.get("compression_config")
    if not settings:
        dtype = _dtype(config)
        return {"dense": dtype, "experts": dtype}, []
    if not isinstance(settings, Mapping):
        settings = {"quant_method": str(settings)}
    method = str(settings.get("quant_method", "unknown"))
    if method in _METHODS:
        dense, experts = _METHODS[method]
        return {"dense": dense, "experts": experts}, []
    if (narrow := _narrow(settings)) is not None:
        return {"dense": narrow, "experts": narrow}, [f"weights are quantised ({method}) and counted as {narrow}"]
    wide = _dtype(config)
    note = (
        f"weights are quantised ({method}), and how narrow is not known here: they are counted as {wide}, which is too "
        "much. --weights-dtype says what they take"
    )
    return {"dense": wide, "experts": wide}, [note]


def _dtype(config: Mapping[str, Any]) -> str:
    stated = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    dtype = _DTYPES.get(stated, stated)
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"the config has dtype {stated!r}, whose size is not known")
    return dtype


def _narrow(settings: Mapping[str, Any]) -> str | None:
    """The dtype that all quantised weights have; None where the settings do not say one."""
    found = set(_stated(settings))
    return found.pop() if len(found) == 1 else None


def _stated(settings: Mapping[str, Any]) -> Iterator[str | None]:
    """Spellings of each method.

    gptq, awq: bits.
    bitsandbytes: a flag.
    compressed-tensors: a group's weights.
    modelopt: an algorithm.
    """
    for name in _BIT_FIELDS:
        if name in settings:
            yield _BITS.get(settings[name]) if isinstance(settings[name], int) else None
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        yield "int4" if settings.get("load_in_4bit") else "int8"
    if "quant_algo" in settings:
        yield _ALGORITHMS.get(str(settings["quant_algo"]))
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            is_fp8 = weights.get("type") == "float" and weights.get("num_bits") == 8
            yield "fp8" if is_fp8 else next(_stated(weights), None)
