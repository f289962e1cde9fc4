"""What generate() may be asked for: all that only chooses tokens. The rest is refused by name, before it computes."""

import pytest
import torch
from harness.plain_generate import prompt
from transformers import GenerationConfig, LogitsProcessorList, MinLengthLogitsProcessor

from kvire.connectors.transformers import StoredCache
from kvire.connectors.transformers.blocks import CACHE, new_cache
from kvire.core.errors import RequestError

IDS = prompt(40)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({}, "give the prompt once"),
        ({"inputs": IDS, "input_ids": IDS}, "give the prompt once"),
        ({"input_ids": [1, 2, 3]}, "tensor of token ids"),
        ({"input_ids": IDS[0]}, "tensor of token ids"),
        ({"input_ids": IDS.float()}, "tensor of token ids"),
        ({"input_ids": IDS[:, :0]}, "tensor of token ids"),
        ({"input_ids": IDS.repeat(2, 1)}, "hold 2: call once for each"),
        ({"inputs_embeds": torch.zeros(1, 40, 64)}, "inputs_embeds is not supported"),
        ({"input_ids": IDS, "inputs_embeds": torch.zeros(1, 40, 64)}, "inputs_embeds is not supported"),
        ({"input_ids": IDS, "position_ids": torch.arange(40)[None]}, "position_ids is not supported"),
        ({"input_ids": IDS, "token_type_ids": torch.zeros_like(IDS)}, "token_type_ids is not supported"),
        ({"input_ids": IDS, "pixel_values": torch.zeros(1)}, "pixel_values is not supported"),
        ({"input_ids": IDS, "adapter_names": ["a"]}, "adapter_names is not supported"),
        ({"input_ids": IDS, "assistant_model": object()}, "assistant_model is not supported"),
        ({"input_ids": IDS, "custom_generate": "x/y"}, "custom_generate is not supported"),
        ({"input_ids": IDS, "attention_mask": torch.tensor([[0] * 8 + [1] * 32])}, "all ones"),
        ({"input_ids": IDS, "attention_mask": torch.ones(1, 41)}, "all ones"),
        ({"input_ids": IDS, "attention_mask": torch.ones(1, 1, 40, 40)}, "all ones"),
        ({"input_ids": IDS, "pad_token_id": int(IDS[0, 7])}, "padding token"),
        ({"input_ids": IDS, "generation_config": GenerationConfig(pad_token_id=int(IDS[0, 7]))}, "padding token"),
        ({"input_ids": IDS, "num_beams": 3}, "num_beams=3"),
        ({"input_ids": IDS, "num_return_sequences": 2, "do_sample": True}, "num_return_sequences=2"),
        ({"input_ids": IDS, "use_cache": False}, "use_cache=False"),
        ({"input_ids": IDS, "cache_implementation": "static"}, "cache_implementation='static'"),
        ({"input_ids": IDS, "cache_implementation": "quantized"}, "cache_implementation='quantized'"),
        ({"input_ids": IDS, "prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3"),
        ({"input_ids": IDS, "prefill_chunk_size": 16}, "prefill_chunk_size=16"),
        ({"input_ids": IDS, "token_healing": True}, "token_healing"),
        ({"input_ids": IDS, "generation_config": GenerationConfig(num_beams=3)}, "num_beams=3"),
        ({"input_ids": IDS, "max_new_tokns": 3}, "max_new_tokns is not supported"),
    ],
)
def test_refused_by_name(model, config, arguments, match) -> None:
    with StoredCache.open(model, config) as stored, pytest.raises(RequestError, match=match):
        stored.generate(**arguments)


def test_a_cache_of_the_callers_is_refused(model, config) -> None:
    with StoredCache.open(model, config) as stored, pytest.raises(RequestError, match="leave it out"):
        stored.generate(IDS, **{CACHE: new_cache(model.config)})


def test_what_the_models_own_generation_config_asks_for_counts(model, config) -> None:
    model.generation_config.num_beams = 2
    with StoredCache.open(model, config) as stored, pytest.raises(RequestError, match="num_beams=2"):
        stored.generate(IDS)


def test_what_only_chooses_tokens_is_passed_on(model, config) -> None:
    def asked() -> dict:
        return {
            "input_ids": IDS,
            "attention_mask": torch.ones_like(IDS),
            "generation_config": GenerationConfig(repetition_penalty=1.3, max_new_tokens=12, do_sample=False),
            "logits_processor": LogitsProcessorList([MinLengthLogitsProcessor(60, 5)]),
            "prefix_allowed_tokens_fn": lambda _batch, _ids: list(range(0, 256, 2)),
        }

    expected = model.generate(**asked())
    with StoredCache.open(model, config) as stored:
        for reused in (0, 32):
            assert torch.equal(stored.generate(**asked()), expected)
            assert stored.report.reused_tokens == reused
    assert expected.shape == (1, 52)
