"""The same tokens as the model's own generate(), computed or loaded, and no less loaded than is stored."""

import pytest
import torch
from harness.plain_generate import greedy, load, prompt, tiny
from models.tiny import EACH_FAMILY, make_tiny

from kvire.connectors.transformers import StoredCache
from kvire.core.report import MissReason

BLOCK = 16


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_every_family_goes_on_from_what_is_stored(family, tmp_path, config) -> None:
    """Windows (of 24 tokens), latent and shared KV, experts: 100 tokens, then the answer's own tokens as a prompt."""
    model = tiny(family, tmp_path / "model")
    ids = prompt(100)
    expected = model.generate(ids, **greedy(40))
    for reused in (0, 96):
        with StoredCache.open(model, config) as stored:
            assert torch.equal(stored.generate(ids, **greedy(40)), expected)
            assert stored.report.reused_tokens == stored.report.disk_tokens == reused
    with StoredCache.open(model, config) as stored:
        longer = expected[:, :130]
        assert torch.equal(stored.generate(longer, **greedy(10)), expected)
        assert stored.report.reused_tokens == 128


def test_every_length_around_the_edges_of_blocks(model, config) -> None:
    """At most all but the last token is reused, and what follows a whole-prompt hit is right."""
    whole = prompt(5 * BLOCK)
    with StoredCache.open(model, config) as stored:
        for length in (1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1, 5 * BLOCK):
            ids = whole[:, :length]
            expected = model.generate(ids, **greedy(20))
            for _ in range(3):
                assert torch.equal(stored.generate(ids, **greedy(20)), expected), length
            assert stored.report.reused_tokens == (length - 1) // BLOCK * BLOCK
            assert stored.report.prompt_tokens == length


def test_shares_only_the_beginning(model, config) -> None:
    first, second = prompt(80), prompt(80)
    second[0, 50] = (second[0, 50] + 1) % 256
    with StoredCache.open(model, config) as stored:
        stored.generate(first, **greedy(4))
        assert torch.equal(stored.generate(second, **greedy(30)), model.generate(second, **greedy(30)))
        assert stored.report.reused_tokens == 48
        assert (stored.report.miss, stored.report.miss_token) == (MissReason.DIVERGED, 50)


def test_a_call_finds_what_the_one_before_is_still_writing(model, config) -> None:
    ids = prompt(1000)
    with StoredCache.open(model, config, block_size=4) as stored:
        for reused in (0, 996):
            stored.generate(ids, **greedy(2))
            assert stored.report.reused_tokens == reused


def test_more_than_the_buffer_of_what_is_being_written(tmp_path, config, monkeypatch) -> None:
    """A prompt's blocks are all stored, however few fit into the buffer at once."""
    monkeypatch.setattr("kvire.store.write_behind.DEFAULT_BUFFER_BYTES", 1)
    model = tiny("llama", tmp_path / "model")
    with StoredCache.open(model, config, block_size=1) as stored:
        stored.generate(prompt(200), **greedy(2))
        stored.store.flush(10)
        assert stored.store.stats().handles["disk"].tier.blocks == 201


def test_samples_as_the_model_itself_does(model, config) -> None:
    ids, sampling = prompt(100), {"max_new_tokens": 20, "do_sample": True, "temperature": 0.7, "top_k": 20}
    torch.manual_seed(7)
    expected = model.generate(ids, **sampling)
    with StoredCache.open(model, config) as stored:
        for _ in range(2):
            torch.manual_seed(7)
            assert torch.equal(stored.generate(ids, **sampling), expected)


def test_returns_what_generate_returns(model, config) -> None:
    asked = {**greedy(5), "return_dict_in_generate": True, "output_scores": True}
    with StoredCache.open(model, config) as stored:
        stored.generate(prompt(40), **greedy(5))
        out = stored.generate(input_ids=prompt(40), attention_mask=torch.ones(1, 40), **asked)
    expected = model.generate(prompt(40), **asked)
    assert torch.equal(out.sequences, expected.sequences)
    assert torch.allclose(torch.stack(out.scores), torch.stack(expected.scores), atol=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_keeps_its_own_blocks(checkpoint, config, dtype) -> None:
    model = load(checkpoint, dtype=getattr(torch, dtype))
    expected = model.generate(prompt(100), **greedy(1))
    for reused in (0, 96):
        with StoredCache.open(model, config) as stored:
            assert torch.equal(stored.generate(prompt(100), **greedy(1)), expected)
            assert stored.report.reused_tokens == reused
    with StoredCache.open(load(checkpoint), config) as stored:
        stored.generate(prompt(100), **greedy(1))
        assert (stored.report.reused_tokens, stored.report.miss) == (0, MissReason.OTHER_NAMESPACE)
        assert "kv_dtype" in stored.report.miss_detail


def test_positions_that_change_with_length(tmp_path, config) -> None:
    """Beyond the length at which LongRoPE turns all positions otherwise, nothing is stored and nothing is loaded."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [9.0] * 8}
    path = make_tiny("llama", tmp_path / "m", tokenizer=False, rope_parameters=rope, max_position_embeddings=128)
    model, plain = load(path), load(path)
    answer = plain.generate(prompt(50), **greedy(70))
    with StoredCache.open(model, config) as stored:
        for ids, tokens, reused, miss in (
            (prompt(50), 70, 0, MissReason.NEVER_STORED),
            (answer[:, :64], 1, 48, MissReason.COMPLETE),
            (answer[:, :65], 9, 0, MissReason.OFF),
            (prompt(50), 20, 48, MissReason.COMPLETE),
        ):
            assert torch.equal(stored.generate(ids, **greedy(tokens)), plain.generate(ids, **greedy(tokens)))
            assert (stored.report.reused_tokens, stored.report.miss) == (reused, miss)
        stored.store.flush(10)
        assert stored.store.stats().handles["disk"].tier.blocks == 4, "none beyond"
