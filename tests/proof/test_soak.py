"""G8, G14: nothing leaks and every account is right, over many requests through the engine's own thread."""

import ctypes
import gc
import random
import resource
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

import numpy as np
from harness.engines import BLOCK, held, request, scripted_engine, tiny_engine, words
from harness.waiting import PATIENCE_S, until

from kvire.engine.client import EngineClient
from kvire.engine.engine import Engine

CANCELLED = 300
SHORT_REQUESTS, WARM_UP, EVERY, AT_ONCE = 10_000, 2_000, 250, 32
SLOPE_BYTES = 1024


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def rss_bytes() -> int:
    """What is held: memory that earlier tests freed, too, is given back first, or it could take in what leaks."""
    gc.collect()
    with suppress(AttributeError):  # a C library other than GNU's
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def at_rest(engine: Engine) -> bool:
    pools = engine.pool.pools
    return engine.pool.num_free == engine.pool.num_blocks and all(b.ref_count == 0 for p in pools for b in p._blocks)


def stage(engine: Engine, where: str, answered: int) -> Callable[[], bool]:
    """Whether a request has come there: waits for a seat, is in the middle of its prompt, or has so many tokens."""
    scheduler = engine.scheduler
    return {
        "queued": lambda: bool(scheduler.waiting) or len(scheduler.running) > scheduler.max_num_seqs,
        "prefill": lambda: any(0 < seq.num_computed < seq.num_prompt for seq in scheduler.running),
        "decode": lambda: any(seq.num_answer >= answered for seq in scheduler.running),
    }[where]


def soak_cancelled(count: int = CANCELLED) -> None:
    """Cancel one request while it waits, one in the middle of its prompt, one in its answer, and so on."""
    rng = random.Random(8)
    engine = tiny_engine(num_blocks=64, max_batch_tokens=BLOCK, max_num_seqs=2)
    with EngineClient(engine) as client:
        list(client.stream(request(words(1, 5), max_tokens=2)))
        threads, files = threading.active_count(), open_files()
        done: Counter[str] = Counter()
        while sum(done.values()) < count:
            where = rng.choice(("queued", "prefill", "decode"))
            busy = 2 if where == "queued" else 0  # as many as there are seats
            others = [request(words(rng.randrange(9), 3 * BLOCK), max_tokens=400) for _ in range(busy)]
            one = request(words(rng.randrange(2**32), rng.randrange(20, 40) * BLOCK), max_tokens=400)
            outputs: SimpleQueue = SimpleQueue()
            with held(engine, stage(engine, where, rng.randrange(1, 6))) as stands:
                with held(engine):
                    for each in (*others, one):
                        client.submit(each, outputs)
                assert stands.wait(PATIENCE_S)
                for each in rng.sample([*others, one], 1 + len(others)):
                    client.abort(each.request_id)
                    done[where] += 1
                steps = engine.stats.steps
            until(lambda e=engine: not e.has_work and at_rest(e))
            assert engine.stats.steps == steps + 1, "the step that was under way was the last one"
        assert min(done.values()) > count / 10, done
        assert client.in_flight == 0 and not engine._sequences and not engine._seeds
        assert not engine.scheduler._computing
        assert threading.active_count() <= threads, "those of other tests may have ended meanwhile"
        assert open_files() <= files
    engine.pool.check()


def soak_short_requests(count: int = SHORT_REQUESTS, warm_up: int = WARM_UP) -> None:
    """Memory does not grow with the number of requests; every report adds up."""
    rng = random.Random(14)
    engine = scripted_engine(list(b"ok"), prompt_tokens=24, num_blocks=256)
    shared = [words(seed, BLOCK) for seed in range(5)]
    samples: list[tuple[int, int]] = []
    with EngineClient(engine) as client:
        list(client.stream(request(words(1, 24), max_tokens=2)))
        threads, files = threading.active_count(), open_files()
        for sent in range(0, count, AT_ONCE):
            outputs: SimpleQueue = SimpleQueue()
            prompts = {}
            for _ in range(AT_ONCE):
                one = request([*rng.choice(shared), *words(rng.randrange(2**32), 8)], max_tokens=2)
                prompts[one.request_id] = len(one.token_ids)
                client.submit(one, outputs)
            while prompts:
                output = outputs.get(timeout=30)
                if output.cache is not None:
                    report, length = output.cache, prompts[output.request_id]
                    assert report.reused_tokens + report.computed_tokens == length
                    assert 0 <= report.reused_tokens < length
                if output.finish_reason is not None:
                    del prompts[output.request_id]
            if sent >= warm_up and sent // AT_ONCE % (EVERY // AT_ONCE) == 0:
                samples.append((sent, rss_bytes()))
        assert threading.active_count() <= threads, "those of other tests may have ended meanwhile"
        assert open_files() <= files
        assert client.in_flight == 0
    stats = engine.stats
    assert stats.device_tokens + stats.computed_tokens == stats.prompt_tokens and stats.device_tokens > 0
    assert stats.recomputed_tokens == 0 and engine.pool.stats.evictions > 0
    slope = np.polyfit(*np.array(samples, dtype=float).T, deg=1)[0]
    assert slope < SLOPE_BYTES, f"{slope:.0f} bytes a request stay behind"
    assert at_rest(engine)


def test_cancelled_anywhere() -> None:
    soak_cancelled()


def test_ten_thousand_short_requests() -> None:
    soak_short_requests()
