"""Which models are known to be right, and what each of their layers keeps per token.

`family_table.py` lists the families, `layouts.py` holds their rules; everything else is refused by
name, by `refusal.py`.
"""

from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard

from kvire.core.spec import KVGroup, LayerKind
from kvire.models.config_fields import Config, num_layers, positive
from kvire.models.family_table import FAMILIES
from kvire.models.refusal import refuse_unknown

SUPPORTED = tuple(sorted(FAMILIES))


class HasDict(Protocol):
    """A transformers config, as far as it is needed here."""

    def to_dict(self) -> dict[str, Any]:
        """Every field, defaults included."""


def kv_groups(config: Config | HasDict) -> tuple[KVGroup, ...]:
    """Groups of a model, FULL before SLIDING. config: a transformers config, or its config.json as a dict.

    Raises UnsupportedModelError, with what to do, for every model that is not known to be cached right.
    """
    stated = as_dict(config)
    refuse_unknown(stated, supported=SUPPORTED)
    return FAMILIES[stated["model_type"]].layout(_filled_in(stated))


def max_positions(config: Config | HasDict) -> int:
    """The longest sequence, in tokens, that the model was made for."""
    return positive(_filled_in(as_dict(config)), "max_position_embeddings")


def hidden_layers(config: Config | HasDict) -> int:
    """Decoder layers, those included that keep no KV of their own."""
    return num_layers(_filled_in(as_dict(config)))


def expanded_elements_per_token(config: Config | HasDict) -> int | None:
    """Numbers per token that latent attention would keep if it kept K and V of each head; None: it is not latent."""
    fields = _filled_in(as_dict(config))
    if all(group.kind is not LayerKind.LATENT for group in kv_groups(config)):
        return None
    key_width = positive(fields, "qk_nope_head_dim") + positive(fields, "qk_rope_head_dim")
    per_head = key_width + positive(fields, "v_head_dim")
    return num_layers(fields) * positive(fields, "num_attention_heads") * per_head


def as_dict(config: Config | HasDict) -> Config:
    """The config's fields."""
    return config if _is_mapping(config) else config.to_dict()  # type: ignore[union-attr]


def _is_mapping(config: Config | HasDict) -> TypeGuard[Config]:
    return isinstance(config, Mapping)


def _filled_in(stated: Config) -> Config:
    """The fields under their present names, with the class's defaults for those that are not there."""
    family = FAMILIES[stated["model_type"]]
    return {**family.defaults, **{family.names.get(name, name): value for name, value in stated.items()}}
