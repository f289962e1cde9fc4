"""A process that ends with kernels in use says nothing, and with its own exit status."""

import subprocess
import sys

import pytest
from harness.families import family_path

from kvire.core.native import native_module

pytestmark = pytest.mark.skipif(native_module() is None, reason="installed without the native kernels")

LAYER = """
import sys, threading, torch
from kvire.core.native import native_module
native = native_module()
kv = torch.zeros(4, 16, 1, 32)
layer = native.PagedLayer(
    k=kv.data_ptr(), v=kv.data_ptr(), k_block_stride=512, v_block_stride=512, num_blocks=4, block_size=16, heads=1,
    key_width=32, value_width=32, dtype=0,
)
"""
AN_EXCEPTION = LAYER + "raise SystemExit(3)"
# Its frames, and all that they refer to, are still there when Python has ended.
A_DAEMON_THREAD_THAT_WAITS = """
started = threading.Event()
def wait(held):
    started.set()
    threading.Event().wait()
threading.Thread(target=wait, args=(layer,), daemon=True).start()
started.wait()
"""
# It comes back from the kernel when there is no Python to come back to.
A_DAEMON_THREAD_IN_A_KERNEL = """
floats, started = torch.ones(1 << 26), threading.Event()
def read():
    while True:
        started.set()
        native.read_sum(floats=floats.data_ptr(), count=1 << 26, threads=1)
threading.Thread(target=read, daemon=True).start()
started.wait()
"""
ENGINE = """
import sys
from kvire import LLM
llm = LLM(sys.argv[1], kv_memory="4MiB", attention="native")
llm.generate("A prompt", max_tokens=2)
"""
TWO_ENGINES = (
    ENGINE + "other = LLM(sys.argv[1], kv_memory='4MiB', attention='native')\nother.generate('x', max_tokens=2)"
)
AN_ENGINE_AND_AN_EXCEPTION = ENGINE + "\nraise SystemExit(3)"
A_DAEMON_THREAD_THAT_GENERATES = """
import threading
started = threading.Event()
def work():
    started.set()
    while True:
        llm.generate("Another prompt", max_tokens=50)
threading.Thread(target=work, daemon=True).start()
started.wait()
"""

PROGRAMS = {
    "an exception": (AN_EXCEPTION, 3),
    "a daemon thread that waits": (LAYER + A_DAEMON_THREAD_THAT_WAITS, 0),
    "a daemon thread in a kernel": (LAYER + A_DAEMON_THREAD_IN_A_KERNEL, 0),
    "two engines": (TWO_ENGINES, 0),
    "an engine and an exception": (AN_ENGINE_AND_AN_EXCEPTION, 3),
    "a daemon thread that generates": (ENGINE + A_DAEMON_THREAD_THAT_GENERATES, 0),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_end_is_quiet(name: str) -> None:
    program, status = PROGRAMS[name]
    done = subprocess.run(
        [sys.executable, "-c", program, str(family_path("llama"))], capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stderr
    assert "nanobind" not in done.stderr and "terminate" not in done.stderr
