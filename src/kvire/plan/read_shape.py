"""From a config.json to a Shape, failing closed: what is not known to be counted right is refused
by field.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvire.core.errors import ConfigError, UnsupportedModelError
from kvire.plan.families import layouts
from kvire.plan.families.blocks import Feed
from kvire.plan.families.fields import Fields
from kvire.plan.families.mixers import Attention, Latent, Mixer, RecurrentState, attention_kinds, kept_groups
from kvire.plan.families.table import FAMILIES, Family
from kvire.plan.families.wrappers import language_model
from kvire.plan.quantised import checkpoint_weights
from kvire.plan.shape import Draft, IndexLayers, Shape, StateLayers, Weights

DRAFT_FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers")
# Without these a config is a fragment: what its class would fill in is some other model's size.
MUST_STATE = ("num_hidden_layers", "hidden_size", "kv_lora_rank")


def read_shape(config: Mapping[str, Any]) -> Shape:
    """The shape of a config.json.

    Raises ConfigError naming the model_type or the field that is not known.
    """
    try:
        text, wrapped = language_model(config)
        return _read(text, wrapped=wrapped)
    except UnsupportedModelError as error:
        raise ConfigError(str(error)) from error


def _read(config: Mapping[str, Any], *, wrapped: bool) -> Shape:
    family = FAMILIES[config["model_type"]]
    notes = _notes_on_config(config, family, wrapped=wrapped)
    fields = _fields(config, family)
    mixers = family.layout(fields)
    feeds = family.block.layers(fields, mixers)
    weights, quantised = _weights(fields, mixers, feeds, family.block.outside(fields), config)
    draft = _draft(fields, mixers)
    context = fields.count("max_position_embeddings", 0) or None
    fields.refuse_unread()
    return _shape(fields.model_type, mixers, weights, draft, context, [*notes, *quantised, *_notes(mixers)])


def _fields(config: Mapping[str, Any], family: Family) -> Fields:
    """-1 and 0 are no window, and so is a window that is left out where the family also has models
    without.
    """
    if config.get("sliding_window") in (0, -1):
        config = {**config, "sliding_window": None}
    return family.fields(config, (*MUST_STATE, "sliding_window") if _window_may_miss(family) else MUST_STATE)


def _window_may_miss(family: Family) -> bool:
    return family.layout in (layouts.one_window, layouts.all_or_none)


def _notes_on_config(config: Mapping[str, Any], family: Family, *, wrapped: bool) -> list[str]:
    notes = []
    if wrapped:
        notes.append("only the language model is counted: the parts that read images are not, nor are their tokens")
    window = family.defaults.get("sliding_window")
    if window and _window_may_miss(family) and "sliding_window" not in config:
        notes.append(f"sliding_window is left out and counted as none; transformers would take {window:,} tokens")
    return notes


def _draft(fields: Fields, mixers: Sequence[Mixer]) -> Draft | None:
    """Layers for speculative decoding.

    Those of DeepSeek's line keep what its other layers do; others are unknown.
    """
    for name in DRAFT_FIELDS:
        if count := fields.count(name, 0):
            last = mixers[-1]
            known = isinstance(last, Latent) or fields.model_type.startswith("qwen3_5")
            group = last.group((0,)) if known and isinstance(last, Attention | Latent) else None
            return Draft(name, count, count * group.elements_per_token if group else 0)
    return None


def _weights(
    fields: Fields, mixers: Sequence[Mixer], feeds: Sequence[Feed], outside: int, config: Mapping[str, Any]
) -> tuple[Weights, list[str]]:
    """The parameters, and remarks that their size needs."""
    hidden, vocabulary = fields.whole("hidden_size"), fields.whole("vocab_size")
    embeddings = vocabulary * hidden * (1 if fields.flag("tie_word_embeddings") else 2)
    mixing = sum(mixer.parameters(hidden) for mixer in mixers if mixer is not None)
    fields.get("quantization_config"), fields.get("compression_config")
    dtypes, notes = checkpoint_weights(config)
    weights = Weights(
        dense=embeddings + mixing + sum(feed.dense for feed in feeds) + outside,
        experts=sum(feed.experts for feed in feeds),
        active_experts=sum(feed.active_experts for feed in feeds),
        dtypes=dtypes,
    )
    return weights, notes


def _shape(
    kind: str, mixers: Sequence[Mixer], weights: Weights, draft: Draft | None, context: int | None, notes: list[str]
) -> Shape:
    kinds = [(layers, mixers[layers[0]]) for layers in attention_kinds(mixers)]
    attending = [(layers, mixer) for layers, mixer in kinds if isinstance(mixer, Attention | Latent)]
    return Shape(
        model_type=kind,
        layers=len(mixers),
        groups=kept_groups(mixers),
        pair_flops=tuple(len(layers) * mixer.pair_flops for layers, mixer in attending),
        attended=tuple(mixer.attended for _, mixer in attending),
        weights=weights,
        states=_states(mixers),
        index=_index(mixers),
        draft=draft,
        context_tokens=context,
        notes=tuple(notes),
    )


def _states(mixers: Sequence[Mixer]) -> tuple[StateLayers, ...]:
    found: dict[RecurrentState, list[int]] = {}
    for layer, mixer in enumerate(mixers):
        if isinstance(mixer, RecurrentState):
            found.setdefault(mixer, []).append(layer)
    return tuple(
        StateLayers(tuple(layers), state.heads, state.elements, state.conv_elements) for state, layers in found.items()
    )


def _index(mixers: Sequence[Mixer]) -> IndexLayers | None:
    owners = {layer: mixer for layer, mixer in enumerate(mixers) if isinstance(mixer, Latent) and mixer.index_own}
    if not owners:
        return None
    first = next(iter(owners.values()))
    return IndexLayers(tuple(owners), first.index_width, len(owners) * 2 * first.index_heads * first.index_width)


def _notes(mixers: Sequence[Mixer]) -> list[str]:
    """What a reader must know about the figures."""
    notes = []
    if any(isinstance(m, Attention) and m.shared_kv for m in mixers):
        notes.append("full layers make V from K's projection: an engine that keeps the two once needs half for them")
    if any(isinstance(m, Latent) and m.index_own for m in mixers):
        notes.append("the indexer's keys are counted in the KV's dtype unless --index-dtype says otherwise")
    if any(isinstance(m, RecurrentState) for m in mixers):
        notes.append("a state stands for the whole prefix: it is reused only where a copy was kept, not at every block")
    return notes
