"""From a config.json to a Shape, failing closed: what is not known to be counted right is refused by field."""

from collections.abc import Iterable, Mapping
from typing import Any

from kvire.core.errors import ConfigError
from kvire.core.spec import KVGroup, LayerKind
from kvire.plan.families import FAMILIES, NESTED, Layer
from kvire.plan.fields import Fields
from kvire.plan.mixers import Attention, Latent, State
from kvire.plan.shape import Draft, IndexLayers, Shape, StateLayers, Weights

DRAFT_FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_DTYPES = {"torch.bfloat16": "bfloat16", "torch.float16": "float16", "torch.float32": "float32"}
# What quantised checkpoints keep: (dense weights, experts). Embeddings and norms stay wider; that share is small.
QUANTISED = {"fp8": ("fp8", "fp8"), "mxfp4": ("bfloat16", "mxfp4")}

EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")
ALL_ACTIVE = "all experts are counted as active, since how large they are is not known here: prefill looks too slow"


def read_shape(config: Mapping[str, Any]) -> Shape:
    """The shape of a config.json. Raises ConfigError naming the model_type or the field that is not known."""
    outer = config.get("model_type")
    if not isinstance(outer, str):
        raise ConfigError("the config has no model_type, so the model's family is not known")
    kind = NESTED.get(outer, outer)
    if kind not in FAMILIES:
        known = ", ".join(sorted([*FAMILIES, *NESTED]))
        raise ConfigError(f"what {outer} models keep is not known here, so nothing is planned. Known: {known}")
    notes = []
    if outer in NESTED:
        config = _text_config(config, outer)
        notes.append("only the language model is counted: the parts that read images are not, nor are their tokens")
    fields = Fields(config, kind)
    layers = FAMILIES[kind](fields)
    draft = _draft(fields, layers)
    weights = _weights(fields, layers, config)
    context = fields.count("max_position_embeddings", 0) or None
    fields.refuse_unread()
    return _shape(kind, layers, weights, draft, context, [*notes, *_notes(layers)])


def shape_of_groups(config: Mapping[str, Any], groups: tuple[KVGroup, ...], weights: Weights) -> Shape:
    """The shape of a model whose groups another part of Kvire has worked out, and whose weights were counted."""
    fields = Fields(config, str(config.get("model_type")))
    heads = fields.whole("num_attention_heads", fields.count("n_head", 0) or None)
    flops = []
    for group in groups:
        if group.kind is LayerKind.LATENT:
            width = sum(fields.whole(n) for n in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        else:
            width = group.key_width + group.value_width
        flops.append(2 * heads * width * len(group.layers))
    return Shape(
        model_type=fields.model_type,
        layers=sum(len(g.layers) for g in groups),
        groups=groups,
        pair_flops=tuple(flops),
        attended=tuple(g.window for g in groups),
        weights=weights,
        context_tokens=fields.count("max_position_embeddings", fields.count("n_positions", 0)) or None,
        notes=(ALL_ACTIVE,) if any(config.get(name) for name in EXPERT_FIELDS) else (),
    )


def checkpoint_dtypes(config: Mapping[str, Any]) -> dict[str, str]:
    """What the checkpoint keeps its weights in, by part. Raises ConfigError for a quantisation that is not known."""
    settings = config.get("quantization_config")
    if settings is not None:
        method = settings.get("quant_method") if isinstance(settings, Mapping) else settings
        if not isinstance(method, str) or method not in QUANTISED:
            raise ConfigError(
                f"quantization_config has quant_method {method!r}, whose weights' size is not known: pass a config "
                "without it, and --weights-dtype"
            )
        dense, experts = QUANTISED[method]
        return {"dense": dense, "experts": experts}
    stated = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    dtype = _DTYPES.get(stated, stated)
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"the config has dtype {stated!r}, whose size is not known")
    return {"dense": dtype, "experts": dtype}


def _text_config(config: Mapping[str, Any], outer: str) -> Mapping[str, Any]:
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        raise ConfigError(f"the config of this {outer} model has no text_config, where its language model stands")
    above = ("quantization_config", "dtype", "torch_dtype", "tie_word_embeddings")
    return {**{name: config[name] for name in above if name in config}, **inner}


def _draft(fields: Fields, layers: list[Layer]) -> Draft | None:
    """Layers for speculative decoding. Those of DeepSeek's line keep what its other layers do; others are unknown."""
    for name in DRAFT_FIELDS:
        if count := fields.count(name, 0):
            mixer = layers[-1].mixer
            known = isinstance(mixer, Latent) or fields.model_type.startswith("qwen3_5")
            group = mixer.group((0,)) if known and isinstance(mixer, Attention | Latent) else None
            return Draft(name, count, count * group.elements_per_token if group else 0)
    return None


def _weights(fields: Fields, layers: list[Layer], config: Mapping[str, Any]) -> Weights:
    hidden, vocabulary = fields.whole("hidden_size"), fields.whole("vocab_size")
    tied = fields.flag("tie_word_embeddings", default=fields.model_type.startswith("gemma"))
    norms = sum((layer.mixer is not None) + bool(layer.dense or layer.experts) for layer in layers) + 1
    mixers = sum(layer.mixer.parameters(hidden) for layer in layers if layer.mixer is not None)
    fields.get("quantization_config"), fields.get("dtype"), fields.get("torch_dtype")
    return Weights(
        dense=vocabulary * hidden * (1 if tied else 2) + mixers + sum(x.dense for x in layers) + norms * hidden,
        experts=sum(layer.experts for layer in layers),
        active_experts=sum(layer.active_experts for layer in layers),
        dtypes=checkpoint_dtypes(config),
    )


def _shape(
    kind: str, layers: list[Layer], weights: Weights, draft: Draft | None, context: int | None, notes: list[str]
) -> Shape:
    # A layer's own indexer does not change what its latent keeps.
    mixers = [(i, layer.mixer) for i, layer in enumerate(layers) if isinstance(layer.mixer, Attention | Latent)]
    attention = _alike((i, m.group((0,)), m.pair_flops, m.attended) for i, m in mixers)
    states = [(i, layer.mixer) for i, layer in enumerate(layers) if isinstance(layer.mixer, State)]
    owners = [(i, m) for i, m in mixers if isinstance(m, Latent) and m.index_own]
    index = None
    if owners:
        _, first = owners[0]
        flops = len(owners) * 2 * first.index_heads * first.index_width
        index = IndexLayers(tuple(i for i, _ in owners), first.index_width, flops)
    found = dict(mixers)
    return Shape(
        model_type=kind,
        layers=len(layers),
        groups=tuple(found[ids[0]].group(ids) for ids in attention),
        pair_flops=tuple(len(ids) * found[ids[0]].pair_flops for ids in attention),
        attended=tuple(found[ids[0]].attended for ids in attention),
        weights=weights,
        states=tuple(
            StateLayers(
                ids, dict(states)[ids[0]].heads, dict(states)[ids[0]].elements, dict(states)[ids[0]].conv_elements
            )
            for ids in _alike((i, m) for i, m in states)
        ),
        index=index,
        draft=draft,
        context_tokens=context,
        notes=tuple(notes),
    )


def _alike(rows: Iterable[tuple[Any, ...]]) -> list[tuple[int, ...]]:
    """Layers whose rows agree in all but the first entry, which is the layer; full attention before windows."""
    found: dict[tuple[Any, ...], list[int]] = {}
    for layer, *what in rows:
        found.setdefault(tuple(what), []).append(layer)
    return [tuple(found[what]) for what in sorted(found, key=lambda w: bool(getattr(w[0], "window", None)))]


def _notes(layers: list[Layer]) -> list[str]:
    """What a reader must know about the figures."""
    mixers = [layer.mixer for layer in layers]
    notes = []
    if any(isinstance(m, Attention) and m.shared_kv for m in mixers):
        notes.append("full layers make V from K's projection: an engine that keeps the two once needs half for them")
    if any(isinstance(m, Latent) and m.index_own for m in mixers):
        notes.append("the indexer's keys are counted in the KV's dtype unless --index-dtype says otherwise")
    if any(isinstance(m, State) for m in mixers):
        notes.append("a state stands for the whole prefix: it is reused only where a copy was kept, not at every block")
    return notes
