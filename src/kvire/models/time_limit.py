"""A limit on how long other people's Python may run."""

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class _Expired(BaseException):
    """Not an Exception, so that no handler on the way takes it for an error of its own."""


def within(seconds: float, call: Callable[[], T]) -> T:
    """The call's result. Raises TimeoutError if it takes longer: its Python code is stopped wherever it is then.

    Loops and recursion end in time. One long operation of an extension module, or of Python's own, is waited for.
    """
    thread, lock, running = ctypes.c_ulong(threading.get_ident()), threading.Lock(), True

    def expire() -> None:
        with lock:
            if running:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_Expired))

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    try:
        try:
            timer.start()  # may be over before this returns
            return call()
        finally:
            with lock:
                running = False
            timer.cancel()  # Python code: what was raised before the lock was taken arrives here at the latest
    except _Expired:
        raise TimeoutError(f"not within {seconds:g} s") from None
