"""Real servers for tests: redis-server alone and as a cluster of three, and an S3 server (moto). Each is a context
manager that gives a URL for `open_remote` and stops what it started; a test is skipped where redis-server is missing.
"""

import contextlib
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from harness.waiting import until


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextlib.contextmanager
def redis_server(folder: Path, *options: str, port: int | None = None, password: str | None = None) -> Iterator[int]:
    """The port of a server that keeps nothing on disk. password: the one that `options` ask for."""
    if (program := shutil.which("redis-server")) is None:
        pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)")
    port = port or free_port()
    folder.mkdir(parents=True, exist_ok=True)
    fixed = ["--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder), "--save", "", "--appendonly", "no"]
    with _running([program, *fixed, *options], folder / "redis.log"):
        with redis.Redis(port=port, password=password) as client:
            _wait_until(client.ping)
        yield port


@contextlib.contextmanager
def redis_cluster(folder: Path) -> Iterator[list[int]]:
    """The ports of three nodes, each with a third of the slots and no replica."""
    with contextlib.ExitStack() as nodes:
        options = [
            "--cluster-enabled",
            "yes",
            "--cluster-node-timeout",
            "2000",
            "--cluster-require-full-coverage",
            "no",
        ]
        ports = [
            nodes.enter_context(redis_server(folder / str(node), *options, port=_cluster_port())) for node in range(3)
        ]
        clients = [nodes.enter_context(redis.Redis(port=port)) for port in ports]
        for node, client in enumerate(clients):
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", node * 16384 // 3, (node + 1) * 16384 // 3 - 1)
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", ports[0])
        _wait_until(lambda: all(_is_whole(client) for client in clients))
        yield ports


@contextlib.contextmanager
def s3_server(folder: Path, bucket: str = "blocks") -> Iterator[str]:
    """URL of an empty bucket, with everything that open_remote needs."""
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    endpoint = f"http://127.0.0.1:{port}"
    program = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with _running(program, folder / "s3.log"):
        _wait_until(lambda: urllib.request.urlopen(f"{endpoint}/moto-api/", timeout=1).status == 200)
        made = urllib.request.Request(f"{endpoint}/{bucket}", method="PUT")
        assert urllib.request.urlopen(made, timeout=5).status == 200
        yield s3_url(endpoint, bucket)


def s3_url(endpoint: str, bucket: str = "blocks") -> str:
    options = f"endpoint={endpoint}&region=us-east-1&access_key_id=test&secret_access_key=test"
    return f"s3://{bucket}/kv?{options}&virtual_hosted_style_request=false"


@contextlib.contextmanager
def _running(program: list[str], log: Path) -> Iterator[None]:
    with log.open("wb") as output, subprocess.Popen(program, stdout=output, stderr=output) as process:
        try:
            yield
        finally:
            process.kill()


def _wait_until(is_so: Callable[[], object]) -> None:
    def answers() -> object:
        with contextlib.suppress(OSError, redis.RedisError):
            return is_so()
        return False

    until(answers, lambda: "the server did not start", every_s=0.05)


def _cluster_port() -> int:
    """A port whose cluster bus, 10,000 above, is one, too."""
    while (port := free_port()) > 55_535:
        pass
    return port


def _is_whole(client: redis.Redis) -> bool:
    facts = client.execute_command("CLUSTER INFO")
    text = facts.decode() if isinstance(facts, bytes) else str(facts)
    return "cluster_state:ok" in text.replace("'", "").replace(": ", ":") and len(client.cluster("SLOTS")) == 3
