"""What `make sanitize` needs of the tests: its build of the kernels, and memory that must not be
touched.
"""

import ctypes
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader

from torch import Tensor

LIBRARY = "KVIRE_NATIVE_LIBRARY"  # path of the extension to test instead of the installed one


def load_library_under_test() -> None:
    """Make the extension at $KVIRE_NATIVE_LIBRARY kvire._native; without the variable nothing
    happens.

    Raises ImportError if it cannot be loaded, also for an empty path: tests of another library
    would tell nothing.
    """
    if LIBRARY not in os.environ:
        return
    name = "kvire._native"
    assert name not in sys.modules, "the installed kernels were loaded first"
    loader = ExtensionFileLoader(name, os.environ[LIBRARY])
    spec = spec_from_loader(name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[name] = module


@contextmanager
def only_readable(memory: Tensor, parts: Iterable[Tensor]) -> Iterator[None]:
    """Under AddressSanitizer, kernels that touch `memory` outside of its contiguous `parts` end the
    process.

    To the granularity of eight bytes. torch is not instrumented: its own accesses pass.
    """
    process = ctypes.CDLL(None)
    if not hasattr(process, "__asan_poison_memory_region"):
        yield
        return
    for function in (process.__asan_poison_memory_region, process.__asan_unpoison_memory_region):
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    process.__asan_poison_memory_region(memory.data_ptr(), memory.nbytes)
    try:
        for part in parts:
            assert part.is_contiguous()
            process.__asan_unpoison_memory_region(part.data_ptr(), part.nbytes)
        yield
    finally:
        process.__asan_unpoison_memory_region(memory.data_ptr(), memory.nbytes)
