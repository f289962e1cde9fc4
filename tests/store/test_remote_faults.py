"""Remote tiers against servers that fail in every way: each call ends in time, as what it was, and leaves nothing."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import obstore
import pytest
from store import remote_stubs as stubs
from store.blocks import chain, frame_of, kv_of, tenant_key
from store.remote_stubs import Answer, Stub, settled, sockets
from store.servers import free_port, s3_url

from kvire.codec.frame import Frames
from kvire.core.errors import BlockMissing, FrameDamaged, FrameForeign, TierUnavailable
from kvire.store.remote.backend import stamp
from kvire.store.remote.open import open_remote
from kvire.store.remote.tier import RemoteTier
from kvire.store.tier import Tier

TIMEOUT_S = 0.3
LATE_S = 3.0  # what a busy machine may add; the work itself takes a few milliseconds
MISSING, UNAVAILABLE, DAMAGED, FOREIGN = BlockMissing, TierUnavailable, FrameDamaged, FrameForeign

RECORD, OTHER = chain(2, kv_bytes=60_000)
FRAMES = Frames(tenant_key)
VALUE = stamp(None) + bytes(frame_of(RECORD))
OTHERS_VALUE = stamp(None) + bytes(frame_of(OTHER))
MIXED_VALUE = VALUE[: len(VALUE) // 2] + OTHERS_VALUE[len(VALUE) // 2 :]

REDIS: dict[str, tuple[Callable[[], Iterator[Answer]], type[Exception] | None]] = {
    "sound": (lambda: iter([stubs.redis_value(VALUE)]), None),
    "nothing there": (lambda: iter([b"$-1\r\n"]), MISSING),
    "black hole": (lambda: iter([60.0]), UNAVAILABLE),
    "a minute late": (lambda: iter([60.0, stubs.redis_value(VALUE)]), UNAVAILABLE),
    "a byte a second": (lambda: stubs.in_drops(stubs.redis_value(VALUE)), UNAVAILABLE),
    "many bytes a second, but too few": (lambda: stubs.in_drops(stubs.redis_value(VALUE), 0.01), UNAVAILABLE),
    "reset at once": (lambda: iter([stubs.RESET]), UNAVAILABLE),
    "reset in the length": (lambda: stubs.cut_off(stubs.redis_value(VALUE), 0.00004), UNAVAILABLE),
    "reset after half": (lambda: stubs.cut_off(stubs.redis_value(VALUE), 0.5), UNAVAILABLE),
    "reset before the end": (lambda: stubs.cut_off(stubs.redis_value(VALUE), 0.9999), UNAVAILABLE),
    "wrong bytes": (lambda: iter([stubs.redis_value(os.urandom(len(VALUE)))]), DAMAGED),
    "half from another block": (lambda: iter([stubs.redis_value(MIXED_VALUE)]), DAMAGED),
    "another block's value": (lambda: iter([stubs.redis_value(OTHERS_VALUE)]), FOREIGN),
    "half a value": (lambda: iter([stubs.redis_value(VALUE[: len(VALUE) // 2])]), DAMAGED),
    "a value that ends in its stamp": (lambda: iter([stubs.redis_value(VALUE[:7])]), DAMAGED),
    "an empty value": (lambda: iter([stubs.redis_value(b"")]), DAMAGED),
    "too long by one": (lambda: iter([stubs.redis_value(VALUE + b"x")]), DAMAGED),
    "five gigabytes": (lambda: iter([b"$5368709120\r\n", VALUE]), DAMAGED),
    "a length of twenty digits": (lambda: iter([b"$99999999999999999999\r\n", VALUE]), DAMAGED),
    "a length of a thousand digits": (lambda: iter([b"$" + b"9" * 1000 + b"\r\n", VALUE]), UNAVAILABLE),
    "a negative length": (lambda: iter([b"$-7\r\n", VALUE]), UNAVAILABLE),
    "a length that is none": (lambda: iter([b"$1_0\r\n", VALUE]), UNAVAILABLE),
    "a value with more behind it": (lambda: iter([b"$5\r\nhelloworld\r\n"]), UNAVAILABLE),
    "a line without end": (lambda: iter([b"$" + b"1" * 100_000]), UNAVAILABLE),
    "a list": (lambda: iter([b"*3\r\n:1\r\n:2\r\n:3\r\n"]), UNAVAILABLE),
    "a web server": (lambda: iter([b"HTTP/1.1 400 Bad Request\r\n\r\n"]), UNAVAILABLE),
    "still loading": (lambda: iter([b"-LOADING Redis is loading the dataset in memory\r\n"]), UNAVAILABLE),
    "another type": (lambda: iter([b"-WRONGTYPE Operation against a key holding the wrong kind\r\n"]), DAMAGED),
}
OBJECTS: dict[str, tuple[Callable[[], Iterator[Answer]], type[Exception] | None]] = {
    "sound": (lambda: iter([stubs.http_reply(VALUE)]), None),
    "nothing there": (lambda: iter([stubs.http_reply(b"", status=b"404 Not Found")]), MISSING),
    "black hole": (lambda: iter([60.0]), UNAVAILABLE),
    "a minute late": (lambda: iter([60.0, stubs.http_reply(VALUE)]), UNAVAILABLE),
    "a byte a second": (lambda: stubs.in_drops(stubs.http_reply(VALUE)), UNAVAILABLE),
    "a body in drops": (lambda: iter([stubs.http_reply(VALUE)[:500], 60.0]), UNAVAILABLE),
    "reset at once": (lambda: iter([stubs.RESET]), UNAVAILABLE),
    "reset after half": (lambda: stubs.cut_off(stubs.http_reply(VALUE), 0.5), UNAVAILABLE),
    "wrong bytes": (lambda: iter([stubs.http_reply(os.urandom(len(VALUE)))]), DAMAGED),
    "half from another block": (lambda: iter([stubs.http_reply(MIXED_VALUE)]), DAMAGED),
    "another block's value": (lambda: iter([stubs.http_reply(OTHERS_VALUE)]), FOREIGN),
    "half a value": (lambda: iter([stubs.http_reply(VALUE[: len(VALUE) // 2])]), DAMAGED),
    "an empty value": (lambda: iter([stubs.http_reply(b"")]), DAMAGED),
    "five gigabytes": (lambda: iter([stubs.http_reply(VALUE, length=5 << 30)]), DAMAGED),
    "a length that is none": (lambda: iter([b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n"]), UNAVAILABLE),
    "no web server": (lambda: iter([b"+PONG\r\n" * 100]), UNAVAILABLE),
    "forbidden": (lambda: iter([stubs.http_reply(b"", status=b"403 Forbidden")]), UNAVAILABLE),
    "broken": (lambda: iter([stubs.http_reply(b"", status=b"500 Internal Server Error")]), UNAVAILABLE),
}
CASES = [("redis", name) for name in REDIS] + [("s3", name) for name in OBJECTS]


REQUESTS = {"redis": stubs.redis_request, "s3": stubs.http_request}


def answering(kind: str, answer: Callable[[], Iterator[Answer]]) -> Stub:
    """A server that lets everybody log in and says this to everything else."""
    logs_in = lambda words: kind == "redis" and words[0] == b"CLIENT"
    return Stub(REQUESTS[kind], lambda words: iter([b"+OK\r\n"]) if logs_in(words) else answer())


def sound_answer(kind: str, words: list[bytes]) -> bytes:
    """Of a server that holds the block and nothing else."""
    wanted = b"probe" not in b" ".join(words)
    if kind == "s3":
        return stubs.http_reply(VALUE) if wanted else stubs.http_reply(b"", status=b"404 Not Found")
    return {b"CLIENT": b"+OK\r\n", b"EXISTS": b":%d\r\n" % wanted, b"GET": stubs.redis_value(VALUE)}[words[0]]


def url_of(kind: str, port: int) -> str:
    return f"redis://127.0.0.1:{port}" if kind == "redis" else s3_url(f"http://127.0.0.1:{port}")


def opened(kind: str, port: int, *, probe_after_s: float = 60.0) -> RemoteTier:
    return open_remote(url_of(kind, port), timeout_s=TIMEOUT_S, probe_after_s=probe_after_s)


def load(tier: Tier, room_bytes: int = RECORD.kv_bytes) -> None:
    """What a store does with a block."""
    out = memoryview(bytearray(room_bytes))
    reading = FRAMES.reading(RECORD, out)
    reading.finish(tier.read(RECORD.id, reading.buffers))
    assert out == kv_of(RECORD)


@pytest.mark.parametrize(("kind", "mode"), CASES)
def test_every_failure_is_called_by_its_name_in_time(kind, mode):
    answer, expected = {"redis": REDIS, "s3": OBJECTS}[kind][mode]
    threads, before = threading.active_count(), sockets()
    with answering(kind, answer) as server:
        tier = opened(kind, server.port)
        for _ in range(2):  # the second call after whatever the first one left behind
            started = time.monotonic()
            if expected is None:
                load(tier)
            else:
                with pytest.raises(expected):
                    load(tier)
            assert time.monotonic() - started < TIMEOUT_S + LATE_S
        tier.close()
    assert settled(threading.active_count, threads)
    assert settled(sockets, before)


def test_an_answer_too_long_to_read_keeps_no_connection_open(monkeypatch):
    """obstore may hold a result until it is called again, which after `close` is never."""
    held, inner = [], obstore.get_async

    async def holding(*arguments, **options):
        held.append(await inner(*arguments, **options))
        return held[-1]

    monkeypatch.setattr(obstore, "get_async", holding)
    before = sockets()
    with answering("s3", OBJECTS["five gigabytes"][0]) as server:
        tier = opened("s3", server.port)
        with pytest.raises(FrameDamaged):
            load(tier)
        tier.close()
    assert held
    assert settled(sockets, before)


@pytest.mark.parametrize("kind", ["redis", "s3"])
@pytest.mark.parametrize("mode", ["black hole", "a byte a second", "reset at once"])
def test_no_other_call_is_held_up_either(kind, mode):
    answer, _ = {"redis": REDIS, "s3": OBJECTS}[kind][mode]
    calls: list[Callable[[Tier], object]] = [
        lambda tier: tier.held([RECORD.id] * 300),
        lambda tier: tier.write(RECORD, frame_of(RECORD), tenant_key().tag, ttl_s=9),
        lambda tier: tier.delete([RECORD.id], "damaged"),
        lambda tier: tier.delete_tenant(tenant_key().tag),
        lambda tier: tier.clear(),
        lambda tier: tier.pin([RECORD.id], pinned=True),
        lambda tier: list(tier.entries()),
    ]
    with answering(kind, answer) as server:
        for call in calls:
            tier = opened(kind, server.port)
            started = time.monotonic()
            with pytest.raises(TierUnavailable):
                call(tier)
            assert time.monotonic() - started < TIMEOUT_S + LATE_S
            assert tier.stats().unavailable == 1
            started = time.monotonic()
            tier.touch([RECORD.id])
            assert time.monotonic() - started < TIMEOUT_S + LATE_S
            tier.close()


@pytest.mark.parametrize("kind", ["redis", "s3"])
def test_nobody_there(kind):
    tier = opened(kind, free_port())
    with pytest.raises(TierUnavailable):
        load(tier)
    tier.close()


@pytest.mark.parametrize("scheme", ["redis", "rediss", "redis+cluster"])
def test_a_login_that_never_ends(scheme):
    with Stub(stubs.redis_request, lambda _: stubs.in_drops(b"+OK\r\n")) as server:
        tier = open_remote(f"{scheme}://user:secret@127.0.0.1:{server.port}", timeout_s=TIMEOUT_S)
        started = time.monotonic()
        with pytest.raises(TierUnavailable) as caught:
            load(tier)
        assert time.monotonic() - started < TIMEOUT_S + LATE_S
        assert "secret" not in str(caught.value)
        tier.close()


def test_a_resolver_that_never_answers(monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: released.wait(20) and [])
    threads = threading.active_count()
    tier = open_remote("redis://some.host", timeout_s=TIMEOUT_S)
    for _ in range(2):
        started = time.monotonic()
        with pytest.raises(TierUnavailable):
            load(tier)
        assert time.monotonic() - started < TIMEOUT_S + LATE_S
    assert threading.active_count() <= threads + 1  # one asks, however many want to know
    released.set()
    assert settled(threading.active_count, threads)
    tier.close()


def test_a_deadline_of_ones_own_counts():
    with answering("redis", lambda: iter([60.0])) as server:
        tier = open_remote(url_of("redis", server.port), timeout_s=30)
        for call in (
            lambda: tier.read(RECORD.id, [memoryview(bytearray(9))], timeout_s=0.1),
            lambda: tier.held([RECORD.id], timeout_s=0.1),
        ):
            started = time.monotonic()
            with pytest.raises(TierUnavailable):
                call()
            assert time.monotonic() - started < 0.1 + LATE_S
        tier.close()


def test_lengths_are_checked_before_anything_is_allocated():
    """A list of a billion, and a small value of gigabytes, where the answer to EXISTS belongs."""
    for lie in (b"*1000000000\r\n", b"$5368709120\r\n", b"*1\r\n" * 2000):
        with answering("redis", lambda lie=lie: iter([lie, 60.0])) as server:
            tier = opened("redis", server.port)
            started = time.monotonic()
            with pytest.raises(TierUnavailable, match="no answer of a Redis server"):
                tier.held([RECORD.id])
            assert time.monotonic() - started < TIMEOUT_S  # refused, not waited for
            tier.close()


@pytest.mark.parametrize("kind", ["redis", "s3"])
def test_a_tier_that_fails_is_left_alone_and_comes_back(kind):
    modes = {"redis": REDIS, "s3": OBJECTS}[kind]
    threads = threading.active_count()
    with answering(kind, modes["black hole"][0]) as server:
        tier = opened(kind, server.port, probe_after_s=0.05)
        for failures in range(1, 4):
            assert tier.health.healthy
            with pytest.raises(TierUnavailable):
                load(tier)
            assert tier.health.failures == failures
        assert not tier.health.healthy and tier.health.outages == 1
        started = time.monotonic()
        for _ in range(100):
            with pytest.raises(TierUnavailable, match="left alone"):
                load(tier)
        assert time.monotonic() - started < 100 * 0.002
        asked = server.requests
        end = time.monotonic() + 5
        while server.requests == asked and time.monotonic() < end:
            time.sleep(0.01)
        assert server.requests > asked  # by the probe: all other calls were refused
        assert not tier.health.healthy

        server.answer = lambda words: iter([sound_answer(kind, words)])
        while not tier.health.healthy and time.monotonic() < end:
            time.sleep(0.01)
        assert tier.health.healthy
        load(tier)
        assert tier.health.failures == 0 and tier.health.outages == 1
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("probe")]
        tier.close()
    assert settled(threading.active_count, threads)


def test_a_failing_tier_can_be_closed_at_once():
    with answering("redis", lambda: iter([60.0])) as server:
        tier = opened("redis", server.port, probe_after_s=60)
        for _ in range(3):
            with pytest.raises(TierUnavailable):
                load(tier)
        started = time.monotonic()
        tier.close()
        assert time.monotonic() - started < LATE_S
        with pytest.raises(TierUnavailable, match="closed"):
            load(tier)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("probe")]


def test_missing_and_damaged_blocks_are_no_failures_of_the_tier():
    for mode in ("nothing there", "half a value", "too long by one"):
        answer, expected = REDIS[mode]
        with answering("redis", answer) as server:
            tier = opened("redis", server.port)
            for _ in range(5):
                with pytest.raises(expected):
                    load(tier)
            assert tier.health.healthy and tier.health.failures == 0
            tier.close()


def test_a_connection_is_not_used_again_after_half_an_answer():
    """What is left of the first answer must not pass for the second one."""
    answers = iter([[stubs.redis_value(VALUE)[:30_000], 0.6, stubs.redis_value(VALUE)[30_000:]], [b"$-1\r\n"]])
    with answering("redis", lambda: iter(next(answers))) as server:
        tier = opened("redis", server.port)
        with pytest.raises(TierUnavailable):
            load(tier)
        with pytest.raises(BlockMissing):
            load(tier)
        tier.close()


@pytest.mark.parametrize("kind", ["redis", "s3"])
def test_what_was_given_up_is_not_under_way_any_more(kind):
    with answering(kind, lambda: iter([60.0])) as server:
        tier = opened(kind, server.port)
        with pytest.raises(TierUnavailable):
            load(tier)
        time.sleep(0.2)  # with whatever the first call opens for good
        before = sockets()
        with pytest.raises(TierUnavailable):
            load(tier)
        assert settled(sockets, before + 1)  # the server's end, which waits for its minute to be over
        tier.close()


def test_a_value_shorter_than_its_stamp_is_an_empty_frame():
    with answering("redis", lambda: iter([stubs.redis_value(VALUE[:7])])) as server:
        tier = opened("redis", server.port)
        assert tier.read(RECORD.id, [memoryview(bytearray(9))]) == 0
        assert tier.stats().read_bytes == 0
        tier.close()


def test_closing_while_a_call_is_under_way_leaves_nothing():
    before = sockets()
    with answering("redis", lambda: iter([0.1, stubs.redis_value(VALUE)])) as server:
        tier = opened("redis", server.port)
        caller = threading.Thread(target=load, args=(tier,))
        caller.start()
        while not server.requests:
            time.sleep(0.001)
        tier.close()
        caller.join()
        assert settled(sockets, before + 1)  # the one that listens


@pytest.mark.parametrize("kind", ["redis", "s3"])
def test_closing_gives_idle_connections_back(kind):
    with Stub(REQUESTS[kind], lambda words: iter([sound_answer(kind, words)])) as server:
        before = sockets()
        tier = opened(kind, server.port)
        load(tier)
        assert sockets() >= before + 2  # both ends
        tier.close()
        assert settled(sockets, before)
