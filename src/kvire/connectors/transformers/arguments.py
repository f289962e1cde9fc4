"""The arguments of generate() with which KV depends on token ids alone.

Everything else is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from kvire.connectors.transformers.blocks import CACHE
from kvire.core.errors import RequestError

# Of generate() itself. Fields of a GenerationConfig are allowed as well: except for those below
# they only choose tokens.
HARMLESS = frozenset({
    "input_ids", "attention_mask", "generation_config", "logits_processor", "stopping_criteria",
    "prefix_allowed_tokens_fn", "streamer", "tokenizer", "synced_gpus",
})  # fmt: skip

# Values that leave one plain sequence, each token computed once and in order. None stands for the
# default.
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "use_cache": (None, True),
    "cache_implementation": (None,),
    "prefill_chunk_size": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "use_mtp": (None, False),
    "token_healing": (None, False),
    "penalty_alpha": (None,),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
}


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """The checked arguments of one generate() call.

    token_ids: of the one sequence.
    arguments: for generate(), the input ids among them.
    """

    token_ids: list[int]
    arguments: dict[str, Any]


def checked_call(model: Any, inputs: Tensor | None, arguments: Mapping[str, Any]) -> GenerateCall:
    """The prompt of a call.

    Raises RequestError, with advice, for anything but one sequence of plain tokens.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    _refuse_other_inputs(given)
    ids = given.get("input_ids", inputs)
    if ids is None or (inputs is not None and "input_ids" in given):
        raise RequestError("give the prompt once, as input_ids: what a tokenizer returns with return_tensors='pt'")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or not ids.numel():
        raise RequestError("input_ids must be a tensor of token ids, [1, tokens]")
    if len(ids) != 1:
        raise RequestError(
            f"a stored cache is one sequence's, and input_ids hold {len(ids)}: call once for each prompt"
        )
    _refuse_other_ways(model, given)
    _refuse_masks(model, ids, given)
    return GenerateCall(ids[0].tolist(), {**arguments, "input_ids": ids})


def _refuse_other_inputs(given: Mapping[str, Any]) -> None:
    known = vars(GenerationConfig())
    for name in given:
        if name in {CACHE, "cache", "past_key_values"}:
            raise RequestError(f"{name} is what the stored cache itself gives to generate(): leave it out")
        if name not in HARMLESS and name not in known:
            raise RequestError(
                f"{name} is not supported with a stored cache: it can change KV in ways that token ids do not show. "
                "Leave it out, or call the model's own generate()."
            )


def _refuse_other_ways(model: Any, given: Mapping[str, Any]) -> None:
    """As generate() does: the argument, else the given config, else the model's own."""
    sources = [given.get("generation_config"), model.generation_config]
    for name, plain in PLAIN.items():
        stated = (getattr(source, name, None) for source in sources if source is not None)
        value = given.get(name, next((value for value in stated if value is not None), None))
        if value not in plain:
            raise RequestError(
                f"{name}={value!r} is not supported with a stored cache, which follows one plain sequence: set {name}="
                f"{plain[-1]!r} (in the model's generation_config, if it comes from there), or call the model's own "
                "generate()"
            )


def _refuse_masks(model: Any, ids: Tensor, given: Mapping[str, Any]) -> None:
    mask = given.get("attention_mask")
    if mask is None:
        config = given.get("generation_config") or model.generation_config
        padding = given.get("pad_token_id", config.pad_token_id)
        if padding is not None and bool((ids == padding).any()):
            raise RequestError(
                f"the prompt holds the padding token {padding}, and generate() would guess which tokens to mask: pass "
                "the attention_mask that the tokenizer returns"
            )
        return
    if not isinstance(mask, Tensor) or mask.shape != ids.shape or not bool(torch.all(mask == 1)):
        raise RequestError(
            "attention_mask must be [1, tokens] and all ones: KV of masked or padded prompts is not stored. Call once "
            "for each prompt, without padding."
        )
