"""What a figure depends on: the machine, the commit, and the machine's own limits, measured beside it."""

import platform
import statistics
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from kvire.bench.machine import cpu_name

ROOT = Path(__file__).parents[1]


def describe() -> dict[str, Any]:
    """Machine, versions and commit."""
    return {
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _git("rev-parse", "--short", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def read_gb_s() -> float:
    """Pure reads, all threads, best of five: a sum over 512 MiB."""
    data = torch.ones(2**27)
    return data.nbytes / min(_timed(data.sum) for _ in range(5)) / 1e9


def matmul_gflops() -> float:
    """A large float32 matrix product, all threads, best of five."""
    n = 2048
    a, b = torch.rand(n, n), torch.rand(n, n)
    return 2 * n**3 / min(_timed(lambda: a @ b) for _ in range(5)) / 1e9


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Median, interval and the raw samples."""
    return {"median": statistics.median(samples), "min": min(samples), "max": max(samples), "samples": list(samples)}


def _timed(work: Callable[[], object]) -> float:
    started = perf_counter()
    work()
    return perf_counter() - started


def _git(*args: str) -> str:
    return subprocess.run(["git", "-C", ROOT, *args], capture_output=True, text=True, check=False).stdout.strip()
