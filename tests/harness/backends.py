"""The attention backends that exist here; the native one only where the extension was built."""

from kvire.attention.cpu import NativeAttention, native_available
from kvire.attention.reference import PortableAttention


def portable() -> PortableAttention:
    return PortableAttention()


def native() -> PortableAttention:
    return NativeAttention()


BACKENDS = [portable, native] if native_available() else [portable]
