"""Engines over tiers that a test can stop, slow down, break and look into."""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from harness.differential import poison
from harness.engines import BLOCK, SPEC, Answer, drive, request, settle, tiny_engine
from harness.stored import say_what_prefill_costs
from harness.waiting import PATIENCE_S, until
from kvire.core.keys import block_keys
from kvire.core.record import BlockId
from kvire.engine.engine import Engine
from kvire.engine.request import Output, Request
from kvire.plan.cost import Speed
from kvire.store.tiered import TieredStore

# What a token is said to cost to compute. PATIENT: so much that every load is waited for, however
# busy the machine. HASTY: so little that a load that brings nothing is called off after some 50 ms.
# BUSY: less than any load.
PATIENT_S, HASTY_S, BUSY_S = 10.0, 1e-3, 1e-12
BLOCK_BYTES = SPEC.block_bytes(0)


def engine_over(store: TieredStore, num_blocks: int = 256, *, token_s: float = PATIENT_S, **options) -> Engine:
    """A tiny llama that remembers nothing yet; KV that nobody wrote is NaN."""
    engine = tiny_engine(num_blocks, store=store, **options)
    say_what_prefill_costs(engine, token_s)
    poison(engine)
    return engine


def ask_as(
    engine: Engine, token_ids: Sequence[int], *, tenant: str = "", cache_salt: str = "", store: bool = True, **params
) -> Answer:
    """One request of a tenant, alone."""
    one = replace(request(list(token_ids), **params), tenant=tenant, cache_salt=cache_salt, store=store)
    return drive(engine, [one])[one.request_id, 0]


def keep(store: TieredStore, *prompts: Sequence[int], **options) -> list[Answer]:
    """Compute prompts in an engine of its own; every tier has their blocks then."""
    engine = engine_over(store, **options)
    answers = [ask_as(engine, prompt) for prompt in prompts]
    assert store.flush(PATIENCE_S)
    return answers


def ids_of(engine: Engine, prompt: Sequence[int], tenant: str = "", group: int = 0) -> list[BlockId]:
    """Of the full blocks of a prompt."""
    root = engine.reuse.name(tenant).root
    return [BlockId(key, group) for key in block_keys(root, list(prompt), BLOCK)]


def explained(engine: Engine, prompt: Sequence[int], **who) -> Answer:
    """One request, alone; before it ends, the store has said what it knows about the miss."""
    step = engine.step

    def patiently():
        outputs = step()
        for seq in engine.scheduler.running:
            assert seq.reuse.answer is None or seq.reuse.answer.wait(PATIENCE_S) is not None
        return outputs

    engine.step = patiently
    try:
        return ask_as(engine, prompt, **who)
    finally:
        del engine.step


class Steady:
    """Instead of a tier's meter: it says the same whatever is measured."""

    def __init__(self, bytes_per_s: float, latency_s: float = 0.0) -> None:
        self._speed = Speed(latency_s, bytes_per_s, 1)

    def speed(self) -> Speed:
        return self._speed

    def begin(self) -> None: ...

    def end(self, read_bytes: int) -> None: ...

    def first_block(self, waited_s: float, read_bytes: int) -> None: ...


def say_how_fast(store: TieredStore, bytes_per_s: float) -> None:
    """Every tier of the store is said to be so fast."""
    for handle in store._handles:
        handle.meter = Steady(bytes_per_s)


def blank_blocks(engine: Engine) -> list[list[int]]:
    """Of each group: blocks that nobody holds and nobody can find."""
    return [[block.id for block in pool._blank] for pool in engine.pool.pools]


def assert_untouched(engine: Engine, blocks: Iterable[Sequence[int]]) -> None:
    """Blocks that were poisoned as blank are so still: nobody wrote there."""
    for slab, ids in zip(engine.paged.slabs, blocks, strict=True):
        assert slab[list(ids)].isnan().all(), "somebody wrote into memory that was given back"


def flip_bytes_on_disk(folder: Path, every: int = 1000) -> None:
    """Damage every frame that lies in a disk tier's folder."""
    for segment in folder.rglob("*.seg"):
        content = bytearray(segment.read_bytes())
        for at in range(every // 2, len(content), every):
            content[at] ^= 1
        segment.write_bytes(content)


def say_its_namespace_is(engine: Engine, **changed: str) -> Engine:
    """As if the engine were built otherwise: another kind of numerics, another adapter, ..."""
    engine.namespace = engine.reuse.names.namespace = replace(engine.namespace, **changed)
    return engine


def finish(engine: Engine, one: Request) -> Answer:
    """Step until the request is answered, whatever still hangs."""
    answer = Answer()

    def step() -> bool:
        for output in engine.step():
            assert isinstance(output, Output), f"{output}"
            if output.request_id == one.request_id:
                answer.token_ids += output.token_ids
                answer.logprobs += output.logprobs or ()
                answer.finish_reason, answer.cache = output.finish_reason, output.cache or answer.cache
        return answer.finish_reason is not None

    until(step, every_s=0)
    return answer


def at_rest(engine: Engine) -> None:
    """Wait for reads that are under way; everything is free then."""
    settle(engine)
    engine.pool.check()
    assert engine.pool.num_free == engine.pool.num_blocks


@contextmanager
def folder() -> Iterator[Path]:
    """Of a claim's own; what a claim that failed still writes into it is no matter."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as path:
        yield Path(path)
