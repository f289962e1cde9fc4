"""S51, S52: remote tiers that never answer, or answer with memory that somebody else has reused, through the engine."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.engines import BLOCK, oracle, words
from harness.loads import BLOCK_BYTES, ask_as, engine_over, keep
from harness.waiting import PATIENCE_S, until
from store.remote_stubs import RESET, Answer, Stub, redis_request, redis_value, sockets
from store.stores import BentTier, open_store

from kvire.codec.frame import Frames, prefix_bytes
from kvire.codec.seal import TAG_BYTES
from kvire.core.config import StoreConfig
from kvire.core.report import MissReason
from kvire.core.tier_kind import TierKind
from kvire.store.keyring import Keyring
from kvire.store.remote.open import open_remote
from kvire.store.tiered import TieredStore

DEADLINE_S = 0.3
REQUESTS = 25
PROMPT_TOKENS = 4 * BLOCK + 3
VALUE_BYTES = 16 + prefix_bytes(BLOCK) + BLOCK_BYTES + TAG_BYTES  # a stamp and a frame


def never(words: list[bytes]) -> Iterator[Answer]:
    yield 60.0


def in_drops(words: list[bytes]) -> Iterator[Answer]:
    if words[0] == b"GET":
        for at in redis_value(bytes(VALUE_BYTES))[:60].hex():
            yield at.encode()
            yield 1.0
    yield b":1\r\n"


def half_and_reset(words: list[bytes]) -> Iterator[Answer]:
    if words[0] == b"GET":
        yield redis_value(bytes(VALUE_BYTES))[: VALUE_BYTES // 2]
        yield RESET
    yield b":1\r\n"


def much_too_late(words: list[bytes]) -> Iterator[Answer]:
    if words[0] == b"GET":
        yield 60.0
        yield redis_value(bytes(VALUE_BYTES))
    yield b":1\r\n"


@pytest.mark.parametrize("behave", [never, in_drops, half_and_reset, much_too_late])
def test_s51_a_remote_tier_that_never_answers(behave: Callable, tmp_path: Path) -> None:
    """Every request ends within its deadline; after some failures nobody waits any more; nothing is left behind."""
    prompts = [words(i, PROMPT_TOKENS) for i in range(REQUESTS)]
    expected = [oracle(prompt, max_tokens=2).token_ids for prompt in prompts]
    before_threads, before_sockets = threading.active_count(), sockets()
    with Stub(redis_request, lambda line: iter([b"+OK\r\n"]) if line[0] == b"CLIENT" else behave(line)) as server:
        tier = open_remote(f"redis://127.0.0.1:{server.port}", timeout_s=DEADLINE_S, probe_after_s=60.0)
        keyring = Keyring(tmp_path / "keyring.json")
        store = TieredStore([(tier, Frames(keyring.tenant))], keyring, StoreConfig(load_timeout_s=DEADLINE_S))
        with store:
            engine = engine_over(store)  # computing is said to be so slow that it would wait for ever
            took = []
            for prompt, tokens in zip(prompts, expected, strict=True):
                started = time.monotonic()
                answer = ask_as(engine, prompt, max_tokens=2)
                took.append(time.monotonic() - started)
                assert answer.token_ids == tokens
                assert answer.cache.computed_tokens == PROMPT_TOKENS
            assert max(took) < 10, took  # the server lets them wait for a minute
            asked = server.requests
            assert asked < 40, "after some failures the tier is left alone"
            assert store.stats().handles[tier.name].counts.unavailable >= REQUESTS
    until(lambda: threading.active_count() <= before_threads and sockets() <= before_sockets)


def test_s52_a_slow_read_of_memory_that_was_reused(tmp_path: Path) -> None:
    """The second half of each frame is another block's, of equal length: a miss, never a wrong token."""
    prompts = [words(100 + i, PROMPT_TOKENS) for i in range(REQUESTS)]
    tier = BentTier(TierKind.REMOTE)
    with open_store(tmp_path, tier, load_timeout_s=PATIENCE_S) as store:
        keep(store, *prompts)
        seen: dict[object, bytes] = {}

        def overwritten(block_id, buffers, length: int) -> int:
            whole = b"".join(bytes(buffer) for buffer in buffers)[:length]
            other = next((frame for key, frame in seen.items() if key != block_id), bytes(length))
            seen[block_id] = whole
            mixed = whole[: length // 2] + other[length // 2 : length]
            at = 0
            for buffer in buffers:
                buffer[:] = mixed[at : at + len(buffer)].ljust(len(buffer), b"\0")
                at += len(buffer)
            return length

        tier.bend = overwritten
        engine = engine_over(store)
        for prompt in prompts:
            answer = ask_as(engine, prompt)
            assert answer.token_ids == oracle(prompt).token_ids
            assert answer.cache.remote_tokens == 0 and answer.cache.miss is MissReason.DAMAGED
        assert store.stats().handles["bent"].counts.damaged >= REQUESTS
