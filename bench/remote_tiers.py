"""Reading 256 frames from remote tiers, beside redis-py and two limits.

The frames are 94 MB: 4,096 tokens of SmolLM2 in float16.

One limit is a bare socket fed by a process that does nothing else; the other a bare socket that
sends GETs to the same Redis and throws the answers away without looking at them. All take turns in
each round, so that they meet the same machine. The servers run on it: this measures what reading
costs, not a network.
"""

import argparse
import contextlib
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

import redis
from reporting import describe, summary, write

from kvire.core.keys import BlockKey
from kvire.core.record import BlockId, BlockRecord
from kvire.store.remote.open import open_remote
from kvire.store.tier import Tier

FRAMES = 256
FRAME_BYTES = 368_900
SENDER = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
peer, _ = server.accept()
frame = b"x" * int(sys.argv[2])
while peer.recv(1):
    for _ in range(int(sys.argv[1])):
        peer.sendall(frame)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write raw samples here")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()

    room = memoryview(bytearray(FRAMES * FRAME_BYTES))
    buffers = [room[start : start + FRAME_BYTES] for start in range(0, len(room), FRAME_BYTES)]
    room[::4096] = b"\1" * len(room[::4096])  # every page is there before anybody is timed
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(redis_server())
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        tiers = {
            "Kvire, redis://": stack.enter_context(filled(f"redis://127.0.0.1:{port}")),
            "Kvire, file://": stack.enter_context(filled(f"file://{folder}")),
            "Kvire, memory://": stack.enter_context(filled("memory://")),
        }
        client = stack.enter_context(redis.Redis(port=port))
        names = list(client.scan_iter("kvire/1/*", count=1000))
        ways: dict[str, Callable[[], object]] = {"bare socket": stack.enter_context(bare_socket(room))}
        ways["bare socket, GET"] = stack.enter_context(bare_gets(port, names, buffers))
        ways |= {name: reading(tier, buffers) for name, tier in tiers.items()}
        ways["redis-py, MGET"] = lambda: client.mget(names)
        ways["redis-py, GET"] = lambda: [client.get(name) for name in names]
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.rounds):
            for name, way in ways.items():
                started = perf_counter()
                way()
                seconds[name].append(perf_counter() - started)

    limits = [statistics.median(seconds[name]) for name in ("bare socket", "bare socket, GET")]
    print(f"{FRAMES} frames of {FRAME_BYTES:,} bytes, median of {options.rounds}; share of each limit")
    for name, samples in seconds.items():
        median = statistics.median(samples)
        rate = FRAMES * FRAME_BYTES / median / 1e9
        shares = "".join(f"{limit / median:>10.0%}" for limit in limits)
        print(f"{name:<18} {median * 1e3:>7.1f} ms {rate:>6.2f} GB/s {shares}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        rows = {name: {"seconds": summary(samples)} for name, samples in seconds.items()}
        facts = {"machine": describe(), "frames": FRAMES, "frame_bytes": FRAME_BYTES, "redis_py": redis.__version__}
        write(options.json, {**facts, "rows": rows})


@contextlib.contextmanager
def filled(url: str) -> Iterator[Tier]:
    tier = open_remote(url, timeout_s=5)
    frame = memoryview(os.urandom(FRAME_BYTES))
    for number in range(FRAMES):
        record = BlockRecord(block(number), BlockKey(bytes(32)), BlockKey(bytes(32)), number, (), 0, bytes(16))
        assert tier.write(record, frame, bytes(16))
    yield tier
    tier.close()


def block(number: int) -> BlockId:
    return BlockId(BlockKey(number.to_bytes(32, "big")), 0)


def reading(tier: Tier, buffers: list[memoryview]) -> Callable[[], object]:
    """One read after the other, as one loader thread does it."""
    return lambda: [tier.read(block(number), [buffer]) for number, buffer in enumerate(buffers)]


@contextlib.contextmanager
def bare_socket(room: memoryview) -> Iterator[Callable[[], object]]:
    arguments = [sys.executable, "-c", SENDER, str(FRAMES), str(FRAME_BYTES)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as sender:
        assert sender.stdout is not None
        with socket.create_connection(("127.0.0.1", int(sender.stdout.readline()))) as sock:

            def receive() -> None:
                sock.sendall(b"!")
                received = 0
                while received < len(room):
                    received += sock.recv_into(room[received:])

            yield receive


@contextlib.contextmanager
def bare_gets(port: int, names: list[bytes], buffers: list[memoryview]) -> Iterator[Callable[[], object]]:
    requests = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name) for name in names]
    around_bytes = len(b"$%d\r\n" % FRAME_BYTES) + 2
    rest = memoryview(bytearray(around_bytes))
    with socket.create_connection(("127.0.0.1", port)) as sock:

        def receive() -> None:
            for request, buffer in zip(requests, buffers, strict=True):
                sock.sendall(request)
                received = 0
                while received < FRAME_BYTES:
                    received += sock.recv_into(buffer[received:])
                while received < FRAME_BYTES + around_bytes:
                    received += sock.recv_into(rest)

        yield receive


@contextlib.contextmanager
def redis_server() -> Iterator[int]:
    program = shutil.which("redis-server")
    assert program is not None, "redis-server is not installed (Debian: apt-get install redis-server)"
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    options = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
    with subprocess.Popen([program, *options], stdout=subprocess.DEVNULL) as process:
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        try:
            yield port
        finally:
            process.kill()


if __name__ == "__main__":
    main()
