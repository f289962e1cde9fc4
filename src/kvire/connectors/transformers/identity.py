"""The KV of a model in memory: refused alterations, and the namespace of all else."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from kvire.connectors.transformers.blocks import CacheLayout, new_cache
from kvire.connectors.transformers.weights import WeightsDigest
from kvire.core.errors import UnsupportedModelError
from kvire.core.keys import Namespace
from kvire.models.code_digest import ModelCode
from kvire.models.families import as_dict, kv_groups
from kvire.models.fingerprint import config_digest, namespace
from kvire.models.precision import matmul_precision


class ModelIdentity:
    """A model as it is at every call; it may have changed since it was opened."""

    def __init__(self, model: Any) -> None:
        refuse(model)
        self._model = model
        self.limit_tokens = _limit_tokens(as_dict(model.config))
        # LongRoPE leaves in these the last forward's choice of the two in the config; each forward
        # chooses anew.
        self._weights = WeightsDigest(model, without=() if self.limit_tokens is None else ("inv_freq",))
        self._code = ModelCode(model, also=_of_cache(new_cache(model.config)))

    def namespace(self, layout: CacheLayout) -> Namespace:
        """Of the KV that the model would compute now; without a salt.

        Raises UnsupportedModelError.
        """
        refuse(self._model)
        config = self._model.config
        return namespace(
            weights=self._weights.current(),
            config=config_digest(config.to_dict()),
            groups=layout.spec.groups,
            numerics=_numerics(self._model),
            kv_dtype=layout.spec.dtype,
            block_size=layout.spec.block_size,
            build=f"torch {torch.__version__} code {self._code.current()}",
        )


def refuse(model: Any) -> None:
    """Raise UnsupportedModelError if KV does not follow from weights, config and token
    ids alone.
    """
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"a stored cache needs a transformers model, not a {type(model).__name__}. For an adapter of peft: "
            "merge_and_unload() it, and pass the merged model."
        )
    kv_groups(model.config)
    if model.training:
        raise UnsupportedModelError(
            "the model is in training mode, in which KV may be drawn at random: call model.eval()"
        )
    if torch.is_autocast_enabled(model.device.type):
        raise UnsupportedModelError("autocast changes what is computed: load the model in the dtype you want instead")
    for name, module in model.named_modules():
        if (why := _alteration(module)) is not None:
            raise UnsupportedModelError(
                f"{name or 'the model'} {why}, which can change KV without a trace in its weights"
            )


def _alteration(module: Any) -> str | None:
    """The reason why a module computes otherwise than by its class and weights, if any."""
    if type(module).__module__.split(".")[0] == "peft":
        return "is an adapter of peft (merge_and_unload() it)"
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):  # noqa: SLF001 - no public way
        if not str(getattr(hook, "__module__", "")).startswith(("transformers.", "kvire.")):
            return "has a forward hook (remove it)"
    forward = vars(module).get("forward", None)
    own = getattr(forward, "__func__", None) is type(module).forward  # put there, and taken back
    if forward is not None and not own and not hasattr(module, "_hf_hook"):  # accelerate moves tensors, and marks it
        return "has a forward of its own (load the model anew)"
    return None


def _numerics(model: Any) -> str:
    config = model.config.get_text_config(decoder=True)
    kernels = [str(config._attn_implementation)]  # noqa: SLF001 - where transformers keeps it
    if (experts := getattr(config, "_experts_implementation", None)) is not None:
        kernels.append(f"experts={experts}")
    devices = sorted({parameter.device.type for parameter in model.parameters()})
    kernels += [f"matmul={precision}" for device in devices if (precision := matmul_precision(device))]
    dtype = str(model.dtype).removeprefix("torch.")
    return f"transformers {'/'.join([dtype, *kernels, *devices])}"


def _of_cache(cache: Any) -> dict[type, tuple[str, ...]]:
    """The methods through which K and V pass from a layer to its attention."""
    return dict.fromkeys((type(cache), *map(type, cache.layers)), ("update", "get_mask_sizes"))


def _limit_tokens(config: Mapping[str, Any]) -> int | None:
    """The longest sequence with the same rotations as every shorter one; None: no limit.

    Raises UnsupportedModelError if that depends on earlier sequences.
    """
    limits = []
    for name in ("rope_parameters", "rope_scaling"):
        settings = config.get(name) or {}
        for rope in (settings, *(value for value in settings.values() if isinstance(value, dict))):
            kind = rope.get("rope_type", rope.get("type"))
            if kind == "dynamic":
                raise UnsupportedModelError(
                    "rotary type dynamic turns positions by the longest sequence that the model has seen so far, so KV "
                    "of a prompt changes with what came before it: use a checkpoint with another rotary type"
                )
            if kind == "longrope":
                original = rope.get("original_max_position_embeddings")
                limits.append(int(original or config["original_max_position_embeddings"]))
    return min(limits, default=None)
