"""Kvire's server and its peers, each a process that runs until its context ends."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from reporting import ROOT

from kvire.bench.arms.server import process_answering
from kvire.bench.client import Endpoint

PEERS = ROOT.parent / "shared" / "peers"
ENVIRONMENTS = ROOT / ".peers"
LIFETIME_S = 6 * 3600


class MissingPeerError(Exception):
    """A peer is not installed here; the text says what is missing."""


@dataclass(frozen=True)
class Command:
    """How to start a server.

    model: the name that its API answers to.
    """

    words: list[str | Path]
    model: str
    folder: Path = ROOT
    environment: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Server:
    """A running one.

    url: ends in /v1.
    pid: leader of its session.
    """

    name: str
    url: str
    model: str
    pid: int

    def memory_mb(self, field: str = "VmHWM") -> float:
        """Memory of its processes, in 10^6 bytes: VmHWM, the peak since it started, or VmRSS, the
        present.

        Pages of mapped files count, and pages that several of its processes share count in each.
        """
        return sum(_status_kb(pid, field) for pid in _session(self.pid)) * 1024 / 1e6


def kvire(port: int, model: str, kv_memory: str) -> Command:
    program = Path(sys.executable).with_name("kvire")
    return Command([program, "serve", model, "--port", str(port), "--kv-memory", kv_memory], model)


def llama_cpp(port: int, folder: Path, slots: int) -> Command:
    python, starter = ENVIRONMENTS / "llamacpp/bin/python", folder / "serve_llamacpp.py"
    _need(python, starter)
    return Command([python, starter, str(port), str(slots), str(LIFETIME_S)], "default", folder)


def vllm(port: int, folder: Path, model: Path, *, all_cores: bool) -> Command:
    """The command of vLLM's server.

    all_cores: compute on every core; by default vLLM keeps one free for its other processes, half
        of a machine with two cores.
    """
    python, starter = ENVIRONMENTS / "vllm/bin/python", folder / "serve_vllm.sh"
    _need(python, starter)
    cores = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "OMP_NUM_THREADS": str(os.cpu_count())} if all_cores else None
    return Command(["bash", starter, python, model, str(port)], str(model), folder, cores)


@contextmanager
def running(name: str, command: Command, port: int) -> Iterator[Server]:
    """Start a server, wait until it answers, stop it and all its processes at the end."""
    print(f"starting {name}", flush=True)
    started = perf_counter()
    server = Endpoint(f"http://127.0.0.1:{port}/v1", command.model)
    environment = {**os.environ, **(command.environment or {})}
    with process_answering([str(word) for word in command.words], server, environment, command.folder) as pid:
        print(f"{name} answers after {perf_counter() - started:.0f} s", flush=True)
        yield Server(name, server.url, command.model, pid)


def _need(*paths: Path) -> None:
    for path in paths:
        if not path.exists():
            raise MissingPeerError(f"{path.name} is missing from {path.parents[0].name}")


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
