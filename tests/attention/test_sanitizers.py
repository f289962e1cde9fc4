"""That a sanitizer run would notice: faults committed on purpose, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.sanitizer import LIBRARY

pytestmark = pytest.mark.skipif(LIBRARY not in os.environ, reason="`make sanitize` runs these")

PREAMBLE = """
import torch
from harness.sanitizer import load_library_under_test, only_readable
load_library_under_test()
import kvire._native as native

def norm(x_floats=24, weight_floats=8, out_floats=24):
    x, weights, out = torch.ones(x_floats), torch.ones(weight_floats), torch.empty(out_floats)
    native.rms_norm(x=x.data_ptr(), rows=3, width=8, weights=weights.data_ptr(), epsilon=1e-5, out=out.data_ptr(),
                    threads=1)

def write(slots_at=0):
    pool, slots = torch.ones(2, 4, 8), torch.zeros(2, dtype=torch.int64)
    layer = native.PagedLayer(k=pool[0].data_ptr(), v=pool[1].data_ptr(), k_block_stride=32, v_block_stride=32,
                              num_blocks=1, block_size=4, heads=1, key_width=8, value_width=8, dtype=0)
    rows = torch.ones(1, 8)
    with only_readable(pool, [pool[0, :READABLE], pool[1]]):
        native.write_kv(layer, k=rows.data_ptr(), k_token_stride=8, k_head_stride=8, v=rows.data_ptr(),
                        v_token_stride=8, v_head_stride=8, slots=slots.data_ptr() + slots_at, tokens=1, threads=1)
"""


@pytest.mark.parametrize(
    ("calls", "report"),
    [
        ("norm(x_floats=23)", "READ of size"),
        ("norm(weight_floats=7)", "READ of size"),
        ("norm(out_floats=23)", "WRITE of size"),
        ("READABLE = 0; write()", "use-after-poison"),
        ("READABLE = 4; write(slots_at=1)", "misaligned address"),
    ],
)
def test_a_fault_is_reported(calls: str, report: str) -> None:
    child = run(calls)
    assert child.returncode != 0 and report in child.stderr, child.stderr


def test_the_same_without_the_faults_is_not() -> None:
    child = run("norm(); READABLE = 4; write()")
    assert child.returncode == 0, child.stderr


def run(calls: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", PREAMBLE + calls]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
