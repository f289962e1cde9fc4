"""The bytes of a block are those that docs/format.md states, and come back into the very state they were taken from."""

import numpy as np
import pytest
import torch
from harness.plain_generate import prompt, tiny
from models.tiny import WINDOW

from kvire.connectors.transformers.blocks import CACHE, CacheLayout, new_cache
from kvire.core.errors import UnsupportedModelError
from kvire.core.spec import LayerKind

BLOCK = 8


def _computed(model, ids):
    used = new_cache(model.config)
    with torch.no_grad():
        model(input_ids=ids, **{CACHE: used})
    return used


def test_a_slab_is_k_then_v_of_each_layer_by_token_head_width(model) -> None:
    layout, used = CacheLayout.probe(model, BLOCK), _computed(model, prompt(21))
    [slab] = layout.take(used, 1, 2)
    assert slab.shape == (1, layout.spec.block_bytes(0)) == (1, 3 * 2 * BLOCK * 2 * 16 * 4)
    numbers = np.frombuffer(slab.numpy(), np.float32).reshape(3, 2, BLOCK, 2, 16)
    for number, layer in enumerate(used.layers):
        for place, states in enumerate((layer.keys, layer.values)):
            for token in range(BLOCK):
                for head in range(2):
                    expected = states[0, head, BLOCK + token].numpy()
                    assert (numbers[number, place, token, head] == expected).all()


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gemma4_text", "mistral", "deepseek_v2", "gpt_oss"])
@pytest.mark.parametrize("stop", [1, 3, 4, 7])
def test_a_filled_cache_is_in_the_state_of_one_that_computed(family, tmp_path, stop) -> None:
    """Keys, values, lengths and window offsets, bit by bit, before, at and beyond the window of 24 tokens."""
    model = tiny(family, tmp_path)
    layout = CacheLayout.probe(model, BLOCK)
    expected = _computed(model, prompt(stop * BLOCK))
    slabs = layout.take(expected, 0, stop)
    for group, slab in enumerate(slabs):
        slab[: layout.first_needed(group, stop)] = 0xFF  # what is said not to be needed is not read
    filled = layout.empty_cache(model.config)
    layout.fill(filled, slabs, stop, model.device)
    for layer, other in zip(filled.layers, expected.layers, strict=True):
        if layer.keys is not None:
            assert torch.equal(layer.keys, other.keys) and torch.equal(layer.values, other.values)
            assert layer.get_seq_length() == other.get_seq_length()
            assert layer.keys.is_contiguous()
    assert filled.get_seq_length() == stop * BLOCK


def test_groups_are_what_the_model_really_keeps(tmp_path) -> None:
    model = tiny("gemma4_text", tmp_path)
    full, sliding = CacheLayout.probe(model, BLOCK).spec.groups
    assert (full.kind, full.layers, full.key_width, full.window) == (LayerKind.FULL, (1, 3), 32, None)
    assert (sliding.kind, sliding.layers, sliding.key_width, sliding.window) == (
        LayerKind.SLIDING, (0, 2), 16, WINDOW,
    )  # fmt: skip


def test_another_state_than_k_and_v_is_refused_by_its_layer(model, monkeypatch) -> None:
    """A cache class that is not known to be K and V by the token."""

    class IndexedLayer(type(new_cache(model.config).layers[0])):
        pass

    def other(config):
        made = new_cache(config)
        made.layers[1] = IndexedLayer()
        return made

    monkeypatch.setattr("kvire.connectors.transformers.blocks.new_cache", other)
    with pytest.raises(UnsupportedModelError, match="layer 1 keeps its state in a IndexedLayer"):
        CacheLayout.probe(model, BLOCK)


def test_kv_of_a_dtype_that_no_block_has_is_refused(model) -> None:
    with pytest.raises(UnsupportedModelError, match="float64"):
        CacheLayout.probe(model.double(), BLOCK)


def test_kv_of_another_shape_is_not_stored(model) -> None:
    layout = CacheLayout.probe(model, BLOCK)
    used = _computed(model, prompt(20))
    used.layers[2].keys = used.layers[2].keys.half()
    with pytest.raises(UnsupportedModelError, match="layer 2 keeps another KV"):
        layout.take(used, 0, 2)
