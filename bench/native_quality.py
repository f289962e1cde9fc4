"""What eight-bit rows cost: SmolLM2's answers as a native step beside transformers' in float32.

Sixteen texts of 512 tokens (pages of these docs as they once were, and docstrings of Python's own
modules): perplexity, the mean KL of the next token's distribution, and how often the likeliest
token is the same. Both compute from exactly the weights of the file.

    python bench/native_quality.py --json docs/results/native_quality.json
"""

import argparse
import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import torch
from reporting import describe, figure, write
from torch import Tensor

from kvire.cache.batch import Batch
from kvire.cache.paged import PagedKV
from kvire.core.spec import KVSpec
from kvire.models.loader import load_model
from kvire.models.resolve import resolve
from kvire.step.model import StepModel, recorded

TEXTS = Path(__file__).parents[1] / "tests" / "step" / "texts.json"
MODULES = ("argparse", "collections", "statistics", "subprocess", "unittest.case", "threading", "difflib")
TOKENS = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kv-dtype", default="float16")
    options = parser.parse_args()
    packed, plain = load_model(resolve("smollm2", weights="file"), weights="file"), load_model(resolve("smollm2"))
    windows = {layer: group.window for group in packed.groups for layer in group.layers}
    paged = PagedKV(KVSpec(packed.groups, options.kv_dtype, 16, "heads"), TOKENS // 16 + 1)
    step = StepModel(recorded(packed.model, windows), paged)
    found: dict[str, list[float]] = {"nll": [], "float32 nll": [], "kl": [], "same": []}
    for name, text in texts().items():
        ids = torch.tensor(plain.tokenizer(text)["input_ids"][:TOKENS])
        with torch.inference_mode():
            expected = plain.model(input_ids=ids[None]).logits[0].double().log_softmax(-1)
        given = step.forward(batch_of(ids)).double().log_softmax(-1)
        found["float32 nll"].append(nll(expected, ids))
        found["nll"].append(nll(given, ids))
        found["kl"].append(float((expected.exp() * (expected - given)).sum(-1).mean()))
        found["same"].append(float((expected.argmax(-1) == given.argmax(-1)).double().mean()))
        print(f"{name:<16} {len(ids)} tokens  KL {found['kl'][-1]:.4f}", flush=True)
    perplexity = {name: float(torch.tensor(found[name]).mean().exp()) for name in ("nll", "float32 nll")}
    rows = [
        figure("mean KL to float32", "nats", [sum(found["kl"]) / len(found["kl"])]),
        figure("perplexity, float32", "", [perplexity["float32 nll"]]),
        figure("perplexity, native step", "", [perplexity["nll"]]),
        figure("perplexity, change", "%", [100 * (perplexity["nll"] / perplexity["float32 nll"] - 1)]),
        figure("same likeliest token", "%", [100 * sum(found["same"]) / len(found["same"])]),
    ]
    write(options.json, {**describe(), "kv_dtype": options.kv_dtype, "table": rows})


def texts() -> dict[str, str]:
    modules: dict[str, str] = {}
    for name in MODULES:
        module: Any = importlib.import_module(name)
        parts = [module, *(value for _, value in inspect.getmembers(module, inspect.isclass))]
        modules[name] = "\n\n".join(filter(None, map(inspect.getdoc, parts)))
    return json.loads(TEXTS.read_text("utf-8")) | modules


def nll(logprobs: Tensor, ids: Tensor) -> float:
    return float(-logprobs[:-1].gather(1, ids[1:, None]).mean())


def batch_of(ids: Tensor) -> Batch:
    count = len(ids)
    table = torch.arange(-(-count // 16), dtype=torch.int32)
    return Batch(
        token_ids=ids,
        positions=torch.arange(count),
        slots=(torch.arange(count),),
        block_tables=(table[None],),
        context_lens=(count,),
        cu_seqlens=(0, count),
        logits_rows=torch.arange(count),
    )


if __name__ == "__main__":
    main()
