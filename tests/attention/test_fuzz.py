"""Random steps, and random nonsense: the kernels compute what the portable path does, and refuse the rest.

Every tensor is exactly as long as it has to be, so that under AddressSanitizer (`make sanitize`) a read beyond it ends
the process; so does a look at KV that no row of the step may see.
"""

import ctypes
import math
import os
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from harness.backends import INNER_RUN, must_pass_on_a_plain_cpu
from harness.sanitizer import only_readable
from torch import Tensor

from kvire.attention.cpu import NativeAttention, native_available
from kvire.attention.params import AttentionParams
from kvire.attention.reference import AttentionPlan, PortableAttention
from kvire.cache.batch import Batch
from kvire.cache.paged import PagedKV
from kvire.core.dtypes import KV_DTYPES
from kvire.core.native import native_module
from kvire.core.spec import KVGroup, KVSpec, LayerKind

pytestmark = pytest.mark.skipif(not native_available(), reason="installed without the C++ kernels")

SEEDS = range(int(os.environ.get("KVIRE_FUZZ_EXAMPLES", "300")))
LAYER = 3  # the second of two layers that share their blocks
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}
NATIVE_DTYPES = [name for name, dtype in KV_DTYPES.items() if dtype.kernel_code is not None]
NO_BLOCKS = (-1, -(2**31), 2**31 - 1)


@dataclass
class Step:
    """Sequences over a pool of their own, with the entries of the block table that nobody may look at spoilt.

    first_seen: per sequence the oldest position that a row of the step sees. blocks: its block ids, all of them.
    """

    paged: PagedKV
    batch: Batch
    query: Tensor
    k: Tensor
    v: Tensor
    params: AttentionParams
    first_seen: list[int]
    blocks: list[list[int]]

    def run(self, backend: PortableAttention) -> Tensor:
        plan = backend.plan(self.paged, self.batch)
        backend.write(plan, LAYER, self.k, self.v)
        return backend.attend(plan, LAYER, self.query, self.k, self.v, self.params)

    def copy(self) -> "Step":
        """The same over a copy of the pool."""
        paged = PagedKV(self.paged.spec, self.paged.num_blocks)
        paged.slabs[0].copy_(self.paged.slabs[0])
        return replace(self, paged=paged)

    def bytes(self) -> Tensor:
        return self.paged.slabs[0].view(torch.uint8)

    def seen_parts(self) -> list[Tensor]:
        """K and V, and their scales, of what the step's rows see."""
        paged, size, parts = self.paged, self.paged.spec.block_size, []
        views = [paged.k(LAYER), paged.v(LAYER), paged.k_scales(LAYER), paged.v_scales(LAYER)]
        for s, blocks in enumerate(self.blocks):
            for i in range(self.first_seen[s] // size, len(blocks)):
                begin = max(self.first_seen[s] - i * size, 0)
                tokens = slice(begin, self.batch.context_lens[s] - i * size)
                parts += [view[blocks[i], tokens] for view in views if view is not None]
        return parts


def draw_step(seed: int) -> Step:
    draw, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    size = draw.choice([1, 16, 32, 64, draw.randint(1, 64)])
    kv_heads, group_size = draw.randint(1, 4), draw.choice([draw.randint(1, 8)] * 9 + [100])
    key_width = draw.choice([8, 64, 128, draw.randint(1, 130), draw.randint(1, 130)])
    value_width = draw.choice([key_width, draw.randint(1, 130)])
    window = draw.choice([None, None, draw.randint(1, 20), draw.randint(1, 600)])
    lens = [(1, draw.randint(1, 600)) for _ in range(draw.randint(0, 4))]
    for _ in range(draw.randint(0 if lens else 1, 2)):
        count = draw.randint(2, 70)
        lens.append((count, count + draw.choice([0, draw.randint(0, 600 - count)])))

    needed = [-(-length // size) for _, length in lens]
    num_blocks = sum(needed) + draw.randint(1, 4)
    free = draw.sample(range(num_blocks - 1), num_blocks - 1)  # behind the last block is one that nobody owns
    kind = LayerKind.FULL if window is None else LayerKind.SLIDING
    spec = KVSpec(
        (KVGroup(kind, (0, LAYER), kv_heads, key_width, value_width, window),), draw.choice(NATIVE_DTYPES), size
    )
    paged = PagedKV(spec, num_blocks)
    paged.slabs[0].view(torch.uint8).fill_(255)  # in every float dtype a NaN

    first_seen, blocks, slots, positions = [], [], [], []
    table = torch.tensor([[draw.choice((*NO_BLOCKS, num_blocks)) for _ in range(max(needed))] for _ in lens])
    for s, (count, length) in enumerate(lens):
        other = draw.randrange(s + 1)
        common = min((length - count) // size, (lens[other][1] - lens[other][0]) // size)
        shared = blocks[other][: draw.randint(0, common)] if other < s else []
        blocks.append(shared + [free.pop() for _ in range(needed[s] - len(shared))])
        position = torch.arange(len(shared) * size, length)
        slot = torch.tensor(blocks[s])[position // size] * size + position % size
        fill = [torch.randn(len(slot), kv_heads, width, generator=numbers) for width in (key_width, value_width)]
        paged.write(LAYER, *fill, slot)
        first_seen.append(0 if window is None else max(0, length - count - window + 1))
        seen = slice(first_seen[s] // size, needed[s])
        table[s, seen] = torch.tensor(blocks[s][seen])
        slots.append(slot[len(slot) - count :])
        positions.append(position[len(slot) - count :])

    counts = [count for count, _ in lens]
    batch = Batch(
        token_ids=torch.zeros(sum(counts), dtype=torch.int64),
        positions=torch.cat(positions),
        slots=(torch.cat(slots),),
        block_tables=(table.int(),),
        context_lens=tuple(length for _, length in lens),
        cu_seqlens=tuple(sum(counts[:i]) for i in range(len(counts) + 1)),
        logits_rows=torch.empty(0, dtype=torch.int64),
    )
    shapes = ((kv_heads * group_size, key_width), (kv_heads, key_width), (kv_heads, value_width))
    rows = [torch.randn(sum(counts), *shape, generator=numbers) for shape in shapes]
    if draw.random() < 0.5:  # as transformers hands them over
        rows = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in rows]
    sinks = torch.randn(kv_heads * group_size, generator=numbers) if draw.random() < 0.3 else None
    params = AttentionParams(1 / math.sqrt(key_width), window, draw.choice([None, None, 1.5, 20.0]), sinks)
    return Step(paged, batch, *rows, params, first_seen, blocks)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_step_equals_the_portable_path(seed: int) -> None:
    step = draw_step(seed)
    oracle = step.copy()
    expected = oracle.run(PortableAttention())
    torch.set_num_threads(seed % 3 + 1)
    native, portable = NativeAttention(), PortableAttention()
    with only_readable(step.paged.slabs[0], step.seen_parts()):
        out = step.run(native)
        gathered = [gather(native, step, s) for s in range(len(step.blocks))]
    torch.testing.assert_close(out, expected, **TOLERANCE)
    assert torch.equal(step.bytes(), oracle.bytes())
    for s, rows in enumerate(gathered):
        assert all(torch.equal(x, y) for x, y in zip(rows, gather(portable, oracle, s), strict=True))


def gather(backend: PortableAttention, step: Step, sequence: int) -> tuple[Tensor, Tensor]:
    """What multi-head latent attention reads."""
    plan = backend.plan(step.paged, step.batch)
    return backend._gather(plan, LAYER, sequence, step.first_seen[sequence], step.batch.context_lens[sequence])


class Spoilt:
    """kvire._native with other arguments for one kernel; a call that fails must have left its output alone."""

    def __init__(self, out_width: int = 0, kernel: str = "", **changes: Any) -> None:
        self.out_width, self.kernel, self.changes = out_width, kernel, changes

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(native_module(), name)
        return self.watched(kernel) if name.endswith("_attention") else self.plain(kernel)

    def plain(self, kernel: Any) -> Any:
        changes = self.changes if kernel.__name__ == self.kernel else {}
        return lambda *args, **kwargs: kernel(*args, **{**kwargs, **changes})

    def watched(self, kernel: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> None:
            rows = kwargs.get("sequences", kwargs.get("tokens"))
            out_bytes = rows * kwargs["query_heads"] * self.out_width * 4
            before = ctypes.string_at(kwargs["out"], out_bytes)
            try:
                self.plain(kernel)(*args, **kwargs)
            except (IndexError, ValueError):
                assert ctypes.string_at(kwargs["out"], out_bytes) == before
                raise

        return call


def spoilt_backend(step: Step, kernel: str = "", **changes: Any) -> NativeAttention:
    backend = NativeAttention()
    backend._layer(step.paged, LAYER)
    backend._native = Spoilt(step.v.shape[-1], kernel, **changes)
    return backend


@pytest.mark.parametrize("seed", SEEDS[: len(SEEDS) // 2])
def test_nonsense_in_a_random_step_is_refused_and_nothing_is_written(seed: int) -> None:
    step, draw = draw_step(seed), random.Random(seed)
    size, num_blocks = step.paged.spec.block_size, len(step.paged.slabs[0])
    backend = spoilt_backend(step)
    step.run(backend)  # is in order
    before = step.bytes().clone()

    slots = step.batch.slots[0].clone()
    slots[draw.randrange(len(slots))] = draw.choice([-1, -(2**63), 2**63 - 1, num_blocks * size])
    plan = AttentionPlan(step.paged, replace(step.batch, slots=(slots,)))
    with pytest.raises(IndexError, match="slot"):
        backend.write(plan, LAYER, step.k, step.v)

    s = draw.randrange(len(step.blocks))
    table = step.batch.block_tables[0].clone()
    table[s, draw.randrange(step.first_seen[s] // size, len(step.blocks[s]))] = draw.choice((*NO_BLOCKS, num_blocks))
    lens = list(step.batch.context_lens)
    lens[s] = draw.choice([0, -1, -(2**31), 2**31 - 1, table.shape[1] * size + 1])
    spoilt = {"block_tables": ((table,), "block id"), "context_lens": (tuple(lens), "context length")}
    for name, (value, message) in spoilt.items():
        plan = AttentionPlan(step.paged, replace(step.batch, **{name: value}))
        with pytest.raises(IndexError, match=message):
            backend.attend(plan, LAYER, step.query, step.k, step.v, step.params)
    assert torch.equal(step.bytes(), before)


NO_ATTENTION = [
    *({"threads": n} for n in (0, -1)),
    *({"query_heads": n} for n in (0, -4, 5)),
    *({"softcap": x} for x in (-1.0, math.nan)),
    *({"table_width": n} for n in (0, 1, -1, 2**62)),
    *({name: 0} for name in ("queries", "out")),
    {"window": -1},
]
NONSENSE: dict[str, list[dict[str, Any]]] = {
    "decode_attention": [*NO_ATTENTION, {"sequences": -1}, {"block_tables": 0}, {"context_lens": 0}],
    "prefill_attention": [
        *NO_ATTENTION,
        *({"tokens": n} for n in (0, -1, 2**40, 2**62)),
        *({"context_len": n} for n in (0, -1, 4, 10**6, 2**40, 2**62)),
        {"block_table": 0},
    ],
    "write_kv": [{"tokens": -1}, {"tokens": 2**62}, {"k": 0}, {"v": 0}, {"slots": 0}, {"threads": 0}],
    "gather_kv": [
        *({"start": n} for n in (-1, 10**6, 2**40, 2**62)),
        *({"length": n} for n in (-1, 10**6, 2**40, 2**62)),
        *({name: 0} for name in ("block_table", "k_out", "v_out", "threads", "table_width")),
    ],
}


@pytest.mark.parametrize(("kernel", "changes"), [(name, changes) for name in NONSENSE for changes in NONSENSE[name]])
def test_a_senseless_argument_is_refused_and_nothing_is_written(kernel: str, changes: dict[str, Any]) -> None:
    step = next(s for s in map(draw_step, range(1000)) if suits_nonsense(s))
    step.run(NativeAttention())
    before = step.bytes().clone()
    backend = spoilt_backend(step, kernel, **changes)
    with pytest.raises((IndexError, ValueError)):
        gather(backend, step, 0) if kernel == "gather_kv" else step.run(backend)
    assert torch.equal(step.bytes(), before)


def suits_nonsense(step: Step) -> bool:
    """One block does not do for a sequence, there are decodes and prefills, and five heads are one too many."""
    counts = step.batch.query_lens
    blocks = min(map(len, step.blocks))
    return blocks > 1 and counts[0] == 1 and 5 < counts[-1] < 31 and step.k.shape[1] in (2, 3, 4)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_rows_equal_torch(seed: int) -> None:
    draw, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, width, out_width = draw.randint(1, 40), draw.randint(1, 300), draw.randint(1, 200)
    x, weights = (torch.randn(n, width, generator=numbers) for n in (rows, out_width))
    bias = torch.randn(out_width, generator=numbers) if draw.random() < 0.5 else None
    out, normed = torch.empty(rows, out_width), torch.empty(rows, width)
    common = {"x": x.data_ptr(), "rows": rows, "width": width, "threads": draw.randint(1, 3)}
    scale = weights[-1].clone()
    norm = {**common, "weights": scale.data_ptr(), "out": normed.data_ptr(), "epsilon": 1e-5}
    linear = {**common, "weights": weights.data_ptr(), "out": out.data_ptr(), "out_width": out_width}
    linear["bias"] = 0 if bias is None else bias.data_ptr()
    native_module().linear_rows(**linear)
    native_module().rms_norm(**norm)
    torch.testing.assert_close(out, torch.nn.functional.linear(x, weights, bias), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(x, (width,), scale, 1e-5), rtol=1e-5, atol=1e-6)

    for kernel, arguments in (("linear_rows", linear), ("rms_norm", norm)):
        name = draw.choice([name for name in arguments if name not in ("bias", "epsilon")])
        nonsense = draw.choice([-1, -(2**31)]) if name == "rows" else 0
        with pytest.raises(ValueError, match=r"sizes|needed"):
            getattr(native_module(), kernel)(**{**arguments, name: nonsense})


@pytest.mark.parametrize("name", ["num_blocks", "block_size", "heads", "key_width", "value_width"])
@pytest.mark.parametrize("wrong", [0, -1, -(2**62), 2**62])
def test_a_layer_without_a_size_is_refused(name: str, wrong: int) -> None:
    sizes = {"num_blocks": 2, "block_size": 4, "heads": 1, "key_width": 8, "value_width": 8, name: wrong}
    with pytest.raises(ValueError, match="size"):
        native_module().PagedLayer(k=64, v=64, k_block_stride=64, v_block_stride=64, dtype=0, **sizes)


@INNER_RUN
def test_all_of_this_holds_on_a_plain_cpu_and_without_openmp() -> None:
    must_pass_on_a_plain_cpu(__file__)
