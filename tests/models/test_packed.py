"""Models whose matrices stay packed: the same logits as transformers on the unpacked weights."""

import copy
import re
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from harness.engines import drive, request
from step.forms import quantise
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from kvire.core.config import EngineConfig
from kvire.core.errors import ConfigError, UnsupportedModelError
from kvire.engine.build import build_engine
from kvire.models.checkpoint import open_checkpoint
from kvire.models.gguf.convert import convert, gguf_file
from kvire.models.loader import load_model
from kvire.models.packed import PackedLinear, _parameters_on_meta, matrices, packed_model, tensors_of_checkpoint
from kvire.models.packed_cache import packed_folder
from kvire.models.resolve import resolve
from kvire.weights.packed_file import PACKED, PackedFile, write_packed

from .tiny import EACH_FAMILY, make_tiny
from .tiny_gguf import make_gguf

pytest.importorskip("kvire._native")
IDS = torch.arange(3, 40)[None]


@torch.inference_mode()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=IDS).logits


def divergence(model: torch.nn.Module, reference: torch.nn.Module) -> float:
    """Mean KL of the tokens' distributions."""
    p, q = logits(reference).log_softmax(-1), logits(model).log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def rounded(_: torch.nn.Module, arguments: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """Rows as eight-bit integers with a scale for every 32 say them, which is how they meet weights in blocks."""
    [x] = arguments
    rows = quantise(x.reshape(-1, x.shape[-1]).float().numpy())
    values = (rows.q * rows.scale[..., None]).reshape(len(rows.q), -1)[:, : x.shape[-1]]
    return (torch.from_numpy(values).reshape(x.shape),)


def by_the_book(file: PackedFile, model: torch.nn.Module) -> torch.nn.Module:
    """The plain model with exactly the numbers that are packed, and rows rounded before blocks of weights."""
    plain = copy.deepcopy(model)
    kinds = {name: (module, kind) for name, module, kind in matrices(plain)}
    for name, parameter in plain.named_parameters():
        module, kind = kinds.get(name, (None, None))
        values = file[name].floats().T if kind is Conv1D else file[name].floats()
        values = values[:, : parameter.shape[1]] if parameter.dim() == 2 else values  # without padding
        parameter.data = torch.from_numpy(np.array(values))
        if kind in {torch.nn.Linear, Conv1D} and file[name].form.block_inputs > 1:
            module.register_forward_pre_hook(rounded)
    head, embedding = plain.get_output_embeddings(), file[next(iter(file))]
    if head.weight is plain.get_input_embeddings().weight and embedding.form.block_inputs > 1:
        head.register_forward_pre_hook(rounded)
    return plain


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_every_family_runs_packed(family: str, tmp_path: Path) -> None:
    path = make_tiny(family, tmp_path / family)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    files = {}
    for int8 in (False, True):
        tensors = tensors_of_checkpoint(plain, open_checkpoint(path).shards, int8=int8)
        write_packed(tmp_path / f"{int8}", "source", tensors)
        files[int8] = PackedFile(tmp_path / f"{int8}")
    models = {int8: packed_model(AutoConfig.from_pretrained(path), file) for int8, file in files.items()}
    assert sum(isinstance(module, PackedLinear) for module in models[True].modules()) >= (family != "gpt2")
    torch.testing.assert_close(logits(models[False]), logits(plain), rtol=1e-4, atol=1e-4)
    assert divergence(models[True], by_the_book(files[True], plain)) < 0.002


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3"])
def test_a_gguf_keeps_its_own_blocks(arch: str, tmp_path: Path, cache: Path) -> None:
    path = str(make_gguf(tmp_path / "tiny.gguf", arch))
    plain = load_model(resolve(path))
    packed = load_model(resolve(path, weights="file"), weights="file")
    assert packed.form == "q8_0" and packed.weights_bytes < 0.4 * plain.weights_bytes
    file = PackedFile(resolve(path, weights="file") / PACKED)
    for name, parameter in plain.model.named_parameters():
        np.testing.assert_array_equal(file[name].floats(), parameter.numpy())
    assert divergence(packed.model, by_the_book(file, plain.model)) < 0.002


def test_q_and_k_in_the_file_s_order_would_be_noticed(tmp_path: Path, cache: Path, monkeypatch) -> None:
    """A build that leaves rows of Q and K as llama.cpp turned them answers differently."""
    path = str(make_gguf(tmp_path / "tiny.gguf", "llama"))
    right = load_model(resolve(path, weights="file"), weights="file")
    shutil.rmtree(right.path)
    monkeypatch.setattr("kvire.models.gguf.weights._layout", lambda config, header: lambda _, array: array)
    wrong = load_model(resolve(path, weights="file"), weights="file")
    assert divergence(wrong.model, right.model) > 0.01


def test_sixteen_bits_stay_sixteen(tmp_path: Path, cache: Path) -> None:
    path = make_tiny("llama", tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
    packed = load_model(path, weights="file")
    plain = load_model(path)
    assert packed.form == "bf16"
    assert 0.45 * plain.weights_bytes < packed.weights_bytes < 0.55 * plain.weights_bytes
    torch.testing.assert_close(logits(packed.model), logits(plain.model), rtol=1e-5, atol=1e-5)


def test_the_second_start_reads_the_packed_file_alone(tmp_path: Path, cache: Path, monkeypatch) -> None:
    path = make_tiny("llama", tmp_path / "model")
    first = load_model(path, weights="int8")
    monkeypatch.setattr("kvire.models.loader._load_model", None)
    second = load_model(path, weights="int8")
    assert first.weights_digest == second.weights_digest
    assert torch.equal(logits(first.model), logits(second.model))


def test_other_threads_make_modules_as_usual() -> None:
    """While one thread makes a model without memory."""
    made: list[torch.nn.Linear] = []
    with _parameters_on_meta():
        thread = threading.Thread(target=lambda: made.append(torch.nn.Linear(2, 3)))
        thread.start()
        thread.join()
        assert torch.nn.Linear(2, 3).weight.is_meta
    assert not made[0].weight.is_meta and not torch.nn.Linear(2, 3).weight.is_meta


def test_starts_at_once_pack_once(tmp_path: Path, cache: Path) -> None:
    path = make_tiny("llama", tmp_path / "model")
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(load_model(path, weights="int8").weights_digest)) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3 and len(set(found)) == 1


def test_a_damaged_file_is_made_again(tmp_path: Path, cache: Path) -> None:
    path = make_tiny("llama", tmp_path / "model")
    first = load_model(path, weights="int8")
    expected = logits(first.model)
    [file] = cache.rglob(PACKED)
    changed = bytearray(file.read_bytes())
    changed[-100] ^= 4
    del first
    file.write_bytes(changed)
    assert torch.equal(logits(load_model(path, weights="int8").model), expected)


def test_a_damaged_conversion_is_named_and_made_again(tmp_path: Path, cache: Path) -> None:
    path = str(make_gguf(tmp_path / "tiny.gguf"))
    folder = resolve(path, weights="file")
    changed = bytearray((folder / PACKED).read_bytes())
    changed[-100] ^= 4
    (folder / PACKED).write_bytes(changed)
    with pytest.raises(ConfigError, match="it was removed: start again"):
        load_model(folder, weights="file")
    assert load_model(resolve(path, weights="file"), weights="file").form == "q8_0"


def test_a_conversion_in_another_form_is_named(tmp_path: Path, cache: Path) -> None:
    folder = convert(gguf_file(make_gguf(tmp_path / "tiny.gguf")))
    with pytest.raises(ConfigError, match=re.escape("converted with weights='float32', not 'file'")):
        load_model(folder, weights="file")


def test_weights_of_another_model_are_refused(tmp_path: Path, cache: Path) -> None:
    path, other = make_tiny("llama", tmp_path / "a"), make_tiny("llama", tmp_path / "b", num_hidden_layers=2)
    load_model(other, weights="int8")
    [file] = cache.rglob(PACKED)
    with pytest.raises(UnsupportedModelError, match=r"lacks model\.layers\.2"):
        packed_model(AutoConfig.from_pretrained(path), PackedFile(file))


def test_each_form_has_a_folder_and_a_namespace_of_its_own(tmp_path: Path, cache: Path) -> None:
    path = make_tiny("llama", tmp_path / "model")
    assert len({packed_folder(path, digest, form) for digest in "ab" for form in ("file", "int8")}) == 4
    namespaces = set()
    for weights in ("float32", "file", "int8"):
        engine, _ = build_engine(str(path), EngineConfig(weights=weights, kv_memory="4MiB", max_model_len=256))
        namespaces.add(engine.namespace)
        assert weights == "float32" or f"weights={weights}" in engine.namespace.numerics
        engine.close()
    assert len(namespaces) == 3


@pytest.mark.parametrize("weights", ["file", "int8"])
def test_a_hit_does_not_change_the_answer(weights: str, tmp_path: Path, cache: Path) -> None:
    path = str(make_tiny("qwen3", tmp_path / "model"))
    prompt = [int(id_) for id_ in torch.randint(0, 250, (100,), generator=torch.Generator().manual_seed(0))]
    engine, _ = build_engine(path, EngineConfig(weights=weights, kv_memory="4MiB", max_model_len=256))
    cold, warm = (
        next(iter(drive(engine, [request(prompt, max_tokens=20, ignore_eos=True)]).values())) for _ in range(2)
    )
    engine.close()
    assert warm.cache.reused_tokens == 99 and warm.token_ids == cold.token_ids


def test_weights_need_the_cpu() -> None:
    with pytest.raises(ConfigError, match="CPU only"):
        EngineConfig(weights="file", device="cuda")
    with pytest.raises(ConfigError, match="weights must be one of"):
        EngineConfig(weights="int4")


def test_without_kernels_the_remedy_is_said(tmp_path: Path, cache: Path, monkeypatch) -> None:
    path = make_tiny("llama", tmp_path / "model")
    monkeypatch.setattr("kvire.weights.packed_file.native_module", lambda: None)
    with pytest.raises(ConfigError, match="apt install g"):
        load_model(path, weights="int8")
