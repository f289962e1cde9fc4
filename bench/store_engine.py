"""Gain and cost of the store in the engine: SmolLM2, float16 pool, on this machine.

    python bench/store_engine.py [--rounds 3] [--json FILE]

Four questions, each answered in rounds in which every variant takes its turn:

- A document of 1,668 tokens, asked about by an engine with an empty pool and a warm store: first
  token beside the same prompt computed, and beside the same prompt with its blocks still in the
  pool (which computes the same tail).
- The same with sealed and with checksummed frames, from page cache and from dropped pages.
- 4,096 tokens from a tier that is slow (10 and 1 MB/s, one block at a time), far (300 ms) or dying
  (stops in the middle): first token beside an engine without a store.
- Prefill and decode of an engine that saves everything beside one that saves nothing.
"""

import argparse
import random
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

import reporting
from reporting import Bar, figure, medians, ratios
from store_tiers import drop_pages

from kvire import LLM
from kvire.codec.frame import Frames
from kvire.core.config import StoreConfig
from kvire.core.errors import TierUnavailable
from kvire.core.tier_kind import TierKind
from kvire.store.disk.tier import DiskTier
from kvire.store.keyring import Keyring
from kvire.store.tiered import TieredStore

MIB = 1 << 20
DOCUMENT, LONG, ANSWER = 1668, 4096, 64
OPTIONS = {"kv_dtype": "float16", "kv_memory": "512MiB"}


class Throttled:
    """A disk tier behind a bad line.

    stops_after: reads; then each waits until it is told to stop waiting.
    """

    local = False
    kind = TierKind.REMOTE
    read_run = lent = None  # no way around `read`

    def __init__(self, tier: DiskTier, bytes_per_s: float, latency_s: float = 0.0, stops_after: int | None = None):
        self._tier, self._bytes_per_s, self._latency_s = tier, bytes_per_s, latency_s
        self._stops_after = stops_after
        self._line = threading.Lock()
        self._reads = 0
        self.revived = threading.Event()

    def __getattr__(self, name: str):
        return getattr(self._tier, name)

    def held(self, ids, timeout_s=None):
        """After its latency."""
        time.sleep(self._latency_s)
        return self._tier.held(ids, timeout_s)

    def read(self, block_id, buffers, timeout_s=None) -> int:
        """One block at a time goes over the line."""
        self._reads += 1
        if self._stops_after is not None and self._reads > self._stops_after:
            self.revived.wait(timeout_s)
            raise TierUnavailable("it stopped answering")
        time.sleep(self._latency_s)
        with self._line:
            size = self._tier.read(block_id, buffers, timeout_s)
            time.sleep(size / self._bytes_per_s)
        return size

    def again(self) -> None:
        """Alive once more."""
        self._reads = 0


def main() -> None:
    options = _options()
    samples: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="kvire-bench-", dir=options.folder) as name:
        restarts(Path(name), options.rounds, samples)
        bad_tiers(Path(name), options.rounds, samples)
        saving(Path(name), options.rounds, samples)
    reporting.write(options.json, {"machine": reporting.describe(), "table": rows(samples)})


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 40_000) for _ in range(length)]


def ttft(llm: LLM, ids: list[int]) -> tuple[float, object]:
    result = llm.generate(ids, max_tokens=2, temperature=0, ignore_eos=True)
    return result.timing.ttft_s, result


def restarts(folder: Path, rounds: int, samples: dict[str, list[float]]) -> None:
    """TTFT with the blocks nowhere, in the pool, in page cache, on disk."""
    engines = {
        "sealed": LLM("smollm2", store=config(folder / "sealed"), **OPTIONS),
        "checksummed": LLM("smollm2", store=config(folder / "open", encrypt=False), **OPTIONS),
    }
    for number in range(rounds + 1):
        ids = prompt(number, DOCUMENT)
        found: dict[str, float] = {}
        for kind, llm in engines.items():
            found[f"cold, {kind}"], _ = ttft(llm, ids)
            found[f"pool, {kind}"], warm = ttft(llm, ids)
            llm.engine.reuse.flush(30)
            for state in ("page cache", "cold disk"):
                llm.clear_cache()
                if state == "cold disk":
                    drop_pages(folder / ("sealed" if kind == "sealed" else "open"))
                found[f"{state}, {kind}"], result = ttft(llm, ids)
                assert result.cache.disk_tokens >= DOCUMENT - 32, result.cache
                assert result.token_ids == warm.token_ids, "the same answer"
            llm.clear_cache()
        if number:  # the first round touches everything for the first time
            for name, seconds in found.items():
                samples[name].append(1e3 * seconds)
    for llm in engines.values():
        llm.close()


def config(path: Path, *, encrypt: bool = True) -> StoreConfig:
    return StoreConfig(
        path=path, disk_bytes=2 << 30, encrypt=encrypt, key_file=path.parent / f"{path.name}-keys" / "keyring.json"
    )


BAD = {
    "10 MB/s": {"bytes_per_s": 10e6},
    "1 MB/s": {"bytes_per_s": 1e6},
    "300 ms": {"bytes_per_s": 100e6, "latency_s": 0.3},
    "dying": {"bytes_per_s": 100e6, "stops_after": 20},
}


def bad_tiers(folder: Path, rounds: int, samples: dict[str, list[float]]) -> None:
    """TTFT of 4,096 stored tokens beside an engine without a store."""
    keyring = Keyring(folder / "bad-keys" / "keyring.json")
    ids = prompt(99, LONG)
    engines: dict[str, LLM] = {}
    tiers: dict[str, Throttled] = {}
    for name, line in BAD.items():
        tier = Throttled(DiskTier(folder / f"bad {name}", 1 << 30), **line)
        tiers[name] = tier
        store = TieredStore([(tier, Frames(keyring.tenant))], keyring, StoreConfig(), buffer_bytes=256 * MIB)
        store.open()
        engines[name] = LLM("smollm2", store=store, **OPTIONS)
        ttft(engines[name], ids)
        store.flush(60)
        tier.again()
    plain = LLM("smollm2", **OPTIONS)
    for number in range(rounds + 1):
        plain.clear_cache()
        found = {"no store": ttft(plain, ids)[0]}
        for name, llm in engines.items():
            llm.clear_cache()
            found[name], result = ttft(llm, ids)
            if name == "10 MB/s":
                assert result.cache.remote_tokens > 0 < result.cache.computed_tokens, result.cache
            tiers[name].again()
        if number:
            for name, seconds in found.items():
                samples[f"4096 tokens, {name}"].append(1e3 * seconds)
    for llm in (plain, *engines.values()):
        llm.close()


def saving(folder: Path, rounds: int, samples: dict[str, list[float]]) -> None:
    """Prefill and decode with and without saving."""
    engines = {
        "saving": LLM("smollm2", store=config(folder / "saving"), **OPTIONS),
        "not saving": LLM("smollm2", **OPTIONS),
    }
    for number in range(2 * rounds + 1):
        ids = prompt(1000 + number, 1024)
        for name, llm in engines.items():
            llm.clear_cache()
            result = llm.generate(ids, max_tokens=ANSWER, temperature=0, ignore_eos=True)
            if number:
                samples[f"prefill, {name}"].append(1e3 * result.timing.ttft_s)
                samples[f"decode, {name}"].append(1e3 * result.timing.tpot_s)
    for llm in engines.values():
        llm.close()


def rows(samples: dict[str, list[float]]) -> list[dict]:
    def extra(name: str, kind: str) -> list[float]:
        return [a - b for a, b in zip(samples[f"{name}, {kind}"], samples[f"pool, {kind}"], strict=True)]

    cold = samples["cold, sealed"]
    table = []
    for state, bar_ms in (("page cache", 60), ("cold disk", 130)):
        for kind in ("sealed", "checksummed"):
            baseline = medians({"computed": cold, "in the pool": samples[f"pool, {kind}"]}, "ms")
            table.append(
                figure(
                    f"{DOCUMENT} tokens, {state}, {kind}: TTFT", "ms", samples[f"{state}, {kind}"], baseline=baseline
                )
            )
        table.append(
            figure(
                f"{DOCUMENT} tokens, {state}, sealed: TTFT beyond the tail's",
                "ms",
                extra(state, "sealed"),
                bar=Bar("<=", bar_ms),
            )
        )
    sealing = [100 * (value - 1) for value in ratios(samples["page cache, sealed"], samples["page cache, checksummed"])]
    table.append(figure("sealing: share of warm TTFT, page cache", "%", sealing, bar=Bar("<=", 15)))
    plain = samples[f"{LONG} tokens, no store"]
    for name in BAD:
        bar = Bar("<=", 0.65 if name == "10 MB/s" else 1.03)
        share = ratios(samples[f"{LONG} tokens, {name}"], plain)
        table.append(
            figure(
                f"{LONG} tokens, tier of {name}: TTFT over no store",
                "x",
                share,
                baseline=medians({"no store": plain}, "ms"),
                bar=bar,
            )
        )
    for what in ("prefill", "decode"):
        cost = [100 * (value - 1) for value in ratios(samples[f"{what}, saving"], samples[f"{what}, not saving"])]
        table.append(figure(f"saving everything: cost of {what}", "%", cost, bar=Bar("<=", 3)))
    return table


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help="where the stores lie; by default the temporary folder")
    return parser.parse_args()


if __name__ == "__main__":
    main()
