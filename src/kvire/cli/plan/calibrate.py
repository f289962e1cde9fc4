"""Measures this machine for the planner: prefill at several lengths, decode, local tiers."""

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn

from kvire.bench.machine import cpu_name
from kvire.bench.page_cache import drop
from kvire.cli.display import console
from kvire.core.config import StoreConfig
from kvire.core.errors import ConfigError, KvireError
from kvire.core.memory import available_bytes
from kvire.llm import LLM
from kvire.models.planned import find_model
from kvire.plan.calibration import TIERS, Asked, CalibrationSamples, CalibrationTimes, record

LENGTHS = (256, 1024, 3072)  # of prompts; plans between and slightly above them are measured, others scaled
REPEATS = 3
TAIL_TOKENS = 32  # of another question about the same text
WARM_TOKENS = 64  # of a first prompt that is not counted: it touches everything for the first time
DECODE_TOKENS = 24
FLUSH_S = 60.0
STORE_BYTES = 2 << 30
POOL_BYTES = 1 << 30


def calibration_record(
    model: str, kv_dtype: str, lengths: Sequence[int] = LENGTHS, repeats: int = REPEATS
) -> dict[str, Any]:
    """The calibration record (schema kvire.calibration/1) of this machine with this model.

    Progress on standard error.

    Raises ConfigError for a model that cannot be measured here, such as a card of a model that is
    not installed.
    """
    shape, free = find_model(model).shape, available_bytes()
    samples = collect(model, kv_dtype, lengths, repeats)
    return record(CalibrationTimes(model, kv_dtype, cpu_name(), torch.get_num_threads(), free), shape, samples)


def collect(model: str, kv_dtype: str, lengths: Sequence[int], repeats: int) -> CalibrationSamples:
    """Times in the states E, G, R and D.

    They are taken length after length, so that changes in the machine's speed affect all alike.
    """
    samples = CalibrationSamples()
    with Progress(TextColumn("{task.description}"), BarColumn(), console=console, transient=True) as bars:
        task = bars.add_task("measuring this machine", total=2 * repeats * len(lengths))
        for state in ("R", "D"):
            with tempfile.TemporaryDirectory(prefix="kvire-plan-") as folder:
                place, advance = _Place(state, Path(folder)), partial(bars.advance, task)
                _one_tier(place, model, kv_dtype, list(lengths) * repeats, samples, advance)
    return samples


@dataclass(frozen=True, slots=True)
class _Place:
    """One tier to measure, in a folder of its own.

    state: R for memory, D for disk.
    """

    state: str
    folder: Path

    @property
    def store(self) -> StoreConfig:
        """A store of that tier alone."""
        keys = self.folder / "keys" / "keyring.json"
        if self.state == "R":
            return StoreConfig(ram_bytes=STORE_BYTES, key_file=keys)
        return StoreConfig(path=self.folder / "store", disk_bytes=STORE_BYTES, key_file=keys)

    def make_cold(self) -> None:
        """Drop stored blocks from everything but the tier itself."""
        if self.state == "D":
            drop(self.folder / "store")


def _one_tier(
    place: _Place,
    model: str,
    kv_dtype: str,
    lengths: Sequence[int],
    samples: CalibrationSamples,
    advance: Callable[[], object],
) -> None:
    """Every length: nothing kept (E), the pool (G), another question, the tier with an
    empty pool.
    """
    name = TIERS[place.state]
    try:
        llm = LLM(model, store=place.store, kv_dtype=kv_dtype, kv_memory=POOL_BYTES)
    except KvireError as error:
        raise ConfigError(f"{model} cannot be measured here: {error}. Try kvire plan smollm2 --calibrate") from error
    with llm:
        _ask(llm, _tokens(llm, WARM_TOKENS))
        for length in lengths:
            ids = _tokens(llm, length)
            samples.ttft_s[Asked("E", length, length)].append(_ask(llm, ids))
            samples.ttft_s[Asked("G", length, 1)].append(_ask(llm, ids))
            asks_on = ids[:-TAIL_TOKENS] + _tokens(llm, TAIL_TOKENS)
            samples.ttft_s[Asked("G", length, TAIL_TOKENS)].append(_ask(llm, asks_on))
            if not llm.engine.reuse.flush(FLUSH_S):
                raise ConfigError(f"the {name} tier did not take what it was given within {FLUSH_S:.0f} s")
            llm.clear_cache()
            place.make_cold()
            samples.ttft_s[Asked(place.state, length, 1)].append(_ask(llm, ids, from_tier=name))
            advance()
        samples.decode_s.append(_decode_s(llm, _tokens(llm, min(lengths))))


def _ask(llm: LLM, ids: list[int], from_tier: str | None = None) -> float:
    """Seconds to the first token.

    Raises ConfigError if a prompt that should come from a tier was computed.
    """
    result = llm.generate(ids, max_tokens=1, temperature=0, ignore_eos=True)
    if from_tier and getattr(result.cache, f"{from_tier}_tokens") < len(ids) - 2 * llm.engine.config.block_size:
        raise ConfigError(
            f"of {len(ids)} tokens the {from_tier} tier gave {getattr(result.cache, f'{from_tier}_tokens')}: computing "
            "was faster, or the tier is in trouble, so its speed cannot be measured"
        )
    return result.timing.ttft_s


def _decode_s(llm: LLM, ids: list[int]) -> float:
    return llm.generate(ids, max_tokens=DECODE_TOKENS, temperature=0, ignore_eos=True).timing.tpot_s


def _tokens(llm: LLM, count: int) -> list[int]:
    """A new prompt."""
    vocabulary = len(llm.tokenizer)
    return [random.randrange(vocabulary // 50, vocabulary * 4 // 5) for _ in range(count)]  # noqa: S311 - no secret
