"""The attention backends that exist here; the native one only where the extension was built."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvire.attention.cpu import NativeAttention, native_available
from kvire.attention.reference import PortableAttention


def portable() -> PortableAttention:
    return PortableAttention()


def native() -> PortableAttention:
    return NativeAttention()


INNER_RUN = pytest.mark.skipif("KVIRE_ISA" in os.environ, reason="is the run inside")


def must_pass_on_a_plain_cpu(path: str) -> None:
    """Run the tests of a file again with the kernels of the baseline instruction set, and without
    OpenMP.
    """
    environment = {**os.environ, "KVIRE_ISA": "baseline", "KVIRE_OPENMP": "0"}
    names = "import kvire._native as n; print(n.isa(), n.thread_runtime())"
    told = subprocess.run([sys.executable, "-c", names], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.split(maxsplit=1) in (["baseline", "own threads\n"], ["neon", "own threads\n"])
    command = [sys.executable, "-m", "pytest", "-x", "-q", path]
    root = Path(__file__).parents[2]
    inner = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert inner.returncode == 0, inner.stdout[-3000:] + inner.stderr[-5000:]


BACKENDS = [portable, native] if native_available() else [portable]
