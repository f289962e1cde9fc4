"""Every family through the whole engine on a device that only checks: test_device.py runs this in a process of its own.

    python tests/engine/fake_gpu.py FOLDER FAMILY...

torch's fake tensors have a shape and a device but no numbers. An operation on tensors of two devices raises, and so
does reading a number back (`item`, `tolist`, a tensor in an `if`), which on a GPU is a wait. A device of our own
stands for the GPU, since torch without CUDA knows that one by name only.
"""

import random
import sys
from dataclasses import fields, replace
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

sys.path.insert(0, str(Path(__file__).parents[1]))

from models.tiny import make_tiny
from transformers.utils import logging

from kvire.cache.batch import Batch
from kvire.core.config import EngineConfig
from kvire.core.dtypes import KV_DTYPES
from kvire.engine import build
from kvire.engine.engine import Engine
from kvire.engine.request import Request, SamplingParams
from kvire.models.loader import LoadedModel, load_model

GPU = "fakegpu"


class Checked:
    """A model that runs on fake tensors and answers with random logits."""

    def __init__(self, model: Any, mode: FakeTensorMode) -> None:
        self.model, self.mode, self.steps = model, mode, 0

    def forward(self, batch: Batch) -> Tensor:
        parts = {f.name: getattr(batch, f.name) for f in fields(batch)}
        with self.mode:
            logits = self.model.forward(replace(batch, **{name: self._fake(part) for name, part in parts.items()}))
        assert logits.device.type == "cpu" and logits.dtype == torch.float32
        assert logits.shape[0] == batch.logits_rows.numel(), "only the rows that are wanted leave the device"
        self.steps += 1
        return torch.randn(logits.shape)

    def _fake(self, part: Any) -> Any:
        if isinstance(part, tuple):
            return tuple(map(self._fake, part))
        return self.mode.from_tensor(part) if isinstance(part, Tensor) else part


def make_fake(loaded: LoadedModel, mode: FakeTensorMode) -> None:
    """Forget the weights' numbers, and let `.to` move what Module.to moves: parameters and buffers."""

    def change(how: Any) -> None:
        for module in loaded.model.modules():
            for name, value in module._parameters.items():
                if value is not None:
                    module._parameters[name] = nn.Parameter(how(value), requires_grad=False)
            for name, value in module._buffers.items():
                if value is not None:
                    module._buffers[name] = how(value)

    # torch's fake of grouped_mm, which experts run by default, takes bfloat16 only; the real one takes float32.
    loaded.model.set_experts_implementation("batched_mm")
    change(lambda x: mode.from_tensor(x.data))
    loaded.model.to = lambda device: change(lambda x: x.to(device))


def fake_engine(path: Path, **options: Any) -> Engine:
    mode = FakeTensorMode()
    loaded = load_model(path)
    make_fake(loaded, mode)
    gpu = torch.device(GPU, 0)
    with (
        patch.object(build, "load_model", lambda *_, **__: loaded),
        patch.object(build, "choose_device", lambda _: gpu),
        patch.object(build, "free_bytes", lambda _: 1 << 30),
        patch.object(build, "device_with_room", lambda *_: gpu),
        mode,
    ):
        engine, _ = build.build_engine(str(path), EngineConfig(**options))
    assert all(slab.device == gpu for slab in engine.paged.slabs)
    assert engine.namespace.numerics.endswith("/" + GPU)
    engine.model = Checked(engine.model, mode)
    return engine


def run(path: Path, **options: Any) -> None:
    """Prompts in chunks beside decodes; two samples of one prompt, whose last block is copied; a warm prompt."""
    engine = fake_engine(path, kv_memory="4MiB", block_size=8, max_batch_tokens=24, max_num_seqs=4, **options)
    rng = random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(n)] for n in (40, 3, 26)]
    for again in range(2):
        for i, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=2, n=2 if i == 2 else 1, ignore_eos=True, seed=1)
            engine.submit(Request(f"{again}-{i}", tuple(prompt), params))
        while engine.has_work:
            engine.step()
    assert engine.model.steps > 5
    assert engine.stats.device_tokens > 0, "the second round met the first one's blocks"


def main(folder: Path, families: list[str]) -> None:
    _setup_privateuseone_for_python_backend(GPU)
    logging.disable_progress_bar()
    for family in families:
        path = make_tiny(family, folder / family)
        for dtype in KV_DTYPES if family == "llama" else ("float16",):
            started = perf_counter()
            try:
                run(path, kv_dtype=dtype)
            except Exception as error:
                raise AssertionError(f"{family} with a {dtype} pool: {error}") from error
            print(f"{family} {dtype}: {perf_counter() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
