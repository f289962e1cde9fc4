"""Supported model families, and the state that each of their layers keeps per token.

`plan/families/table.py` lists the families and their rules; everything else is refused by name, by
`refusal.py`.
"""

from collections.abc import Collection, Mapping
from typing import Any, Protocol, TypeGuard

from kvire.core.errors import UnsupportedModelError
from kvire.core.spec import KVGroup, LayerKind
from kvire.models.refusal import Config, refuse_unknown
from kvire.plan.families.fields import Fields
from kvire.plan.families.mixers import kept_groups
from kvire.plan.families.table import FAMILIES, running

SUPPORTED = running()


class HasDict(Protocol):
    """The part of a transformers config used here."""

    def to_dict(self) -> dict[str, Any]:
        """Every field, defaults included."""


def kv_groups(config: Config | HasDict) -> tuple[KVGroup, ...]:
    """Groups of a model, FULL before SLIDING.

    config: a transformers config, or its config.json as a dict.

    Raises UnsupportedModelError, with advice, for every model that is not known to be cached right.
    """
    stated = as_dict(config)
    refuse_unknown(stated, supported=running())
    return kept_groups(FAMILIES[stated["model_type"]].layout(_fields(stated)))


def max_positions(config: Config | HasDict) -> int:
    """The longest sequence, in tokens, that the model supports."""
    return _fields(as_dict(config)).whole("max_position_embeddings")


def hidden_layers(config: Config | HasDict) -> int:
    """Decoder layers, including those without KV of their own."""
    return _fields(as_dict(config)).layers()


def expanded_elements_per_token(config: Config | HasDict) -> int | None:
    """Elements per token that latent attention would keep if it kept K and V of each head.

    None: it is not latent.
    """
    if all(group.kind is not LayerKind.LATENT for group in kv_groups(config)):
        return None
    fields = _fields(as_dict(config))
    per_head = sum(fields.whole(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return fields.layers() * fields.whole("num_attention_heads") * per_head


def need_output_matrix(config: Config | HasDict, tensors: Collection[str]) -> None:
    """Raise UnsupportedModelError if the config requires an output matrix that is missing.

    tensors: names in the weight files.

    Without it a class would go on with random numbers. A superfluous one does no harm: transformers
    takes the file's.
    """
    stated = as_dict(config)
    if _fields(stated).flag("tie_word_embeddings") or has_output_matrix(tensors):
        return
    said = "false" if "tie_word_embeddings" in stated else f"left out, which is false for {stated['model_type']}"
    raise UnsupportedModelError(
        f"the weight files lack weights that the model needs: lm_head.weight, since tie_word_embeddings is {said}. If "
        "the model's output matrix is its embedding, set tie_word_embeddings to true in config.json; else download the "
        "model again."
    )


def has_output_matrix(tensors: Collection[str]) -> bool:
    """Whether there is an output matrix beside the embedding."""
    return any(name.endswith(("lm_head.weight", "embed_out.weight")) for name in tensors)


def as_dict(config: Config | HasDict) -> Config:
    """The config's fields."""
    return config if _is_mapping(config) else config.to_dict()  # type: ignore[union-attr]


def _is_mapping(config: Config | HasDict) -> TypeGuard[Config]:
    return isinstance(config, Mapping)


def _fields(stated: Config) -> Fields:
    return FAMILIES[stated["model_type"]].fields(stated)
