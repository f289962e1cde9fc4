"""Kvire's server and those it is measured against, each a process of its own, running until its context ends."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep

import machine

PEERS = machine.ROOT.parent / "shared" / "peers"
ENVIRONMENTS = machine.ROOT / ".peers"
START_TIMEOUT_S = 240
LIFETIME_S = 6 * 3600


class MissingPeerError(Exception):
    """A peer is not installed here; the text says what is missing."""


@dataclass(frozen=True)
class Command:
    """How to start a server. model: the name that its API answers to."""

    words: list[str | Path]
    model: str
    folder: Path = machine.ROOT
    environment: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Server:
    """A running one. url: ends in /v1. pid: leader of its session."""

    name: str
    url: str
    model: str
    pid: int

    def memory_mb(self, field: str = "VmHWM") -> float:
        """Memory of its processes, in 10^6 bytes: VmHWM, the peak since it started, or VmRSS, the present.

        Pages of mapped files count, and pages that several of its processes share count in each.
        """
        return sum(_status_kb(pid, field) for pid in _session(self.pid)) * 1024 / 1e6


def kvire(port: int, model: str, kv_memory: str) -> Command:
    program = Path(sys.executable).with_name("kvire")
    return Command([program, "serve", model, "--port", str(port), "--kv-memory", kv_memory], model)


def llama_cpp(port: int, peers: Path, slots: int) -> Command:
    python, starter = ENVIRONMENTS / "llamacpp/bin/python", peers / "serve_llamacpp.py"
    _need(python, starter)
    return Command([python, starter, str(port), str(slots), str(LIFETIME_S)], "default", peers)


def vllm(port: int, peers: Path, folder: Path, *, all_cores: bool) -> Command:
    """all_cores: left to itself, vLLM keeps one core free for its other processes, which on two cores is half."""
    python, starter = ENVIRONMENTS / "vllm/bin/python", peers / "serve_vllm.sh"
    _need(python, starter)
    cores = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "OMP_NUM_THREADS": str(os.cpu_count())} if all_cores else None
    return Command(["bash", starter, python, folder, str(port)], str(folder), peers, cores)


@contextmanager
def running(name: str, command: Command, port: int) -> Iterator[Server]:
    """Start a server, wait until it answers, stop it and all its processes at the end."""
    print(f"starting {name}", flush=True)
    started = perf_counter()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command.words,
            cwd=command.folder,
            env={**os.environ, **(command.environment or {})},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            server = Server(name, f"http://127.0.0.1:{port}/v1", command.model, process.pid)
            while not _answers(server.url):
                if process.poll() is not None or perf_counter() - started > START_TIMEOUT_S:
                    log.seek(0)
                    raise RuntimeError(f"{name} did not start:\n{log.read()[-3000:].decode(errors='replace')}")
                sleep(0.2)
            print(f"{name} answers after {perf_counter() - started:.0f} s", flush=True)
            yield server
        finally:
            for kill in (signal.SIGTERM, signal.SIGKILL):
                _signal(process.pid, kill)
                _wait(process, 10)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _need(*paths: Path) -> None:
    for path in paths:
        if not path.exists():
            raise MissingPeerError(f"{path.name} is missing from {path.parents[0].name}")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/models", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _session(leader: int) -> list[int]:
    """Process ids of the session that `leader` began."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                if os.getsid(int(path.name)) == leader:
                    found.append(int(path.name))
            except ProcessLookupError:
                continue
    return found


def _status_kb(pid: int, field: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), 0)


def _signal(session: int, kill: signal.Signals) -> None:
    try:
        os.killpg(session, kill)
    except ProcessLookupError:
        return


def _wait(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return
