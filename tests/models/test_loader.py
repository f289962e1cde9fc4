"""Loading: the unmodified class with exactly the weights of the files, and what goes with it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from kvire.core.errors import ConfigError, UnsupportedModelError
from kvire.core.spec import LayerKind
from kvire.models import loader
from kvire.models.families import kv_groups
from kvire.models.loader import load_model

from .tiny import EACH_FAMILY, EOS, WINDOW, byte_tokenizer, make_tiny


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, use_cache=False).logits[0, -1]


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_every_family(family: str, tmp_path: Path) -> None:
    loaded = load_model(make_tiny(family, tmp_path / family))
    config = AutoConfig.from_pretrained(loaded.path)
    assert isinstance(config, PreTrainedConfig)
    keeping = config.num_hidden_layers - getattr(config, "num_kv_shared_layers", 0)
    assert sorted(i for group in loaded.groups for i in group.layers) == list(range(keeping))
    assert all(group.window == WINDOW for group in loaded.groups if group.kind is LayerKind.SLIDING)
    assert loaded.max_positions == 2048
    assert loaded.eos_token_ids == (EOS,)
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    assert loaded.weights_bytes > 100_000


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_logits_depend_on_all_of_the_kv(family: str, tmp_path: Path) -> None:
    """What makes the tiny models worth testing with: every token in reach changes the answer visibly."""
    loaded = load_model(make_tiny(family, tmp_path / family))
    ids = torch.randint(0, 256, (1, 20), generator=torch.Generator().manual_seed(1))
    answer = _logits(loaded.model, ids)
    for position in range(ids.shape[1]):
        changed = ids.clone()
        changed[0, position] = (changed[0, position] + 100) % 256
        assert (_logits(loaded.model, changed) - answer).abs().max() > 0.01, position


def test_the_same_seed_is_the_same_model(tmp_path: Path) -> None:
    one, two, other = (load_model(make_tiny("llama", tmp_path / str(i), seed=seed)) for i, seed in enumerate((0, 0, 1)))
    assert (one.weights_digest, one.config_digest) == (two.weights_digest, two.config_digest)
    assert one.weights_digest != other.weights_digest
    longer = load_model(make_tiny("llama", tmp_path / "longer", rms_norm_eps=1e-3))
    assert longer.config_digest != one.config_digest


def test_weights_stored_in_bfloat16_are_computed_with_in_float32(tmp_path: Path) -> None:
    folder = make_tiny("qwen3", tmp_path / "model")
    half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    byte_tokenizer().save_pretrained(tmp_path / "half")
    loaded = load_model(tmp_path / "half")
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    for name, value in half.state_dict().items():
        assert torch.equal(value.float(), loaded.model.state_dict()[name])
    assert load_model(tmp_path / "half", dtype="bfloat16").weights_bytes * 2 == loaded.weights_bytes


def test_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = load_model(make_tiny("llama", tmp_path / "model")).tokenizer
    text = "Grüße, 世界!\n"
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False).startswith("<|im_start|>")


def _rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, value in change.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("family", "wrong", "words"),
    [
        ("mistral", {"window": 23}, "looks back 24 tokens, config.json says 23"),
        ("gemma4_text", {"window": 23}, "looks back 24 tokens, config.json says 23"),
        ("exaone4", {"kind": LayerKind.FULL, "window": None}, "looks back 24 tokens, config.json says None"),
        ("llama", {"kind": LayerKind.SLIDING, "window": 24}, "looks back None tokens, config.json says 24"),
        ("gpt2", {"layers": (0, 1)}, r"layers \[0, 1, 2\] keep KV"),
        ("qwen3", {"kv_heads": 4}, "K is 32 wide, not 64"),
    ],
)
def test_groups_are_held_against_the_layers_as_built(
    family: str, wrong: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    *others, last = kv_groups(AutoConfig.from_pretrained(make_tiny(family, tmp_path / family)))
    monkeypatch.setattr(loader, "kv_groups", lambda _: (*others, replace(last, **wrong)))
    with pytest.raises(UnsupportedModelError, match=words):
        load_model(tmp_path / family)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, "lacks weights.*up_proj"),
        ({"model.layers.1.self_attn.q_proj.bias": torch.zeros(64)}, "no place for.*q_proj.bias"),
    ],
)
def test_files_that_do_not_belong_together(tmp_path: Path, change: dict[str, torch.Tensor | None], words: str) -> None:
    folder = make_tiny("llama", tmp_path / "model")
    _rewrite(folder, change)
    with pytest.raises(UnsupportedModelError, match=words):
        load_model(folder)


def test_weights_of_other_shapes(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "model")
    _rewrite(folder, {"model.norm.weight": torch.zeros(63)})
    with pytest.raises(UnsupportedModelError, match=r"model.norm.weight"):
        load_model(folder)


def test_not_enough_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny("llama", tmp_path / "model")
    monkeypatch.setattr(loader, "available_bytes", lambda: 1000)
    with pytest.raises(ConfigError, match=r"needs .* and 1000 B of memory are available"):
        load_model(folder)


def test_an_unknown_dtype(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"int3"):
        load_model(tmp_path, dtype="int3")


def test_files_that_change_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny("llama", tmp_path / "model")
    inner = loader._load_model

    def rewriting(*args):
        model = inner(*args)
        (folder / "copy").write_bytes((folder / "model.safetensors").read_bytes())
        (folder / "copy").rename(folder / "model.safetensors")
        return model

    monkeypatch.setattr(loader, "_load_model", rewriting)
    with pytest.raises(UnsupportedModelError, match=r"being written while it was loaded"):
        load_model(folder)


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"no tokenizer"):
        load_model(make_tiny("llama", tmp_path / "model", tokenizer=False))


def test_code_that_comes_with_a_tokenizer_is_not_run(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "model")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}}
    path.write_text(json.dumps(config | {"tokenizer_class": "X"}))
    (folder / "tokenization_x.py").write_text(f"open({str(tmp_path / 'exploded')!r}, 'w')")
    with pytest.raises(UnsupportedModelError, match=r"tokenizer"):
        load_model(folder)
    assert not (tmp_path / "exploded").exists()


def test_every_file_that_names_an_end_counts(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": [259, 7]}')
    assert load_model(folder).eos_token_ids == (7, EOS, 259)


def test_a_config_that_its_class_refuses(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"rms_norm_eps": "small"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"config\.json is not valid.*rms_norm_eps"):
        load_model(folder)
