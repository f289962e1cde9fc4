"""Lower bounds for a model's step on this machine: the longer of its arithmetic and its reads."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Self

import torch

WEIGHT_BYTES = 4  # float32
KV_BYTES = 4


@dataclass(frozen=True)
class Roofline:
    """A decoder with grouped-query attention, a gated MLP and tied embeddings, in float32.

    body, head: parameters that every token, and every row of logits, multiplies with.
    pair_flops: attention's operations per (query, key) pair, all layers.
    kv_bytes_per_token: K and V, all layers.
    flops, read_bytes: what the machine does in a second.
    """

    body: int
    head: int
    pair_flops: int
    kv_bytes_per_token: int
    flops: float
    read_bytes: float

    @classmethod
    def measure(cls, folder: Path) -> Self:
        """Shapes from config.json in `folder`; the machine's limits are measured now."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        heads, kv_heads, width = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        projections = 2 * hidden * heads * width + 2 * hidden * kv_heads * width
        return cls(
            body=layers * (projections + 3 * hidden * config["intermediate_size"]),
            head=config["vocab_size"] * hidden,
            pair_flops=4 * layers * heads * width,
            kv_bytes_per_token=2 * layers * kv_heads * width * KV_BYTES,
            flops=matmul_gflops() * 1e9,
            read_bytes=read_gb_s() * 1e9,
        )

    def measured_again(self) -> Self:
        """The machine's limits are the best that was ever seen: a neighbour may have been busy the
        first time.
        """
        flops, read_bytes = matmul_gflops() * 1e9, read_gb_s() * 1e9
        return replace(self, flops=max(flops, self.flops), read_bytes=max(read_bytes, self.read_bytes))

    def describe(self) -> dict[str, float]:
        """What the machine does in a second."""
        return {"read_gb_s": self.read_bytes / 1e9, "matmul_gflops": self.flops / 1e9}

    def prefill_s(self, tokens: int, reused: int = 0) -> float:
        """`tokens` new ones behind `reused`, one row of logits."""
        return self._step_s(tokens, tokens * reused + tokens**2 / 2, reused, 1)

    def decode_s(self, sequences: int, context: float) -> float:
        """One token for each of `sequences`, all with `context` tokens."""
        return self._step_s(sequences, sequences * context, sequences * context, sequences)

    def break_even_mb_s(self, prefill_tok_s: float) -> float:
        """A place that gives KV back faster than this beats recomputing it."""
        return self.kv_bytes_per_token * prefill_tok_s / 1e6

    def _step_s(self, tokens: float, pairs: float, kv_tokens: float, rows: int) -> float:
        flops = 2 * self.body * tokens + 2 * self.head * rows + self.pair_flops * pairs
        read_bytes = (self.body + self.head) * WEIGHT_BYTES + kv_tokens * self.kv_bytes_per_token
        return max(flops / self.flops, read_bytes / self.read_bytes)


def read_gb_s() -> float:
    """Pure reads, all threads, best of five: a sum over 512 MiB."""
    data = torch.ones(2**27)
    return data.nbytes / min(_timed(data.sum) for _ in range(5)) / 1e9


def matmul_gflops() -> float:
    """A large float32 matrix product, all threads, best of five."""
    n = 2048
    a, b = torch.rand(n, n), torch.rand(n, n)
    return 2 * n**3 / min(_timed(lambda: a @ b) for _ in range(5)) / 1e9


def _timed(work: Callable[[], object]) -> float:
    started = perf_counter()
    work()
    return perf_counter() - started
