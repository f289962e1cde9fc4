"""The device: which one is chosen and refused, and that everything of a step lies on it.

No GPU is needed. What runs on one is checked by `make gpu-check`.
"""

import logging
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from attention.cases import Shape, make_case, random_shape
from harness.engines import ask, tiny_engine, words
from models.tiny import FAMILIES, make_tiny

from kvire.attention.reference import PortableAttention
from kvire.cache.batch import Batch
from kvire.cache.staging import BatchStaging, BlockCopies
from kvire.core.config import EngineConfig
from kvire.core.errors import ConfigError
from kvire.engine import device
from kvire.engine.build import build_engine
from kvire.engine.device import choose_device, device_with_room, free_bytes, prepare

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
CHECKED_ALWAYS = ("llama", "gemma3_text", "gpt_oss", "deepseek_v3")


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the choice only: nothing can be computed on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(device, "_unusable_gpu", lambda: None)


@pytest.fixture
def with_broken_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore text")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "ones", fail)


@pytest.mark.usefixtures("without_gpu")
def test_cuda_without_a_torch_for_it_says_which_torch_to_install() -> None:
    with pytest.raises(ConfigError, match=r"built without CUDA; install one with CUDA .* device='cpu'"):
        build_engine("nowhere", EngineConfig(device="cuda"))


@pytest.mark.usefixtures("without_gpu")
def test_cuda_without_a_gpu_says_where_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError, match=r"finds no GPU; .*nvidia-smi.*device='cpu'"):
        build_engine("nowhere", EngineConfig(device="cuda"))


@pytest.mark.usefixtures("without_gpu")
def test_auto_without_a_gpu_is_the_cpu() -> None:
    assert choose_device(EngineConfig()) == CPU


@pytest.mark.usefixtures("with_gpu")
def test_auto_takes_a_gpu_that_works() -> None:
    assert choose_device(EngineConfig()) == CUDA
    assert choose_device(EngineConfig(device="cuda", attention="portable")) == CUDA
    assert choose_device(EngineConfig(device="cpu")) == CPU


@pytest.mark.usefixtures("with_broken_gpu")
def test_a_gpu_that_does_not_compute(caplog: pytest.LogCaptureFixture) -> None:
    """auto goes on with the CPU and says why; cuda is refused."""
    with caplog.at_level(logging.WARNING):
        assert choose_device(EngineConfig()) == CPU
    assert "no kernel image is available for execution on the device)" in caplog.text
    with pytest.raises(ConfigError, match=r"no kernel image .* device='cpu'"):
        choose_device(EngineConfig(device="cuda"))


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize("option", [{"attention": "native"}, {"deterministic": True}])
def test_what_needs_the_cpu_keeps_auto_there_and_is_refused_with_cuda(option: dict) -> None:
    assert choose_device(EngineConfig(**option)) == CPU
    with pytest.raises(ConfigError, match="device='cpu'"):
        choose_device(EngineConfig(device="cuda", **option))


def test_free_memory_of_a_gpu_counts_what_torch_keeps_for_reuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100, 400))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 20)
    assert free_bytes(CUDA) == 130
    insisting, auto = EngineConfig(device="cuda"), EngineConfig()
    assert device_with_room(130, CUDA, insisting) == CUDA
    with pytest.raises(ConfigError, match=r"131 B .* the GPU has 130 B free"):
        device_with_room(131, CUDA, insisting)
    assert device_with_room(131, CUDA, auto) == CPU
    assert device_with_room(131, CPU, insisting) == CPU  # already there


def test_tf32_is_switched_off_for_a_gpu_only() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        prepare(CPU)
        assert torch.get_float32_matmul_precision() == "high"
        prepare(CUDA)
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_namespace_names_the_device(tmp_path: Path) -> None:
    engine, _ = build_engine(str(make_tiny("llama", tmp_path)), EngineConfig(kv_memory="1MiB", device="cpu"))
    assert engine.namespace.numerics.split("/")[-1] == "cpu"


def batch_of(tokens: int, width: int, logits: int = 1) -> Batch:
    numbers = torch.arange(tokens)
    table = torch.arange(width, dtype=torch.int32)[None]
    return Batch(
        numbers, numbers + 1, (numbers + 2, numbers + 3), (table, table + 1), (9,), (0, tokens), numbers[:logits]
    )


def assert_same(moved: Batch, batch: Batch) -> None:
    for field in fields(batch):
        ours, theirs = getattr(moved, field.name), getattr(batch, field.name)
        assert type(ours) is type(theirs)
        for x, y in zip(ours, theirs, strict=True):
            assert torch.equal(x, y) and x.dtype == y.dtype if isinstance(y, torch.Tensor) else x == y


def test_a_staged_batch_is_the_same_and_outlives_the_next_one() -> None:
    staging = BatchStaging(CPU)
    batches = [batch_of(3, 5), batch_of(700, 90, logits=0), batch_of(1, 1)]
    moved = [staging.to_device(batch) for batch in batches]
    for got, batch in zip(moved, batches, strict=True):
        assert_same(got, batch)
        assert got.positions.data_ptr() != batch.positions.data_ptr()
    assert all(table.is_contiguous() for table in moved[0].block_tables)


def test_an_engine_answers_the_same_with_staged_batches() -> None:
    prompt = words(5, 75)
    expected = ask(tiny_engine(max_batch_tokens=32), prompt, logprobs=3)
    engine = tiny_engine(max_batch_tokens=32)
    engine.model._staging = BatchStaging(CPU)
    answer = ask(engine, prompt, logprobs=3)
    assert (answer.token_ids, answer.logprobs) == (expected.token_ids, expected.logprobs)


def test_blocks_go_to_the_host_and_back() -> None:
    slabs = torch.randn(9, 40).to(torch.float16)
    before = slabs.clone()
    copies = BlockCopies(slabs)
    host = copies.host_blocks(3)
    copy = copies.copy_out([7, 0, 4], host)
    copy.wait()
    assert copy.done() and torch.equal(host, before[[7, 0, 4]])
    slabs.zero_()
    copies.copy_in(host, [1, 8, 2]).wait()
    assert torch.equal(slabs[[1, 8, 2]], before[[7, 0, 4]])
    assert not slabs[[0, 3, 4, 5, 6, 7]].any()


SHAPES = [
    Shape(lens=((1, 40), (1, 300), (50, 75))),
    Shape(lens=((1, 40), (50, 75)), window=20, softcap=20.0, sinks=True, dtype="float16"),
    Shape(lens=((1, 40), (50, 75)), dtype="int8"),
    random_shape(3),
]


@pytest.mark.parametrize("shape", SHAPES, ids=("plain", "window-softcap-sinks", "int8", "random"))
def test_attention_makes_no_tensor_on_the_default_device(shape: Shape) -> None:
    """Tensors made without a device would have no numbers here, and mixing them with real ones raises."""
    expected = make_case(shape).run(PortableAttention())
    case = make_case(shape)
    staging = BatchStaging(CPU)
    with torch.device("meta"):
        case.batch = staging.to_device(case.batch)
        assert torch.equal(case.run(PortableAttention()), expected)


def test_gpu_check_without_a_gpu_says_so() -> None:
    script = Path(__file__).parents[2] / "tools" / "gpu_check.py"
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, timeout=300, env=hidden
    )
    assert done.returncode == 2
    assert "device='cuda' cannot be used" in done.stderr and "--device cpu" in done.stderr


def check_on_fake_gpu(families: tuple[str, ...], folder: Path) -> None:
    script = Path(__file__).with_name("fake_gpu.py")
    done = subprocess.run(
        [sys.executable, script, folder, *families], capture_output=True, text=True, check=False, timeout=550
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for family in families:
        assert f"{family} " in done.stdout


def test_every_tensor_of_a_step_lies_on_the_gpu_and_nobody_waits_for_it(tmp_path: Path) -> None:
    check_on_fake_gpu(CHECKED_ALWAYS, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_the_same_of_every_other_family(part: int, tmp_path: Path) -> None:
    check_on_fake_gpu(tuple(family for family in FAMILIES if family not in CHECKED_ALWAYS)[part::6], tmp_path)
