"""vLLM's cache per token, group by group, and the check that this connector supports it."""

from dataclasses import dataclass
from typing import Any

from kvire.core.errors import UnsupportedModelError

KINDS = {"FullAttentionSpec": "full", "MLAAttentionSpec": "latent", "SlidingWindowSpec": "sliding"}
QUANTISATIONS = {"NONE", "FP8_PER_TENSOR"}  # others keep scales of their own beside K and V


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share block tables.

    window: last tokens that they attend to; None: all.
    """

    layers: tuple[str, ...]
    kind: str
    window: int | None


def read_groups(kv_cache_config: Any) -> tuple[tuple[Group, ...], int]:
    """The groups as vLLM has them, and the tokens in a block.

    Raises UnsupportedModelError for an unsupported one.
    """
    sizes = {group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups}
    if len(sizes) != 1:
        raise _refused(f"its groups have blocks of {', '.join(map(str, sorted(sizes))) or 'no'} tokens")
    return tuple(_group(number, group) for number, group in enumerate(kv_cache_config.kv_cache_groups)), sizes.pop()


def _group(number: int, group: Any) -> Group:
    per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    specs = list(per_layer.values()) if per_layer else [group.kv_cache_spec]
    names = sorted({type(spec).__name__ for spec in specs})
    shown = f"group {number} ({len(group.layer_names)} layers from {group.layer_names[0]}, {', '.join(names)})"
    if any(name not in KINDS for name in names):
        raise _refused(f"{shown} keeps something other than plain attention KV")
    for spec in specs:
        quantisation = getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE")
        if quantisation not in QUANTISATIONS:
            raise _refused(f"{shown} has a quantised cache of kind {quantisation}")
        if getattr(spec, "model_version", None) is not None:
            raise _refused(f"{shown} is of the sparse kind {spec.model_version}")
    if getattr(group, "is_eagle_group", False):
        raise _refused(f"{shown} belongs to a draft model, whose weights are not part of the name of a block")
    if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
        raise _refused(f"{shown} is not kept where a connector may read it")
    windows = {spec.sliding_window if type(spec).__name__ == "SlidingWindowSpec" else None for spec in specs}
    if len(windows) > 1:
        raise _refused(f"{shown} mixes windows")
    return Group(tuple(group.layer_names), "+".join(KINDS[name] for name in names), windows.pop())


def _refused(why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"Kvire cannot keep this model's KV under vLLM: {why}. Start vLLM without the connector; "
        "docs/vllm.md lists what is supported"
    )
