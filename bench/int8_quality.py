"""Quality lost with fewer bits of KV: SmolLM2 over float32, float16 and int8 pools.

Nothing was tuned on the texts.

    python bench/int8_quality.py [--json FILE]

Texts: thirty topics of Python's own documentation (pydoc_data), the first 512 tokens of each.
Perplexity is of every token but the first, scored in chunks over the paged cache, so that attention
reads KV as the pool holds it. Greedy answers continue the first 200 tokens. The baseline is the
same engine with a float32 pool.
"""

import argparse
import hashlib
import json
import math
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import reporting
from reporting import figure

from kvire import LLM

TOPICS = (  # noqa: SIM905 (thirty lines otherwise)
    "specialnames compound types formatstrings string-methods typesseq debugger attribute-access customization "
    "typesmapping assignment comparisons execmodel strings import try operator-summary calls sequence-types function "
    "naming typesseq-mutable numeric-types identifiers objects async raise binary with class"
).split()
TEXT_TOKENS, PREFIX_TOKENS, ANSWER_TOKENS = 512, 200, 32
DTYPES = ("float32", "float16", "int8")
BASELINE = DTYPES[0]
POOL = "512MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the report here")
    options = parser.parse_args()
    pools = {dtype: measure(dtype) for dtype in DTYPES}
    report = {
        "machine": reporting.describe(),
        "texts": {"source": "pydoc_data.topics", "topics": TOPICS, "sha256": digest(), "tokens_each": TEXT_TOKENS},
        "table": [row for dtype in DTYPES for row in rows(dtype, pools)],
        "pools": pools,
    }
    reporting.write(options.json, report)


def digest() -> str:
    """Of the whole texts: another Python version has others."""
    return hashlib.sha256(json.dumps([topics[name] for name in TOPICS]).encode()).hexdigest()


def measure(dtype: str) -> dict[str, Any]:
    """Per text: mean negative log-probability of its tokens, and the greedy answer to its
    beginning.
    """
    with LLM("smollm2", kv_dtype=dtype, kv_memory=POOL, prefix_cache=False) as llm:
        texts = [list(llm.encode(topics[name]))[:TEXT_TOKENS] for name in TOPICS]
        assert all(len(ids) == TEXT_TOKENS for ids in texts)
        scored = llm.generate(texts, max_tokens=0, prompt_logprobs=0)
        answers = llm.generate(
            [ids[:PREFIX_TOKENS] for ids in texts], max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True
        )
        print(f"{dtype}: {len(texts)} texts scored and continued", flush=True)
        return {
            "bytes_per_token": llm.engine.paged.spec.bytes_per_token,
            "nll": [mean_nll(result.prompt_logprobs) for result in scored],
            "answers": [result.token_ids for result in answers],
        }


def mean_nll(logprobs: Any) -> float:
    known = [-token.logprob for token in logprobs[1:]]
    return math.fsum(known) / len(known)


def rows(dtype: str, pools: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    pool, base = pools[dtype], pools[BASELINE]
    name = f"{dtype} pool"
    found = [
        figure(f"{name}: KV per token", "bytes", [pool["bytes_per_token"]]),
        figure(f"{name}: perplexity of all texts", "", [perplexity(pool)]),
    ]
    if dtype == BASELINE:
        return found
    change = [100 * math.expm1(ours - theirs) for ours, theirs in zip(pool["nll"], base["nll"], strict=True)]
    agreed = [agreement(*pair) for pair in zip(pool["answers"], base["answers"], strict=True)]
    total = 100 * (perplexity(pool) / perplexity(base) - 1)
    beside = f"{BASELINE} pool"
    return [
        *found,
        figure(f"{name}: perplexity of all texts, change", "%", [total], baseline=beside),
        figure(f"{name}: perplexity of each text, change", "%", change, baseline=beside),
        figure(f"{name}: greedy tokens up to the first difference", f"of {ANSWER_TOKENS}", agreed, baseline=beside),
        figure(f"{name}: mean of that", "%", [100 * sum(agreed) / len(agreed) / ANSWER_TOKENS], baseline=beside),
        figure(f"{name}: identical answers", f"of {len(TOPICS)}", [agreed.count(ANSWER_TOKENS)], baseline=beside),
    ]


def perplexity(pool: dict[str, Any]) -> float:
    return math.exp(math.fsum(pool["nll"]) / len(pool["nll"]))


def agreement(ours: list[int], theirs: list[int]) -> int:
    """How many leading tokens are the same."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))


if __name__ == "__main__":
    main()
