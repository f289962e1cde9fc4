"""G8, G14 over stores: nothing leaks, every account is right, and what is loaded when its request leaves comes back."""

import random
import threading
from collections import Counter
from itertools import count
from pathlib import Path
from queue import SimpleQueue

import numpy as np
from harness.engines import BLOCK, drive, held, request, scripted_engine, settle, words
from harness.loads import PATIENT_S, engine_over, keep
from harness.stored import disk, memory, say_what_prefill_costs, store_over
from harness.waiting import PATIENCE_S, until
from proof.test_soak import SLOPE_BYTES, at_rest, open_files, rss_bytes, stage
from store.stores import BentTier, open_store

from kvire.engine.client import EngineClient

B = BLOCK


class Hanging:
    """Reads of a tier, of which the one of that number hangs from now on, until `go` is set."""

    def __init__(self, tier: BentTier, number: int) -> None:
        self.hangs, self.go = threading.Event(), threading.Event()
        self._numbers = count(1)
        self._number = number
        tier.bend = self._bend

    def _bend(self, block_id, buffers, length: int) -> int:
        if next(self._numbers) == self._number:
            self.hangs.set()
            self.go.wait(PATIENCE_S)
        return length


def soak_cancelled_loads(path: Path, cancelled: int = 150) -> None:
    """Cancelled while queued, while loading (also in the middle of a read), while decoding and while being stored."""
    rng, tier = random.Random(8), BentTier()
    prompts = [words(i, rng.randrange(6, 12) * B) for i in range(12)]
    threads, files = threading.active_count(), open_files()
    store = open_store(path, tier)
    store.open()
    keep(store, *prompts)
    engine = engine_over(store, num_blocks=64, max_num_seqs=2)
    with EngineClient(engine) as client:
        done: Counter[str] = Counter()
        while sum(done.values()) < cancelled:
            where = rng.choice(("queued", "loading", "decode", "storing"))
            prompt = words(rng.randrange(2**32), 4 * B) if where == "storing" else rng.choice(prompts)
            busy = 2 if where == "queued" else 0
            others = [request(words(i, 3 * B), max_tokens=400) for i in range(busy)]
            one = request(prompt, max_tokens=400)
            outputs: SimpleQueue = SimpleQueue()
            client.clear()
            if where == "loading":
                reads = Hanging(tier, rng.randrange(1, 5))
                client.submit(one, outputs)
                assert reads.hangs.wait(PATIENCE_S)
                client.abort(one.request_id)
                until(lambda: not engine.scheduler.running)
                reads.go.set()
            else:
                come = stage(engine, "queued" if where == "queued" else "decode", rng.randrange(1, 4))
                with held(engine, come) as stands:
                    with held(engine):
                        for each in (*others, one):
                            client.submit(each, outputs)
                    assert stands.wait(PATIENCE_S)
                    for each in (*others, one):
                        client.abort(each.request_id)
            done[where] += 1 + len(others)
            until(lambda: not engine.has_work and at_rest(engine))
        assert min(done.values()) > cancelled / 20, done
        assert client.in_flight == 0 and not engine._sequences and not engine.scheduler._computing
        assert store.flush(10)
        assert store.stats().handles["bent"].counts.loaded_blocks > cancelled / 4
    engine.pool.check()
    until(lambda: threading.active_count() <= threads and open_files() <= files)


def soak_short_stored_requests(path: Path, count: int = 3_000, warm_up: int = 1_000) -> None:
    """Memory does not grow with the number of requests; every report adds up."""
    rng, at_once = random.Random(14), 25
    shared = [words(seed, B) for seed in range(5)]
    samples: list[tuple[int, int]] = []
    with store_over(memory, path) as store:
        engine = scripted_engine(list(b"ok"), prompt_tokens=2 * B + 8, num_blocks=128, store=store)
        say_what_prefill_costs(engine, PATIENT_S)
        for sent in range(0, count, at_once):
            if sent % 500 == 0:
                engine.clear()
            requests = [
                request([*rng.choice(shared), *words(rng.randrange(2**32), B + 8)], max_tokens=2)
                for _ in range(at_once)
            ]
            for answer in drive(engine, requests, check=False).values():
                report = answer.cache
                assert report.reused_tokens + report.computed_tokens == 2 * B + 8
            if sent >= warm_up and sent % 250 == 0:
                samples.append((sent, rss_bytes()))
        stats = engine.stats
        assert store.flush(30)
        memory_stats = store.stats().handles["memory"]
        assert stats.memory_tokens > 0 and memory_stats.tier.evictions["room"] > 0
        assert memory_stats.tier.used_bytes <= memory_stats.tier.limit_bytes
    reused = stats.device_tokens + stats.memory_tokens
    assert reused + stats.computed_tokens == stats.prompt_tokens
    slope = np.polyfit(*np.array(samples, dtype=float).T, deg=1)[0]
    assert slope < SLOPE_BYTES, f"{slope:.0f} bytes a request stay behind"
    settle(engine)
    assert at_rest(engine)


def test_cancelled_loads(tmp_path: Path) -> None:
    soak_cancelled_loads(tmp_path)


def test_s54_thousands_of_short_stored_requests(tmp_path: Path) -> None:
    soak_short_stored_requests(tmp_path)


def test_engines_come_and_go_over_one_folder(tmp_path: Path) -> None:
    """Threads and files of a store end with its engine, also when it closes in the middle of a request."""
    prompt = words(1, 6 * B + 3)
    threads = files = 0
    for life in range(12):
        with store_over(disk, tmp_path) as store:
            engine = engine_over(store)
            with EngineClient(engine) as client:
                outputs: SimpleQueue = SimpleQueue()
                client.submit(request(prompt, max_tokens=500), outputs)
                outputs.get(timeout=PATIENCE_S)
        if life == 2:
            threads, files = threading.active_count(), open_files()
    until(lambda: threading.active_count() <= threads and open_files() <= files)
