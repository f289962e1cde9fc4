"""Reading a config.json: whole numbers that are there, or the class's default; anything else is
refused by name.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvire.core.errors import UnsupportedModelError

MAX_LAYERS = 4096  # far beyond any model; a damaged config must not make us build a list of 10^9

# A field whose name has one of these words may change the KV. Unread and in use, it stops the
# plan.
_SUSPECT = re.compile(
    r"kv|cache|window|sliding|swa|attn|attention|latent|lora_rank|compress|index|head|layer|state|ssm|conv|mamba|linear"
    r"|share|chunk|nextn|mtp|cross|memory|block|hybrid|recurrent|sparse|global|local|interval|pattern|ratio"
)
# These do not: how scores are scaled and masked, initial values, training, names.
_HARMLESS = frozenset(
    """use_cache attention_value_scale attn_logit_softcapping attn_temperature_tuning attn_scale attn_implementation
    query_pre_attn_scalar rms_norm_layer cross_attention_hidden_size moe_layer_freq image_token_index boi_token_index
    eoi_token_index audio_token_index partial_rotary_factor use_mamba_kernels mamba_hidden_act mamba_ssm_cache_dtype
    mamba_proj_bias use_conv_bias chunk_size index_topk index_topk_freq router_jitter_noise num_local_experts
    initial_context_length add_swa_attention_sink_bias add_full_attention_sink_bias attention_projection_layout
    use_bidirectional_attention layerscale_value decoder_sparse_step output_attentions output_hidden_states
    scale_attn_weights scale_attn_by_inverse_layer_idx reorder_and_upcast_attn attention_multiplier pretraining_tp
    expert_layer_period moe_layers mlp_layer_types qk_layernorm use_qk_norm qk_norm_type attn_type_list
    mtp_use_dedicated_embeddings use_mtp mlp_only_layers attention_type vocab_size_per_layer_input
    mtp_transformer_layers cache_implementation layer_switch clip_qkv chunk_size_feed_forward use_parallel_block
    order_of_interleaved_layers sliding_window_pattern moe_layer_start_index moe_layer_end_index moe_layer_interval
    max_window_layers attention_out_bias shared_expert_intermediate_size""".split()  # noqa: SIM905 - sixty names in quotes would be a page
)
_HARMLESS_FORM = re.compile(
    r"^(_|rope_|initializer|id2|label2)|flash|(dropout(_prob)?|_pdrop|_eps|_epsilon|_theta|_base_freq|_in_fp32|_coef)$"
)
_NEUTRAL = {"full_attn_mod": 1, "compression_ratio": 1}  # with this value they change nothing


class Fields:
    """A config.json with its class's defaults, and which of its fields have been read.

    defaults: by field, where the config leaves it out; null in the config is null.
    names: present names of fields by their older ones.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        model_type: str,
        defaults: Mapping[str, Any] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        renamed = {(names or {}).get(name, name): value for name, value in config.items()}
        self._stated = renamed
        self._config = {**(defaults or {}), **renamed}
        self._read: set[str] = {"model_type", "architectures"}
        self.model_type = model_type

    def get(self, name: str, default: Any = None) -> Any:
        """A field as it stands, or `default` where it is absent or null."""
        self._read.add(name)
        value = self._config.get(name)
        return default if value is None else value

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number above zero.

        Raises UnsupportedModelError for anything else, or if absent without default.
        """
        value = self.count(name, default)
        if value == 0:
            raise self.wrong(name, "which should be a whole number above zero")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number, perhaps zero."""
        value = self.get(name, default)
        if value is None:
            raise UnsupportedModelError(
                f"the config of this {self.model_type} model has no {name}, without which its KV is not known"
            )
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.wrong(name, "which should be a whole number")
        return value

    def alike(self, name: str, default: int | None = None) -> int:
        """The same as `whole` where the config may say it once for each layer; refused where layers
        differ.
        """
        value = self.get(name)
        if not isinstance(value, list) or not value:
            return self.whole(name, default)
        if any(type(entry) is not int or entry != value[0] or entry < 1 for entry in value):
            raise self.wrong(name, "which should be the same whole number for every layer")
        return int(value[0])

    def flag(self, name: str, *, default: bool = False) -> bool:
        """True or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "which should be true or false")
        return value

    def layers(self) -> int:
        """Decoder layers."""
        layers = self.whole("num_hidden_layers")
        if layers > MAX_LAYERS:
            raise self.wrong("num_hidden_layers", "more than any model has: the file is damaged")
        return layers

    def window(self, name: str = "sliding_window") -> int | None:
        """Tokens that a sliding layer looks back, itself included; None: the config switches
        windows off.
        """
        value = self.get(name)
        if value in (0, -1) and not isinstance(value, bool):
            raise self.wrong(name, "which is no window: write null where layers see everything")
        if name == "sliding_window" and self.get("sliding_window_size", value) != value:
            raise self.wrong("sliding_window_size", f"and sliding_window {value}: which of them counts is not known")
        return None if value is None else self.whole(name)

    def per_layer(self, name: str, known: Sequence[Any], default: list[Any]) -> list[Any]:
        """One entry of `known` for each layer.

        Raises UnsupportedModelError naming an entry that is not known.
        """
        stated = self.get(name)
        if stated is None:
            return default
        if not isinstance(stated, list | tuple | str):
            raise self.wrong(name, f"which should have an entry for each of {len(default)} layers")
        if len(stated) != len(default):
            raise UnsupportedModelError(
                f"the config of this {self.model_type} model has {len(stated)} {name} for {len(default)} layers"
            )
        if unknown := sorted({str(entry) for entry in stated if entry not in known}):
            raise UnsupportedModelError(
                f"{name} of this {self.model_type} model has {', '.join(unknown)}: what such a layer keeps is not known"
            )
        return list(stated)

    def wrong(self, name: str, why: str) -> UnsupportedModelError:
        """The error for a field with a value that nothing can be said for."""
        value = repr(self._config.get(name))[:60]
        return UnsupportedModelError(f"the config of this {self.model_type} model has {name} {value}, {why}")

    def refuse_unread(self) -> None:
        """Raise UnsupportedModelError if a field that may change what is kept is in use and was not
        read.
        """
        for name, value in self._stated.items():
            if name in self._read or name in _HARMLESS or _HARMLESS_FORM.search(name) or _NEUTRAL.get(name) == value:
                continue
            if _SUSPECT.search(name) and value not in (None, False, 0, 0.0, [], {}, ""):
                raise UnsupportedModelError(
                    f"the config of this {self.model_type} model has {name}, which may change what it keeps and is not "
                    "known here: its KV cannot be planned for"
                )
