"""Whatever changes KV changes the namespace, or is refused: also what no file and no version counter tells of."""

import pytest
import torch
from harness.plain_generate import greedy, load, prompt, tiny
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, AutoConfig
from transformers.cache_utils import DynamicLayer
from transformers.models.llama import modeling_llama

from kvire.connectors.transformers import StoredCache
from kvire.connectors.transformers.identity import refuse
from kvire.connectors.transformers.weights import FACTORS, WeightsDigest, checksum_on_device
from kvire.core.errors import ConfigError, UnsupportedModelError
from kvire.core.report import MissReason


def _edit_in_place(model) -> None:
    model.model.layers[0].self_attn.k_proj.weight.data[3, 5] += 0.001


def _merge_by_data(model) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data += 0.01 * torch.outer(torch.ones(weight.shape[0]), torch.ones(weight.shape[1]))


def _through_numpy(model) -> None:
    model.model.embed_tokens.weight.detach().numpy()[0, 0] += 0.5


def _replace(model) -> None:
    model.model.norm.weight = nn.Parameter(model.model.norm.weight * 1.001)


def _round_positions(model) -> None:
    model.model.rotary_emb.inv_freq.data = model.model.rotary_emb.inv_freq.bfloat16().float()


def _other_activation(model) -> None:
    model.model.layers[0].mlp.act_fn = nn.GELU()


def _eager(model) -> None:
    model.set_attn_implementation("eager")


def _other_scaling_of_positions(model) -> None:
    model.model.rotary_emb.attention_scaling *= 1.3


def _other_scaling_of_scores(model) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling *= 3


def _other_epsilon(model) -> None:
    model.model.layers[0].input_layernorm.variance_epsilon = 0.1


@pytest.mark.parametrize(
    "change",
    [
        _edit_in_place, _merge_by_data, _through_numpy, _replace, _round_positions, _other_activation, _eager,
        _other_scaling_of_positions, _other_scaling_of_scores, _other_epsilon,
    ],
)  # fmt: skip
def test_a_model_changed_in_memory_does_not_hit(checkpoint, config, change) -> None:
    """While it is open, between two calls; and what it computes then is not found by the unchanged one."""
    ids, model = prompt(100), load(checkpoint)
    with StoredCache.open(model, config) as stored:
        before = stored.generate(ids, **greedy(20))
        change(model)
        expected = model.generate(ids, **greedy(20))
        assert torch.equal(stored.generate(ids, **greedy(20)), expected)
        assert stored.report.reused_tokens == 0
        assert stored.report.miss is MissReason.OTHER_NAMESPACE
        assert stored.report.miss_detail in {"weights", "numerics", "build"}
        assert torch.equal(stored.generate(ids, **greedy(20)), expected)
        assert stored.report.reused_tokens == 96
    with StoredCache.open(load(checkpoint), config) as stored:
        assert torch.equal(stored.generate(ids, **greedy(20)), before)
        assert stored.report.reused_tokens == 96


def _other_mlp(patch) -> None:
    forward = modeling_llama.LlamaMLP.forward
    patch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: 0.5 * forward(self, x))


def _other_rotary_function(patch) -> None:
    patch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, *_, **__: (q, k))


def _another_attention_under_the_same_name(patch) -> None:
    def attention(module, query, key, value, *_, **__):
        out = value.repeat_interleave(query.shape[1] // value.shape[1], 1)[..., -query.shape[2] :, :]
        return out.transpose(1, 2).contiguous(), None

    patch.setitem(AttentionInterface._global_mapping, "sdpa", attention)


def _attention_of_torch_replaced(patch) -> None:
    attend = functional.scaled_dot_product_attention
    patch.setattr(functional, "scaled_dot_product_attention", lambda *args, **options: 0.5 * attend(*args, **options))


def _another_cache(patch) -> None:
    update = DynamicLayer.update
    patch.setattr(DynamicLayer, "update", lambda self, k, v, *_, **__: update(self, k, 2 * v))


@pytest.mark.parametrize(
    "edit",
    [
        _other_mlp, _other_rotary_function, _another_attention_under_the_same_name, _attention_of_torch_replaced,
        _another_cache,
    ],
)  # fmt: skip
def test_edited_code_does_not_hit(checkpoint, config, edit) -> None:
    """Between two calls, and in a model that was opened after the edit; taken back, everything is found again."""
    ids, model = prompt(100), load(checkpoint)
    with StoredCache.open(model, config) as stored:
        before = stored.generate(ids, **greedy(8))
        with pytest.MonkeyPatch.context() as patch:
            edit(patch)
            expected = model.generate(ids, **greedy(8))
            assert torch.equal(stored.generate(ids, **greedy(8)), expected)
            assert (stored.report.reused_tokens, stored.report.miss_detail) == (0, "build")
            assert stored.store.flush(10)
            with StoredCache.open(load(checkpoint), stored.store) as other:
                other.generate(ids, **greedy(8))
                assert other.report.reused_tokens == 96
        assert torch.equal(stored.generate(ids, **greedy(8)), before)
        assert stored.report.reused_tokens == 96


def test_the_digest_is_the_same_in_every_copy(checkpoint) -> None:
    one, other = load(checkpoint), load(checkpoint)
    assert WeightsDigest(one).current() == WeightsDigest(other).current()
    other.model.norm.weight.data[0] += 1
    assert WeightsDigest(one).current() != WeightsDigest(other).current()


def test_a_checksum_on_a_device_sees_every_bit() -> None:
    """Also in what is left behind the last full row of random numbers."""
    content = torch.randint(0, 256, (FACTORS + 1000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    sound = checksum_on_device(content)
    assert len(sound) == 16
    for place in (0, 1, FACTORS - 1, FACTORS, FACTORS + 999):
        for bit in (1, 128):
            content[place] ^= bit
            assert checksum_on_device(content) != sound
            content[place] ^= bit
    content[[0, 1]] = content[[1, 0]]
    assert checksum_on_device(content) != sound
    content[[0, 1]] = content[[1, 0]]
    assert checksum_on_device(content) == sound


def test_tenants_and_salts_share_nothing(model, config) -> None:
    ids = prompt(100)
    for who in ({}, {"tenant": "a"}, {"tenant": "b"}, {"cache_salt": "x"}, {"tenant": "a", "cache_salt": "x"}):
        with StoredCache.open(model, config, **who) as stored:
            stored.generate(ids, **greedy(2))
            assert (stored.report.reused_tokens, stored.report.miss) == (0, MissReason.NEVER_STORED), who
            stored.generate(ids, **greedy(2))
            assert stored.report.reused_tokens == 96, who


def test_a_forgotten_tenant_is_not_found_again(model, config) -> None:
    with StoredCache.open(model, config, tenant="a") as stored:
        stored.generate(prompt(100), **greedy(2))
        stored.store.flush(10)
        assert stored.store.forget("a") == 6
        stored.generate(prompt(100), **greedy(2))
        assert stored.report.reused_tokens == 0


def test_another_block_size_is_another_namespace(model, config) -> None:
    for size, reused in ((16, 96), (8, 96), (32, 96)):
        for expected in (0, reused):
            with StoredCache.open(model, config, block_size=size) as stored:
                stored.generate(prompt(100), **greedy(2))
                assert stored.report.reused_tokens == expected


class _Wrapped(nn.Module):
    def __init__(self, model) -> None:
        super().__init__()
        self.model = model


def _in_training(model):
    return model.train()


def _steered(model):
    model.model.layers[0].register_forward_hook(lambda _module, _args, out: out)
    return model


def _patched(model):
    layer = model.model.layers[0].mlp
    layer.forward = lambda x: 2 * type(layer).forward(layer, x)
    return model


def _adapted(model):
    kind = type("Linear", (nn.Linear,), {"__module__": "peft.tuners.lora.layer"})
    model.model.layers[0].mlp.up_proj = kind(64, 128, bias=False)
    return model


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (_Wrapped, "merge_and_unload"),
        (_in_training, r"model.eval\(\)"),
        (_steered, r"model.layers.0 has a forward hook"),
        (_patched, r"model.layers.0.mlp has a forward of its own"),
        (_adapted, "adapter of peft"),
    ],
)
def test_a_model_that_is_more_than_its_weights_is_refused(model, config, change, match) -> None:
    """When it is opened, and when it becomes so later."""
    refuse(model)
    with StoredCache.open(model, config) as stored:
        stored.generate(prompt(40), **greedy(2))
        changed = change(model)
        with pytest.raises(UnsupportedModelError, match=match):
            StoredCache.open(changed, config)
        if changed is model:
            with pytest.raises(UnsupportedModelError, match=match):
                stored.generate(prompt(40), **greedy(2))


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_another_precision_of_products_does_not_hit(model, config, precision) -> None:
    with StoredCache.open(model, config) as stored:
        stored.generate(prompt(100), **greedy(2))
        torch.set_float32_matmul_precision(precision)
        try:
            stored.generate(prompt(100), **greedy(2))
        finally:
            torch.set_float32_matmul_precision("highest")
        assert (stored.report.reused_tokens, stored.report.miss_detail) == (0, "numerics")


def test_autocast_is_refused(model, config) -> None:
    with (
        StoredCache.open(model, config) as stored,
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(UnsupportedModelError, match="autocast"),
    ):
        stored.generate(prompt(40), **greedy(2))


def test_hooks_of_transformers_itself_are_none_of_ours(model, config) -> None:
    """output_hidden_states leaves some behind in newer versions; they only look."""
    with StoredCache.open(model, config) as stored:
        for reused in (0, 32):
            stored.generate(prompt(40), **greedy(2), output_hidden_states=True, return_dict_in_generate=True)
            assert stored.report.reused_tokens == reused


@pytest.mark.parametrize("family", ["mamba", "jamba", "falcon_h1", "t5"])
def test_running_states_and_encoders_are_refused_by_name(model, config, family) -> None:
    """By the config alone, before anything is computed."""
    model.config = AutoConfig.for_model(family)
    with pytest.raises(UnsupportedModelError, match=family):
        StoredCache.open(model, config)


def test_positions_that_depend_on_earlier_sequences_are_refused(tmp_path, config) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    with pytest.raises(UnsupportedModelError, match="dynamic"):
        StoredCache.open(tiny("llama", tmp_path / "model", rope_parameters=rope), config)


@pytest.mark.parametrize("size", [0, -1, 1025, 1.5, True])
def test_block_sizes_that_are_none(model, config, size) -> None:
    with pytest.raises(ConfigError, match="block_size"):
        StoredCache.open(model, config, block_size=size)


def test_a_window_changed_in_memory_is_refused(tmp_path, config) -> None:
    """mistral's attention reads its window from the config at every call."""
    model, ids = tiny("mistral", tmp_path / "model"), prompt(100)
    with StoredCache.open(model, config) as stored:
        stored.generate(ids, **greedy(20))
        model.config.sliding_window = 40
        with pytest.raises(UnsupportedModelError, match="opened"):
            stored.generate(ids, **greedy(20))
