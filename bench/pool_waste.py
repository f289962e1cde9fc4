"""Unused share of the blocks in use: docqa and shared, sampled after every engine step.

    python bench/pool_waste.py [--json FILE] [--peers DIR]

waste = (blocks held * block_size - tokens held) / (blocks held * block_size)

blocks held: blocks that some running sequence leases; one that several share counts once. tokens
held: slots of those blocks whose KV is written; a shared block's slots count once. Blocks that are
merely remembered are free and count on neither side. A prompt gets all its blocks when it is
admitted and fills them chunk by chunk, so the first steps of a long prompt waste most; "reserved"
is the share of slots that wait for prompt tokens which are being computed.

The figure is the mean over all steps. Greedy answers of a fixed length over fixed prompts: it comes
out the same every time, whatever else the machine does.
"""

import argparse
import runpy
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peers
import reporting
from reporting import Bar, figure
from workloads import QUESTIONS, message, text

from kvire.core.config import EngineConfig
from kvire.engine.build import build_engine
from kvire.engine.engine import Engine
from kvire.engine.request import Request, SamplingParams
from kvire.engine.sequence import Sequence
from kvire.models.chat import encode_chat

MODEL = "smollm2"
KV_MEMORY = "512MiB"
DOC_WORDS, SYSTEM_WORDS, SHARERS = 1500, 300, 16
Ids = tuple[int, ...]
Words = Callable[[int, int], str]  # seed, count


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peers", type=Path, default=peers.PEERS)
    options = parser.parse_args()
    words = words_of(options.peers)
    engine, loaded = build_engine(MODEL, EngineConfig(kv_memory=KV_MEMORY))
    block_size = engine.pool.block_size
    table = []
    for name, rounds, max_tokens, bar in (
        ("docqa", [[prompt] for prompt in docqa(loaded.tokenizer, words)], 32, Bar("<", 4)),
        ("shared", [shared(loaded.tokenizer, words)], 64, Bar("<", 10)),
    ):
        samples = [sample for prompts in rounds for sample in run(engine, prompts, max_tokens)]
        waste, reserved = ([100 * value for value in column] for column in zip(*samples, strict=True))
        print(f"{name}: {len(samples)} steps, most {max(waste):.1f} %")
        mean = statistics.mean(waste)
        tokens = len(rounds[0][0])
        row = figure(
            f"pool waste, {name}, {sum(map(len, rounds))} prompts of {tokens} tokens: mean over {len(waste)} steps",
            "%", [mean], bar=bar, limit=0.0, limit_is=f"half a block of {block_size} per answer is the price of blocks",
            baseline=f"{statistics.mean(reserved):.2f} % of it reserved for prompts being computed",
        )  # fmt: skip
        table.append(row | {"steps": waste})
    reporting.write(options.json, {"machine": reporting.describe(), "kv_memory": KV_MEMORY, "table": table})


def docqa(tokenizer: Any, words: Words) -> list[Ids]:
    document = words(1, DOC_WORDS)
    return [encode_chat(tokenizer, [message("user", f"{document}\n\n{question}")]) for question in QUESTIONS]


def shared(tokenizer: Any, words: Words) -> list[Ids]:
    system = message("system", words(1, SYSTEM_WORDS))
    return [encode_chat(tokenizer, [system, message("user", words(1001 + i, 60))]) for i in range(SHARERS)]


def words_of(folder: Path) -> Words:
    """The text of the client that all systems share, if it is there: lengths are then those of
    serving.py.
    """
    path = folder / "load.py"
    return runpy.run_path(str(path))["words"] if path.exists() else text


def run(engine: Engine, prompts: list[Ids], max_tokens: int) -> Iterator[tuple[float, float]]:
    """Answer the prompts together; (waste, reserved) after each step in which somebody runs."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.submit(Request(f"waste-{i}", prompt, params))
    while engine.has_work:
        engine.step()
        if engine.scheduler.running:
            yield slots(engine)


def slots(engine: Engine) -> tuple[float, float]:
    """Of the slots in leased blocks: the share without KV, and the share that waits for known
    prompt tokens.
    """
    size = engine.pool.block_size
    held = (engine.pool.num_blocks - engine.pool.num_free) * size
    written = filled(engine.scheduler.running, size, lambda seq: seq.num_computed)
    known = filled(engine.scheduler.running, size, lambda seq: max(seq.num_computed, seq.num_prompt))
    return (held - written) / held, (known - written) / held


def filled(running: list[Sequence], size: int, tokens_of: Callable[[Sequence], int]) -> int:
    """Slots that hold a token, over distinct blocks of the first group."""
    by_block: dict[int, int] = {}
    for seq in running:
        assert seq.lease is not None
        for index, block_id in enumerate(seq.lease.leases[0].block_ids):
            here = min(size, max(0, tokens_of(seq) - index * size))
            by_block[block_id] = max(by_block.get(block_id, 0), here)
    return sum(by_block.values())


if __name__ == "__main__":
    main()
