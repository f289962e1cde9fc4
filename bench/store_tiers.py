"""Read speed of each tier beside the machine's own: 4,096 tokens of SmolLM2 in float16, 94 MB.

    python bench/store_tiers.py [--rounds 7] [--json FILE]

256 blocks of 368,640 bytes through TieredStore.load, from the request to the last verified byte in
its place. In every round each tier takes its turn, beside a plain copy of the same bytes, `dd
iflag=direct` of a file as large, and the same values received over a plain socket from the same
Redis server. Cold means that the files' pages were written out and dropped; a virtual disk may
still have them.
"""

import argparse
import os
import shutil
import socket
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter, sleep

import numpy as np
import reporting
from reporting import Bar, figure, ratios

from kvire.codec.buffers import aligned_buffer
from kvire.codec.frame import Frames
from kvire.core.config import StoreConfig
from kvire.core.keys import BlockKey, block_keys
from kvire.core.record import BlockId, BlockRecord
from kvire.store.disk.tier import DiskTier
from kvire.store.keyring import Keyring
from kvire.store.memory.tier import MemoryTier
from kvire.store.open import unsealed
from kvire.store.place import DISK_BYTES
from kvire.store.remote.open import open_remote
from kvire.store.ticket import LoadState, Wanted
from kvire.store.tiered import TieredStore

BLOCKS, BLOCK_BYTES, BLOCK_TOKENS = 256, 368_640, 16
TOTAL_BYTES = BLOCKS * BLOCK_BYTES
ROOT = BlockKey(bytes(32))
COPY, DD, RAW = "plain copy", "dd iflag=direct", "Redis by a plain socket"
MEMORY, CHECKED, SEALED, COLD, REDIS = (
    "memory", "disk, page cache, checksummed", "disk, page cache, sealed", "disk, cold, sealed", "Redis, sealed",
)  # fmt: skip


def main() -> None:
    options = _options()
    rng = np.random.default_rng(0)
    kv, out = aligned_bytes(), aligned_bytes()
    kv[:] = rng.integers(0, 256, TOTAL_BYTES, np.uint8)
    samples: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="kvire-bench-", dir=options.folder) as name:
        folder = Path(name)
        sources = {source: stack.enter_context(store) for source, store in stores(folder)}
        for store in sources.values():
            fill(store, kv)
        raw = stack.enter_context(raw_redis(folder, kv)) if REDIS in sources else None
        plain = folder / "plain"
        plain.write_bytes(kv.tobytes())
        for _ in range(options.rounds + 1):
            samples[COPY].append(timed(lambda: np.copyto(out, kv)))
            for source, store in sources.items():
                if source == COLD:
                    drop_pages(folder / "sealed")
                samples[source].append(restore(store, out))
                assert np.array_equal(out, kv), f"{source} gave back other bytes"
                out.fill(0)
            drop_pages(plain)
            samples[DD].append(dd(plain))
            if raw is not None:
                samples[RAW].append(raw(out))
    table = rows({source: values[1:] for source, values in samples.items()})  # the first round touches everything
    report = {"machine": reporting.describe(), "bytes": TOTAL_BYTES, "blocks": BLOCKS, "table": table}
    reporting.write(options.json, report)


def aligned_bytes() -> np.ndarray:
    """TOTAL_BYTES aligned as a pool's slabs are."""
    return np.frombuffer(aligned_buffer(TOTAL_BYTES), np.uint8)


def stores(folder: Path) -> Iterator[tuple[str, TieredStore]]:
    """The tiers, each the only one of its store. Not open yet."""
    keyring = Keyring(folder / "keys" / "keyring.json")
    open_keys = Keyring(folder / "open" / "keyring.json", encrypt=False)
    config = replace(StoreConfig(), load_timeout_s=10.0)

    def over(tier, frames, keys=keyring) -> TieredStore:
        return TieredStore([(tier, frames)], keys, config, buffer_bytes=2 * TOTAL_BYTES)

    size = DISK_BYTES  # as by default: it decides how large the files are
    yield MEMORY, over(MemoryTier(3 * TOTAL_BYTES), Frames(unsealed(keyring)))
    yield CHECKED, over(DiskTier(folder / "checked", size), Frames(open_keys.tenant), open_keys)
    yield SEALED, over(DiskTier(folder / "sealed-warm", size), Frames(keyring.tenant))
    yield COLD, over(DiskTier(folder / "sealed", size), Frames(keyring.tenant))
    if (port := redis_port(folder)) is not None:
        yield REDIS, over(open_remote(f"redis://127.0.0.1:{port}", timeout_s=10.0), Frames(keyring.tenant))


def records() -> list[BlockRecord]:
    tokens = list(range(BLOCKS * BLOCK_TOKENS))
    keys = block_keys(ROOT, tokens, BLOCK_TOKENS)
    return [
        BlockRecord(
            BlockId(key, 0), keys[i - 1] if i else ROOT, ROOT, i,
            tuple(tokens[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS]), BLOCK_BYTES, bytes(16),
        )
        for i, key in enumerate(keys)
    ]  # fmt: skip


def fill(store: TieredStore, kv: np.ndarray) -> None:
    for i, record in enumerate(records()):
        assert store.save(record, kv[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES].data), "the buffer holds everything"
    assert store.flush(120), "written"


def restore(store: TieredStore, out: np.ndarray) -> float:
    wanted = [Wanted(record, out[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES].data) for i, record in enumerate(records())]
    started = perf_counter()
    ticket = store.load(wanted)
    ticket.wait(60)
    seconds = perf_counter() - started
    assert all(state is LoadState.READY for state in ticket.states()), ticket.failure(0)
    return seconds


def timed(call) -> float:
    started = perf_counter()
    call()
    return perf_counter() - started


def drop_pages(path: Path) -> None:
    """Write a file, or every file of a folder, out, and let the kernel forget it."""
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            handle = os.open(file, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def dd(path: Path) -> float:
    command = ["dd", f"if={path}", "of=/dev/null", "bs=1M", "iflag=direct"]
    return timed(lambda: subprocess.run(command, check=True, capture_output=True))


def redis_port(folder: Path) -> int | None:
    if shutil.which("redis-server") is None:
        print("no redis-server: its rows are left out")
        return None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--save", "", "--appendonly", "no", "--dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _servers.append(process)
    for _ in range(100):
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                break
        sleep(0.05)
    _ports.append(port)
    return port


_servers: list[subprocess.Popen] = []
_ports: list[int] = []


@contextmanager
def raw_redis(folder: Path, kv: np.ndarray):  # noqa: ARG001
    """The same values under keys of their own, asked for one after the other and received into
    place.
    """
    client = socket.create_connection(("127.0.0.1", _ports[0]))
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for i in range(BLOCKS):
        value = kv[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES].tobytes()
        key = f"raw{i:04}".encode()
        client.sendall(b"*3\r\n$3\r\nSET\r\n$7\r\n" + key + b"\r\n$%d\r\n" % len(value) + value + b"\r\n")
        assert client.recv(5) == b"+OK\r\n"
    head = len(b"$%d\r\n" % BLOCK_BYTES)

    def receive(out: np.ndarray) -> float:
        started = perf_counter()
        client.sendall(b"".join(b"*2\r\n$3\r\nGET\r\n$7\r\nraw%04d\r\n" % i for i in range(BLOCKS)))
        scratch = bytearray(16)
        for i in range(BLOCKS):
            for view in (
                memoryview(scratch)[:head],
                out[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES].data,
                memoryview(scratch)[:2],
            ):
                at = 0
                while at < len(view):
                    at += client.recv_into(view[at:])
        return perf_counter() - started

    try:
        yield receive
    finally:
        client.close()
        for server in _servers:
            server.terminate()
            server.wait()


def rows(samples: dict[str, list[float]]) -> list[dict]:
    def speed(name: str) -> list[float]:
        return [TOTAL_BYTES / seconds / 1e9 for seconds in samples[name]]

    def row(name: str, limit: str, bar: float) -> list[dict]:
        if name not in samples or limit not in samples:
            return []
        share = [100 * value for value in ratios(samples[limit], samples[name])]
        return [
            figure(f"{name}: 94 MB back", "ms", [1e3 * s for s in samples[name]], baseline=f"{limit}: "
                   f"{1e3 * sorted(samples[limit])[len(samples[limit]) // 2]:.1f} ms"),
            figure(f"{name}: share of {limit}", "%", share, bar=Bar(">=", bar)),
        ]  # fmt: skip

    return [
        figure(COPY, "GB/s", speed(COPY)),
        figure(DD, "GB/s", speed(DD)),
        *row(MEMORY, COPY, 60),
        *row(CHECKED, COPY, 40),
        *row(SEALED, COPY, 20),
        *row(COLD, DD, 80),
        *row(REDIS, RAW, 60),
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help="where the disk tiers lie; by default the temporary folder")
    return parser.parse_args()


if __name__ == "__main__":
    main()
